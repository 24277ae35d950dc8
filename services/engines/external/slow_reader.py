"""Aborts a generation whose answer is not read: it would keep its place in the batch and its blocks."""

import asyncio
import math
from collections.abc import Callable

from baton.errors import Overloaded


class SlowReader:
    """Calls `give_up` with an error once output has waited for its reader for `seconds`, unless they are infinite."""

    def __init__(self, seconds: float, give_up: Callable[[Overloaded], None]) -> None:
        self._seconds = seconds
        self._give_up = give_up
        self._timer: asyncio.TimerHandle | None = None

    def has_output(self) -> None:
        """Notes that there is output that the reader does not have yet."""
        if self._timer is None and self._seconds < math.inf:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._is_late)

    def has_read(self) -> None:
        """Notes that the reader has everything, or that it need not read."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_late(self) -> None:
        self._timer = None
        self._give_up(Overloaded(f"the answer was not read for {self._seconds} s", retry_after_seconds=1.0))
