"""Blocks that are lent to other workers, to read: of a running sequence, of the prefix cache, or of host memory."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from services.engines.memory.allocation import KeptBlocks, uncount
from services.engines.pytorch.kv_cache.blocks import BlockPool
from services.engines.pytorch.sequence import State, TokenSequence
from services.engines.pytorch.steps.tier_loads import Promotion, TierLoads


@dataclass(frozen=True, slots=True)
class LentBlocks:
    """Full blocks, of a running sequence or of the prefix cache, that others may read, with references of its own.

    `next_token` is that of the sequence; `hashes` are those of the prefix cache, which another worker will have too.
    """

    block_ids: tuple[int, ...]
    num_tokens: int
    next_token: int
    prefix_hash: bytes
    hashes: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class BlockLoans:
    """Lends blocks, and takes them back. What it holds counts in `kept` and in `held`, which are the scheduler's."""

    pool: BlockPool
    loads: TierLoads
    block_tokens: int
    kept: KeptBlocks
    held: Counter[int]
    running: Sequence[TokenSequence]

    @property
    def are_copied(self) -> bool:
        """True while blocks of host memory are copied for a loan."""
        return bool(self.loads.promotions)

    def lend(self, sequence: TokenSequence, most_tokens: int) -> LentBlocks | None:
        """Holds a running sequence's full blocks within its first `most_tokens` ids, beside itself."""
        size = self.block_tokens
        full = max(0, min(sequence.computed, most_tokens - 1)) // size
        blocks = tuple(sequence.blocks[:full])
        if sequence.state is not State.RUNNING or not blocks or not self.kept.may_add(blocks, 0):
            return None
        link = sequence.chain.value(sequence.tokens, full * size)
        return self._lend(LentBlocks(blocks, full * size, sequence.tokens[full * size], link))

    def lend_cached(self, hashes: Sequence[bytes]) -> LentBlocks | None:
        """Holds the blocks of the longest known prefix of a chain; None if there are none, or too many are held."""
        blocks = tuple(self.pool.match(hashes))
        if not blocks or not self.kept.may_lend(blocks):
            return None
        return self._lend_chain(blocks, hashes)

    def lend_all(self, hashes: Sequence[bytes], lent: Callable[[LentBlocks | None], None]) -> None:
        """Calls `lent` with the blocks of the longest prefix of a chain that is in the pool and in host memory, held as
        by `lend_cached`: at once, or once those in host memory are copied.
        """
        cached = self.pool.match(hashes)
        contents = self.loads.in_host_memory(hashes[len(cached) :])
        most = min(self.pool.available_beside(cached) - len(self.running), self.kept.room_to_lend(cached))
        contents = contents[: max(0, most)]
        if not contents:
            lent(self.lend_cached(hashes))
            return
        self.pool.share(cached)
        new = self.pool.allocate(len(contents))
        if there := self.loads.still_there(contents):
            self.loads.promote(there, cached, new, partial(self._lend_promoted, hashes, lent))
            return
        # What was evicted for the copies has taken their place in host memory.
        self.pool.release([*cached, *new])
        lent(self.lend_cached(hashes))

    def _lend_promoted(
        self, hashes: Sequence[bytes], lent: Callable[[LentBlocks | None], None], promotion: Promotion, copied: int
    ) -> None:
        blocks = (*promotion.cached, *promotion.new[:copied])
        if blocks and self.kept.may_lend(blocks):
            lent(self._lend_chain(blocks, hashes))
        else:
            lent(None)
        self.pool.release([*promotion.cached, *promotion.new])

    def _lend_chain(self, blocks: tuple[int, ...], hashes: Sequence[bytes]) -> LentBlocks:
        names, size = hashes[: len(blocks)], self.block_tokens
        return self._lend(LentBlocks(blocks, len(blocks) * size, 0, names[-1], names))

    def _lend(self, lent: LentBlocks) -> LentBlocks:
        self.pool.share(lent.block_ids)
        self.kept.add(lent.block_ids)
        self.held.update(lent.block_ids)
        return lent

    def give_back(self, lent: LentBlocks) -> int:
        """Ends the loan of blocks; returns how many."""
        self.kept.remove(lent.block_ids)
        uncount(self.held, lent.block_ids)
        self.pool.release(lent.block_ids)
        self.pool.lent(lent.hashes)
        return len(lent.block_ids)

    def end_copies(self) -> None:
        """Ends all copies for loans at once: only what the pool had is lent."""
        self.loads.end_promotions()
