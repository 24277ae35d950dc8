"""Where in which trace a request is, for engines that trace themselves and know nothing of how services do it."""

from contextvars import ContextVar

_CURRENT: ContextVar[str] = ContextVar("request_traceparent", default="")


def note_traceparent(traceparent: str) -> None:
    """Of the request that this task, and those it starts, work for; empty without a trace."""
    _CURRENT.set(traceparent)


def current_traceparent() -> str:
    """As W3C traceparent; empty where nothing is traced."""
    return _CURRENT.get()
