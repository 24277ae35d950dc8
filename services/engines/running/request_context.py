"""Context variables of the request that a task works for, which engines read: the KV it freed, and its trace."""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class FreedKv:
    """The KV that an engine freed when its request was stopped; none if the request was still waiting."""

    tokens: int = 0
    blocks: int = 0

    def give_back(self, tokens: int, blocks: int) -> None:
        """Adds `blocks`, which held the KV of `tokens`."""
        if blocks:
            self.tokens += tokens
            self.blocks += blocks


_FREED_KV: ContextVar[FreedKv | None] = ContextVar("freed_kv", default=None)
_TRACEPARENT: ContextVar[str] = ContextVar("request_traceparent", default="")


def track_freed_kv() -> FreedKv:
    """Starts a new count for the request of this task and of the tasks that it starts."""
    freed = FreedKv()
    _FREED_KV.set(freed)
    return freed


def current_freed_kv() -> FreedKv:
    """Returns the count of this task's request; outside of a request, one that is read by no caller."""
    return _FREED_KV.get() or FreedKv()


def set_traceparent(traceparent: str) -> None:
    """Sets the trace of this task's request, as W3C traceparent; empty without a trace."""
    _TRACEPARENT.set(traceparent)


def current_traceparent() -> str:
    """Returns the trace of this task's request, as W3C traceparent; empty without a trace."""
    return _TRACEPARENT.get()
