"""Waits for a condition; all tests wait this way."""

import asyncio
import inspect
import time
from collections.abc import Callable

PATIENCE_SECONDS = 60.0

_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.02


async def eventually(holds: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Returns as soon as `holds()` is true. Fails, naming the condition, if it is not within the time."""
    deadline = time.monotonic() + seconds
    pause = _FIRST_PAUSE_SECONDS
    while not holds():
        # Checked once more after the deadline: this process may have been suspended.
        is_over = time.monotonic() > deadline
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        if is_over and not holds():
            raise AssertionError(f"not within {seconds:g} s: {_described(holds)}")


def _described(holds: Callable[[], bool]) -> str:
    try:
        return " ".join(inspect.getsource(holds).split())
    except (OSError, TypeError):
        return repr(holds)
