"""What is worth keeping: the blocks of sessions that go on, and on the disk only while it is read."""

import math
import time
from collections.abc import Callable, Sequence

Clock = Callable[[], float]

_HOUR_SECONDS = 3600.0
# The disk is written while at least this share of what was written is read.
_LEAST_READ_SHARE = 0.05
# So many writes in an hour say something; before, all are made.
_ENOUGH_WRITES = 256
# Of the writes that are not worth it one in so many is made, to notice when they are again.
_TRIAL = 20


class SessionBlocks:
    """Which blocks only one session has used. A block that another session uses, too, belongs to none of them.

    `lost` must be told of each block that no tier has any more; otherwise this grows without bound.
    """

    def __init__(self) -> None:
        self._owner: dict[bytes, str] = {}
        self._blocks: dict[str, set[bytes]] = {}

    def use(self, session: str, hashes: Sequence[bytes]) -> None:
        """Notes that a request of a session has computed or found these blocks; "" is a request without session."""
        owner, own = self._owner, self._blocks.setdefault(session, set()) if session else set()
        for block_hash in hashes:
            if block_hash in own:
                continue
            before = owner.get(block_hash)
            if before is None and session:
                owner[block_hash] = session
                own.add(block_hash)
            elif before != session:
                self._take_from(before or "", block_hash)
                owner[block_hash] = ""

    def end(self, session: str) -> list[bytes]:
        """Forgets a session, and returns the blocks that no other one has used."""
        own = self._blocks.pop(session, set())
        for block_hash in own:
            del self._owner[block_hash]
        return list(own)

    def lost(self, block_hash: bytes) -> None:
        """Notes that no tier has a block any more."""
        owner = self._owner.pop(block_hash, "")
        self._take_from(owner, block_hash)

    def _take_from(self, session: str, block_hash: bytes) -> None:
        own = self._blocks.get(session)
        if own is not None:
            own.discard(block_hash)
            if not own:
                del self._blocks[session]


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
        self._writes += 1

    def read(self, blocks: int) -> None:
        """Counts blocks that were read."""
        self._decay()
        self._reads += blocks

    def _decay(self) -> None:
        now = self._clock()
        left = math.exp((self._at - now) / _HOUR_SECONDS)
        self._writes, self._reads, self._at = self._writes * left, self._reads * left, now
