"""The times at which kept streams go: many of them by one timer of the loop."""

import asyncio
import math
from collections.abc import Callable
from contextvars import Context
from typing import Generic, TypeVar

TICK_SECONDS = 0.25

Item = TypeVar("Item")


class Graces(Generic[Item]):
    """Calls `end` with each item once its time has come, and at most a tick later.

    One timer for all items of a tick: a timer takes 0.5 KB, as much as a quarter of an answer that has ended.
    """

    def __init__(self, end: Callable[[Item], None], context: Context) -> None:
        self._end = end
        self._context = context
        # Each with its own number, so that all of its items have the same one; they end in the reverse of their order.
        self._ticks: dict[int, tuple[int, asyncio.TimerHandle, dict[Item, None]]] = {}

    def begin(self, item: Item, seconds: float) -> int:
        """Ends the item after so many seconds, unless `cancel` is called with the tick that is returned."""
        loop = asyncio.get_running_loop()
        tick = math.ceil((loop.time() + seconds) / TICK_SECONDS)
        if tick not in self._ticks:
            timer = loop.call_at(tick * TICK_SECONDS, self._pass, tick, context=self._context)
            self._ticks[tick] = tick, timer, {}
        tick, _, items = self._ticks[tick]
        items[item] = None
        return tick

    def cancel(self, item: Item, tick: int) -> None:
        """Lets the item be, if its time has not come yet."""
        if tick not in self._ticks:
            return
        _, timer, items = self._ticks[tick]
        items.pop(item, None)
        if not items:
            timer.cancel()
            del self._ticks[tick]

    def _pass(self, tick: int) -> None:
        self._end_all(self._ticks.pop(tick)[2])

    def _end_all(self, items: dict[Item, None]) -> None:
        try:
            while items:
                self._end(items.popitem()[0])
        finally:
            if items:  # the others go, whatever one of them raises
                self._end_all(items)
