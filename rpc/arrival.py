"""When the call that a task answers reached this process: before its message was read and its caller known."""

import time
from contextvars import ContextVar

_ARRIVED: ContextVar[float | None] = ContextVar("arrived", default=None)


def note_arrival() -> None:
    """A call has just come; whatever this task goes on to do belongs to it."""
    _ARRIVED.set(time.perf_counter())


def arrived_at() -> float:
    """When it came, in seconds of time.perf_counter; now, outside of any call."""
    arrived = _ARRIVED.get()
    return time.perf_counter() if arrived is None else arrived
