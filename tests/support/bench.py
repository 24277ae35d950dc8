"""Whole clusters in this process: simulated workers and a router over one in-memory registry, spoken to by gRPC."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from baton.inference.v1 import cluster_service_pb2, cluster_service_pb2_grpc, generate_pb2, inference_service_pb2_grpc
from support.tcp_proxy import TcpProxy

from discovery.memory import MemoryRegistry
from router.cluster import Cluster
from router.config import ProbeConfig, RetryConfig, RouterConfig
from router.host import host_router
from rpc.aio import timeout
from rpc.channels import open_channel
from services.config import HandoffConfig, WorkerConfig
from services.engines.simulated_config import SimulatedConfig
from services.host import Worker, host_worker

PATIENCE_SECONDS = 20.0
PROBE = ProbeConfig(interval_seconds=0.1, timeout_seconds=0.5)
# Requests are measured only where somebody could read it.
FAST_ROUTER = RouterConfig(
    listen="127.0.0.1:0", metrics_listen="127.0.0.1:0", probe=PROBE, drain_seconds=0, retry=RetryConfig(wait_seconds=0)
)
# For workers that compute in this process: who answers late is busy, not lost.
PATIENT = FAST_ROUTER.model_copy(update={"probe": ProbeConfig(interval_seconds=0.1, timeout_seconds=10.0)})


@dataclass
class Bench:
    """A running cluster. The router reaches every worker through a proxy, which a test may cut or freeze."""

    registry: MemoryRegistry
    stub: inference_service_pb2_grpc.InferenceServiceStub
    operators: cluster_service_pb2_grpc.ClusterServiceStub
    address: str
    cluster: Cluster
    workers: dict[str, Worker] = field(default_factory=dict)
    proxies: dict[str, TcpProxy] = field(default_factory=dict)
    _stacks: dict[str, AsyncExitStack] = field(default_factory=dict)

    async def generate(self, **fields: object) -> "Stream":
        """All messages of one request."""
        request = generate_pb2.GenerateRequest(**fields)  # type: ignore[arg-type]
        return Stream([message async for message in self.stub.Generate(request, timeout=PATIENCE_SECONDS)])

    async def text_of(self, **fields: object) -> str:
        return (await self.generate(**fields)).text

    async def start(self, config: WorkerConfig) -> Worker:
        """A worker whose record in the router's registry has the address of its proxy."""
        stack = AsyncExitStack()
        own = MemoryRegistry("test")
        worker = await stack.enter_async_context(host_worker(config, own))
        proxy = await stack.enter_async_context(TcpProxy(worker.address))
        record = replace(own.workers()[0], address=proxy.address)
        await stack.enter_async_context(self.registry.register(record))
        self.workers[worker.worker_id], self._stacks[worker.worker_id] = worker, stack
        self.proxies[worker.worker_id] = proxy
        return worker

    async def stop(self, worker_id: str) -> None:
        del self.workers[worker_id]
        await self._stacks.pop(worker_id).aclose()

    async def close(self) -> None:
        for stack in self._stacks.values():
            await stack.aclose()

    async def ready(self, count: int) -> None:
        """Waits until the router sends work to that many workers."""

        def are_ready() -> bool:
            return len(self.cluster.workers) == count == sum(not worker.problem for worker in self.cluster.workers)

        await eventually(are_ready)

    def used_blocks(self) -> int:
        return sum(worker.engine.load().blocks_used for worker in self.workers.values())

    async def list_workers(self) -> Sequence[cluster_service_pb2.Worker]:
        answer = await self.operators.ListWorkers(cluster_service_pb2.ListWorkersRequest())
        return answer.workers


@dataclass(frozen=True)
class Stream:
    """What a client got."""

    messages: list[generate_pb2.GenerateResponse]

    @property
    def started(self) -> generate_pb2.Started:
        return self.messages[0].started

    @property
    def finished(self) -> generate_pb2.Finished:
        return self.messages[-1].finished

    @property
    def placed(self) -> tuple[str, str]:
        return self.finished.prefill_worker_id, self.finished.decode_worker_id

    @property
    def text(self) -> str:
        return "".join(message.token.text for message in self.messages)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for message in self.messages for token_id in message.token.token_ids]


OpenBench = Callable[..., AbstractAsyncContextManager[Bench]]


def simulated(worker_id: str, *roles: str, **engine: object) -> WorkerConfig:
    """A worker that costs nothing unless `engine` says so."""
    return WorkerConfig(
        worker_id=worker_id,
        roles=roles,  # type: ignore[arg-type]
        engine=SimulatedConfig(name="demo", num_blocks=512, **engine),  # type: ignore[arg-type]
        handoff=HandoffConfig(lease_seconds=5.0),
        drain_seconds=0,
    )


PREFILL = simulated("p1", "prefill")
DECODE = simulated("d1", "decode")


@asynccontextmanager
async def bench(*configs: WorkerConfig, router: RouterConfig = FAST_ROUTER) -> AsyncIterator[Bench]:
    """A router and these workers, all ready."""
    registry = MemoryRegistry("test")
    async with host_router(router, registry) as host, open_channel(host.address) as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        operators = cluster_service_pb2_grpc.ClusterServiceStub(channel)
        running = Bench(registry, stub, operators, host.address, host.cluster)
        try:
            for config in configs:
                await running.start(config)
            await running.ready(len(configs))
            yield running
        finally:
            await running.close()


async def eventually(holds: Callable[[], bool]) -> None:
    """Waits until the condition holds."""
    async with timeout(PATIENCE_SECONDS):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
