"""Two routers of one fleet that record what is asked for, before the same workers: runs requests, and disturbs them."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from support.clients.resuming import Received
from support.cluster.in_process import FAST_ROUTER
from support.engines.checkpoints import DEMO
from support.eventually import PATIENCE_SECONDS, eventually

from baton import AsyncClient
from baton.calls import stream, unary
from baton.connection.credentials import RECORDED
from baton.inference.v1 import cluster_service_pb2, cluster_service_pb2_grpc, generate_pb2, inference_service_pb2_grpc
from baton.inference.v1.record_pb2 import RequestRecord
from discovery.memory import MemoryRegistry
from router.config import RecordsConfig, RouterConfig
from router.server import Router, host_router
from rpc.channels import open_channel
from services.config import WorkerConfig
from services.engines.pytorch.config import PyTorchConfig
from services.server import Worker, host_worker

ALLOWED = RecordsConfig(asked=True, prompts=True)


@dataclass
class Recorded:
    """The routers, with a stub and a client of each, and the workers."""

    registry: MemoryRegistry
    routers: Sequence[Router]
    stubs: Sequence[inference_service_pb2_grpc.InferenceServiceStub]
    operators: cluster_service_pb2_grpc.ClusterServiceStub
    clients: Sequence[AsyncClient]
    workers: dict[str, Worker]

    async def run(self, request: generate_pb2.GenerateRequest, router: int = 0) -> RequestRecord:
        """Runs a request to its end, and returns its record."""
        await self._read(self.stubs[router].Generate(request, timeout=PATIENCE_SECONDS, metadata=RECORDED), request)
        return await self.record(request.request_id)

    async def run_moved(self, request: generate_pb2.GenerateRequest, after: int) -> RequestRecord:
        """The same, but its decode is moved to another worker after some tokens."""
        call = self.stubs[0].Generate(request, timeout=PATIENCE_SECONDS, metadata=RECORDED)
        received, asked = Received(request), False
        async with aclosing(stream(call)) as messages:
            async for message in messages:
                received.add(message)
                if received.tokens >= after and not asked:
                    asked = True
                    await self._move_all()
        return await self.record(request.request_id)

    async def run_resumed(self, request: generate_pb2.GenerateRequest, after: int) -> RequestRecord:
        """The same, but its client loses the stream after some tokens, and goes on at the other router."""
        kept = generate_pb2.GenerateRequest()
        kept.CopyFrom(request)
        kept.response.keep.seconds = 5
        call = self.stubs[0].Generate(kept, timeout=PATIENCE_SECONDS, metadata=RECORDED)
        received = await self._read(call, kept, after)
        if received.finished is None:
            resumed = self.stubs[1].ResumeGeneration(received.resume(), timeout=PATIENCE_SECONDS, metadata=RECORDED)
            async with aclosing(stream(resumed)) as messages:
                async for message in messages:
                    received.add(message)
        return await self.record(request.request_id)

    async def record(self, request_id: str, router: int = -1) -> RequestRecord:
        """The latest record of a request, as a router finds it."""
        return (await self.clients[router].records(request_id))[-1]

    async def _move_all(self) -> None:
        for name, worker in self.workers.items():
            if worker.engines.load().running:
                request = cluster_service_pb2.MoveStreamsRequest(worker_id=name)
                await unary(self.operators.MoveStreams(request, timeout=PATIENCE_SECONDS))

    async def _read(self, call: Any, request: generate_pb2.GenerateRequest, until: int = 10**9) -> Received:
        received = Received(request)
        async with aclosing(stream(call)) as messages:
            async for message in messages:
                received.add(message)
                if received.tokens >= until:
                    break
        return received


def demo_workers(prefill: int = 1, decode: int = 2, **engine: Any) -> list[WorkerConfig]:
    """Workers of the demonstration model, on one thread each, in float32."""
    options = {"model": DEMO, "name": "demo", "device": "cpu", "dtype": "float32", "threads": 1, **engine}
    config = PyTorchConfig.model_validate({"kv_cache_bytes": 64 << 20, **options})
    roles = ["prefill"] * prefill + ["decode"] * decode
    return [
        WorkerConfig(worker_id=f"{role}-{number}", roles=(role,), engine=config, drain_seconds=0)  # type: ignore[arg-type]
        for number, role in enumerate(roles)
    ]


@asynccontextmanager
async def recorded(
    *configs: WorkerConfig, records: RecordsConfig = ALLOWED, router: RouterConfig = FAST_ROUTER, routers: int = 2
) -> AsyncIterator[Recorded]:
    registry = MemoryRegistry("test")
    names = [f"router-{number}" for number in range(routers)]
    own = [router.model_copy(update={"records": records, "router_id": name}) for name in names]
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(host_worker(each, registry)) for each in configs]
        hosts = [await stack.enter_async_context(host_router(each, registry)) for each in own]
        channels = [await stack.enter_async_context(open_channel(each.address)) for each in hosts]
        clients = [await stack.enter_async_context(AsyncClient(each.address)) for each in hosts]
        await eventually(lambda: all(_is_ready(each, len(configs), routers) for each in hosts))
        yield Recorded(
            registry,
            hosts,
            [inference_service_pb2_grpc.InferenceServiceStub(channel) for channel in channels],
            cluster_service_pb2_grpc.ClusterServiceStub(channels[0]),
            clients,
            {worker.worker_id: worker for worker in workers},
        )


def _is_ready(router: Router, workers: int, routers: int) -> bool:
    """True if a router sends work to all workers, and knows the other routers."""
    ready = sum(not worker.problem for worker in router.cluster.workers)
    return ready == workers and (router.path.peers is None or len(list(router.path.peers.links)) == routers - 1)
