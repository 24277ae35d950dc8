"""Requests to a router whose admission control is tested: run, refused, waiting, and inside until cancelled."""

import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from support.clients.scraping import sample
from support.cluster.in_process import FAST_ROUTER, Bench, simulated
from support.eventually import eventually

from baton.inference.v1 import generate_pb2
from router.config import AdmissionConfig, QuotaConfig, QuotasConfig, RouterConfig

PREFILL = simulated("p1", "prefill")
DECODE = simulated("d1", "decode", decode_step_seconds=0.01)
SLOW_PREFILL = simulated("p1", "prefill", prefill_tokens_per_second=100)  # "x" * 20 takes 0.2 s


def router(admission: AdmissionConfig | None = None, quotas: QuotasConfig | None = None) -> RouterConfig:
    update = {"admission": admission or AdmissionConfig(), "quotas": quotas or QuotasConfig()}
    return FAST_ROUTER.model_copy(update=update)


def one_at_a_time(max_waiting: int = 10) -> RouterConfig:
    return router(AdmissionConfig(max_running_per_worker=1, max_waiting=max_waiting))


def limited(**default: float) -> RouterConfig:
    return router(quotas=QuotasConfig(default=QuotaConfig(**default)))  # type: ignore[arg-type]


def request(tokens: int = 5, prompt: str = "x", request_id: str = "") -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(prompt=prompt, stopping={"max_tokens": tokens}, request_id=request_id)


async def run(running: Bench, tokens: int = 5, prompt: str = "x", timeout: float = 60, **metadata: object) -> None:
    """One request to its end; metadata by the end of its key."""
    sent = tuple((f"x-baton-{key}", str(value)) for key, value in metadata.items())
    async for _ in running.stub.Generate(request(tokens, prompt), timeout=timeout, metadata=sent):
        pass


async def refusal(running: Bench, **options: object) -> aio.AioRpcError:
    with pytest.raises(aio.AioRpcError) as caught:
        await run(running, **options)  # type: ignore[arg-type]
    return caught.value


def status_of(error: aio.AioRpcError) -> status_pb2.Status:
    wire = next(value for key, value in error.trailing_metadata() or () if key == "grpc-status-details-bin")
    return status_pb2.Status.FromString(wire)


def reason(error: aio.AioRpcError) -> tuple[str, str]:
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status_of(error).details)
    return error.code().name, info.reason


def retry_seconds(error: aio.AioRpcError) -> float:
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status_of(error).details)
    return retry.retry_delay.ToNanoseconds() / 1e9


async def occupy(running: Bench, tokens: int = 400) -> "aio.UnaryStreamCall[object, generate_pb2.GenerateResponse]":
    """A request that is inside, until it is cancelled."""
    call = running.stub.Generate(request(tokens))
    await call.read()
    return call


async def read_to_end(call: "aio.UnaryStreamCall[object, generate_pb2.GenerateResponse]") -> None:
    while await call.read():
        pass


async def waiting(count: int) -> None:
    """Returns when so many requests wait in this process's routers."""
    await eventually(lambda: sample("baton_router_waiting_requests") == count)
