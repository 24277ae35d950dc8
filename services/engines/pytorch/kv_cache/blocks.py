"""Which blocks of the pool are in use, which are free, and which free ones still contain a known prefix.

The hash chain of a growing sequence.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from engine_protocol.prefix_hash import block_hash, extend_chain, media_key, root_hash, token_bytes
from services.engines.prompt import MediaSpan, Retain, Session
from services.engines.pytorch.kv_cache.events import BlockRemoved, BlockStored, CacheListener
from services.engines.pytorch.kv_cache.kept_cache import KeptCache
from services.engines.pytorch.kv_cache.retention import RETAINED_SHARE, EvictionOrder, Sessions

# One in so many blocks of the pool is emptied ahead of need, at most so many at once: a step waits for it.
_AHEAD_SHARE = 32
_AHEAD_AT_ONCE = 16

NULL_BLOCK = 0
"""Never allocated, and always zero: padding points to it."""


class LowerTiers(Protocol):
    """The tiers below the pool."""

    def demote(self, evicted: Sequence[tuple[int, bytes]]) -> Sequence[bytes]:
        """Takes over the contents of blocks that are evicted, and reports them; returns the names of those lost."""

    def stored(self, block_hash: bytes) -> None:
        """Notes that the pool has a block, so that no tier below need have it."""

    def lose(self, hashes: Sequence[bytes]) -> int:
        """Drops blocks that no request will read again, and reports them. Returns how many were here."""

    def leave_first(self, hashes: Sequence[bytes]) -> None:
        """Lets blocks of a chain leave before all others."""


class BlockPool:
    """Counts references to blocks. A block without references is free; its content stays cached until it is reused.

    Blocks without content are allocated first, lowest ids first so that neighbours stay together; then those whose
    content goes down; then cached ones, in the order of retention.py. One tenant retains at most `retained_share` of
    all blocks.
    """

    def __init__(
        self, num_blocks: int, listener: CacheListener | None = None, retained_share: float = RETAINED_SHARE
    ) -> None:
        self.total = num_blocks - 1
        self._few = self.total // _AHEAD_SHARE
        self.lower: LowerTiers | None = None
        self.record_of_cache: KeptCache | None = None
        self._listener = listener
        self._references = [0] * num_blocks
        self._empty = list(range(1, num_blocks))
        self._emptied: deque[int] = deque()  # whose content goes to the tiers below, in the order in which it leaves
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._idle = EvictionOrder(self._hash_of, self._block_of, int(self.total * retained_share))
        self._sessions = Sessions(self.total)

    @property
    def available(self) -> int:
        """The blocks that `allocate` can return."""
        return len(self._empty) + len(self._emptied) + len(self._idle)

    @property
    def used(self) -> int:
        """The blocks with references."""
        return self.total - self.available

    def allocate(self, count: int) -> list[int]:
        """Allocates `count` blocks for writing; so many must be available."""
        assert count <= self.available
        blocks = [heapq.heappop(self._empty) for _ in range(min(count, len(self._empty)))]
        if len(blocks) < count:
            blocks += self._take_emptied(count - len(blocks))
        if self.lower is not None and len(self._empty) + len(self._emptied) < self._few // 2:
            self._emptied += self._evict(min(self._few, _AHEAD_AT_ONCE, self._idle.unretained))
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _take_emptied(self, count: int) -> list[int]:
        """Takes blocks whose content goes down. Sequences that grow, by few, get those that have left first: a large
        allocation leaves these to them, and waits for the others.
        """
        few, missing = self._few if self.lower is not None else 0, count - len(self._emptied)
        if missing > 0:
            self._emptied += self._evict(self._to_empty(missing))
        left = 0 if count <= few else min(few, len(self._emptied) - count)
        self._emptied.rotate(-left)
        taken = [self._emptied.popleft() for _ in range(count)]
        self._emptied.rotate(left)
        return taken

    def empty_ahead(self, count: int, cached: Sequence[int], most: int) -> bool:
        """Empties at most `most` unused blocks, but for `cached`, of those that an allocation of `count` would have to.

        False if that allocation would have to empty none.
        """
        self.share(cached)
        wanted = self._to_empty(count - len(self._empty) - len(self._emptied))
        if wanted > 0:
            self._emptied += self._evict(min(most, wanted))
        self.release(cached)
        return wanted > 0

    def _to_empty(self, missing: int) -> int:
        """Returns how many blocks to empty for those that are missing: some more, if no tenant retains them."""
        few = self._few if self.lower is not None else 0
        return missing + max(0, min(few, self._idle.unretained - missing))

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Returns the cached blocks of the longest known prefix of the chain, without references to them."""
        blocks: list[int] = []
        for link in hashes:
            block = self._block_of.get(link)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def available_beside(self, blocks: Sequence[int]) -> int:
        """Returns how many blocks could be allocated after `blocks` are shared."""
        return self.available - sum(self._references[block] == 0 for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Adds a reference to each of these cached blocks."""
        for block in blocks:
            if not self._references[block]:
                self._idle.discard(block)
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drops a reference of each. The end of a prefix is reused before its beginning."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0
            if self._references[block] == 0:
                self._retire(block)

    def store(self, block: int, block_hash: bytes) -> None:
        """Adds a full block to the cache, unless its content is cached already."""
        if block_hash in self._block_of or block in self._hash_of:
            return
        self._hash_of[block] = block_hash
        self._block_of[block_hash] = block
        if self.record_of_cache is not None:
            self.record_of_cache.stored(block, block_hash)
        if self.lower is not None:
            self.lower.stored(block_hash)
        self._emit(BlockStored(block_hash))

    def seal(self) -> None:
        """After a step: records the blocks that were stored, as far as it need not wait."""
        if self.record_of_cache is not None:
            self.record_of_cache.flush()

    def seal_all(self) -> None:
        """Records all blocks that were stored, while there is no step."""
        if self.record_of_cache is not None:
            self.record_of_cache.finish()

    def forget(self, blocks: Sequence[int]) -> list[int]:
        """Removes blocks without other references from the cache, and returns them."""
        own = [block for block in blocks if self._references[block] == 1]
        for block in own:
            self._forget(block)
        return own

    def retain(self, hashes: Sequence[bytes], retain: Retain) -> int:
        """Retains the cached blocks of a chain. Returns how many, from the first on, its tenant's bound allows."""
        return self._idle.retain(hashes, retain)

    def retained_by(self) -> Sequence[tuple[bytes, int]]:
        """The tenants that retain most blocks, and how many; it may be a second old."""
        return self._idle.retained_by()

    def record(self, session: Session | None, hashes: Sequence[bytes]) -> None:
        """Notes the chain of a request, which has released its blocks, and ends its session if it says so."""
        if session is None:
            self._sessions.record_other(hashes)
            return
        self._sessions.record(session, hashes)
        if session.ends:
            self.end_session(session.key)

    def end_session(self, key: bytes) -> int:
        """Lets blocks be evicted first that no other session has used. Returns how many."""
        links = list(self._sessions.end(key))
        return self._idle.mark_dead(links) + (self.lower.lose(links) if self.lower is not None else 0)

    def lent(self, hashes: Sequence[bytes]) -> None:
        """Notes that another worker has these blocks of a chain, too. Those of one session alone are evicted first,
        since that is likely to stay there.
        """
        own = self._sessions.own(hashes)
        self._idle.mark_dead(reversed(own))
        if self.lower is not None:
            self.lower.leave_first(own)

    def adopt(self, contents: Mapping[int, bytes]) -> None:
        """Takes blocks that have content of an earlier process into the cache, the first to be evicted first."""
        self._empty = [block for block in self._empty if block not in contents]
        self._hash_of.update(contents)
        self._block_of.update((block_hash, block) for block, block_hash in contents.items())
        for block in contents:
            self._idle.add(block)

    def claim(self, blocks: Sequence[int]) -> None:
        """Adds a reference to each of these blocks, which decodes of an earlier process have left."""
        self.share([block for block in blocks if block in self._hash_of])
        own = {block for block in blocks if block not in self._hash_of}
        self._empty = [block for block in self._empty if block not in own]
        for block in own:
            self._references[block] = 1

    def drop(self, hashes: Sequence[bytes]) -> None:
        """Removes the unused blocks of a chain from the cache."""
        unused = self._pop_unused(hashes)
        for block in unused:
            self._forget(block)
        self._add_empty(unused)

    def demote(self, hashes: Sequence[bytes]) -> list[int]:
        """Moves the unused blocks of a chain to the tiers below, the last first. Returns them; they are empty."""
        unused = self._pop_unused(hashes)
        self._demote([(block, self._detach(block)) for block in reversed(unused)])
        self._emptied.extend(reversed(unused))
        return unused

    def _pop_unused(self, hashes: Sequence[bytes]) -> list[int]:
        unused = [block for block in self.match(hashes) if not self._references[block]]
        for block in unused:
            self._idle.discard(block)
        return unused

    def clear_cache(self) -> None:
        """Removes all unused blocks from the cache."""
        while self._idle:
            block = self._idle.pop()
            self._forget(block)
            heapq.heappush(self._empty, block)

    def _retire(self, block: int) -> None:
        if block in self._hash_of:
            self._idle.add(block)
        else:
            heapq.heappush(self._empty, block)

    def _evict(self, count: int) -> list[int]:
        """Takes unused blocks that have content. What others may want of it goes to the tiers below, all at once."""
        blocks: list[int] = []
        evicted: list[tuple[int, bytes]] = []
        for _ in range(count):
            is_dead = self._idle.has_dead
            block = self._idle.pop()
            blocks.append(block)
            if is_dead or self.lower is None:
                self._forget(block)
            else:
                evicted.append((block, self._detach(block)))
        self._demote(evicted)
        return blocks

    def _demote(self, evicted: Sequence[tuple[int, bytes]]) -> None:
        if self.lower is not None and evicted:
            for block_hash in self.lower.demote(evicted):
                self._emit(BlockRemoved(block_hash))

    def _add_empty(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            heapq.heappush(self._empty, block)

    def _detach(self, block: int) -> bytes:
        """Forgets what a block contains, without a report."""
        block_hash = self._hash_of.pop(block)
        self._erase(block)
        self._idle.forget(block_hash)
        del self._block_of[block_hash]
        return block_hash

    def _forget(self, block: int) -> None:
        if block in self._hash_of:
            self._emit(BlockRemoved(self._detach(block)))

    def _erase(self, block: int) -> None:
        if self.record_of_cache is not None:
            self.record_of_cache.erased(block)

    def _emit(self, event: BlockStored | BlockRemoved) -> None:
        if self._listener is not None:
            self._listener(event)


class HashChain:
    """The hashes of a growing sequence's full blocks, each computed once."""

    __slots__ = ("_block_tokens", "_links", "_media", "_root")

    def __init__(self, salt: str, block_tokens: int, media: Sequence[MediaSpan] = (), lora: str = "") -> None:
        self._root = root_hash(salt, lora)
        self._block_tokens = block_tokens
        self._media = media
        self._links: list[bytes] = []

    def upto(self, token_ids: Sequence[int], num_tokens: int) -> list[bytes]:
        """Returns the hashes of the full blocks in the first `num_tokens` tokens. Tokens may be appended, never
        changed.
        """
        full, links, size = num_tokens // self._block_tokens, self._links, self._block_tokens
        if len(links) < full and not self._media:
            content = token_bytes(token_ids[len(links) * size : full * size])
            links += extend_chain(links[-1] if links else self._root, content, size)
        while len(links) < full:
            start = len(links) * size
            end = start + size
            parent = links[-1] if links else self._root
            links.append(block_hash(parent, token_ids[start:end], media_key(self._media, start, end)))
        return links[:full]

    def extend(self, token_ids: Sequence[int], num_tokens: int, most: int) -> bool:
        """Computes at most `most` more of these hashes. False if none of them is left to compute."""
        known = len(self._links)
        self.upto(token_ids, min(num_tokens, (known + most) * self._block_tokens))
        return len(self._links) < num_tokens // self._block_tokens

    def value(self, token_ids: Sequence[int], num_tokens: int) -> bytes:
        """Returns the last hash of those blocks, or the root if there is none."""
        links = self.upto(token_ids, num_tokens)
        return links[-1] if links else self._root

    def unfinished(self, token_ids: Sequence[int], num_tokens: int) -> bytes | None:
        """Returns the name of the block that the first `num_tokens` tokens fill in part; None with media, which would
        have to be in it.
        """
        if self._media:
            return None
        links = self.upto(token_ids, num_tokens)
        return block_hash(links[-1] if links else self._root, token_ids[len(links) * self._block_tokens : num_tokens])
