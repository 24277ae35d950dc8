"""A clock that stands still until a test moves it."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class Planned:
    """A scheduled call."""

    at: float
    number: int
    call: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


class ManualClock:
    """Called like `time.monotonic`; `call_later` is the event loop's, `now` and `sleep` are a lease clock's."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._numbers = itertools.count()
        self._planned: list[Planned] = []

    def __call__(self) -> float:
        return self._now

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Waits until the test has moved the clock far enough."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.call_later(seconds, lambda: None if woken.done() else woken.set_result(None))
        await woken

    def call_later(self, seconds: float, call: Callable[[], None]) -> Planned:
        planned = Planned(self._now + seconds, next(self._numbers), call)
        self._planned.append(planned)
        return planned

    def advance(self, seconds: float) -> None:
        """Advances the time, and makes the calls that are due, in their order."""
        end = self._now + seconds
        while due := [each for each in self._planned if each.at <= end and not each.is_cancelled]:
            first = min(due, key=lambda each: (each.at, each.number))
            self._planned.remove(first)
            self._now = max(self._now, first.at)
            first.call()
        self._now = end
