"""A worker that evicts what is read last of all, because it knows: how much is left for any order of eviction."""

import heapq
import math
from collections.abc import Callable

from benchmarks.tiers.worker import Sizes, Worker
from services.engines.pytorch.kv_cache.blocks import BlockPool
from services.engines.pytorch.kv_cache.tiers.directory import Spill, TierDirectory, TierListener

NextUse = Callable[[bytes], float]


class KnowingPool(BlockPool):
    """Evicts the unused block that is read last; of equal ones, the one that was used least recently."""

    def __init__(self, num_blocks: int, listener: TierListener, next_use: NextUse) -> None:
        super().__init__(num_blocks, listener)
        self._next_use = next_use
        self._planned: list[int] = []

    def allocate(self, count: int) -> list[int]:
        missing = count - len(self._empty)
        self._planned = self._victims(missing) if missing > 0 else []
        return super().allocate(count)

    def _victims(self, count: int) -> list[int]:
        order = {block: place for place, block in enumerate(self._idle)}
        hashes = self._hash_of
        return heapq.nlargest(count, order, key=lambda block: (self._next_use(hashes[block]), -order[block]))[::-1]

    def _evict(self) -> int:
        self._idle.move_to_end(self._planned.pop(), last=False)
        return super()._evict()


class KnowingDirectory(TierDirectory):
    """Evicts from host memory, and loses from the disk, what is read last. It searches for several at once."""

    next_use: NextUse

    def _make_room(self, may_spill: bool) -> Spill | None:
        blocks = self._host.slot_of
        if blocks:
            order = {block_hash: place for place, block_hash in enumerate(blocks)}
            worst = heapq.nlargest(32, order, key=lambda each: (self.next_use(each), -order[each]))
            for block_hash in reversed(worst):
                blocks.move_to_end(block_hash, last=False)
        return super()._make_room(may_spill and math.isfinite(self.next_use(next(iter(blocks)))))


class KnowingWorker(Worker):
    """A worker with both."""

    next_use: NextUse

    def _make_pool(self, sizes: Sizes) -> BlockPool:
        return KnowingPool(sizes.pool + 1, self._tell, self.next_use)

    def _make_directory(self, sizes: Sizes) -> TierDirectory:
        directory = KnowingDirectory(sizes.host, sizes.disk, self._tell, self._time)
        directory.next_use = self.next_use
        return directory
