"""The blocks of the simulated pool: which are free, used, or cached for their prefix, and the bytes in them.

The bytes follow from the tokens, so that wrong blocks are detected.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from baton.errors import EngineFailed
from services.engines.kv_events import KvPublisher
from services.engines.memory.shared_pool import SharedPool
from services.engines.simulated.sequence import Sequence as Running


class Blocks:
    """Reference counts of a pool's blocks, and the index of the full ones by hash.

    A block without references that has a hash stays cached until its place is needed, least recently used first. The
    blocks of data-parallel rank `rank` follow those of the ranks before it.
    """

    def __init__(self, num_blocks: int, publisher: KvPublisher | None = None, rank: int = 0) -> None:
        self.total = num_blocks
        self._publisher = publisher
        self._rank = rank
        ids = range(rank * num_blocks, (rank + 1) * num_blocks)
        self._free = list(reversed(ids))
        self._references = dict.fromkeys(ids, 0)
        self._hashes: dict[int, bytes | None] = dict.fromkeys(ids)
        self._by_hash: dict[bytes, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def used(self) -> int:
        return self.total - len(self._free) - len(self._evictable)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Returns the longest run of cached blocks from the start of the chain. Takes no references."""
        found = []
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def take(self, cached: Sequence[int], count: int) -> list[int] | None:
        """Takes references to `cached` and to `count` new blocks. Returns None, and takes none, if there
        are too few.
        """
        if count > len(self._free):
            evictable = len(self._evictable) - sum(block_id in self._evictable for block_id in cached)
            if count > len(self._free) + evictable:
                return None
        for block_id in cached:
            self._references[block_id] += 1
            self._evictable.pop(block_id, None)
        self.empty(count)
        return [*cached, *self._take_free(count)]

    def lacking(self, cached: Sequence[int], count: int) -> int:
        """The number of cached blocks to empty before `take` finds `count` free ones; 0 if there are too few."""
        lacking = max(0, count - len(self._free))
        return lacking if lacking <= len(self._evictable) - len(cached) else 0

    def keep(self, cached: Iterable[int]) -> None:
        """Has these blocks emptied after all others."""
        for block_id in cached:
            if block_id in self._evictable:
                self._evictable.move_to_end(block_id)

    def empty(self, count: int) -> None:
        """Empties cached blocks until `count` are free, or none is cached."""
        for _ in range(min(count - len(self._free), len(self._evictable))):
            self._free.append(self._evict())

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Adds a full block to the index; of two blocks with the same hash the first one stays."""
        if block_hash not in self._by_hash and self._hashes[block_id] is None:
            self._by_hash[block_hash] = block_id
            self._hashes[block_id] = block_hash
            if self._publisher is not None:
                self._publisher.stored(block_hash, self._rank)

    def release(self, block_ids: Sequence[int]) -> None:
        """Drops one reference of each. The ends of chains are reused before their beginnings."""
        for block_id in reversed(block_ids):
            self._references[block_id] -= 1
            if self._references[block_id]:
                continue
            if self._hashes[block_id] is None:
                self._free.append(block_id)
            else:
                self._evictable[block_id] = None

    def clear(self) -> None:
        """Removes all blocks without references from the index."""
        while self._evictable:
            self._free.append(self._evict())

    def _take_free(self, count: int) -> list[int]:
        """All at once: 56,000 one by one take 10 ms."""
        start = len(self._free) - count
        taken = self._free[start:][::-1]
        del self._free[start:]
        self._references.update(dict.fromkeys(taken, 1))
        return taken

    def _evict(self) -> int:
        block_id, _ = self._evictable.popitem(last=False)
        block_hash = self._hashes[block_id]
        assert block_hash is not None
        del self._by_hash[block_hash]
        self._hashes[block_id] = None
        if self._publisher is not None:
            self._publisher.removed(block_hash, self._rank)
        return block_id


class Contents:
    """Writes and checks blocks, and adds full ones to the prefix cache."""

    def __init__(self, memory: SharedPool, blocks: Blocks, block_tokens: int) -> None:
        self._memory = memory
        self._blocks = blocks
        self._block_tokens = block_tokens

    def write(self, sequence: Running, before: int) -> None:
        """Fills the blocks that have got new tokens since `before` tokens were computed."""
        size = self._block_tokens
        for index in range(before // size, -(-sequence.computed // size)):
            full = (index + 1) * size <= sequence.computed
            # Blocks that others may read are written whole; those of a running decode when they are full.
            if not full and not sequence.held:
                continue
            content_hash = sequence.content_hash(index, sequence.computed)
            self._memory.block(sequence.blocks[index])[:] = self._bytes(content_hash)
            if full:
                sequence.learn(index, content_hash)
                self._blocks.register(sequence.blocks[index], content_hash)

    def verify(self, sequence: Running) -> None:
        """Raises EngineFailed if the pulled blocks belong to another prompt. On any thread."""
        for index, block_id in enumerate(sequence.blocks):
            if self._memory.block(block_id) != self._bytes(sequence.content_hash(index, sequence.computed)):
                raise EngineFailed(f"block {index} of the pulled KV does not belong to this prompt")

    def register(self, block_ids: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Adds full blocks that were pulled to the index. Raises EngineFailed if one belongs to another prompt."""
        for block_id, block_hash in zip(block_ids, hashes, strict=False):
            if self._memory.block(block_id) != self._bytes(block_hash):
                raise EngineFailed("a block that was pulled does not belong to this prompt")
            self._blocks.register(block_id, block_hash)

    def _bytes(self, content_hash: bytes) -> bytes:
        size = self._memory.block_bytes
        return (content_hash * (size // len(content_hash) + 1))[:size]
