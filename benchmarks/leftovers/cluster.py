"""Two routers and simulated workers of all roles, in two processes that say what they hold."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe
from typing import Any, Literal

from benchmarks.leftovers import garbage
from benchmarks.leftovers.heap import heap
from benchmarks.processes import child, received, run_process
from discovery.memory import MemoryRegistry
from discovery.record import WorkerRecord
from router.config import (
    AdmissionConfig,
    EmbeddingsConfig,
    OpenAIConfig,
    ProbeConfig,
    QuotaConfig,
    QuotasConfig,
    RetryConfig,
    RouterConfig,
    RoutingConfig,
)
from router.server import host_router
from rpc.server import ServerKind
from runtime.garbage import return_large_memory
from services.config import HandoffConfig, WorkerConfig
from services.engines.simulated.config import SimulatedConfig
from services.server import host_worker

MODEL = "leftovers"
# How long an answer that nobody reads is kept.
KEEP_SECONDS = 2
REFUSED_TENANT = "refused"
_WORKERS = ("encode-0", "prefill-0", "prefill-1", "decode-0", "decode-1", "embed-0", "diffuse-0")

Command = Literal["heap", "tasks", "watch", "garbage"]


@dataclass(frozen=True, slots=True)
class Cluster:
    """The running processes, and how many tasks they have without requests. `other_address` is the second router's."""

    address: str
    other_address: str
    openai_address: str
    pipes: tuple[Pipe, ...]
    tasks: tuple[int, ...]

    async def settled(self) -> None:
        """Waits until no task of a request is left, and no kept answer."""
        while any(now > idle for now, idle in zip(await self.ask("tasks"), self.tasks, strict=True)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def ask(self, command: Command) -> tuple[Any, Any]:
        """The answers of the router and of the workers.

        "heap" is their memory, see heap.py, "tasks" a number, and "garbage" what only a collection frees of what was
        made since "watch"; see garbage.py.
        """
        for pipe in self.pipes:
            pipe.send(command)
        router, workers = [await received(pipe) for pipe in self.pipes]
        return router, workers


@asynccontextmanager
async def running_cluster(server: ServerKind) -> AsyncIterator[Cluster]:
    """Two routers, two prefill and two decode workers, and one of each other role, on this kind of server."""
    async with child(_run_workers, server) as (workers, _):
        records = await received(workers)
        async with child(_run_router, server, records) as (router, _):
            addresses = await received(router)
            idle = Cluster(*addresses, (router, workers), (0, 0))
            yield replace(idle, tasks=await _idle_tasks(idle))


async def _idle_tasks(cluster: Cluster) -> tuple[int, ...]:
    """The most tasks within a second: streams from a router to its workers are opened one after the other."""
    most: tuple[int, ...] = (0, 0)
    for _ in range(10):
        most = tuple(map(max, most, await cluster.ask("tasks")))
        await asyncio.sleep(0.1)
    return most


def _run_workers(pipe: Pipe, server: ServerKind) -> None:
    async def serve() -> None:
        registry = MemoryRegistry("leftovers")
        async with AsyncExitStack() as stack:
            workers = [
                await stack.enter_async_context(host_worker(_worker(each, server), registry)) for each in _WORKERS
            ]
            pipe.send(registry.workers())
            await _answer(pipe, lambda: sum(len(each.kept) for each in workers))

    run_process(serve)


def _run_router(pipe: Pipe, server: ServerKind, records: list[WorkerRecord]) -> None:
    async def serve() -> None:
        return_large_memory()
        registry = MemoryRegistry("leftovers")
        async with AsyncExitStack() as stack:
            for record in records:
                await stack.enter_async_context(registry.register(record))
            routers = [await stack.enter_async_context(host_router(_router(server), registry)) for _ in range(2)]
            while any(  # noqa: ASYNC110
                sum(not worker.problem for worker in router.cluster.workers) < len(records) for router in routers
            ):
                await asyncio.sleep(0.01)
            first, other = routers
            pipe.send((first.address, other.address, first.openai_address))
            await _answer(pipe)

    run_process(serve)


async def _answer(pipe: Pipe, kept: Callable[[], int] = lambda: 0) -> None:
    """Answers commands until it is told to stop. `kept` is the number of kept answers."""
    answers: dict[str, Callable[[], object]] = {
        "heap": heap,
        "tasks": lambda: len(asyncio.all_tasks()) + kept(),
        "watch": garbage.watch,
        "garbage": garbage.found,
    }
    while (command := await asyncio.to_thread(pipe.recv)) != "stop":
        pipe.send(answers[command]())


def _router(server: ServerKind) -> RouterConfig:
    return RouterConfig(
        listen="127.0.0.1:0",
        metrics_listen="127.0.0.1:0",
        server=server,
        openai=OpenAIConfig(listen="127.0.0.1:0"),
        # Several workers compute in one process: a late answer means busy, not lost.
        probe=ProbeConfig(interval_seconds=0.1, timeout_seconds=20, hung_seconds=60),
        drain_seconds=0,
        allow_faults=True,
        admission=AdmissionConfig(predict_deadlines=False),
        quotas=QuotasConfig(tenants={REFUSED_TENANT: QuotaConfig(requests_per_second=1e-9, burst_seconds=1e-9)}),
        # So few that they are all there before anything is measured.
        embeddings=EmbeddingsConfig(max_bytes=2**19),
        retry=RetryConfig(wait_seconds=0.5, budget_floor=1_000_000),
        # Each prompt is prefilled on one worker and decoded on another.
        routing=RoutingConfig(policy="least_loaded"),
    )


def _worker(worker_id: str, server: ServerKind) -> WorkerConfig:
    return WorkerConfig(
        worker_id=worker_id,
        server=server,
        roles=(worker_id.partition("-")[0],),  # type: ignore[arg-type]
        engine=SimulatedConfig(
            name=MODEL,
            num_blocks=4096,
            block_bytes=64,
            max_context_tokens=8192,
            allow_faults=True,
            image_tokens=4,
        ),
        handoff=HandoffConfig(lease_seconds=5.0),
        drain_seconds=0,
    )
