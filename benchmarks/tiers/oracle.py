"""Eviction that knows when each session returns: the block that is used again last leaves first (Belady's order)."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from services.engines.pytorch.kv_cache.blocks import BlockPool
from services.engines.pytorch.kv_cache.retention import EvictionOrder
from services.engines.pytorch.kv_cache.tiers.directory import Placed, TierDirectory

_NEVER = math.inf


class Returns:
    """The next use of each block, as far as the sessions that have it say."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._sessions: defaultdict[bytes, set[str]] = defaultdict(set)
        self._blocks: defaultdict[str, set[bytes]] = defaultdict(set)
        self._next: dict[bytes, float] = {}

    def sent(self, session: str, hashes: Sequence[bytes]) -> None:
        """Notes the blocks of a session, which are in use now."""
        self._blocks[session].update(hashes)
        for block_hash in hashes:
            self._sessions[block_hash].add(session)
        self.returns(session, 0.0)

    def returns(self, session: str, at: float) -> None:
        """Notes when a session comes back."""
        self._at[session] = at
        self._refresh(self._blocks[session])

    def ended(self, session: str) -> None:
        """Notes that a session does not come back."""
        self._at.pop(session, None)
        blocks = self._blocks.pop(session, set())
        for block_hash in blocks:
            self._sessions[block_hash].discard(session)
        self._refresh(blocks)

    def last_used(self, hashes: Iterable[bytes]) -> bytes:
        """Of some blocks, the first that is not used again, or else the one that is used again last."""
        return max(hashes, key=self.next_use)

    def next_use(self, block_hash: bytes) -> float:
        """The earliest use of a block; infinity if there is none."""
        return self._next.get(block_hash, _NEVER)

    def _refresh(self, hashes: Iterable[bytes]) -> None:
        for block_hash in hashes:
            uses = [self._at[session] for session in self._sessions[block_hash]]
            if uses:
                self._next[block_hash] = min(uses)
            else:
                self._next.pop(block_hash, None)


class OracleOrder(EvictionOrder):
    """Of the pool's unused blocks, the one that is used again last is evicted; of equals, the one unused longest."""

    def __init__(self, pool: BlockPool, returns: Returns) -> None:
        super().__init__(pool._hash_of, pool._block_of, 0)
        self._returns = returns

    def pop(self) -> int:
        if not self._dead and self._idle:
            hashes = (self._hash_of[block] for block in self._idle)
            self._idle.move_to_end(self._block_of[self._returns.last_used(hashes)], last=False)
        return super().pop()


class OracleDirectory(TierDirectory):
    """The same order in host memory, which takes nothing that is used later than all that it has."""

    returns: Returns

    def place(self, block_hash: bytes, *, may_spill: bool) -> Placed | None:
        slots, next_use = self._host.slot_of, self.returns.next_use
        if self._host.is_full and slots:
            victim = self.returns.last_used(slots)
            if next_use(victim) < next_use(block_hash) or next_use(block_hash) == _NEVER:
                return None
            slots.move_to_end(victim, last=False)
        return super().place(block_hash, may_spill=may_spill)
