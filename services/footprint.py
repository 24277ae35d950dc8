"""What a request gives back when it is stopped: the engine notes it, and whoever stopped the request is told."""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Footprint:
    """KV that a request had when its engine let go of it, in tokens and in blocks. Nothing: it was still waiting."""

    tokens: int = 0
    blocks: int = 0

    def give_back(self, tokens: int, blocks: int) -> None:
        """Adds `blocks`, which held the KV of `tokens`."""
        if blocks:
            self.tokens += tokens
            self.blocks += blocks


_CURRENT: ContextVar[Footprint | None] = ContextVar("footprint", default=None)


def begin_footprint() -> Footprint:
    """A new one for the request that this task, and those it starts, work for."""
    footprint = Footprint()
    _CURRENT.set(footprint)
    return footprint


def current_footprint() -> Footprint:
    """That of the request that this task works for; one that nobody reads, where nobody has begun one."""
    return _CURRENT.get() or Footprint()
