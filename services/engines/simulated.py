"""The simulated engine: ids that follow from prompt and seed, steps that cost what the configuration says, real blocks.

The pool's bytes follow from the tokens, and a decode from pulled KV checks them all: stale blocks cannot go unnoticed.
Everything runs on the event loop, so that no state changes between two awaits.
"""

import asyncio
import hashlib
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from rpc.aio import TaskGroup
from rpc.errors import EngineFailed, InvalidRequest, Overloaded
from services.engine import (
    EngineLoad,
    Finished,
    FinishReason,
    KvLayout,
    ModelFacts,
    Prompt,
    PulledKv,
    Sampling,
    Tokens,
)
from services.engines.shared_pool import SharedPool
from services.engines.simulated_blocks import Blocks
from services.engines.simulated_config import SimulatedConfig
from services.engines.simulated_kv import Claim, SimulatedKv, SimulatedReservation
from services.engines.simulated_sequence import Sequence, chain
from services.engines.simulated_stream import SimulatedStream
from services.engines.simulated_tokens import TokenStream, byte_vocabulary, finish_reason, folder_vocabulary, logprob


class SimulatedEngine:
    """An Engine without a model. See services/engine.py for the contract, SimulatedConfig for what it costs."""

    def __init__(self, config: SimulatedConfig) -> None:
        self._config = config
        self._vocabulary = folder_vocabulary(Path(config.model)) if config.model else byte_vocabulary()
        self._blocks = Blocks(config.num_blocks)
        self._held: Counter[int] = Counter()
        self._waiting: deque[Sequence | Claim] = deque()
        self._running: dict[Sequence, None] = {}
        self._wake = asyncio.Event()
        self._ready_at = 0.0
        self._resources = ExitStack()

    async def __aenter__(self) -> Self:
        started = time.monotonic()
        self._memory = self._resources.enter_context(SharedPool(self._config.num_blocks, self._config.block_bytes))
        await asyncio.sleep(self._config.load_seconds)
        self._facts = self._describe(time.monotonic() - started)
        self._group = await TaskGroup().__aenter__()
        self._loop = self._group.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.cancel()
        try:
            await self._group.__aexit__(None, None, None)
        finally:
            self._fail_all(EngineFailed("the engine is closed"))
            self._resources.close()

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def memory(self) -> SharedPool:
        return self._memory

    @property
    def healthy(self) -> bool:
        return not self._loop.done()

    def load(self) -> EngineLoad:
        """What runs and waits now, and which blocks that takes."""
        waiting = [item for item in self._waiting if isinstance(item, Sequence)]
        return EngineLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            waiting_prefill_tokens=sum(sequence.missing for sequence in waiting),
            blocks_total=self._blocks.total,
            blocks_used=self._blocks.used,
            blocks_held=len(self._held),
        )

    async def prefill(self, prompt: Prompt, sampling: Sampling) -> SimulatedKv:
        """Computes the prompt and one id. See PrefillEngine."""
        sequence = self._sequence(prompt, sampling)
        sequence.held = True
        self._enqueue(sequence)
        try:
            await sequence.changed.wait()
            if sequence.error:
                raise sequence.error
            return self._hold(sequence)
        finally:
            self._drop(sequence)

    async def reserve(self, prompt: Prompt, num_tokens: int) -> SimulatedReservation:
        """Blocks to pull into. See DecodeEngine."""
        self._check_fits(num_tokens + 1)
        claim = Claim(self._count_blocks(num_tokens), chain(prompt.cache_salt, prompt.context[:num_tokens], self._size))
        self._enqueue(claim)
        try:
            await claim.granted.wait()
            if claim.error:
                raise claim.error
            reservation = SimulatedReservation(tuple(claim.blocks), claim.cached_blocks, num_tokens, self._release)
            claim.blocks = []
            return reservation
        finally:
            self._drop(claim)

    def decode(self, source: Prompt | PulledKv, sampling: Sampling) -> SimulatedStream:
        """Generates to the end. See DecodeEngine."""
        sequence = self._adopt(source, sampling) if isinstance(source, PulledKv) else self._sequence(source, sampling)
        return SimulatedStream(self._generate(sequence), partial(self._drop, sequence))

    async def _generate(self, sequence: Sequence) -> AsyncGenerator[Tokens | Finished, None]:
        try:
            self._verify(sequence)
            self._begin(sequence)
            while True:
                await sequence.changed.wait()
                sequence.changed.clear()
                if sequence.error:
                    raise sequence.error
                if tokens := sequence.take():
                    yield tokens
                if sequence.finish and not sequence.output:
                    yield sequence.finished()
                    return
        finally:
            self._drop(sequence)

    @property
    def _size(self) -> int:
        return self._config.block_tokens

    def _describe(self, load_seconds: float) -> ModelFacts:
        config, files = self._config, self._vocabulary.files
        weights = hashlib.sha256(files.tokenizer_json).hexdigest()[:16]
        layout = KvLayout(
            model=f"simulated:{config.name}:{weights}",
            dtype="uint8",
            num_layers=1,
            kv_factor=1,
            kv_heads=1,
            block_tokens=config.block_tokens,
            head_dim=config.block_bytes // config.block_tokens,
            block_bytes=config.block_bytes,
        )
        return ModelFacts(
            name=config.name,
            engine="simulated",
            max_context_tokens=config.context_tokens,
            vocab_size=self._vocabulary.size,
            max_logprobs=20,
            eos_token_ids=(self._vocabulary.eos_token_id,),
            layout=layout,
            files=files,
            load_seconds=load_seconds,
        )

    def _sequence(self, prompt: Prompt, sampling: Sampling) -> Sequence:
        self._check_prompt(prompt)
        stream = TokenStream(self._vocabulary, sampling, self._config.end_probability)
        return Sequence(prompt, sampling, stream, self._size)

    def _adopt(self, kv: PulledKv, sampling: Sampling) -> Sequence:
        """A sequence whose first blocks are the reservation's. Takes them over, also when it raises."""
        reservation = kv.reservation
        assert isinstance(reservation, SimulatedReservation)
        with ExitStack() as undo:
            blocks = reservation.take()
            undo.callback(self._release, blocks)
            sequence = self._sequence(kv.prompt, sampling)
            if len(sequence.ids) <= reservation.num_tokens:
                raise InvalidRequest.of("emitted", f"nothing follows the {reservation.num_tokens} pulled tokens")
            undo.pop_all()
        sequence.blocks, sequence.computed = list(blocks), reservation.num_tokens
        sequence.cached_tokens = reservation.cached_blocks * self._size
        return sequence

    def _verify(self, sequence: Sequence) -> None:
        """Checks all bytes that were pulled, and makes the full blocks findable."""
        for index, block_id in enumerate(sequence.blocks):
            if self._memory.block(block_id) != self._content(sequence.content_hash(index, sequence.computed)):
                raise EngineFailed(f"block {index} of the pulled KV does not belong to this prompt")
        for index in range(sequence.computed // self._size):
            self._blocks.register(sequence.blocks[index], sequence.hashes[index])

    def _begin(self, sequence: Sequence) -> None:
        if sequence.generated < sequence.sampling.max_tokens:
            self._enqueue(sequence)
            return
        sequence.finish = FinishReason.LENGTH
        sequence.changed.set()

    def _content(self, content_hash: bytes) -> bytes:
        return (content_hash * (self._config.block_bytes // len(content_hash) + 1))[: self._config.block_bytes]

    def _check_prompt(self, prompt: Prompt) -> None:
        if not prompt.token_ids:
            raise InvalidRequest.of("prompt", "has no tokens")
        for name, ids in (("prompt", prompt.token_ids), ("emitted", prompt.emitted)):
            if ids and max(ids) >= self._vocabulary.size:
                index = next(index for index, id in enumerate(ids) if id >= self._vocabulary.size)
                raise InvalidRequest.of(
                    f"{name}[{index}]", f"{ids[index]} is outside the vocabulary of {self._vocabulary.size}"
                )
        self._check_fits(len(prompt.context) + 1)

    def _check_fits(self, num_tokens: int) -> None:
        limit = self._config.context_tokens
        if num_tokens > limit:
            raise InvalidRequest.of("prompt", f"leaves no room in a context of {limit} tokens")

    def _count_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._size)

    def _enqueue(self, item: Sequence | Claim) -> None:
        if not self.healthy:
            raise EngineFailed("the engine has stopped")
        if len(self._waiting) >= self._config.max_waiting:
            raise Overloaded(f"{len(self._waiting)} requests wait already", retry_after_seconds=1.0)
        self._waiting.append(item)
        self._wake.set()

    def _drop(self, item: Sequence | Claim) -> None:
        """Forgets a request and gives its blocks back, wherever it is."""
        if isinstance(item, Sequence):
            self._running.pop(item, None)
        if item in self._waiting:
            self._waiting.remove(item)
        self._release(item.blocks)
        item.blocks = []

    def _release(self, block_ids: tuple[int, ...] | list[int]) -> int:
        self._blocks.release(block_ids)
        self._wake.set()
        return len(block_ids)

    def _hold(self, sequence: Sequence) -> SimulatedKv:
        if sequence.finish:
            self._drop(sequence)
        blocks = tuple(sequence.blocks)
        sequence.blocks = []
        self._held.update(blocks)
        return SimulatedKv(sequence, blocks, self._let_go)

    def _let_go(self, block_ids: tuple[int, ...]) -> int:
        self._held.subtract(block_ids)
        for block_id in block_ids:
            if not self._held[block_id]:
                del self._held[block_id]
        return self._release(block_ids)

    def _fail_all(self, error: EngineFailed) -> None:
        for item in [*self._running, *self._waiting]:
            item.error = error
            (item.changed if isinstance(item, Sequence) else item.granted).set()

    async def _run(self) -> None:
        while True:
            self._admit()
            if not self._running:
                self._wake.clear()
                await self._wake.wait()
                continue
            batch = self._plan()
            await self._spend(batch)
            for sequence, count in batch:
                if sequence in self._running:
                    self._advance(sequence, count)

    def _admit(self) -> None:
        """Gives blocks in the order of arrival; a full batch holds up sequences, and not reservations."""
        skipped: list[Sequence | Claim] = []
        while self._waiting:
            item = self._waiting.popleft()
            if isinstance(item, Sequence) and len(self._running) >= self._config.max_batch:
                skipped.append(item)
            elif not (self._grant(item) if isinstance(item, Claim) else self._start(item)):
                skipped.append(item)
                break
        self._waiting.extendleft(reversed(skipped))

    def _grant(self, claim: Claim) -> bool:
        cached = self._blocks.match(claim.hashes)
        blocks = self._blocks.take(cached, claim.count - len(cached))
        if blocks is None:
            return False
        claim.blocks, claim.cached_blocks = blocks, len(cached)
        claim.granted.set()
        return True

    def _start(self, sequence: Sequence) -> bool:
        cached = [] if sequence.blocks else self._blocks.match(sequence.hashes[: (len(sequence.ids) - 1) // self._size])
        needed = self._count_blocks(len(sequence.ids)) - len(sequence.blocks) - len(cached)
        blocks = self._blocks.take(cached, needed)
        if blocks is None:
            return False
        sequence.blocks += blocks
        sequence.computed = sequence.computed or len(cached) * self._size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
        sequence.clock.start()
        if sequence.missing == 1 and not sequence.held:
            sequence.clock.decode()
        self._running[sequence] = None
        return True

    def _plan(self) -> list[tuple[Sequence, int]]:
        """How many tokens of which sequences the next step computes."""
        budget = self._config.prefill_chunk_tokens
        batch = []
        for sequence in list(self._running):
            if sequence not in self._running:
                continue
            if sequence.missing == 1 and not sequence.held:
                if self._make_room(sequence):
                    batch.append((sequence, 1))
            elif budget:
                count = min(sequence.missing, budget)
                budget -= count
                batch.append((sequence, count))
        return batch

    def _make_room(self, sequence: Sequence) -> bool:
        """A block for the next token; where there is none, the youngest sequences are run again later."""
        while len(sequence.blocks) * self._size < len(sequence.ids):
            blocks = self._blocks.take((), 1)
            if blocks is not None:
                sequence.blocks += blocks
                continue
            youngest = next(other for other in reversed(self._running) if not other.held)
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        del self._running[sequence]
        self._release(sequence.blocks)
        sequence.blocks, sequence.computed = [], 0
        self._waiting.appendleft(sequence)

    async def _spend(self, batch: list[tuple[Sequence, int]]) -> None:
        config = self._config
        prefill = sum(count for sequence, count in batch if count > 1 or sequence.held)
        seconds = config.decode_step_seconds if any(count == 1 for _, count in batch) else 0.0
        if prefill:
            seconds += config.prefill_base_seconds
            seconds += prefill / config.prefill_tokens_per_second if config.prefill_tokens_per_second else 0.0
        # Steps follow one another without the loop's latency in between, unless the engine was idle.
        now = time.monotonic()
        self._ready_at = (self._ready_at if now - self._ready_at < seconds else now) + seconds
        await asyncio.sleep(max(0.0, self._ready_at - now))

    def _advance(self, sequence: Sequence, count: int) -> None:
        before = sequence.computed
        sequence.computed += count
        self._write(sequence, before)
        if sequence.missing:
            return
        sequence.clock.decode()
        token_id = sequence.grow()
        if sequence.sampling.logprobs is not None:
            sequence.logprobs.append(logprob(token_id, sequence.sampling.logprobs, self._vocabulary))
        room = self._config.context_tokens - len(sequence.ids)
        sequence.finish = finish_reason(
            token_id, sequence.generated, room, self._vocabulary.eos_token_id, sequence.sampling
        )
        if sequence.finish or sequence.held:
            del self._running[sequence]
        sequence.changed.set()

    def _write(self, sequence: Sequence, before: int) -> None:
        """Fills the blocks that have new tokens, and makes the full ones findable."""
        for index in range(before // self._size, self._count_blocks(sequence.computed)):
            full = (index + 1) * self._size <= sequence.computed
            if not full and not sequence.held:
                continue
            content_hash = sequence.content_hash(index, sequence.computed)
            self._memory.block(sequence.blocks[index])[:] = self._content(content_hash)
            if full:
                if index == len(sequence.hashes):
                    sequence.hashes.append(content_hash)
                self._blocks.register(sequence.blocks[index], content_hash)
