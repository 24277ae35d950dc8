"""A worker that serves: its health report and metrics, its supervision, and its drain."""

import asyncio
import faulthandler
import gc
import math
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from baton.errors import Draining, EngineFailed
from rpc.health import Health
from runtime.aio import run_with_background, wait_until_done
from runtime.clock import monotonic
from runtime.telemetry.monitor import Report, status
from services.engines.base import Engine, EngineLoad
from services.handoff.leases import LeaseTable
from services.identity import Identity, WorkerRegistration
from services.requests.calls import Calls
from services.resume.streams import NOTHING_KEPT, KeptStreams, KeptUsage
from services.telemetry import metrics
from services.worker_engines import WorkerEngines

log = structlog.get_logger(__name__)

_STATE_SECONDS = 0.25
_DRAIN_POLL_SECONDS = 0.05
# A process that was suspended finds all its waits overdue when it continues: a failure counts if it lasts.
_CONFIRM_FAILURE_SECONDS = 1.0
_SHUTDOWN_SECONDS = 5.0
_LOCKED_SHUTDOWN_SECONDS = _SHUTDOWN_SECONDS + 1

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """The work that is left before a drain ends."""

    running: int
    handoffs_held: int

    @property
    def drained(self) -> bool:
        return not self.running and not self.handoffs_held


class Drainer:
    """Drains a worker: new requests are refused, running ones may finish, and held KV may be pulled. It is final."""

    def __init__(
        self,
        calls: Calls,
        leases: LeaseTable,
        registration: WorkerRegistration,
        drain_seconds: float,
        fetch_seconds: float,
    ) -> None:
        self._calls = calls
        self._leases = leases
        self._registration = registration
        self._drain_seconds = drain_seconds
        self._held_seconds = max(leases.lease_seconds, fetch_seconds)
        self._finished = asyncio.Event()

    async def drain(self, grace_seconds: float | None = None) -> AsyncGenerator[DrainProgress, None]:
        """Yields the progress, now and after every change, until nothing is left.

        After the grace, or the configured time, running requests are stopped; their callers get Draining, and may retry
        elsewhere. After one lease more, or `fetch_seconds` if that is longer, held blocks are freed.
        """
        self._calls.draining = True
        await self._registration.drain()
        deadline = monotonic() + (self._drain_seconds if grace_seconds is None else grace_seconds)
        known = self.progress
        yield known
        while not known.drained:
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
            await self._enforce(deadline)
            if (progress := self.progress) != known:
                known = progress
                yield known

    def finish(self, _call: object = None) -> None:
        """Notes that the caller of a drain has received its end."""
        self._finished.set()

    async def finished(self) -> None:
        """Waits until a drain that was called for has ended: the process may end too."""
        await self._finished.wait()

    @property
    def progress(self) -> DrainProgress:
        """Returns the work that is left now, draining or not."""
        return DrainProgress(len(self._calls), len(self._leases))

    async def _enforce(self, deadline: float) -> None:
        overdue = monotonic() - deadline
        if overdue > 0 and len(self._calls):
            await self._calls.stop_all(Draining("the worker ended before the request did"))
        if overdue > self._held_seconds and len(self._leases):
            await self._leases.release_all()


@dataclass(frozen=True, slots=True)
class _State:
    """The values behind a worker's metrics."""

    is_healthy: bool
    is_responsive: bool
    load: EngineLoad
    kept: KeptUsage
    held: int
    embedding_blocks: int
    embedding_blocks_used: int


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker that serves. Leaving the context that it came from drains it."""

    identity: Identity
    engines: WorkerEngines
    leases: LeaseTable
    drainer: Drainer
    health: Health
    kept: KeptStreams

    @property
    def worker_id(self) -> str:
        return self.identity.worker_id

    @property
    def engine(self) -> Engine | None:
        """The language model; None on a worker that only encodes."""
        return self.engines.engine

    @property
    def address(self) -> str:
        return self.identity.address

    @property
    def epoch(self) -> int:
        return self.identity.epoch

    def report(self) -> Report:
        """Returns the body of /health."""
        return {
            "status": status(self.health.serving),
            "worker_id": self.worker_id,
            "roles": self.identity.roles,
            "model": self.engines.facts.name,
        }

    async def watch_engines(self) -> None:
        """Keeps the metrics up to date until cancelled. Raises EngineFailed once an engine has failed."""
        async with aclosing(poll_changes(self._state, _STATE_SECONDS)) as states:
            async for state in states:
                metrics.observe_load(state.load)
                kept = state.kept
                metrics.observe_kept(kept.attached, kept.parked, kept.finished)
                # Looked at while something is kept, as often as anything changes.
                metrics.KEPT_BYTES.set(0 if kept == NOTHING_KEPT else self.kept.num_bytes)
                metrics.HANDOFFS_HELD.set(state.held)
                if self.engine is not None:
                    metrics.observe_blocks(state.load)
                metrics.observe_embeddings(state.embedding_blocks, state.embedding_blocks_used)
                if state.is_responsive != self.health.serving:
                    # Routers choose other workers until it answers again.
                    log.warning("engine answers again" if state.is_responsive else "engine does not answer in time")
                    self.health.set("", state.is_responsive)
                if not state.is_healthy and not await self._recovers():
                    self.health.set("", False)
                    raise EngineFailed("the engine has failed", worker_id=self.worker_id)

    async def _recovers(self) -> bool:
        await asyncio.sleep(_CONFIRM_FAILURE_SECONDS)
        return self.engines.healthy

    def _state(self) -> _State:
        pool = self.engines.encoding.pool if self.engines.encoding else None
        return _State(
            is_healthy=self.engines.healthy,
            is_responsive=self.engines.responsive,
            load=self.engines.load(),
            kept=self.kept.usage,
            held=len(self.leases),
            embedding_blocks=pool.total if pool else 0,
            embedding_blocks_used=pool.used if pool else 0,
        )


async def supervise(worker: Worker, stopping: asyncio.Event) -> None:
    """Returns when `stopping` is set or a drain has ended. Raises EngineFailed once an engine has failed.

    The caller then shuts down in order. A broken engine may hang at that, so that a few seconds after its failure the
    process ends in any case, with exit code 1.
    """
    try:
        await run_with_background(worker.watch_engines(), _first(stopping.wait(), worker.drainer.finished()))
    except EngineFailed:
        exit_soon()
        raise


def exit_soon() -> None:
    """Ends the process with exit code 1 in a few seconds, if it has not ended by then: a broken engine may hang."""
    gc.freeze()  # freeing the memory of a failed device can abort the process
    # A hang that holds the interpreter's lock stops the timer too, but not this, which needs no lock.
    faulthandler.dump_traceback_later(_LOCKED_SHUTDOWN_SECONDS, exit=True)
    timer = threading.Timer(_SHUTDOWN_SECONDS, _exit)
    timer.daemon = True
    timer.start()


async def poll_changes(
    read: Callable[[], Value], interval_seconds: float, repeat_seconds: float = math.inf
) -> AsyncGenerator[Value, None]:
    """Yields the value now, and after each change, reading it every `interval_seconds`. Never ends by itself.

    A value that has not changed is repeated once `repeat_seconds` have passed, at the next reading.
    """
    known = read()
    yield known
    loop = asyncio.get_running_loop()
    yielded_at = loop.time()
    while True:
        await asyncio.sleep(interval_seconds)
        value = read()
        if value != known or loop.time() - yielded_at >= repeat_seconds:
            known, yielded_at = value, loop.time()
            yield known


async def _first(*events: Coroutine[Any, Any, Any]) -> None:
    """Waits for the first of several."""
    waiting = [asyncio.ensure_future(event) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
        await wait_until_done(*waiting)


def _exit() -> None:
    log.error("engine shutdown timed out; exiting", seconds=_SHUTDOWN_SECONDS)
    os._exit(1)
