"""When the call that a task serves arrived in this process, and the size of its message."""

from contextvars import ContextVar

from baton_http2.server.arrival import read_at
from runtime.clock import perf_counter

_ARRIVED: ContextVar[float | None] = ContextVar("arrived", default=None)
_SIZE: ContextVar[int] = ContextVar("message_bytes", default=0)


def record_call() -> None:
    """Records when the call that this task serves was read, or now, if the server does not tell."""
    _ARRIVED.set(read_at())


def record_arrival() -> None:
    """Records now as the arrival of the call that this task serves."""
    _ARRIVED.set(perf_counter())


def arrived_at() -> float:
    """When the call arrived, in seconds of time.perf_counter; now, outside of a call."""
    arrived = _ARRIVED.get()
    return perf_counter() if arrived is None else arrived


def record_size(message_bytes: int) -> None:
    """Records the size of the message of the call that this task serves."""
    _SIZE.set(message_bytes)


def message_bytes() -> int:
    """The size of the call's message on the wire; 0 outside of a call."""
    return _SIZE.get()
