"""The requests of one model that run or wait: by priority, then in the order of arrival."""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from baton.errors import BatonError, NoWorker, Overloaded
from router.routing.latency import Average, Clock
from router.telemetry import metrics

_RETRY_SECONDS = 1.0  # without measurements
_LONGEST_RETRY_SECONDS = 60.0


class Timer(Protocol):
    """A scheduled call."""

    def cancel(self) -> None:
        """Prevents the call."""


CallLater = Callable[[float, Callable[[], None]], Timer]


def _call_later(seconds: float, call: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(seconds, call)


@dataclass(order=True, slots=True)
class _Waiter:
    rank: int  # the lowest goes first
    number: int
    granted: "asyncio.Future[None]" = field(compare=False)


class AdmissionQueue:
    """A priority queue. `limit` returns how many requests may run now: None for any number, 0 without a worker.

    During an outage, when the limit is 0, requests wait for `outage_seconds`. After that the waiting ones are refused
    with NoWorker, and new ones pass: routing then refuses them with the reason for each worker. Call `update` whenever
    the limit may have changed.
    """

    def __init__(
        self,
        limit: Callable[[], int | None],
        max_waiting: int,
        outage_seconds: float = 10.0,
        *,
        clock: Clock = time.monotonic,
        call_later: CallLater = _call_later,
    ) -> None:
        self._limit = limit
        self._max_waiting = max_waiting
        self._outage_seconds = outage_seconds
        self._call_later = call_later
        self._waiting: list[_Waiter] = []
        self._numbers = itertools.count()
        self._running = 0
        self._run_seconds = Average(clock=clock)
        self._outage: Timer | None = None
        self._outage_is_long = False

    @property
    def is_unused(self) -> bool:
        """Whether no request runs or waits."""
        return not self._running and not self._waiting

    @property
    def running(self) -> int:
        """The number of running requests."""
        return self._running

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._waiting)

    def expected_seconds(self, priority: int) -> float:
        """The expected wait for a request of this priority; 0 if unknown."""
        limit = self._limit()
        if not limit or (self._running < limit and not self._waiting):
            return 0.0
        ahead = sum(waiter.rank <= -priority for waiter in self._waiting)
        return (ahead + 1) * (self._run_seconds.value or 0.0) / limit

    def enter_now(self) -> bool:
        """Counts a request as running if it need not wait. Returns whether it does; call `leave` at its end."""
        limit = self._limit()
        self._update(limit)
        if self._waiting or not self._has_room(limit):
            return False
        self._running += 1
        return True

    def count_running(self) -> None:
        """Counts a request that runs already, whatever the limit; call `leave` at its end."""
        self._running += 1

    async def enter(self, priority: int) -> None:
        """Waits until the request may run; call `leave` at its end.

        Raises Overloaded if too many wait, now or later, and NoWorker if an outage lasts too long.
        """
        waiter = _Waiter(-priority, next(self._numbers), asyncio.get_running_loop().create_future())
        self._make_room(waiter)
        heapq.heappush(self._waiting, waiter)
        self.update()
        metrics.WAITING.inc()
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.cancelled():
                self._remove(waiter)
            elif waiter.granted.exception() is None:
                # Admitted and cancelled at the same moment.
                self._running -= 1
                self.update()
            raise
        finally:
            metrics.WAITING.dec()

    def leave(self, seconds: float | None) -> None:
        """Notes the end of a request after this time; None if it did not use a worker."""
        if seconds is not None:
            self._run_seconds.add(seconds)
        self._running -= 1
        self.update()

    def update(self) -> None:
        """Admits as many requests as the limit allows."""
        self._update(self._limit())

    def _update(self, limit: int | None) -> None:
        self._note_outage(limit == 0)
        while self._waiting and self._has_room(limit):
            waiter = heapq.heappop(self._waiting)
            if not waiter.granted.done():
                self._running += 1
                waiter.granted.set_result(None)

    def _has_room(self, limit: int | None) -> bool:
        return limit is None or self._outage_is_long or self._running < limit

    def _note_outage(self, has_no_worker: bool) -> None:
        if not has_no_worker:
            if self._outage is not None:
                self._outage.cancel()
            self._outage, self._outage_is_long = None, False
        elif self._outage is None:
            self._outage = self._call_later(self._outage_seconds, self._end_waiting)

    def _end_waiting(self) -> None:
        """Refuses all waiting requests, because the outage has lasted too long."""
        if self._limit() != 0:
            self.update()
            return
        self._outage_is_long = True
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            _refuse(waiter, NoWorker(f"no decode worker has been ready for {self._outage_seconds:g} s"))

    def _make_room(self, waiter: _Waiter) -> None:
        """Evicts the waiter with the lowest priority, or refuses the new one."""
        if len(self._waiting) < self._max_waiting:
            return
        error = Overloaded(
            f"{len(self._waiting)} requests are waiting already", retry_after_seconds=self._retry_seconds()
        )
        last = max(self._waiting, default=waiter)
        metrics.REFUSALS.labels(error.reason).inc()
        if last.rank <= waiter.rank:
            raise error
        self._remove(last)
        _refuse(last, error)

    def _remove(self, waiter: _Waiter) -> None:
        # Numbers differ, so waiters are equal only if they are the same.
        if waiter in self._waiting:
            self._waiting.remove(waiter)
            heapq.heapify(self._waiting)

    def _retry_seconds(self) -> float:
        run_seconds = self._run_seconds.value
        if run_seconds is None:
            return _RETRY_SECONDS
        return min(_LONGEST_RETRY_SECONDS, max(0.1, len(self._waiting) * run_seconds / max(1, self._limit() or 0)))


def _refuse(waiter: _Waiter, error: BatonError) -> None:
    if not waiter.granted.done():
        waiter.granted.set_exception(error)
