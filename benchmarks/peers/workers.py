"""Baton's workers: simulated engines of three speeds, which note their steps."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.peers.clients.load import STEP_SECONDS
from benchmarks.peers.clients.steps import StepLog
from benchmarks.processes import child, received, run_process, until_told
from benchmarks.router_overhead import worker_config
from devtools.trace_viewer.api import open_viewer
from devtools.trace_viewer.store import Bounds
from discovery.memory import MemoryRegistry
from discovery.record import WorkerRecord
from services.engines.simulated.scheduler import SimulatedScheduler
from services.server import host_worker


def run_workers(pipe: Connection, steps: Path, context_tokens: int) -> None:
    """Serves each role of each model until the pipe ends."""
    _note_steps(StepLog(steps))

    async def serve() -> None:
        registry = MemoryRegistry("benchmark")
        async with AsyncExitStack() as stack:
            for model, step_seconds in STEP_SECONDS.items():
                for role in ("prefill", "decode"):
                    config = worker_config(model, role, step_seconds if role == "decode" else 0.0)
                    # Room for the stream beside 1,024 others.
                    engine = config.engine.model_copy(update={"max_batch": 2048, "max_context_tokens": context_tokens})
                    config = config.model_copy(update={"server": "http2", "engine": engine})
                    await stack.enter_async_context(host_worker(config, registry))
            pipe.send(registry.workers())
            await until_told(pipe)

    run_process(serve)


def run_viewer(pipe: Connection) -> None:
    """Receives the routers' spans until the pipe ends."""

    async def serve() -> None:
        async with open_viewer("127.0.0.1:0", "127.0.0.1:0", Bounds()) as viewer:
            pipe.send(viewer.otlp_address)
            await until_told(pipe)

    run_process(serve)


@asynccontextmanager
async def workers(steps: Path, context_tokens: int = 1024) -> AsyncIterator[tuple[Sequence[WorkerRecord], int, str]]:
    """The workers' records, the id of their process, and the address of a receiver of spans."""
    async with child(run_workers, steps, context_tokens) as (pipe, pid), child(run_viewer) as (viewer, _):
        yield await received(pipe), pid, await received(viewer)


def _note_steps(log: StepLog) -> None:
    """Notes the end of each step that takes time: the next thing that the scheduler does is to make its tokens."""
    spend = SimulatedScheduler._spend

    async def noted(self: SimulatedScheduler, batch: Any) -> None:
        await spend(self, batch)
        if self._config.decode_step_seconds:
            log.note()

    SimulatedScheduler._spend = noted  # type: ignore[method-assign]
