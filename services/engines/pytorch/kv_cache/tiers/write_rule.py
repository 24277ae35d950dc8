"""The rule of writing to the disk: only while it is read."""

import math
import time
from collections.abc import Callable

Clock = Callable[[], float]

_HOUR_SECONDS = 3600.0
# The disk is written while at least this share of what was written is read.
_LEAST_READ_SHARE = 0.05
# So many writes in an hour say something; before, all are made.
_ENOUGH_WRITES = 256
# Of the writes that are not worth it one in so many is made, to notice when they are again.
_TRIAL = 20


class WriteRule:
    """Says whether a block should be written to the disk: while enough of what was written is read, over an hour."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._writes = self._reads = 0.0
        self._refused = 0

    def may_write(self) -> bool:
        """True if the next block should be written; one in 20 is in any case."""
        self._decay()
        if self._writes < _ENOUGH_WRITES or self._reads >= _LEAST_READ_SHARE * self._writes:
            return True
        self._refused += 1
        return self._refused % _TRIAL == 0

    def wrote(self) -> None:
        """Counts a block that was written."""
        self._decay()
        self._writes += 1

    def read(self, blocks: int) -> None:
        """Counts blocks that were read."""
        self._decay()
        self._reads += blocks

    def _decay(self) -> None:
        now = self._clock()
        left = math.exp((self._at - now) / _HOUR_SECONDS)
        self._writes, self._reads, self._at = self._writes * left, self._reads * left, now
