"""Which sequences take part in the next step, which wait, and which are preempted when the pool is full."""

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from baton.errors import Overloaded
from services.engines.kv import packed_ids
from services.engines.memory.allocation import UNSHARED, AllocationRules, Grant, KeptBlocks, grant_blocks, uncount
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.kv_cache.blocks import BlockPool
from services.engines.pytorch.kv_cache.tiers.tiers import KvTiers
from services.engines.pytorch.runners.batch import Chunk
from services.engines.pytorch.sequence import State, TokenSequence
from services.engines.pytorch.speculation.drafting import Drafter
from services.engines.pytorch.steps.loans import BlockLoans
from services.engines.pytorch.steps.tier_loads import (
    ALL_BLOCKS,
    STEP_BLOCKS,
    BlockReservation,
    TierLoads,
)
from services.engines.running import metrics
from services.engines.seals import BlockContents

# So many blocks of a prompt are named in a step that only decodes.
_NAMED_BLOCKS = 256
# With so few tokens of a prompt a step is hardly longer than one that only decodes.
_FEW_TOKENS = 32
# For so many steps at most the start of a load is prepared.
_MOST_DEFERRED = 256


@dataclass(frozen=True, slots=True)
class _Need:
    """The blocks that a request needs: those cached already, and the number of new ones."""

    cached: list[int]
    missing: int

    def state(self, kept: KeptBlocks) -> Grant:
        """Returns why the blocks cannot be allocated now."""
        return Grant.POOL_FULL if kept.fits_beside_kept(self.cached, self.missing) else Grant.HELD


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The limits of a step, and of the engine."""

    max_sequences: int
    max_step_tokens: int
    max_waiting: int
    max_context_tokens: int
    block_tokens: int
    prefix_cache: bool

    @classmethod
    def of(
        cls, config: PyTorchConfig, max_step_tokens: int, block_tokens: int, max_context_tokens: int
    ) -> "SchedulerLimits":
        """The configured limits, of a model and a device."""
        return cls(
            max_sequences=config.max_sequences,
            max_step_tokens=max_step_tokens,
            max_waiting=config.max_waiting,
            max_context_tokens=max_context_tokens,
            block_tokens=block_tokens,
            prefix_cache=config.prefix_cache,
        )


class Scheduler:
    """First come, first served, by the rules of memory/allocation.py, in steps of bounded size: decodes first, then
    prompts.

    A sequence gets the blocks for all its tokens when it is admitted, and another one whenever it needs more. If no
    block is free, the newest running sequence is preempted: it frees all its blocks and waits at the front of the queue
    to be computed again. A sequence that was pulled without the embeddings of its media cannot be computed again: it
    keeps its blocks and pauses. Held and reserved blocks are never taken away.

    With `tiers`, a sequence whose prefix is in one of them gets its blocks, waits while they are loaded, and then runs.
    A preempted one is loaded again, too, with its unfinished block, and computes nothing twice.
    """

    def __init__(
        self,
        pool: BlockPool,
        limits: SchedulerLimits,
        rules: AllocationRules = UNSHARED,
        drafter: Drafter | None = None,
        tiers: KvTiers | None = None,
    ) -> None:
        self.running: list[TokenSequence] = []
        self.waiting: deque[TokenSequence | BlockReservation] = deque()
        self.reserved = 0
        self.kept = KeptBlocks(pool.total, rules)
        self.held: Counter[int] = Counter()  # the blocks that other workers may read, with how many loans and prompts
        self._pool = pool
        self._limits = limits
        self._drafter = drafter
        self._loads = TierLoads(tiers if limits.prefix_cache else None, pool, limits.block_tokens)
        self.loans = BlockLoans(pool, self._loads, limits.block_tokens, self.kept, self.held, self.running)
        self._last_wait_seconds = 0.0

    @property
    def loading(self) -> Sequence[TokenSequence]:
        """The sequences that have their blocks, and wait for content of tiers below the pool."""
        return self._loads.sequences

    def enqueue(self, item: TokenSequence | BlockReservation) -> None:
        """Appends a request to the queue. Raises Overloaded if the queue is full."""
        if len(self.waiting) >= self._limits.max_waiting:
            retry_after = max(0.1, self._last_wait_seconds)
            raise Overloaded(f"{len(self.waiting)} requests are waiting already", retry_after_seconds=retry_after)
        item.state = State.WAITING
        self.waiting.append(item)

    def join(self, sequence: TokenSequence) -> None:
        """Adds a sequence that already has its blocks to the running ones."""
        sequence.state = State.RUNNING
        self.running.append(sequence)

    def remove(self, item: TokenSequence | BlockReservation) -> int:
        """Removes a request in any state, and frees its blocks; returns how many."""
        if item.state is State.WAITING:
            self.waiting.remove(item)
        elif item.state is State.RUNNING and isinstance(item, TokenSequence):
            self.running.remove(item)
        elif item.state is State.RESERVED:
            self.reserved -= 1
        elif item.state is State.LOADING and isinstance(item, TokenSequence):
            self._loads.give_up(item)
        if isinstance(item, TokenSequence):
            self._loads.unpark(item)
        if item.state is State.HELD:
            uncount(self.held, item.blocks)
        item.state = State.DONE
        freed = self._free(item)
        if freed and isinstance(item, TokenSequence) and self._limits.prefix_cache:
            self._pool.record(item.prompt.session, item.chain.upto(item.tokens, item.computed))
        return freed

    def hold(self, sequence: TokenSequence) -> None:
        """Removes a sequence from the steps; it keeps its blocks."""
        self.running.remove(sequence)
        self.held.update(sequence.blocks)
        sequence.state = State.HELD

    def keep(self, sequence: TokenSequence) -> None:
        """Holds a sequence that was not meant to be held."""
        sequence.hold = True
        self.kept.add(sequence.blocks)
        self.hold(sequence)

    def add_reserved(self, reservation: BlockReservation, sequence: TokenSequence) -> None:
        """Moves the filled blocks of a reservation to the sequence, which then runs."""
        self.reserved -= 1
        reservation.state = State.DONE
        blocks, reservation.blocks = reservation.blocks, []
        sequence.gain(blocks)
        sequence.journal()
        self.join(sequence)

    def is_held_up(self, reservation: BlockReservation) -> bool:
        """True if a reservation waits for KV held for other workers, and not only for requests that run here."""
        if reservation.state is not State.WAITING:
            return False
        return self._find(reservation.num_tokens, reservation.hashes).state(self.kept) is Grant.HELD

    def retire(self, sequence: TokenSequence) -> None:
        """Removes a sequence whose blocks a step still writes; `remove` frees them later."""
        self.running.remove(sequence)
        sequence.state = State.DONE

    def schedule(self) -> list[Chunk]:
        """Returns the chunks of the next step; none if nothing can run now."""
        self._finish_loads()
        able = [s for s in self.running if not s.awaits_mask]
        ready = [s for s in able if s.state is State.RUNNING and self._grow(s)]
        return self._chunks(ready)

    def schedule_ahead(self) -> list[Chunk]:
        """Returns the chunks of the step after one that is in flight; none if it must complete first.

        Nothing is preempted meanwhile: blocks that are being written must not get another owner.
        """
        self._finish_loads()
        able = [s for s in self.running if not s.awaits_mask]
        going_on = [s for s in able if not s.ends_in_flight(self._limits.max_context_tokens)]
        if sum(max(0, self._missing(sequence)) for sequence in going_on) > self._pool.available:
            return []
        return self._chunks([sequence for sequence in going_on if self._grow(sequence)])

    def _chunks(self, ready: list[TokenSequence]) -> list[Chunk]:
        chunks = [Chunk.next_of(sequence, 1) for sequence in ready if sequence.remaining == 1]
        if self._drafter is not None:
            chunks = self._drafter.extend(chunks, self._limits.max_step_tokens - len(chunks), self._allocate_drafts)
        budget = self._limits.max_step_tokens - sum(chunk.count for chunk in chunks)
        for sequence in ready:
            if sequence.remaining > 1 and budget > 0:
                chunks.append(Chunk.next_of(sequence, sequence.chunk_tokens(budget)))
                budget -= chunks[-1].count
        return chunks + self._admit(budget)

    def _grow(self, sequence: TokenSequence) -> bool:
        """Allocates blocks for all tokens of the sequence, and preempts newer ones if necessary; False if that is not
        enough.
        """
        missing = self._missing(sequence)
        while missing > self._pool.available:
            victim = self._newest_since(sequence)
            if victim is None:
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        if missing > 0:
            sequence.gain(self._pool.allocate(missing))
        return True

    def _allocate_drafts(self, sequence: TokenSequence, tokens: int) -> int:
        """Allocates blocks for `tokens` more, unless others need them; returns for how many there is need."""
        missing = self._num_blocks(sequence.length + tokens) - len(sequence.blocks)
        if missing > 0 and self._pool.available >= missing + len(self.running):
            sequence.gain(self._pool.allocate(missing))
        return min(tokens, len(sequence.blocks) * self._limits.block_tokens - sequence.length)

    def _missing(self, sequence: TokenSequence) -> int:
        return self._num_blocks(sequence.length) - len(sequence.blocks)

    def _newest_since(self, sequence: TokenSequence) -> TokenSequence | None:
        """Returns the sequences to preempt for `sequence`: newer ones without a chunk in this step, then itself."""
        newer = self.running[self.running.index(sequence) :]
        return next((other for other in reversed(newer) if other.is_recomputable), None)

    def _preempt(self, sequence: TokenSequence) -> None:
        metrics.PREEMPTIONS.inc()
        self.running.remove(sequence)
        sequence.report_lost()
        self._loads.park(sequence)
        self._free(sequence)
        sequence.computed = sequence.stored_blocks = 0
        sequence.state = State.WAITING
        self.waiting.appendleft(sequence)

    def _admit(self, budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []

        def grant(item: TokenSequence | BlockReservation) -> Grant:
            nonlocal budget
            if len(self.running) + len(self.loading) + self.reserved >= self._limits.max_sequences:
                return Grant.LATER
            if isinstance(item, BlockReservation):
                return self._reserve(item)
            if budget <= 0:
                return Grant.LATER
            granted = self._start(item)
            if item.state is State.RUNNING:
                chunks.append(Chunk.next_of(item, item.chunk_tokens(budget)))
                budget -= chunks[-1].count
            return granted

        grant_blocks(self.waiting, grant)
        return chunks

    def _reserve(self, reservation: BlockReservation) -> Grant:
        need = self._find(reservation.num_tokens, reservation.hashes)
        if not self._allocate(reservation, need):
            return need.state(self.kept)
        reservation.cached_blocks = len(need.cached)
        reservation.granted_ids = packed_ids(reservation.blocks)
        reservation.state = State.RESERVED
        self.reserved += 1
        self._loads.when_settled(reservation.blocks, partial(reservation.settled, None))
        return Grant.GRANTED

    def _start(self, sequence: TokenSequence) -> Grant:
        # Compute the last token always: its logits are needed, and the cache has none.
        # To report on the prompt, all of it: log probabilities are not cached either.
        cacheable = 0 if sequence.prompt_report is not None else len(sequence.tokens) - 1
        if self._names_in_parts(sequence, cacheable):
            return Grant.LATER
        hashes = sequence.chain.upto(sequence.tokens, cacheable)
        need = self._find(len(sequence.tokens), hashes)
        cached = len(need.cached)
        end = self._loads.end_for(sequence, hashes, cached)
        if end is None or (end > cached and self._empties_in_parts(sequence, need)):
            return Grant.LATER
        if sequence.hold and not self.kept.may_add(need.cached, need.missing):
            return Grant.HELD
        if not self._allocate(sequence, need):
            return need.state(self.kept)
        if sequence.hold:
            self.kept.add(sequence.blocks)
        self._begin(sequence, cached, self._loads.contents_for(sequence, hashes, cached, end))
        return Grant.GRANTED

    def _names_in_parts(self, sequence: TokenSequence, num_tokens: int) -> bool:
        """Computes some of a long prompt's hashes in this step; False if it may have all at once."""
        if not self._loads.has_tiers or not self._may_defer(sequence):
            return False
        is_left = sequence.chain.extend(sequence.tokens, num_tokens, _NAMED_BLOCKS)
        sequence.deferred += is_left
        return is_left

    def _empties_in_parts(self, sequence: TokenSequence, need: _Need) -> bool:
        """Empties some of the blocks that a load needs in this step; False if it may have all at once, or must wait."""
        room = self._pool.available_beside(need.cached) - len(self.running)
        if need.missing > room or not self._may_defer(sequence):
            return False
        is_left = self._pool.empty_ahead(need.missing, need.cached, STEP_BLOCKS)
        sequence.deferred += is_left
        return is_left

    def _may_defer(self, sequence: TokenSequence) -> bool:
        """True if a load's start is prepared in parts: not for ever, since later requests may take what is prepared."""
        return sequence.deferred < _MOST_DEFERRED and self._step_blocks == STEP_BLOCKS

    @property
    def _step_blocks(self) -> int:
        """The most blocks of loads to handle in a step: few while all that run wait for one token each, or nearly."""
        is_short = bool(self.running) and all(sequence.remaining <= _FEW_TOKENS for sequence in self.running)
        return STEP_BLOCKS if is_short else ALL_BLOCKS

    def _begin(self, sequence: TokenSequence, cached: int, contents: Sequence[BlockContents]) -> None:
        """Starts a sequence that has its blocks, of which the first `cached` ones are filled, or loads more of them."""
        sequence.computed = cached * self._limits.block_tokens
        sequence.stored_blocks = cached
        contents = self._loads.still_there(contents)
        if contents:
            self._loads.begin(sequence, contents, cached, at_once=self._step_blocks == ALL_BLOCKS)
        else:
            # After a preemption keep the count of the first time: that is what the cache saved the request.
            sequence.cached_tokens = sequence.cached_tokens if sequence.started else sequence.computed
            self.join(sequence)
        self._record_start(sequence)

    def _record_start(self, sequence: TokenSequence) -> None:
        if not sequence.started:
            sequence.started = time.monotonic()
            self._last_wait_seconds = sequence.queue_seconds

    def _finish_loads(self) -> None:
        """Lets the sequences run whose loads have ended: with all that they waited for, or with less."""
        for sequence in self._loads.finished(self._step_blocks if self.loading else ALL_BLOCKS):
            self.join(sequence)

    def _find(self, num_tokens: int, hashes: list[bytes]) -> _Need:
        cached = self._pool.match(hashes) if self._limits.prefix_cache else []
        return _Need(cached, self._num_blocks(num_tokens) - len(cached))

    def _allocate(self, item: TokenSequence | BlockReservation, need: _Need) -> bool:
        """Gives `item` its blocks, cached ones first, if there are enough.

        One block for each running sequence stays free, so that an admission does not cause a preemption at once.
        """
        if self._pool.available_beside(need.cached) < need.missing + len(self.running):
            return False
        self._pool.share(need.cached)
        item.gain(need.cached + self._pool.allocate(need.missing))
        return True

    def _free(self, item: TokenSequence | BlockReservation) -> int:
        blocks = item.lose()
        if isinstance(item, TokenSequence) and item.hold:
            self.kept.remove(blocks)
        self._pool.release(blocks)
        return len(blocks)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._limits.block_tokens)
