"""The sequences that wait for blocks of tiers below the pool, and the unfinished blocks of those that are preempted.

Blocks that are reserved for KV of another worker.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from baton.errors import BatonError
from services.engines.pytorch.kv_cache.blocks import BlockPool
from services.engines.pytorch.kv_cache.tiers.jobs import Load, LoadItem, PrefixLoad
from services.engines.pytorch.kv_cache.tiers.tiers import KvTiers
from services.engines.pytorch.sequence import State, TokenSequence
from services.engines.seals import BlockContents

STEP_BLOCKS = 24
"""So many blocks are prepared, begun and ended a step while it only decodes: the host does it while the device computes
a step. Of 4 MiB, they are a third of what the link brings: the threads that copy hold the interpreter, too."""
ALL_BLOCKS = 1 << 60
"""Where no running sequence waits for it."""
# So many parts of a load are on their way: one is copied while the others are begun and ended.
_PARTS = 3


@dataclass(eq=False, slots=True)
class Promotion:
    """A copy of blocks in host memory, for a loan. They stay there, too.

    It holds `cached`, the blocks of the prefix that the pool has, and `new`, those that are loaded into; `ended` takes
    them all over, with how many of the new ones have their content.
    """

    cached: Sequence[int]
    new: Sequence[int]
    load: Load
    ended: Callable[["Promotion", int], None]


class TierLoads:
    """Loads the prefixes of sequences that have their blocks. Without tiers there is nothing to load."""

    def __init__(self, tiers: KvTiers | None, pool: BlockPool, block_tokens: int) -> None:
        self.sequences: list[TokenSequence] = []
        self.promotions: list[Promotion] = []
        self._tiers = tiers
        self._pool = pool
        self._block_tokens = block_tokens

    @property
    def has_tiers(self) -> bool:
        """True if there is something to load from."""
        return self._tiers is not None

    def end_for(self, sequence: TokenSequence, hashes: Sequence[bytes], cached: int) -> int | None:
        """Returns up to which block of the chain to load, after the first `cached` ones, which the pool has; None if
        another sequence is loading them: wait for it. It is decided once for all steps that prepare a load.
        """
        tiers = self._tiers
        if tiers is None or cached == len(hashes):
            return cached
        if tiers.is_loading(hashes[cached]):
            return None
        if sequence.load_end <= cached:
            sequence.load_end = cached + tiers.worth_loading(hashes[cached:])
            tiers.directory.touch(hashes[cached : sequence.load_end])
        return sequence.load_end

    def contents_for(
        self, sequence: TokenSequence, hashes: Sequence[bytes], cached: int, end: int
    ) -> Sequence[BlockContents]:
        """Returns the blocks to load, those from `cached` to `end`, and the unfinished one after them, if there is one.
        The directory may not have all of them any more.
        """
        sequence.load_end = 0
        sizes = repeat(self._block_tokens)
        contents = list(map(tuple.__new__, repeat(BlockContents), zip(hashes[cached:end], sizes, strict=False)))
        if sequence.parked is not None and end == len(hashes) and self._follows(sequence, sequence.parked, hashes):
            contents.append(sequence.parked)
        return contents

    def still_there(self, contents: Sequence[BlockContents]) -> Sequence[BlockContents]:
        """Returns the first of these blocks that have not left their tier for those that the pool has evicted since."""
        return self._tiers.directory.readable(contents) if self._tiers is not None and contents else contents

    def begin(self, sequence: TokenSequence, contents: Sequence[BlockContents], first: int, *, at_once: bool) -> None:
        """Starts to load into the blocks of a sequence, from `first` on, at once or in the next step."""
        assert self._tiers is not None
        blocks = sequence.blocks[first : first + len(contents)]
        sequence.load = PrefixLoad(contents, blocks, self._tiers.late_at(len(contents)), len(contents))
        sequence.state = State.LOADING
        self.sequences.append(sequence)
        self._tiers.expect(contents)
        if at_once:
            self._begin_part(sequence.load, self._tiers)

    def in_host_memory(self, hashes: Sequence[bytes]) -> list[BlockContents]:
        """Returns the first of these blocks if they are in host memory, and no other load brings them."""
        tiers = self._tiers
        if tiers is None or not hashes or tiers.is_loading(hashes[0]):
            return []
        count, _ = tiers.directory.following(hashes)
        tiers.directory.touch(hashes[:count])
        return [BlockContents(block_hash, self._block_tokens) for block_hash in hashes[:count]]

    def promote(
        self,
        contents: Sequence[BlockContents],
        cached: Sequence[int],
        new: Sequence[int],
        ended: Callable[[Promotion, int], None],
    ) -> None:
        """Starts to copy blocks of host memory, at least one, into the first of the new ones of the pool."""
        assert self._tiers is not None
        load = self._tiers.load(contents, new[: len(contents)])
        self.promotions.append(Promotion(cached, new, load, ended))

    def end_promotions(self) -> None:
        """Ends all promotions at once."""
        for promotion in self.promotions:
            assert self._tiers is not None
            self._tiers.give_back(promotion.load)
            promotion.ended(promotion, 0)
        self.promotions.clear()

    def finished(self, most_blocks: int = ALL_BLOCKS) -> list[TokenSequence]:
        """Ends what is complete, has failed or is late, and begins what follows it, up to so many blocks each. Returns
        the sequences that wait for nothing more.
        """
        tiers = self._tiers
        if tiers is None:
            return []
        tiers.poll()
        for promotion in [each for each in self.promotions if tiers.has_ended(each.load)]:
            self.promotions.remove(promotion)
            promotion.ended(promotion, tiers.copied(promotion.load))
        to_end = to_begin = most_blocks
        for sequence in self.sequences:
            load = sequence.load
            assert load is not None
            to_end -= self._end_parts(sequence, load, tiers, to_end)
            to_begin -= self._begin_parts(load, tiers, to_begin)
        ended = [each for each in self.sequences if each.load and not each.load.parts and not each.load.has_more]
        for sequence in ended:
            self._end(sequence)
        return ended

    def _end_parts(self, sequence: TokenSequence, load: PrefixLoad, tiers: KvTiers, most_blocks: int) -> int:
        """Stores the parts that have ended. After one that is not whole nothing more is loaded. Returns the blocks."""
        count = 0
        while load.parts and count < most_blocks and tiers.has_ended(load.parts[0]):
            part = load.parts.popleft()
            items = tiers.finish(part)
            self._store(sequence, load, items)
            count += len(part.items)
            if len(items) < len(part.items):
                self._drop_rest(load, tiers)
        return count

    def _begin_parts(self, load: PrefixLoad, tiers: KvTiers, most_blocks: int) -> int:
        """Begins what follows, while not enough is on its way. Returns the blocks."""
        before = load.begun
        while load.has_more and load.begun - before < most_blocks and len(load.parts) < _PARTS:
            self._begin_part(load, tiers)
        return load.begun - before

    def _begin_part(self, load: PrefixLoad, tiers: KvTiers) -> None:
        """Begins the next part. What has left its tier meanwhile, and all after it, is computed."""
        wanted = load.waiting(STEP_BLOCKS)
        contents = tiers.directory.readable(wanted)
        if contents:
            load.parts.append(tiers.load(contents, load.blocks[load.begun :][: len(contents)], load.late_at))
        tiers.unexpect(contents)
        load.begun += len(contents)
        if len(contents) < len(wanted):
            self._end_before(load, tiers)

    def _drop_rest(self, load: PrefixLoad, tiers: KvTiers) -> None:
        while load.parts:
            tiers.give_back(load.parts.pop())
        self._end_before(load, tiers)

    def _end_before(self, load: PrefixLoad, tiers: KvTiers) -> None:
        """Loads nothing of what has not begun."""
        tiers.unexpect(load.waiting(len(load.contents)))
        load.end = load.begun

    def give_up(self, sequence: TokenSequence) -> None:
        """Ends the load of a sequence that is gone."""
        assert self._tiers is not None
        assert sequence.load is not None
        self.sequences.remove(sequence)
        self._drop_rest(sequence.load, self._tiers)
        sequence.load = None

    def when_settled(self, blocks: Sequence[int], call: Callable[[], None]) -> None:
        """Calls once these blocks may be written: at once without tiers."""
        if self._tiers is None:
            call()
        else:
            self._tiers.when_settled(blocks, call)

    def park(self, sequence: TokenSequence) -> None:
        """Keeps the unfinished block of a sequence that is preempted; the others are in the prefix cache."""
        filled, tokens = divmod(sequence.computed, self._block_tokens)
        if self._tiers is None or not tokens or sequence.prompt_report is not None:  # which needs all to be computed
            return
        name = sequence.chain.unfinished(sequence.tokens, sequence.computed)
        if name is not None and self._tiers.park(sequence.blocks[filled], BlockContents(name, tokens)):
            sequence.parked = BlockContents(name, tokens)

    def unpark(self, sequence: TokenSequence) -> None:
        """Drops the unfinished block of a sequence that ends."""
        if sequence.parked is not None and self._tiers is not None:
            self._tiers.directory.lose(sequence.parked.block_hash)
            sequence.parked = None

    def _follows(self, sequence: TokenSequence, parked: BlockContents, hashes: Sequence[bytes]) -> bool:
        """True if an unfinished block comes right after the full ones. More of them than when it was parked may be
        cached, because another sequence has computed them.
        """
        end = len(hashes) * self._block_tokens + parked.tokens
        return sequence.chain.unfinished(sequence.tokens, end) == parked.block_hash

    def _store(self, sequence: TokenSequence, load: PrefixLoad, items: Sequence[LoadItem]) -> None:
        """Adds blocks that are there to the prefix cache."""
        for item in items:
            load.loaded[item.place.tier] += 1
            load.tokens[item.place.tier] += item.contents.tokens
            sequence.computed += item.contents.tokens
            if item.contents.tokens == self._block_tokens:
                self._pool.store(item.block, item.contents.block_hash)
        sequence.stored_blocks = sequence.computed // self._block_tokens

    def _end(self, sequence: TokenSequence) -> None:
        load, sequence.load, sequence.parked = sequence.load, None, None
        assert load is not None
        if not sequence.first_token_at:
            sequence.cached_tokens, sequence.loaded_tokens = sequence.computed, dict(load.tokens)
            sequence.loaded_blocks = load.loaded.total() if load.is_whole else 0
        self.sequences.remove(sequence)


@dataclass(eq=False, slots=True)
class BlockReservation:
    """A reservation: blocks for KV of another worker or, while queued, the request for them. Calls `settled` with the
    result.
    """

    num_tokens: int
    hashes: list[bytes]
    settled: Callable[[BatonError | None], None]
    state: State = State.NEW
    blocks: list[int] = field(default_factory=list)
    granted_ids: Sequence[int] = ()
    cached_blocks: int = 0
    passed: int = 0

    @property
    def reserves(self) -> bool:
        """True: it waits for blocks to pull into."""
        return True

    def gain(self, blocks: Sequence[int]) -> None:
        """Adds blocks to its table."""
        self.blocks += blocks

    def lose(self) -> list[int]:
        """Empties its table. Returns the blocks."""
        blocks, self.blocks = self.blocks, []
        return blocks
