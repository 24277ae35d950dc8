"""A router that has just started says so: until its first view of the cluster is whole no model is unknown to it."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.clients.kserve_call import infer, text_request
from support.clients.openai_api import OPENAI_ROUTER
from support.cluster.in_process import simulated
from support.eventually import PATIENCE_SECONDS, eventually

from baton.calls import unary
from baton.engine.v1 import worker_pb2, worker_pb2_grpc
from baton.errors import ModelNotFound, NoWorker, RouterStarting
from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc, model_pb2
from discovery.memory import MemoryRegistry
from discovery.record import WorkerRecord
from router.server import Router, host_router
from router.workers import members
from rpc.channels import open_channel
from rpc.health import Health
from rpc.server import Service, serve
from services.server import host_worker

CHAT = [{"role": "user", "content": "hello"}]
ANTHROPIC = {"anthropic-version": "2023-06-01"}
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Slow(MemoryRegistry):
    """A registry whose first view comes once it is `answering`."""

    def __init__(self) -> None:
        super().__init__("test")
        self.answering = asyncio.Event()

    async def watch(self) -> AsyncGenerator[tuple[WorkerRecord, ...], None]:
        await self.answering.wait()
        async for records in super().watch():
            yield records


@dataclass
class Started:
    """A router, and what its clients call it by."""

    router: Router
    stub: inference_service_pb2_grpc.InferenceServiceStub
    channel: aio.Channel
    http: httpx2.AsyncClient

    async def generate(self, model: str = "demo") -> Sequence[int]:
        request = generate_pb2.GenerateUnaryRequest(
            request=generate_pb2.GenerateRequest(model=model, prompt="hello", stopping={"max_tokens": 2})
        )
        answer = await unary(self.stub.GenerateUnary(request, timeout=PATIENCE_SECONDS))
        return answer.token.token_ids

    async def health(self) -> Any:
        request = health_pb2.HealthCheckRequest()
        return (await health_pb2_grpc.HealthStub(self.channel).Check(request)).status

    async def infer(self) -> Any:
        return await infer(self.router.address, text_request("hello"))

    async def post(self, path: str, **body: Any) -> httpx2.Response:
        return await self.http.post(path, content=json.dumps({"model": "demo", **body}))

    async def message(self, path: str = "", **body: Any) -> httpx2.Response:
        """A call of Anthropic's API."""
        content = json.dumps({"model": "demo", "messages": CHAT, **body})
        return await self.http.post(f"/messages{path}", content=content, headers=ANTHROPIC)


@asynccontextmanager
async def started(registry: MemoryRegistry) -> AsyncIterator[Started]:
    async with (
        host_router(OPENAI_ROUTER, registry) as router,
        open_channel(router.address) as channel,
        httpx2.AsyncClient(trust_env=False, timeout=30, base_url=f"http://{router.openai_address}/v1") as http,
    ):
        yield Started(router, inference_service_pb2_grpc.InferenceServiceStub(channel), channel, http)


async def test_until_the_registry_is_read_every_api_says_that_the_router_starts() -> None:
    registry = Slow()
    async with host_worker(simulated("w1", "prefill", "decode"), registry), started(registry) as client:
        assert await client.health() == NOT_SERVING
        with pytest.raises(RouterStarting, match="has not read the registry") as refused:
            await client.generate()
        assert refused.value.retry_after_seconds == 1.0
        with pytest.raises(RouterStarting):
            await unary(client.stub.ListModels(model_pb2.ListModelsRequest(), timeout=PATIENCE_SECONDS))
        with pytest.raises(aio.AioRpcError, match="UNAVAILABLE"):
            await client.infer()
        for response in (
            await client.post("/chat/completions", messages=CHAT),
            await client.post("/completions", prompt="hello"),
            await client.post("/responses", input="hello"),
            await client.message(max_tokens=2),
            await client.message("/count_tokens"),
            await client.http.get("/models", headers=ANTHROPIC),
            await client.http.get("/models"),
            await client.http.get("/models/demo"),
        ):
            assert (response.status_code, response.headers.get("retry-after")) == (503, "1"), response.text
        registry.answering.set()
        await eventually(lambda: client.router.health.serving)
        assert await client.health() == SERVING
        assert len(await client.generate()) == 2
        with pytest.raises(ModelNotFound):
            await client.generate("other")
        assert (await client.message(max_tokens=2)).status_code == 200


class Hesitating(worker_pb2_grpc.WorkerServiceServicer):
    """A worker that does not tell its model."""

    async def GetModel(self, _request: worker_pb2.GetModelRequest, _context: Any) -> worker_pb2.GetModelResponse:
        await asyncio.Event().wait()
        raise AssertionError


@pytest.fixture
async def hesitating() -> AsyncIterator[str]:
    """The address of such a worker."""
    name = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
    service = Service(name, worker_pb2_grpc.add_WorkerServiceServicer_to_server, Hesitating())
    health = Health()
    health.set("", True)
    async with serve("127.0.0.1:0", [service], health=health, drain_seconds=0) as server:
        yield server.address


async def test_a_name_is_unknown_once_the_workers_that_were_there_have_told_their_models(hesitating: str) -> None:
    registry = MemoryRegistry("test")
    record = WorkerRecord("w2", 1, hesitating, ("decode",), "late", "simulated", "layout", 1024)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(registry.register(record))
        await stack.enter_async_context(host_worker(simulated("w1", "prefill", "decode"), registry))
        client = await stack.enter_async_context(started(registry))
        await eventually(lambda: client.router.health.serving)
        assert len(await client.generate()) == 2
        for name in ("late", "late:adapter", "other"):
            with pytest.raises(RouterStarting, match="worker w2 has not told its models yet"):
                await client.generate(name)


async def test_names_are_not_uncertain_for_ever(hesitating: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_TELLING_SECONDS", 0.0)
    registry = MemoryRegistry("test")
    record = WorkerRecord("w2", 1, hesitating, ("decode",), "late", "simulated", "layout", 1024)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(registry.register(record))
        await stack.enter_async_context(host_worker(simulated("w1", "prefill", "decode"), registry))
        client = await stack.enter_async_context(started(registry))
        await eventually(lambda: client.router.health.serving)
        with pytest.raises(ModelNotFound):
            await client.generate("other")
        with pytest.raises(NoWorker, match="w2: its model card has not been read yet") as refused:
            await client.generate("late")
        assert not isinstance(refused.value, RouterStarting)


async def test_a_worker_that_comes_later_does_not_make_names_uncertain(hesitating: str) -> None:
    registry = MemoryRegistry("test")
    async with host_worker(simulated("w1", "prefill", "decode"), registry), started(registry) as client:
        await eventually(lambda: client.router.health.serving)
        record = WorkerRecord("w2", 1, hesitating, ("decode",), "late", "simulated", "layout", 1024)
        async with registry.register(record):
            await eventually(lambda: len(client.router.cluster.workers) == 2)
            with pytest.raises(ModelNotFound):
                await client.generate("other")
