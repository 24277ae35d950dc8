"""Which blocks of the pool are in use, which are free, and which free ones still hold a known prefix."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NULL_BLOCK = 0
"""Never handed out and always zero: what padding points to."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block of this hash can be found in the prefix cache from now on."""

    block_hash: bytes


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The prefix cache has lost the block of this hash."""

    block_hash: bytes


CacheListener = Callable[[BlockStored | BlockRemoved], None]


class BlockPool:
    """Counts references to blocks. A block with none is free, and keeps its content for the cache until it is reused.

    Blocks without content are handed out first, lowest ids first so that neighbours stay together; then the cached
    ones, least recently used first.
    """

    def __init__(self, num_blocks: int, listener: CacheListener | None = None) -> None:
        self.total = num_blocks - 1
        self._listener = listener
        self._references = [0] * num_blocks
        self._empty = list(range(1, num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._empty) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks that somebody refers to."""
        return self.total - self.available

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks for writing; there must be as many available."""
        assert count <= self.available
        blocks = [heapq.heappop(self._empty) if self._empty else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The cached blocks of the longest known prefix of the chain, without taking them."""
        blocks: list[int] = []
        for link in hashes:
            block = self._block_of.get(link)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def available_beside(self, blocks: Sequence[int]) -> int:
        """Blocks that could still be allocated after sharing `blocks`."""
        return self.available - sum(self._references[block] == 0 for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Takes one more reference to each of these cached blocks."""
        for block in blocks:
            self._idle.pop(block, None)
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Gives one reference of each back. The end of a prefix is reused before its beginning."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0
            if self._references[block] == 0:
                self._retire(block)

    def store(self, block: int, block_hash: bytes) -> None:
        """Makes a full block findable, unless its content is known already."""
        if block_hash in self._block_of or block in self._hash_of:
            return
        self._hash_of[block] = block_hash
        self._block_of[block_hash] = block
        self._tell(BlockStored(block_hash))

    def forget(self, blocks: Sequence[int]) -> list[int]:
        """Takes blocks that nobody else refers to out of the cache, and says which they were."""
        own = [block for block in blocks if self._references[block] == 1]
        for block in own:
            self._forget(block)
        return own

    def clear_cache(self) -> None:
        """Forgets every block that is not in use."""
        while self._idle:
            heapq.heappush(self._empty, self._evict())

    def _retire(self, block: int) -> None:
        if block in self._hash_of:
            self._idle[block] = None
        else:
            heapq.heappush(self._empty, block)

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]
            self._tell(BlockRemoved(block_hash))

    def _tell(self, event: BlockStored | BlockRemoved) -> None:
        if self._listener is not None:
            self._listener(event)
