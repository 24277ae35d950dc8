"""Decodes that are moved to another worker while they run: the client gets the same ids, and nothing is computed again."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.clients.scraping import since
from support.cluster.in_process import FAST_ROUTER, Bench, Stream, bench, running_stream, simulated
from support.eventually import PATIENCE_SECONDS, eventually

from baton.calls import stream, unary
from baton.inference.v1 import cluster_service_pb2
from router.config import RouterConfig
from services.config import WorkerConfig
from services.server import Worker, host_worker

STEP = 0.005
LONG = {"prompt": "hello " * 20, "sampling": {"temperature": 1.0, "seed": 3}, "stopping": {"max_tokens": 200}}


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

    @property
    def busy(self) -> str:
        """The only worker that decodes."""
        [found] = [name for name in self.workers if self.running(name)]
        return found

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


@pytest.fixture(scope="module")
def undisturbed() -> Stream:
    async def ask() -> Stream:
        async with bench(simulated("d1", "decode")) as running:
            return await running.generate(**LONG)

    return asyncio.run(ask())


def _other(cluster: Shared, name: str) -> str:
    [other] = [one for one in cluster.workers if one != name]
    return other


async def test_a_stream_is_moved_with_its_kv(undisturbed: Stream) -> None:
    moved, computed = since("baton_router_moves_total", outcome="moved"), since("baton_worker_prompt_tokens_total")
    async with shared(*decoders("d1", "d2")) as cluster:
        async with running_stream(cluster.bench, 20, **LONG) as task:
            source = cluster.busy
            assert await cluster.move(source) == 1
            await eventually(lambda: cluster.running(source) == 0)
            answer = await task
        assert answer.token_ids == undisturbed.token_ids
        assert answer.text == undisturbed.text
        assert (answer.finished.moves, answer.finished.migrations) == (1, 0)
        assert answer.finished.decode_worker_id == _other(cluster, source)
    assert moved.grown == 1


async def test_a_stream_may_be_moved_again_and_again(undisturbed: Stream) -> None:
    async with shared(*decoders("d1", "d2")) as cluster:
        async with running_stream(cluster.bench, 5, **LONG) as task:
            for _ in range(5):
                source = cluster.busy
                await cluster.move(source)
                await eventually(lambda: cluster.running(source) == 0 and cluster.running(_other(cluster, source)))
            answer = await task
        assert answer.token_ids == undisturbed.token_ids
        assert answer.finished.moves == 5


async def test_a_worker_that_stops_gives_its_streams_away(undisturbed: Stream) -> None:
    computed = since("baton_router_moves_total", outcome="recomputed")
    async with shared(*decoders("d1")) as cluster:
        async with AsyncExitStack() as stack:
            tasks = [await stack.enter_async_context(running_stream(cluster.bench, 3, **LONG)) for _ in range(6)]
            await cluster.start(decoders("d2")[0])
            await cluster.bench.ready(2)
            await cluster.stop("d1")
            answers = [await task for task in tasks]
        for answer in answers:
            assert answer.token_ids == undisturbed.token_ids
            assert (answer.finished.moves, answer.finished.migrations) == (1, 0)
    assert computed.grown == 0


async def test_without_another_worker_a_stream_stays(undisturbed: Stream) -> None:
    async with shared(*decoders("d1")) as cluster:
        async with running_stream(cluster.bench, 5, **LONG) as task:
            assert await cluster.move("d1") == 1
            answer = await task
        assert answer.token_ids == undisturbed.token_ids
        assert answer.finished.moves == 0
