"""The requests of one model that run, and those that wait until there is room: the most urgent first, then in order."""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from router import metrics
from router.pace import Average
from rpc.errors import Overloaded

_RETRY_SECONDS = 1.0  # where nothing is known
_LONGEST_RETRY_SECONDS = 60.0


@dataclass(order=True, slots=True)
class _Place:
    rank: int  # less is sooner
    number: int
    granted: "asyncio.Future[None]" = field(compare=False)


class Line:
    """`limit` says how many may run at once, at each moment; 0 is any number."""

    def __init__(self, limit: Callable[[], int], max_waiting: int) -> None:
        self._limit = limit
        self._max_waiting = max_waiting
        self._waiting: list[_Place] = []
        self._numbers = itertools.count()
        self._running = 0
        self._stay_seconds = Average()

    @property
    def is_unused(self) -> bool:
        """Whether nobody is in it."""
        return not self._running and not self._waiting

    def expected_seconds(self, priority: int) -> float:
        """How long one of this priority would wait, as far as is known."""
        limit = self._limit()
        if not limit or (self._running < limit and not self._waiting):
            return 0.0
        ahead = sum(place.rank <= -priority for place in self._waiting)
        return (ahead + 1) * (self._stay_seconds.value or 0.0) / limit

    def enter_now(self) -> bool:
        """Whether one may run at once; if so it does, until `leave`."""
        limit = self._limit()
        if limit and (self._running >= limit or self._waiting):
            return False
        self._running += 1
        return True

    async def enter(self, priority: int) -> None:
        """Returns when it may run, which ends with `leave`. Raises Overloaded if too many wait, also later."""
        place = _Place(-priority, next(self._numbers), asyncio.get_running_loop().create_future())
        self._make_room(place)
        heapq.heappush(self._waiting, place)
        self._let_in()
        metrics.WAITING.inc()
        try:
            await place.granted
        except asyncio.CancelledError:
            if place.granted.cancelled():
                self._remove(place)
            elif place.granted.exception() is None:
                # Let in and gone in the same moment.
                self._running -= 1
                self._let_in()
            raise
        finally:
            metrics.WAITING.dec()

    def leave(self, seconds: float) -> None:
        """One that ran so long has ended."""
        self._stay_seconds.add(seconds)
        self._running -= 1
        self._let_in()

    def _let_in(self) -> None:
        limit = self._limit()
        while self._waiting and (not limit or self._running < limit):
            place = heapq.heappop(self._waiting)
            if not place.granted.done():
                self._running += 1
                place.granted.set_result(None)

    def _make_room(self, place: _Place) -> None:
        """Whoever is less urgent goes; if nobody is, the newcomer."""
        if len(self._waiting) < self._max_waiting:
            return
        error = Overloaded(f"{len(self._waiting)} requests wait already", retry_after_seconds=self._retry_seconds())
        last = max(self._waiting, default=place)
        metrics.REFUSALS.labels(error.reason).inc()
        if last.rank <= place.rank:
            raise error
        self._remove(last)
        if not last.granted.done():
            last.granted.set_exception(error)

    def _remove(self, place: _Place) -> None:
        # Two places compare equal only if they are the same.
        if place in self._waiting:
            self._waiting.remove(place)
            heapq.heapify(self._waiting)

    def _retry_seconds(self) -> float:
        stay = self._stay_seconds.value
        if stay is None:
            return _RETRY_SECONDS
        return min(_LONGEST_RETRY_SECONDS, max(0.1, len(self._waiting) * stay / max(1, self._limit())))
