"""Who of the simulated engine's requests computes when: the queue, the batch, and the steps.

Everything runs on the event loop, so that no state changes between two awaits.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence as Items

from rpc.errors import EngineFailed, HandoffLost, Overloaded
from services.engines.simulated_blocks import Blocks
from services.engines.simulated_config import SimulatedConfig
from services.engines.simulated_contents import Contents
from services.engines.simulated_kv import Claim
from services.engines.simulated_sequence import Sequence
from services.engines.simulated_tokens import Vocabulary, finish_reason, logprob
from services.footprint import current_footprint


class Scheduler:
    """Computes sequences in steps, and grants claims. `run` is the engine's loop; without it nothing proceeds."""

    def __init__(self, config: SimulatedConfig, vocabulary: Vocabulary, blocks: Blocks, contents: Contents) -> None:
        self._config = config
        self._vocabulary = vocabulary
        self._blocks = blocks
        self._contents = contents
        self._size = config.block_tokens
        self._wake = asyncio.Event()
        self._ready_at = 0.0
        self._tokens = 0
        self.waiting: deque[Sequence | Claim] = deque()
        self.running: dict[Sequence, None] = {}
        self.failure: EngineFailed | None = None

    def enqueue(self, item: Sequence | Claim) -> None:
        """Takes a request in. Raises EngineFailed once the engine has failed, Overloaded if too many wait."""
        if self.failure:
            raise self.failure
        if len(self.waiting) >= self._config.max_waiting:
            raise Overloaded(f"{len(self.waiting)} requests wait already", retry_after_seconds=1.0)
        self.waiting.append(item)
        self._wake.set()

    def drop(self, item: Sequence | Claim) -> None:
        """Forgets a request and gives its blocks back, wherever it is; once is as good as twice."""
        if isinstance(item, Sequence):
            self.running.pop(item, None)
        if item in self.waiting:
            self.waiting.remove(item)
        current_footprint().give_back(item.computed if isinstance(item, Sequence) else 0, len(item.blocks))
        self.release(item.blocks)
        item.blocks = []

    def release(self, block_ids: Items[int]) -> int:
        """Gives blocks back to whoever waits for them; returns how many."""
        self._blocks.release(block_ids)
        self._wake.set()
        return len(block_ids)

    def fail(self, failure: EngineFailed) -> None:
        """Fails every request, now and from now on."""
        self.failure = failure
        for item in [*self.running, *self.waiting]:
            item.error = failure
            item.changed.set()

    async def run(self) -> None:
        """Steps until cancelled, or until the engine fails as it is configured to."""
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
            return
        batch = self._plan()
        if not batch:
            await self._make_way()
            return
        await self._spend(batch)
        for sequence, count in batch:
            if sequence in self.running:
                self._advance(sequence, count)

    def _admit(self) -> None:
        """Gives blocks in the order of arrival; a full batch holds up sequences, and not claims."""
        self._start_adopted()
        skipped: list[Sequence | Claim] = []
        while self.waiting:
            item = self.waiting.popleft()
            if isinstance(item, Sequence) and len(self.running) >= self._config.max_batch:
                skipped.append(item)
            elif not (self._grant(item) if isinstance(item, Claim) else self._start(item)):
                skipped.append(item)
                break
        self.waiting.extendleft(reversed(skipped))

    def _start_adopted(self) -> None:
        """Those with pulled KV wait behind nobody: who is before them may be waiting for their very blocks."""
        for item in tuple(self.waiting):
            if isinstance(item, Sequence) and item.blocks and len(self.running) < self._config.max_batch:
                self.waiting.remove(item)
                self._run(item)

    def _grant(self, claim: Claim) -> bool:
        cached = self._blocks.match(claim.hashes)
        blocks = self._blocks.take(cached, claim.count - len(cached))
        if blocks is None:
            return False
        claim.blocks, claim.cached_blocks = blocks, len(cached)
        claim.changed.set()
        return True

    def _start(self, sequence: Sequence) -> bool:
        reusable = sequence.hashes[: (len(sequence.ids) - 1) // self._size]
        cached = self._blocks.match(reusable)
        blocks = self._blocks.take(cached, -(-len(sequence.ids) // self._size) - len(cached))
        if blocks is None:
            return False
        sequence.blocks, sequence.computed = blocks, len(cached) * self._size
        self._run(sequence)
        return True

    def _run(self, sequence: Sequence) -> None:
        sequence.start()
        self.running[sequence] = None

    def _plan(self) -> list[tuple[Sequence, int]]:
        """How many tokens of which sequences the next step computes."""
        budget = self._config.prefill_chunk_tokens
        batch = []
        for sequence in list(self.running):
            if sequence not in self.running:
                continue
            if (not sequence.decoding and not budget) or not self._make_room(sequence):
                continue
            if sequence.decoding:
                batch.append((sequence, 1))
            else:
                count = min(sequence.missing, budget)
                budget -= count
                batch.append((sequence, count))
        return batch

    def _make_room(self, sequence: Sequence) -> bool:
        """Blocks for all its tokens; where there are none, the youngest sequences are run again later."""
        while len(sequence.blocks) * self._size < len(sequence.ids):
            blocks = self._blocks.take((), 1)
            if blocks is not None:
                sequence.blocks += blocks
                continue
            youngest = next((other for other in reversed(self.running) if other.gives_way), None)
            if youngest is None:
                return False
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    async def _make_way(self) -> None:
        """Waits for blocks that others have; where those that wait for one have them all, ends the youngest."""
        if not self.running:
            return
        if self._blocks.used > len({block for sequence in self.running for block in sequence.blocks}):
            self._wake.clear()
            await self._wake.wait()
            return
        sequence = next(reversed(self.running))
        sequence.error = HandoffLost("its blocks were needed, and without the embeddings it cannot be run again here")
        self.drop(sequence)
        sequence.changed.set()

    def _preempt(self, sequence: Sequence) -> None:
        del self.running[sequence]
        self.release(sequence.blocks)
        sequence.blocks, sequence.computed = [], 0
        self.waiting.appendleft(sequence)

    async def _spend(self, batch: Items[tuple[Sequence, int]]) -> None:
        """Lets a step's time pass. Steps follow one another without the loop's latency, unless it was idle."""
        seconds = self._cost(batch)
        now = time.monotonic()
        self._ready_at = (self._ready_at if now - self._ready_at < seconds else now) + seconds
        await asyncio.sleep(max(0.0, self._ready_at - now))

    def _cost(self, batch: Items[tuple[Sequence, int]]) -> float:
        config = self._config
        prefilled = sum(count for sequence, count in batch if not sequence.decoding)
        seconds = config.decode_step_seconds if any(sequence.decoding for sequence, _ in batch) else 0.0
        if prefilled:
            seconds += config.prefill_base_seconds
        if prefilled and config.prefill_tokens_per_second:
            seconds += prefilled / config.prefill_tokens_per_second
        return seconds

    def _advance(self, sequence: Sequence, count: int) -> None:
        before = sequence.computed
        sequence.computed += count
        self._contents.write(sequence, before)
        if not sequence.missing:
            self._generate(sequence)

    def _generate(self, sequence: Sequence) -> None:
        self._fail_if_it_is_time()
        token_id = sequence.grow()
        sampling = sequence.sampling
        if sampling.logprobs is not None:
            sequence.logprobs.append(logprob(token_id, sampling.logprobs, self._vocabulary))
        room = self._config.context_tokens - len(sequence.ids)
        sequence.finish = finish_reason(token_id, sequence.generated, room, self._vocabulary.eos_token_id, sampling)
        if sequence.finish or sequence.held:
            del self.running[sequence]
        sequence.changed.set()

    def _fail_if_it_is_time(self) -> None:
        self._tokens += 1
        if 0 < self._config.fail_after_tokens < self._tokens:
            raise EngineFailed(f"failed after {self._config.fail_after_tokens} tokens, as configured")
