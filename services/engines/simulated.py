"""The simulated engine: ids that follow from prompt and seed, steps that cost what the configuration says, real blocks.

The pool's bytes follow from the tokens, and a decode from pulled KV checks them all: stale blocks cannot go unnoticed.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from functools import partial
from types import TracebackType

from typing_extensions import Self

from rpc.aio import TaskGroup
from rpc.errors import EngineFailed, InvalidRequest
from services.answer import Finished, FinishReason, Tokens
from services.engine import EngineLoad, ModelFacts
from services.engines.closing_stream import ClosingStream
from services.engines.media_checks import check_computable, check_media
from services.engines.shared_pool import SharedPool
from services.engines.simulated_blocks import Blocks
from services.engines.simulated_config import SimulatedConfig
from services.engines.simulated_contents import Contents
from services.engines.simulated_facts import kv_layout, model_facts
from services.engines.simulated_images import check_embeddings
from services.engines.simulated_kv import Claim, SimulatedKv, SimulatedReservation
from services.engines.simulated_scheduler import Scheduler
from services.engines.simulated_sequence import Sequence, chain
from services.engines.simulated_tokens import TokenStream, vocabulary_of
from services.kv import PulledKv
from services.prompt import Prompt, Sampling


class SimulatedEngine:
    """An Engine without a model. See services/engine.py for the contract, SimulatedConfig for what it costs."""

    def __init__(self, config: SimulatedConfig) -> None:
        self._config = config
        self._vocabulary = vocabulary_of(config)
        self._blocks = Blocks(config.num_blocks)
        self._held: Counter[int] = Counter()
        self._resources = ExitStack()

    async def __aenter__(self) -> Self:
        started = time.monotonic()
        self._memory = self._resources.enter_context(SharedPool(self._config.num_blocks, self._config.block_bytes))
        self._contents = Contents(self._memory, self._blocks, self._config.block_tokens)
        self._scheduler = Scheduler(self._config, self._vocabulary, self._blocks, self._contents)
        await asyncio.sleep(self._config.load_seconds)
        layout = kv_layout(self._config, self._vocabulary)
        self._facts = model_facts(self._config, self._vocabulary, layout, time.monotonic() - started)
        self._group = await TaskGroup().__aenter__()
        self._loop = self._group.create_task(self._scheduler.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.cancel()
        try:
            await self._group.__aexit__(None, None, None)
        finally:
            self._scheduler.fail(EngineFailed("the engine is closed"))
            self._resources.close()

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def memory(self) -> SharedPool:
        return self._memory

    @property
    def healthy(self) -> bool:
        return self._scheduler.failure is None

    def load(self) -> EngineLoad:
        """What runs and waits now, and which blocks that takes."""
        waiting = self._scheduler.waiting
        return EngineLoad(
            running=len(self._scheduler.running),
            waiting=len(waiting),
            waiting_prefill_tokens=sum(item.missing for item in waiting if isinstance(item, Sequence)),
            blocks_total=self._blocks.total,
            blocks_used=self._blocks.used,
            blocks_held=len(self._held),
        )

    async def prefill(self, prompt: Prompt, sampling: Sampling) -> SimulatedKv:
        """Computes the prompt and one id. See PrefillEngine."""
        sequence = self._run_here(prompt, sampling)
        sequence.held = True
        try:
            self._scheduler.enqueue(sequence)
            await sequence.changed.wait()
            if sequence.error:
                raise sequence.error
            return self._hold(sequence)
        finally:
            self._scheduler.drop(sequence)

    async def reserve(self, prompt: Prompt, num_tokens: int) -> SimulatedReservation:
        """Blocks to pull into. See DecodeEngine."""
        self._check_fits(num_tokens + 1)
        size = self._config.block_tokens
        claim = Claim(-(-num_tokens // size), chain(prompt, prompt.context[:num_tokens], size))
        try:
            self._scheduler.enqueue(claim)
            await claim.changed.wait()
            if claim.error:
                raise claim.error
            blocks, claim.blocks = tuple(claim.blocks), []
            return SimulatedReservation(blocks, claim.cached_blocks, num_tokens, self._scheduler.release)
        finally:
            self._scheduler.drop(claim)

    def decode(self, source: Prompt | PulledKv, sampling: Sampling) -> ClosingStream:
        """Generates to the end. See DecodeEngine."""
        sequence = self._adopt(source, sampling) if isinstance(source, PulledKv) else self._run_here(source, sampling)
        return ClosingStream(self._generate(sequence), partial(self._drop, sequence))

    async def _drop(self, sequence: Sequence) -> None:
        self._scheduler.drop(sequence)

    async def _generate(self, sequence: Sequence) -> AsyncGenerator[Tokens | Finished, None]:
        try:
            self._contents.verify(sequence)
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
            self._scheduler.drop(sequence)

    def _begin(self, sequence: Sequence) -> None:
        if sequence.generated < sequence.sampling.max_tokens:
            self._scheduler.enqueue(sequence)
            return
        sequence.finish = FinishReason.LENGTH
        sequence.changed.set()

    def _run_here(self, prompt: Prompt, sampling: Sampling) -> Sequence:
        check_computable(prompt)
        return self._sequence(prompt, sampling)

    def _sequence(self, prompt: Prompt, sampling: Sampling) -> Sequence:
        self._check_prompt(prompt)
        stream = TokenStream(self._vocabulary, sampling, self._config.end_probability)
        return Sequence(prompt, sampling, stream, self._config.block_tokens)

    def _adopt(self, kv: PulledKv, sampling: Sampling) -> Sequence:
        """A sequence whose first blocks are the reservation's. Takes them over, also when it raises."""
        reservation = kv.reservation
        assert isinstance(reservation, SimulatedReservation)
        with ExitStack() as undo:
            blocks = reservation.take()
            undo.callback(self._scheduler.release, blocks)
            sequence = self._sequence(kv.prompt, sampling)
            if len(sequence.ids) <= reservation.num_tokens:
                raise InvalidRequest.of("emitted", f"nothing follows the {reservation.num_tokens} pulled tokens")
            undo.pop_all()
        sequence.adopt(blocks, reservation.num_tokens, reservation.cached_blocks)
        return sequence

    def _hold(self, sequence: Sequence) -> SimulatedKv:
        if sequence.finish:
            self._scheduler.drop(sequence)
        blocks, sequence.blocks = tuple(sequence.blocks), []
        self._held.update(blocks)
        return SimulatedKv(sequence, blocks, self._let_go)

    def _let_go(self, block_ids: tuple[int, ...]) -> int:
        self._held.subtract(block_ids)
        for block_id in block_ids:
            if not self._held[block_id]:
                del self._held[block_id]
        return self._scheduler.release(block_ids)

    def _check_prompt(self, prompt: Prompt) -> None:
        if not prompt.token_ids:
            raise InvalidRequest.of("prompt", "has no tokens")
        for name, ids in (("prompt", prompt.token_ids), ("emitted", prompt.emitted)):
            if ids and max(ids) >= self._vocabulary.size:
                raise InvalidRequest.of(name, f"{max(ids)} is outside the vocabulary of {self._vocabulary.size}")
        self._check_fits(len(prompt.context) + 1)
        check_media(prompt, self._facts)
        check_embeddings(prompt.media)

    def _check_fits(self, num_tokens: int) -> None:
        limit = self._config.context_tokens
        if num_tokens > limit:
            raise InvalidRequest.of("prompt", f"leaves no room in a context of {limit} tokens")
