"""The fuzzer's target: a router and two workers on their own event loop, and the rules for their answers."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode, aio

from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc
from discovery.memory import MemoryRegistry
from router.config import RouterConfig
from router.server import host_router
from rpc.channels import open_channel
from runtime.aio import timeout
from services.config import HandoffConfig, WorkerConfig
from services.engines.simulated.config import SimulatedConfig
from services.server import Worker, host_worker

LEASE_SECONDS = 0.5
CALL_SECONDS = 20.0

Result = TypeVar("Result")


@dataclass(frozen=True)
class Target:
    """The cluster, and a channel to each of its processes' servers."""

    loop: asyncio.AbstractEventLoop
    workers: tuple[Worker, Worker]
    router: aio.Channel
    prefill: aio.Channel
    decode: aio.Channel

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs a coroutine on the cluster's event loop."""
        return self.loop.run_until_complete(work)

    def send(self, channel: aio.Channel, method: str, wire: bytes) -> None:
        """Makes a call and reads at most two messages. An error must come in time and say what is wrong."""
        self.run(_send(channel, method, wire))

    def still_works(self) -> None:
        """Checks that an ordinary request still runs."""
        self.run(_generate(self.router))


async def _send(channel: aio.Channel, method: str, wire: bytes) -> None:
    call = channel.unary_stream(method, request_serializer=bytes)(wire, timeout=CALL_SECONDS)
    try:
        # A watch says nothing more until something changes.
        for _ in range(1 if method.endswith(("/WatchLoad", "/SubscribeKvEvents")) else 2):
            async with timeout(CALL_SECONDS + 5):
                if await call.read() is aio.EOF:
                    break
    except aio.AioRpcError as error:
        check_error(error)
    finally:
        call.cancel()


def check_error(error: aio.AioRpcError) -> None:
    """Checks that an error has one of our reasons and an expected code; a timeout or an unknown code fails."""
    wire = next((value for key, value in error.trailing_metadata() or () if key == "grpc-status-details-bin"), b"")
    info = error_details_pb2.ErrorInfo()
    has_reason = any(detail.Unpack(info) for detail in status_pb2.Status.FromString(wire).details)
    said = f"{error.code()} {info.reason}: {error.details()}"
    assert error.code() not in (StatusCode.UNKNOWN, StatusCode.DEADLINE_EXCEEDED), said
    assert has_reason, said
    assert info.reason != "INTERNAL_ERROR", said


async def _generate(channel: aio.Channel) -> None:
    stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
    request = generate_pb2.GenerateRequest(prompt="hello", stopping={"max_tokens": 3})
    answer = await stub.GenerateUnary(generate_pb2.GenerateUnaryRequest(request=request), timeout=CALL_SECONDS)
    assert len(answer.token.token_ids) == 3


def _worker(role: str) -> WorkerConfig:
    return WorkerConfig(
        worker_id=role,
        roles=(role,),  # type: ignore[arg-type]
        engine=SimulatedConfig(num_blocks=64, block_bytes=64, max_context_tokens=256),
        handoff=HandoffConfig(lease_seconds=LEASE_SECONDS),
        drain_seconds=0,
    )


@asynccontextmanager
async def fuzzed_cluster(loop: asyncio.AbstractEventLoop) -> AsyncIterator[Target]:
    """A running cluster. At the end of the context no block may be in use."""
    registry = MemoryRegistry("test")
    async with (
        host_worker(_worker("prefill"), registry) as prefill,
        host_worker(_worker("decode"), registry) as decode,
        host_router(RouterConfig(listen="127.0.0.1:0", drain_seconds=0), registry) as router,
        open_channel(router.address) as to_router,
        open_channel(prefill.address) as to_prefill,
        open_channel(decode.address) as to_decode,
    ):
        async with timeout(CALL_SECONDS):
            while sum(not worker.problem for worker in router.cluster.workers) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield Target(loop, (prefill, decode), to_router, to_prefill, to_decode)
        # Unused handoffs are freed within one lease and a second; nothing else uses blocks.
        async with timeout(LEASE_SECONDS + 1):
            while any(worker.engines.load().blocks_used for worker in (prefill, decode)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
