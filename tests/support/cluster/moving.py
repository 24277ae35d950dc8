"""A router, and simulated workers in its own registry: it sees their drains, roles and loads."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from support.cluster.in_process import FAST_ROUTER, Bench, Stream, bench, simulated
from support.eventually import PATIENCE_SECONDS, eventually

from baton.calls import unary
from baton.inference.v1 import cluster_service_pb2, generate_pb2
from router.config import RouterConfig
from services.config import WorkerConfig
from services.server import Worker, host_worker

STEP = 0.005


@dataclass
class Shared:
    """A router, and workers in its registry: it sees their drains and their roles."""

    bench: Bench
    workers: dict[str, Worker] = field(default_factory=dict)
    stacks: dict[str, AsyncExitStack] = field(default_factory=dict)

    async def start(self, config: WorkerConfig) -> None:
        stack = self.stacks[config.worker_id] = AsyncExitStack()
        self.workers[config.worker_id] = await stack.enter_async_context(host_worker(config, self.bench.registry))

    async def stop(self, worker_id: str) -> None:
        await self.stacks.pop(worker_id).aclose()
        del self.workers[worker_id]

    def running(self, worker_id: str) -> int:
        return self.workers[worker_id].engines.load().running

    def other(self, worker_id: str) -> str:
        """The other one of two workers."""
        [found] = [name for name in self.workers if name != worker_id]
        return found

    @property
    def busy(self) -> str:
        """The only worker that decodes."""
        [found] = [name for name in self.workers if self.running(name)]
        return found

    async def moved(self, source: str) -> None:
        """Waits until the only stream of `source` runs on the other worker."""
        await eventually(lambda: self.running(source) == 0 and self.running(self.other(source)) == 1)

    async def move(self, worker_id: str, streams: int = 0) -> int:
        request = cluster_service_pb2.MoveStreamsRequest(worker_id=worker_id, streams=streams)
        return (await unary(self.bench.operators.MoveStreams(request, timeout=PATIENCE_SECONDS))).streams


@asynccontextmanager
async def shared(*configs: WorkerConfig, router: RouterConfig = FAST_ROUTER) -> AsyncIterator[Shared]:
    async with bench(router=router) as running:
        found = Shared(running)
        try:
            for config in configs:
                await found.start(config)
            await running.ready(len(configs))
            yield found
            await eventually(lambda: not any(one.engines.load().blocks_used for one in found.workers.values()))
        finally:
            for name in tuple(found.stacks):
                await found.stop(name)


def decoders(*names: str, **engine: Any) -> Sequence[WorkerConfig]:
    configs = [simulated(name, "decode", decode_step_seconds=STEP, **engine) for name in names]
    return [config.model_copy(update={"drain_seconds": PATIENCE_SECONDS}) for config in configs]


async def answer(running: Bench, plan: str = "", **fields: Any) -> Stream:
    """A whole answer, under a plan of faults."""
    metadata = [("x-baton-fault", plan)] if plan else []
    call = running.stub.Generate(generate_pb2.GenerateRequest(**fields), timeout=PATIENCE_SECONDS, metadata=metadata)
    return Stream([message async for message in call])
