"""Which blocks of the simulated pool are free, used, or cached for their prefix."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence


def root_hash(cache_salt: str) -> bytes:
    """What the chain of a prompt's block hashes starts from."""
    return hashlib.blake2b(cache_salt.encode(), digest_size=32).digest()


def link_hash(previous: bytes, token_ids: Sequence[int], media: bytes = b"") -> bytes:
    """The hash of a block, full or not: of all tokens, and of the media at them, up to its end."""
    return hashlib.blake2b(array("I", token_ids).tobytes() + media, key=previous, digest_size=32).digest()


class Blocks:
    """Reference counts of a pool's blocks, and the index of the full ones by hash.

    A block without references that has a hash stays cached until its place is needed, least recently used first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.total = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def used(self) -> int:
        return self.total - len(self._free) - len(self._evictable)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The longest run of cached blocks from the start of the chain. Takes no reference."""
        found = []
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def take(self, cached: Sequence[int], count: int) -> list[int] | None:
        """References to `cached` and to `count` new blocks after them, or None, and nothing taken, without room."""
        evictable = len(self._evictable) - sum(block_id in self._evictable for block_id in cached)
        if count > len(self._free) + evictable:
            return None
        for block_id in cached:
            self._references[block_id] += 1
            self._evictable.pop(block_id, None)
        return [*cached, *(self._take_one() for _ in range(count))]

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Makes a full block findable; of two with one hash the first stays the known one."""
        if block_hash not in self._by_hash and self._hashes[block_id] is None:
            self._by_hash[block_hash] = block_id
            self._hashes[block_id] = block_hash

    def release(self, block_ids: Sequence[int]) -> None:
        """Drops one reference of each. Ends of chains come to be reused before their beginnings."""
        for block_id in reversed(block_ids):
            self._references[block_id] -= 1
            if self._references[block_id]:
                continue
            if self._hashes[block_id] is None:
                self._free.append(block_id)
            else:
                self._evictable[block_id] = None

    def _take_one(self) -> int:
        block_id = self._free.pop() if self._free else self._evict()
        self._references[block_id] = 1
        return block_id

    def _evict(self) -> int:
        block_id, _ = self._evictable.popitem(last=False)
        block_hash = self._hashes[block_id]
        assert block_hash is not None
        del self._by_hash[block_hash]
        self._hashes[block_id] = None
        return block_id
