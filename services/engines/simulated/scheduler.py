"""The simulated engine's scheduler: the queue, the batch, and the steps.

Everything runs on the event loop, so no state changes between two awaits.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items

from baton.errors import BatonError, EngineFailed, HandoffLost, InvalidRequest, Overloaded
from runtime.aio import timeout
from runtime.clock import monotonic
from services.engines.answer import FinishReason
from services.engines.memory.allocation import (
    UNSHARED,
    AllocationRules,
    Grant,
    KeptBlocks,
    grant_blocks,
    no_free_blocks,
)
from services.engines.running import metrics
from services.engines.running.request_context import current_freed_kv
from services.engines.simulated.blocks import Blocks, Contents
from services.engines.simulated.config import SimulatedConfig
from services.engines.simulated.kv import Claim
from services.engines.simulated.sequence import Sequence
from services.engines.simulated.timing import step_timing
from services.engines.simulated.tokens import Vocabulary, finish_reason, logprob

PIECE_BLOCKS = 2048  # freed, or emptied, in about 2 ms


class SimulatedScheduler:
    """Computes sequences in steps, and grants claims. `run` is the engine's loop; nothing proceeds without it."""

    def __init__(
        self,
        config: SimulatedConfig,
        vocabulary: Vocabulary,
        blocks: Blocks,
        contents: Contents,
        rules: AllocationRules = UNSHARED,
    ) -> None:
        self._config = config
        self._timing = step_timing(config)
        self._vocabulary = vocabulary
        self._blocks = blocks
        self._contents = contents
        self._rules = rules
        self._kept = KeptBlocks(blocks.total, rules)
        self._size = config.block_tokens
        self._wake = asyncio.Event()
        self._ready_at = 0.0
        self._tokens = 0
        self._begun = 0
        self.waiting: deque[Sequence | Claim] = deque()
        self.running: dict[Sequence, None] = {}
        self.failure: EngineFailed | None = None

    @property
    def prompt_tokens(self) -> int:
        """The prompt tokens of running sequences that are not computed yet."""
        return sum(sequence.missing for sequence in self.running if not sequence.decoding)

    def enqueue(self, item: Sequence | Claim) -> None:
        """Adds a request. Raises EngineFailed if the engine has failed, and Overloaded if too many requests wait.

        Where none waits before it, a claim is granted at once, and not after the step that runs: its blocks are pulled
        meanwhile, and its sequence takes part in the next step.
        """
        if self.failure:
            raise self.failure
        if not self.waiting and self._starts_at_once(item):
            self._wake.set()
            return
        if len(self.waiting) >= self._config.max_waiting:
            raise Overloaded(f"{len(self.waiting)} requests wait already", retry_after_seconds=1.0)
        if isinstance(item, Sequence):
            item.arrived = self._begun
        self.waiting.append(item)
        self._wake.set()

    def _starts_at_once(self, item: Sequence | Claim) -> bool:
        """Grants a claim, or adds a sequence with pulled KV to the batch; False if it has to wait."""
        if isinstance(item, Claim):
            return self._grant(item) is Grant.GRANTED
        if not item.blocks or len(self.running) >= self._config.max_batch:
            return False
        self._run(item)
        return True

    def drop(self, item: Sequence | Claim) -> None:
        """Removes a request and frees its blocks, in whatever state it is. Idempotent."""
        if isinstance(item, Sequence):
            self.running.pop(item, None)
        if item in self.waiting:
            self.waiting.remove(item)
        current_freed_kv().give_back(item.computed if isinstance(item, Sequence) else 0, len(item.blocks))
        self._free(item)

    def yield_next(self, sequence: Sequence) -> None:
        """Ends a sequence at its next token, to go on elsewhere; at once if it waits for blocks."""
        sequence.yields = True
        if sequence in self.waiting and not sequence.blocks:
            self._end_without_kv(sequence)

    def lend(self, sequence: Sequence, most_tokens: int) -> Items[int]:
        """Holds a running sequence's full blocks within its first `most_tokens` ids, beside itself; perhaps none."""
        full = max(0, min(sequence.computed, most_tokens - 1) // self._size)
        blocks = sequence.blocks[:full]
        if sequence not in self.running or not blocks or not self._kept.may_add(blocks, 0):
            return ()
        return self._keep(blocks)

    def lend_cached(self, hashes: Items[bytes]) -> Items[int]:
        """Holds the blocks of the longest known prefix of a chain; perhaps none."""
        blocks = self._blocks.match(hashes)
        return self._keep(blocks) if blocks and self._kept.may_lend(blocks) else ()

    def _keep(self, blocks: list[int]) -> list[int]:
        self._blocks.take(blocks, 0)
        self._kept.add(blocks)
        return blocks

    def let_go(self, block_ids: Items[int]) -> int:
        """Frees blocks that were held for another worker; returns how many."""
        return self._release(block_ids, self._kept.remove)

    async def make_room(self, hashes: Items[bytes], count: int) -> None:
        """Empties cached blocks for a request of very many, in pieces; the request takes all of its blocks at once."""
        if count <= PIECE_BLOCKS:
            return
        cached = self._blocks.match(hashes)
        if self._blocks.lacking(cached, count - len(cached)) > PIECE_BLOCKS:
            self._blocks.keep(cached)
        while (lacking := self._blocks.lacking(cached, count - len(cached))) > PIECE_BLOCKS:
            self._blocks.empty(count - len(cached) - lacking + PIECE_BLOCKS)
            await asyncio.sleep(0)

    def release(self, block_ids: Items[int]) -> int:
        """Frees blocks and offers them to waiting requests; returns how many."""
        return self._release(block_ids)

    def _release(self, block_ids: Items[int], *before: Callable[[Items[int]], None]) -> int:
        """Frees very many in pieces, the end of the chain first, so that the event loop is not held."""
        piece, rest = block_ids[-PIECE_BLOCKS:], block_ids[:-PIECE_BLOCKS]
        for step in (*before, self._blocks.release):
            step(piece)
        self._wake.set()
        if rest:
            asyncio.get_running_loop().call_soon(self._release, rest, *before)
        return len(block_ids)

    def is_held_up(self, claim: Claim) -> bool:
        """True if a claim waits for KV held for other workers, and not only for requests that run here."""
        return claim in self.waiting and self._refusal(*self._find(claim)) is Grant.HELD

    def give_up(self, claim: Claim) -> None:
        """Ends a claim that has waited too long for held KV."""
        self.waiting.remove(claim)
        claim.error = no_free_blocks(self._rules)
        claim.changed.set()

    def fail(self, failure: EngineFailed) -> None:
        """Fails every request, now and later."""
        self.failure = failure
        for item in [*self.running, *self.waiting]:
            item.error = failure
            item.changed.set()

    async def run(self) -> None:
        """Runs steps until it is cancelled, or until the engine fails as configured."""
        try:
            while True:
                await self._step()
        except EngineFailed as failure:
            self.fail(failure)

    async def _step(self) -> None:
        self._admit()
        if not self.running:
            self._wake.clear()
            await self._wake.wait()
            self._begun += 1
            return
        batch = self._plan()
        if not batch:
            await self._resolve_deadlock()
            return
        self._begun += 1
        await self._spend(batch)
        for sequence, count in batch:
            if sequence in self.running:
                self._advance(sequence, count)

    def _admit(self) -> None:
        """Offers blocks by the rules of memory/allocation.py; a full batch stops sequences, but not claims."""
        self._start_adopted()
        grant_blocks(self.waiting, self._admit_one)

    def _admit_one(self, item: Sequence | Claim) -> Grant:
        if isinstance(item, Claim):
            return self._grant(item)
        if len(self.running) >= self._config.max_batch or self.prompt_tokens >= self._prompt_budget():
            # A sequence starts only when a step has room for it: earlier prompts are then in the prefix cache.
            return Grant.LATER
        return Grant.LATER if self._is_planned_without(item) else self._start(item)

    def _prompt_budget(self) -> int:
        """The prompt tokens of the next step, at most."""
        if self._config.timing is None:
            return self._config.prefill_chunk_tokens
        return self._config.timing.step_tokens - sum(sequence.decoding for sequence in self.running)

    def _is_planned_without(self, sequence: Sequence) -> bool:
        """True if it came too late for the next step: a measured engine plans it while the one before it runs."""
        return self._config.timing is not None and bool(self.running) and sequence.arrived >= self._begun

    def _start_adopted(self) -> None:
        """Starts sequences with pulled KV before all others: an earlier one may be waiting for their blocks."""
        for item in tuple(self.waiting):
            if isinstance(item, Sequence) and item.blocks and len(self.running) < self._config.max_batch:
                self.waiting.remove(item)
                self._run(item)

    def _grant(self, claim: Claim) -> Grant:
        cached, missing = self._find(claim)
        blocks = self._blocks.take(cached, missing)
        if blocks is None:
            return self._refusal(cached, missing)
        claim.blocks, claim.cached_blocks = blocks, len(cached)
        claim.changed.set()
        return Grant.GRANTED

    def _start(self, sequence: Sequence) -> Grant:
        cached = self._blocks.match(sequence.hashes[: (len(sequence.ids) - 1) // self._size])
        missing = -(-len(sequence.ids) // self._size) - len(cached)
        if sequence.held and not self._kept.may_add(cached, missing):
            return Grant.HELD
        blocks = self._blocks.take(cached, missing)
        if blocks is None:
            return self._refusal(cached, missing)
        if sequence.held:
            self._kept.add(blocks)
        sequence.blocks, sequence.computed = blocks, len(cached) * self._size
        self._run(sequence)
        return Grant.GRANTED

    def _find(self, claim: Claim) -> tuple[list[int], int]:
        cached = self._blocks.match(claim.hashes)
        return cached, claim.count - len(cached)

    def _refusal(self, cached: list[int], missing: int) -> Grant:
        return Grant.POOL_FULL if self._kept.fits_beside_kept(cached, missing) else Grant.HELD

    def _run(self, sequence: Sequence) -> None:
        sequence.start()
        self.running[sequence] = None

    def _plan(self) -> list[tuple[Sequence, int]]:
        """Returns how many tokens of which sequences the next step computes."""
        budget = self._prompt_budget()
        batch = []
        for sequence in list(self.running):
            if sequence not in self.running:
                continue
            if (not sequence.decoding and not budget) or not self._allocate(sequence):
                continue
            if sequence.decoding:
                batch.append((sequence, 1))
            else:
                count = min(sequence.missing, budget)
                budget -= count
                batch.append((sequence, count))
        return batch

    def _allocate(self, sequence: Sequence) -> bool:
        """Allocates blocks for all tokens of a sequence; preempts the youngest sequences if there are too few."""
        while len(sequence.blocks) * self._size < len(sequence.ids):
            blocks = self._blocks.take((), 1)
            if blocks is not None:
                sequence.blocks += blocks
                continue
            youngest = next((other for other in reversed(self.running) if other.is_preemptible), None)
            if youngest is None:
                return False
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    async def _resolve_deadlock(self) -> None:
        """Waits for blocks of other requests, and briefly for held KV; then fails the youngest waiting sequence."""
        if not self.running:
            return
        # Those with pulled KV that wait are stuck, too: the batch is full, or they would run.
        adopted = (item for item in self.waiting if isinstance(item, Sequence))
        stuck = {block for sequence in (*self.running, *adopted) for block in sequence.blocks}
        kept = self._kept.beside(stuck)
        if self._blocks.used > len(stuck) + kept:
            await self._changed(None)
            return
        if kept and await self._changed(self._rules.held_wait_seconds):
            return
        sequence = next(reversed(self.running))
        reason = "its blocks were needed, and without the embeddings it cannot be run again here"
        self._fail_one(sequence, HandoffLost(reason))

    def _fail_one(self, sequence: Sequence, error: BatonError) -> None:
        sequence.error = error
        self.drop(sequence)
        sequence.changed.set()

    async def _changed(self, seconds: float | None) -> bool:
        """True if blocks become free or requests arrive in time."""
        self._wake.clear()
        try:
            async with timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    def _free(self, item: Sequence | Claim) -> None:
        blocks, item.blocks = item.blocks, []
        if isinstance(item, Sequence) and item.held:
            self.let_go(blocks)
        else:
            self.release(blocks)

    def _preempt(self, sequence: Sequence) -> None:
        metrics.PREEMPTIONS.inc()
        del self.running[sequence]
        self._free(sequence)
        sequence.computed = 0
        self.waiting.appendleft(sequence)
        if sequence.yields:
            self._end_without_kv(sequence)

    def _end_without_kv(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        sequence.finish = FinishReason.YIELDED
        sequence.changed.set()

    async def _spend(self, batch: Items[tuple[Sequence, int]]) -> None:
        """Waits for the duration of a step. Steps follow each other without the event loop's latency, unless it was
        idle.
        """
        seconds = self._timing.seconds(batch)
        now = monotonic()
        self._ready_at = (self._ready_at if now - self._ready_at < seconds else now) + seconds
        await asyncio.sleep(max(0.0, self._ready_at - now))

    def _advance(self, sequence: Sequence, count: int) -> None:
        before = sequence.computed
        sequence.computed += count
        self._contents.write(sequence, before)
        if sequence.missing:
            sequence.report_computed()
        else:
            self._generate(sequence)

    def _generate(self, sequence: Sequence) -> None:
        self._fail_if_it_is_time()
        try:
            token_id = sequence.grow()
        except InvalidRequest as failure:  # of a grammar that cannot be followed
            self._fail_one(sequence, failure)
            return
        sampling = sequence.sampling
        if sampling.logprobs is not None:
            sequence.logprobs.append(logprob(token_id, sampling.logprobs, self._vocabulary))
        left = self._config.context_tokens - len(sequence.ids)
        sequence.finish = finish_reason(token_id, sequence.generated, left, self._vocabulary.eos_token_id, sampling)
        if sequence.yields and not sequence.finish:
            self._hold(sequence)
        if sequence.finish or sequence.held:
            del self.running[sequence]
        sequence.changed.set()

    def _hold(self, sequence: Sequence) -> None:
        """Holds a sequence that was not meant to be held: its last block is not written yet."""
        sequence.held, sequence.finish = True, FinishReason.YIELDED
        self._contents.write(sequence, sequence.computed // self._size * self._size)
        self._kept.add(sequence.blocks)

    def _fail_if_it_is_time(self) -> None:
        self._tokens += 1
        if 0 < self._config.fail_after_tokens < self._tokens:
            raise EngineFailed(f"failed after {self._config.fail_after_tokens} tokens, as configured")
