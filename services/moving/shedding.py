"""The number of decodes that a worker wants to give away: routers are told with its load, and move them."""

from collections.abc import Iterator
from contextlib import contextmanager

from runtime.clock import monotonic
from services.engines.base import EngineLoad
from services.moving.running import RunningDecodes
from services.requests.calls import Calls

# Below this share of free blocks a decode is moved away, before one has to be preempted and computed again.
_LEAST_FREE = 0.04
# An operator's wish that no other worker has had room for is dropped.
_WISH_SECONDS = 30.0


class Shedding:
    """The decodes that a worker wants to give away now."""

    def __init__(self, decodes: RunningDecodes, calls: Calls) -> None:
        self._decodes = decodes
        self._calls = calls
        self._most_left = 0
        self._wish_until = 0.0
        self._loses_role = False

    def shed(self, streams: int) -> int:
        """Wants to give so many of the running ones away, all if 0. Returns how many these are."""
        running = len(self._decodes)
        count = min(streams, running) if streams else running
        self._most_left, self._wish_until = running - count, monotonic() + _WISH_SECONDS
        return count

    @contextmanager
    def shedding_all(self, *, is_needed: bool) -> Iterator[None]:
        """Wants to give all away while the context is open, if it loses the role."""
        self._loses_role = is_needed
        try:
            yield
        finally:
            self._loses_role = False

    def wanted(self, load: EngineLoad) -> int:
        """The number that it wants to give away."""
        running = len(self._decodes)
        if self._loses_role or self._calls.draining:
            return running
        if monotonic() < self._wish_until and running > self._most_left:
            return running - self._most_left
        self._wish_until = 0.0
        # Each of them may need a block within the next tokens.
        is_full = load.blocks_total - load.blocks_used < max(_LEAST_FREE * load.blocks_total, running)
        return 1 if is_full and running > 1 else 0
