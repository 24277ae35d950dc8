"""The requests of one model that run or wait, in the order of fair_queue.py."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from baton.errors import BatonError, NoWorker, Overloaded
from router.admission.fair_queue import FairQueue
from router.admission.lanes import Ticket
from router.routing.latency import Average, Clock
from router.telemetry import metrics
from runtime.clock import monotonic

_RETRY_SECONDS = 1.0  # without measurements
_LONGEST_RETRY_SECONDS = 60.0


class Timer(Protocol):
    """A scheduled call."""

    def cancel(self) -> None:
        """Prevents the call."""


CallLater = Callable[[float, Callable[[], None]], Timer]


def _call_later(seconds: float, call: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(seconds, call)


class Places(Protocol):
    """The number of a fleet's places that this router may use."""

    def usable(self, limit: int) -> int:
        """Of so many that all routers have together."""

    def changed(self) -> None:
        """Notes that requests wait for more places, or have left some."""


class OwnPlaces:
    """Places that no other router uses."""

    def usable(self, limit: int) -> int:
        """All of them."""
        return limit

    def changed(self) -> None:
        """No-op."""


_OWN_PLACES = OwnPlaces()


class AdmissionQueue:
    """Admits requests. `limit` returns how many may run now in the fleet: None for any number, 0 without a worker.

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
        order: FairQueue | None = None,
        places: Places = _OWN_PLACES,
        clock: Clock = monotonic,
        call_later: CallLater = _call_later,
    ) -> None:
        self._limit = limit
        self._max_waiting = max_waiting
        self._outage_seconds = outage_seconds
        self._call_later = call_later
        self.order = order or FairQueue(clock=clock)
        self._places = places
        self._running = 0
        self._run_seconds, self._run_work = Average(clock=clock), Average(clock=clock)
        self._outage: Timer | None = None
        self._outage_is_long = False

    @property
    def is_unused(self) -> bool:
        """True if no request runs or waits."""
        return not self._running and not self.order.count

    @property
    def running(self) -> int:
        """The number of running requests."""
        return self._running

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return self.order.count

    @property
    def limit(self) -> int | None:
        """The number of requests that may run in the fleet."""
        return self._limit()

    def expected_seconds(self, ticket: Ticket) -> float:
        """The expected wait for a request; 0 if unknown."""
        limit = self._limit()
        if not limit or (not self.order.count and self._has_room(limit)):
            return 0.0
        places = max(1, self._places.usable(limit))
        return (self.order.work_ahead(ticket) + ticket.work) * self._seconds_of_work / places

    @property
    def _seconds_of_work(self) -> float:
        """The seconds that a unit of work takes a place; 0 if unknown."""
        return (self._run_seconds.value or 0.0) / (self._run_work.value or 1.0)

    def enter_now(self, ticket: Ticket) -> bool:
        """Counts a request as running if it need not wait. Returns whether it does; call `leave` at its end."""
        limit = self._limit()
        if limit is not None or self.order.count:
            self._update(limit)
            if self.order.count or not self._has_room(limit):
                return False
        self._running += 1
        self.order.begin(ticket)
        return True

    def count_running(self, ticket: Ticket) -> None:
        """Counts a request that runs already, whatever the limit; call `leave` at its end."""
        self._running += 1
        self.order.begin(ticket)

    async def enter(self, ticket: Ticket) -> None:
        """Waits until the request may run; call `leave` at its end.

        Raises Overloaded if too many wait, now or later, and NoWorker if an outage lasts too long.
        """
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ticket.granted = granted
        self._make_room(ticket)
        self.order.push(ticket)
        self.update()
        self._places.changed()
        metrics.WAITING.inc()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self.order.discard(ticket)
            elif granted.exception() is None:
                # Admitted and cancelled at the same moment.
                self.leave(ticket, None)
            raise
        finally:
            metrics.WAITING.dec()

    def leave(self, ticket: Ticket, seconds: float | None, cached_tokens: int = 0, answer_tokens: int = 0) -> None:
        """Notes the end of a request after this time; None if it did not use a worker."""
        self._running -= 1
        if seconds is None:
            self.order.undo(ticket)
        else:
            self._run_seconds.add(seconds)
            if self.order.tells_tenants:
                self._run_work.add(ticket.work)
            self.order.end(ticket, cached_tokens, answer_tokens)
        running = self._running
        self.update()
        if self.order.count and self._running == running:
            # The place is another router's now, which waits for it.
            self._places.changed()

    def update(self) -> None:
        """Admits as many requests as the limit allows."""
        limit = self._limit()
        if limit is not None or self.order.count or self._outage is not None:
            self._update(limit)

    def _update(self, limit: int | None) -> None:
        self._note_outage(limit == 0)
        while self.order.count and self._has_room(limit):
            ticket = self.order.pop()
            assert ticket.granted is not None
            if ticket.granted.done():
                # Cancelled, which its task has not noticed yet.
                self.order.undo(ticket)
                continue
            self._running += 1
            ticket.granted.set_result(None)

    def _has_room(self, limit: int | None) -> bool:
        return limit is None or self._outage_is_long or self._running < self._places.usable(limit)

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
        for ticket in self.order.clear():
            _refuse(ticket, NoWorker(f"no decode worker has been ready for {self._outage_seconds:g} s"))

    def _make_room(self, ticket: Ticket) -> None:
        """Evicts the request that has the least claim to wait, or refuses the new one."""
        if self.order.count < self._max_waiting:
            return
        last = self.order.to_evict(ticket)
        error = self._overloaded(last)
        metrics.REFUSALS.labels(error.reason).inc()
        if last is ticket:
            raise error
        self.order.discard(last)
        _refuse(last, error)

    def _overloaded(self, refused: Ticket) -> Overloaded:
        message, tenant = f"{self.order.count} requests are waiting already", refused.tenant
        if not self.order.tells_tenants:
            return Overloaded(message, retry_after_seconds=self._retry_seconds())
        name = tenant.name or "default"
        message += f"; {tenant.count} of them are of tenant {name}, more than of any other that could make room"
        seconds = self._retry_seconds(self.order.work_ahead(refused))
        return Overloaded(message, retry_after_seconds=seconds, subject=name)

    def _retry_seconds(self, work: float | None = None) -> float:
        """The time at which there may be room: once so much work is done, or all that waits."""
        if self._run_seconds.value is None:
            return _RETRY_SECONDS
        seconds = self.order.count * self._run_seconds.value if work is None else work * self._seconds_of_work
        return min(_LONGEST_RETRY_SECONDS, max(0.1, seconds / max(1, self._limit() or 0)))


def _refuse(ticket: Ticket, error: BatonError) -> None:
    if ticket.granted is not None and not ticket.granted.done():
        ticket.granted.set_exception(error)
