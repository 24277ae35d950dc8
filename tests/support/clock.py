"""Clocks that a test moves: one stands still otherwise, the other one runs."""

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from runtime.aio import timeout


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


class RunningClock:
    """The monotonic clock, which a test may also advance. `now` and `sleep` are a lease clock's."""

    def __init__(self) -> None:
        self._ahead = 0.0
        self._moved = asyncio.Event()

    def now(self) -> float:
        return time.monotonic() + self._ahead

    async def sleep(self, seconds: float) -> None:
        end = self.now() + seconds
        while (left := end - self.now()) > 0:
            try:
                async with timeout(left):
                    await self._moved.wait()
            except TimeoutError:
                return

    def advance(self, seconds: float) -> None:
        """Advances the time, and wakes those that sleep."""
        self._ahead += seconds
        self._moved.set()
        self._moved = asyncio.Event()
