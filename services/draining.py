"""The end of a worker: nothing new is taken, what runs may finish, and what is held may be pulled."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import structlog

from rpc.errors import Draining
from services.calls import Calls
from services.leases import LeaseTable
from services.registering import Announcement

log = structlog.get_logger(__name__)

_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Progress:
    """What is left to do."""

    running: int
    handoffs_held: int

    @property
    def drained(self) -> bool:
        return not self.running and not self.handoffs_held


class Drainer:
    """Drains a worker, once for all: a worker that drains never takes work again."""

    def __init__(
        self, calls: Calls, leases: LeaseTable, announcement: Announcement, drain_seconds: float, fetch_seconds: float
    ) -> None:
        self._calls = calls
        self._leases = leases
        self._announcement = announcement
        self._drain_seconds = drain_seconds
        self._held_seconds = max(leases.lease_seconds, fetch_seconds)
        self._finished = asyncio.Event()

    async def drain(self, grace_seconds: float | None = None) -> AsyncGenerator[Progress, None]:
        """What is left, now and after every change, until nothing is.

        After the grace, or the configured time, what still runs is stopped. After one lease more, or `fetch_seconds` if
        that is longer, what is still held is freed. Callers of stopped requests get Draining, and may go elsewhere.
        """
        self._calls.draining = True
        await self._announcement.drain()
        deadline = time.monotonic() + (self._drain_seconds if grace_seconds is None else grace_seconds)
        known = self.progress
        yield known
        while not known.drained:
            await asyncio.sleep(_LOOK_SECONDS)
            await self._enforce(deadline)
            if (progress := self.progress) != known:
                known = progress
                yield known

    def finish(self, _call: object = None) -> None:
        """Notes that whoever asked for the drain has heard of its end."""
        self._finished.set()

    async def finished(self) -> None:
        """Waits until a drain that was asked for has ended: the process may go."""
        await self._finished.wait()

    @property
    def progress(self) -> Progress:
        """What there is to do now, draining or not."""
        return Progress(len(self._calls), len(self._leases))

    async def _enforce(self, deadline: float) -> None:
        overdue = time.monotonic() - deadline
        if overdue > 0 and len(self._calls):
            await self._calls.stop_all(Draining("the worker ended before the request did"))
        if overdue > self._held_seconds and len(self._leases):
            await self._leases.release_all()
