"""The time at which a call was read from its connection, before its task has its first turn of the loop."""

from contextvars import ContextVar

from baton_http2.clock import perf_counter

_READ_AT: ContextVar[float | None] = ContextVar("call_read_at", default=None)


def note_read(at: float) -> None:
    """Records when the call that this task serves was read, in seconds of time.perf_counter."""
    _READ_AT.set(at)


def read_at() -> float:
    """The time at which the call of this task was read; now, where another server has read it."""
    at = _READ_AT.get()
    return perf_counter() if at is None else at
