"""Clusters in this process: simulated workers and a router with an in-memory registry, called through gRPC."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from support.eventually import PATIENCE_SECONDS, eventually
from support.servers.tcp_proxy import TcpProxy

from baton.inference.v1 import cluster_service_pb2, cluster_service_pb2_grpc, generate_pb2, inference_service_pb2_grpc
from discovery.memory import MemoryRegistry
from router.config import ProbeConfig, RetryConfig, RouterConfig, RoutingConfig
from router.context import RequestTable
from router.server import host_router
from router.workers.cluster import Cluster
from rpc.channels import open_channel
from services.config import HandoffConfig, WorkerConfig
from services.engines.simulated.config import SimulatedConfig
from services.server import Worker, host_worker

# This client shares an event loop with the server that answers its pings, and everything else.
_PATIENT_CHANNEL = {"grpc.keepalive_timeout_ms": 60_000, "grpc.http2.ping_timeout_ms": 60_000}

PROBE = ProbeConfig(interval_seconds=0.1, timeout_seconds=1.5)
# Prefill and decode on separate workers, whatever the workers' caches hold: most tests need a known choice.
PLACED_BY_LOAD = RoutingConfig(policy="least_loaded")
# Requests are measured only if the metrics are served.
FAST_ROUTER = RouterConfig(
    listen="127.0.0.1:0",
    metrics_listen="127.0.0.1:0",
    probe=PROBE,
    drain_seconds=0,
    retry=RetryConfig(wait_seconds=0),
    routing=PLACED_BY_LOAD,
)
# Workers compute in this process: a late answer means busy, not lost.
PATIENT = FAST_ROUTER.model_copy(update={"probe": ProbeConfig(interval_seconds=0.1, timeout_seconds=10.0)})


@dataclass
class Bench:
    """A running cluster. If it is `proxied`, the router reaches each worker by a proxy, which a test may cut or freeze.

    A proxy runs on the event loop of the test: where that is held for 3 s, pings are not answered in time.
    """

    registry: MemoryRegistry
    stub: inference_service_pb2_grpc.InferenceServiceStub
    operators: cluster_service_pb2_grpc.ClusterServiceStub
    address: str
    cluster: Cluster
    openai_address: str = ""  # if its router serves OpenAI's API
    proxied: bool = True
    report: Callable[[], Mapping[str, object]] = dict  # the router's at /health
    requests: RequestTable = field(default_factory=RequestTable)  # those that run at the router
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
        """A worker whose record in the router's registry has the address of its proxy, or its own."""
        stack = AsyncExitStack()
        own = MemoryRegistry("test")
        worker = await stack.enter_async_context(host_worker(config, own))
        record = own.workers()[0]
        if self.proxied:
            proxy = await stack.enter_async_context(TcpProxy(worker.address))
            record, self.proxies[worker.worker_id] = replace(record, address=proxy.address), proxy
        await stack.enter_async_context(self.registry.register(record))
        self.workers[worker.worker_id], self._stacks[worker.worker_id] = worker, stack
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
        return sum(worker.engines.load().blocks_used for worker in self.workers.values())

    async def list_workers(self) -> Sequence[cluster_service_pb2.Worker]:
        answer = await self.operators.ListWorkers(cluster_service_pb2.ListWorkersRequest())
        return answer.workers


@dataclass(frozen=True)
class Stream:
    """The messages that a client got."""

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


def simulated(worker_id: str, *roles: str, **engine: object) -> WorkerConfig:
    """A worker whose engine takes no time unless `engine` says so."""
    return WorkerConfig(
        worker_id=worker_id,
        roles=roles,  # type: ignore[arg-type]
        engine=SimulatedConfig(**{"name": "demo", "num_blocks": 512, **engine}),  # type: ignore[arg-type]
        handoff=HandoffConfig(lease_seconds=5.0),
        drain_seconds=0,
    )


PREFILL = simulated("p1", "prefill")
DECODE = simulated("d1", "decode")


@asynccontextmanager
async def bench(
    *configs: WorkerConfig, router: RouterConfig = FAST_ROUTER, proxied: bool = True
) -> AsyncIterator[Bench]:
    """A router and these workers, all ready."""
    registry = MemoryRegistry("test")
    async with (
        host_router(router, registry) as host,
        open_channel(host.address, replaced_options=_PATIENT_CHANNEL) as channel,
    ):
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        operators = cluster_service_pb2_grpc.ClusterServiceStub(channel)
        running = Bench(
            registry, stub, operators, host.address, host.cluster, host.openai_address, proxied, host.report
        )
        running.requests = host.requests
        try:
            for config in configs:
                await running.start(config)
            await running.ready(len(configs))
            yield running
        finally:
            await running.close()


@asynccontextmanager
async def running_stream(running: Bench, until_tokens: int, **fields: Any) -> AsyncIterator["asyncio.Task[Stream]"]:
    """A running request, which has at least `until_tokens` tokens when the context opens."""
    reached = asyncio.Event()

    async def read() -> Stream:
        stream = Stream([])
        async for message in running.stub.Generate(generate_pb2.GenerateRequest(**fields), timeout=PATIENCE_SECONDS):
            stream.messages.append(message)
            if len(stream.token_ids) >= until_tokens:
                reached.set()
        return stream

    task = asyncio.create_task(read())
    await asyncio.wait([task, asyncio.create_task(reached.wait())], return_when=asyncio.FIRST_COMPLETED)
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def growing(running: Bench, until_tokens: int = 3, **fields: Any) -> AsyncIterator[Stream]:
    """A running request that is read all the time and ends with the context; it has some tokens when that opens."""
    stream = Stream([])

    async def read() -> None:
        async for message in running.stub.Generate(generate_pb2.GenerateRequest(**fields), timeout=PATIENCE_SECONDS):
            stream.messages.append(message)

    task = asyncio.create_task(read())
    try:
        await eventually(lambda: len(stream.token_ids) >= until_tokens or task.done())
        yield stream
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
