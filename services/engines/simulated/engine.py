"""The simulated engine: ids that follow from prompt and seed, steps at the configured cost, real blocks.

The pool's bytes follow from the tokens, and a decode from pulled KV checks them all, so stale blocks are always
detected.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as Items
from contextlib import AsyncExitStack, ExitStack
from functools import partial

from typing_extensions import Self

from baton.errors import ConfigError, EngineFailed, InvalidRequest, Unsupported
from rpc.violations import Violations
from runtime.aio import TaskGroup
from runtime.clock import monotonic
from runtime.threads import of_many
from services.engines.answer import Finished, FinishReason, Tokens
from services.engines.base import Engine, EngineLoad, ModelFacts, PromptProgress
from services.engines.guidance.compiler import GrammarCompiler
from services.engines.guidance.vocabulary import open_vocabulary
from services.engines.kv import PulledKv
from services.engines.kv_events import KvChange
from services.engines.memory.allocation import UNSHARED, AllocationRules, uncount
from services.engines.memory.shared_pool import OwnedBlocks, SharedPool
from services.engines.prompt import Prompt, Sampling
from services.engines.running.generation import ClosingStream
from services.engines.simulated.config import SimulatedConfig
from services.engines.simulated.encoder import check_embeddings
from services.engines.simulated.kv import Claim, SimulatedKv, SimulatedLoan, SimulatedReservation
from services.engines.simulated.ranks import RankParts, SimulatedRanks
from services.engines.simulated.scheduler import PIECE_BLOCKS, SimulatedScheduler
from services.engines.simulated.sequence import Sequence, chain
from services.engines.simulated.tokens import TokenStream, kv_layout, model_facts, vocabulary_of


class SimulatedEngine(Engine):
    """An Engine without a model. See services/engines/base.py for the contract, and SimulatedConfig for the costs."""

    def __init__(self, config: SimulatedConfig, rules: AllocationRules = UNSHARED) -> None:
        self._config = config
        self._rules = rules
        self._vocabulary = vocabulary_of(config)
        self._parts = RankParts(config, rules)
        self._held: Counter[int] = Counter()
        self._is_asleep = False
        self._resources = ExitStack()
        self._tasks = AsyncExitStack()

    async def __aenter__(self) -> Self:
        started = monotonic()
        self._memory = self._resources.enter_context(self._open_memory())
        self._ranks = SimulatedRanks(self._config, self._vocabulary, self._memory, self._parts)
        await asyncio.sleep(self._config.load_seconds)
        self._grammars = self._open_grammars()
        layout = kv_layout(self._config, self._vocabulary)
        self._facts = model_facts(self._config, self._vocabulary, layout, monotonic() - started)
        self._group = await self._tasks.enter_async_context(TaskGroup())
        self._loops = [self._group.create_task(self._ranks.run(rank)) for rank in self._ranks.all]
        return self

    async def __aexit__(self, *exception: object) -> None:
        for loop in self._loops:
            loop.cancel()
        try:
            await self._tasks.aclose()
        finally:
            self._ranks.fail(EngineFailed("the engine is closed"))
            self._resources.close()

    def _open_memory(self) -> SharedPool:
        num_blocks = self._config.data_parallel_ranks * self._config.num_blocks
        return SharedPool(num_blocks, self._config.block_bytes)

    def _open_grammars(self) -> GrammarCompiler | None:
        if not self._config.guided_decoding:
            return None
        known = self._vocabulary
        vocabulary = open_vocabulary(known.files, known.size, (known.eos_token_id,))
        if vocabulary is None:
            raise ConfigError("engine.guided_decoding: the model's tokenizer cannot be used for it")
        grammars = GrammarCompiler(vocabulary)
        self._resources.callback(grammars.close)
        return grammars

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def memory(self) -> SharedPool:
        return self._memory

    @property
    def healthy(self) -> bool:
        return self._ranks.failure is None

    @property
    def moves_decodes(self) -> bool:
        """True."""
        return True

    @property
    def kv_events(self) -> "SimulatedEngine":
        """Itself: it reports its prefix cache."""
        return self

    def kv_changes(self) -> AsyncGenerator[KvChange, None]:
        """Yields the changes of the prefix cache. See ReportsKvEvents."""
        if not self._config.kv_events:
            raise Unsupported("engine.kv_events is false: the engine does not report its prefix cache")
        return self._parts.kv_events.changes()

    @property
    def releases_memory(self) -> "SimulatedEngine":
        """Itself."""
        return self

    async def release_memory(self) -> bool:
        """Empties the pool. See ReleasesMemory."""
        if any(rank.requests or rank.blocks.used for rank in self._ranks.all):
            return False
        self._is_asleep = True
        for rank in self._ranks.all:
            rank.blocks.clear()
        self._memory.clear()
        return True

    async def resume_memory(self) -> None:
        """Takes the configured time."""
        await asyncio.sleep(self._config.wake_seconds)
        self._is_asleep = False

    def load(self) -> EngineLoad:
        """Returns the running and waiting requests, and their blocks."""
        return self._ranks.load(len(self._held))

    @property
    def progress(self) -> "SimulatedEngine":
        """Itself: it tells of each chunk."""
        return self

    async def prefill(self, prompt: Prompt, sampling: Sampling) -> SimulatedKv:
        """Computes the prompt and one id. See PrefillEngine."""
        return await self.prefill_reporting(prompt, sampling, None)

    async def prefill_reporting(
        self, prompt: Prompt, sampling: Sampling, progress: PromptProgress | None
    ) -> SimulatedKv:
        """Computes a prompt as `prefill` does, with progress (ReportsProgress)."""
        sequence = self._run_here(prompt, sampling)
        sequence.held, sequence.progress = True, progress
        await self._prepare(sequence)
        try:
            await self._make_room(sequence)
            self._of(sequence).enqueue(sequence)
            await sequence.changed.wait()
            if sequence.error:
                raise sequence.error
            return self._hold(sequence)
        finally:
            self._of(sequence).drop(sequence)

    async def reserve(self, prompt: Prompt, num_tokens: int) -> SimulatedReservation:
        """Reserves blocks for a pull. See DecodeEngine."""
        self._check_fits(num_tokens + 1)
        size = self._config.block_tokens
        hashes = await of_many(num_tokens, lambda: chain(prompt, prompt.context[:num_tokens], size))
        claim = Claim(-(-num_tokens // size), hashes)
        rank = self._ranks.of_prompt(prompt)
        scheduler = rank.scheduler
        try:
            await scheduler.make_room(hashes, claim.count)
            scheduler.enqueue(claim)
            if not claim.changed.is_set():
                await self._await(claim, scheduler)
            if claim.error:
                raise claim.error
            return SimulatedReservation(claim, num_tokens, scheduler.release, rank.contents.register)
        finally:
            scheduler.drop(claim)

    async def _await(self, claim: Claim, scheduler: SimulatedScheduler) -> None:
        granted = asyncio.ensure_future(claim.changed.wait())
        try:
            while not claim.changed.is_set():
                await asyncio.wait([granted], timeout=self._rules.held_wait_seconds)
                if scheduler.is_held_up(claim):
                    scheduler.give_up(claim)
        finally:
            granted.cancel()

    def decode(self, source: Prompt | PulledKv, sampling: Sampling) -> "_SteppedStream":
        """Generates to the end. See DecodeEngine."""
        sequence = self._adopt(source, sampling) if isinstance(source, PulledKv) else self._run_here(source, sampling)
        return _SteppedStream(self, sequence)

    def generation(self, source: Prompt | PulledKv, sampling: Sampling) -> "_SteppedStream":
        """The same as `decode`."""
        return self.decode(source, sampling)

    async def drop(self, sequence: Sequence) -> None:
        """Ends a generation; once is as good as twice."""
        self._of(sequence).drop(sequence)

    async def generate(self, sequence: Sequence) -> AsyncGenerator[Tokens | Finished, None]:
        """Generates to the end."""
        try:
            await self.begin(sequence)
            while True:
                await sequence.changed.wait()
                sequence.changed.clear()
                if sequence.error:
                    raise sequence.error
                if tokens := sequence.pull():
                    yield tokens
                if sequence.finish and not sequence.output:
                    yield sequence.finished()
                    return
        finally:
            self._of(sequence).drop(sequence)

    async def begin(self, sequence: Sequence) -> None:
        """Lets a sequence join the batch, once its KV is found to be right."""
        await self._prepare(sequence)
        rank = self._ranks.all[sequence.rank]
        if sequence.computed:
            await of_many(sequence.computed, partial(rank.contents.verify, sequence))
            await self._register(sequence)
        else:
            await self._make_room(sequence)
        if sequence.generated < sequence.sampling.max_tokens:
            rank.scheduler.enqueue(sequence)
            return
        sequence.finish = FinishReason.LENGTH
        sequence.changed.set()

    async def _make_room(self, sequence: Sequence) -> None:
        await self._of(sequence).make_room(sequence.hashes, -(-len(sequence.ids) // self._config.block_tokens))

    async def _register(self, sequence: Sequence) -> None:
        """Adds the pulled blocks to the prefix cache, very many in pieces."""
        register = self._ranks.all[sequence.rank].contents.register
        full = sequence.computed // self._config.block_tokens
        for start in range(0, full, PIECE_BLOCKS):
            if start:
                await asyncio.sleep(0)
            end = min(full, start + PIECE_BLOCKS)
            register(sequence.blocks[start:end], sequence.hashes[start:end])

    async def _prepare(self, sequence: Sequence) -> None:
        """Prepares a sequence of ids of the vocabulary, and its place in its grammar."""
        await of_many(sequence.prompt.num_tokens, partial(self._check_ids, sequence.prompt))
        await of_many(sequence.prompt.num_tokens, sequence.prepare)
        guide = sequence.sampling.guide
        if guide is None:
            return
        if self._grammars is None:
            raise Unsupported(f"{self._facts.name} has no guided decoding")
        sequence.follow(await self._grammars.guidance(guide, sequence.prompt.emitted))

    def _check_ids(self, prompt: Prompt) -> None:
        violations = Violations()
        violations.token_ids("prompt", prompt.token_ids, self._vocabulary.size)
        violations.token_ids("emitted", prompt.emitted, self._vocabulary.size)
        violations.raise_any()

    def _run_here(self, prompt: Prompt, sampling: Sampling) -> Sequence:
        assert prompt.is_computable
        sequence = self._sequence(prompt, sampling)
        sequence.rank = self._ranks.of_prompt(prompt).number
        return sequence

    def _of(self, sequence: Sequence) -> SimulatedScheduler:
        return self._ranks.all[sequence.rank].scheduler

    def _sequence(self, prompt: Prompt, sampling: Sampling) -> Sequence:
        self._check_prompt(prompt)
        stream = TokenStream(self._vocabulary, sampling, self._config.end_probability, prompt.emitted)
        return Sequence(prompt, sampling, stream, self._config.block_tokens)

    def _adopt(self, kv: PulledKv, sampling: Sampling) -> Sequence:
        """Returns a sequence that begins with the reservation's blocks. Takes them over, also when it raises."""
        reservation = kv.reservation
        assert isinstance(reservation, SimulatedReservation)
        with ExitStack() as undo:
            blocks = reservation.take()
            rank = self._ranks.of_blocks(blocks)
            undo.callback(rank.scheduler.release, blocks)
            sequence = self._sequence(kv.prompt, sampling)
            sequence.rank = rank.number
            if kv.prompt.num_tokens <= reservation.num_tokens:
                raise InvalidRequest.of("emitted", f"nothing follows the {reservation.num_tokens} pulled tokens")
            undo.pop_all()
        sequence.adopt(blocks, reservation.num_tokens, reservation.cached_blocks)
        return sequence

    def yield_next(self, sequence: Sequence) -> None:
        """Ends a sequence at its next token, to go on elsewhere."""
        self._of(sequence).yield_next(sequence)

    def pop_held(self, sequence: Sequence) -> SimulatedKv | None:
        """The KV of a sequence that has yielded, once; None if it had none."""
        return self._hold(sequence) if sequence.held and sequence.blocks else None

    def lend(self, sequence: Sequence, most_tokens: int) -> SimulatedLoan | None:
        """The full blocks of a sequence that goes on; None if there are none."""
        blocks = tuple(self._of(sequence).lend(sequence, most_tokens))
        if not blocks:
            return None
        self._held.update(blocks)
        return SimulatedLoan(sequence, blocks, len(blocks) * self._config.block_tokens, self._let_go)

    @property
    def prefixes(self) -> "SimulatedEngine":
        """Itself."""
        return self

    async def lend_prefix(self, block_hashes: Items[bytes], rank: int) -> OwnedBlocks | None:
        """Holds blocks of the prefix cache. See LendsPrefixes."""
        blocks = tuple(self._ranks.all[rank].scheduler.lend_cached(block_hashes))
        if not blocks:
            return None
        self._held.update(blocks)
        return OwnedBlocks(blocks, len(blocks) * self._config.block_tokens, self._let_go)

    def _hold(self, sequence: Sequence) -> SimulatedKv:
        if sequence.finish not in (None, FinishReason.YIELDED):
            self._of(sequence).drop(sequence)
        blocks, sequence.blocks = tuple(sequence.blocks), []
        self._held.update(blocks)
        return SimulatedKv(sequence, blocks, self._let_go)

    def _let_go(self, block_ids: tuple[int, ...]) -> int:
        uncount(self._held, block_ids)
        return self._ranks.of_blocks(block_ids).scheduler.let_go(block_ids)

    def _check_prompt(self, prompt: Prompt) -> None:
        if not prompt.token_ids:
            raise InvalidRequest.of("prompt", "has no tokens")
        self._check_fits(prompt.num_tokens + 1)
        check_embeddings(prompt.media)

    def _check_fits(self, num_tokens: int) -> None:
        if self._is_asleep:
            raise EngineFailed("its memory was released")
        limit = self._config.context_tokens
        if num_tokens > limit:
            raise InvalidRequest.of("prompt", f"leaves no room in a context of {limit} tokens")


class _SteppedStream(ClosingStream):
    """A generation whose sequence is read without a task."""

    def __init__(self, engine: SimulatedEngine, sequence: Sequence) -> None:
        super().__init__(engine.generate(sequence), partial(engine.drop, sequence))
        self._engine = engine
        self._sequence = sequence

    async def subscribe(self, ready: Callable[[], None]) -> None:
        """Begins."""
        self._sequence.changed.listener = ready
        await self._engine.begin(self._sequence)

    def pull(self) -> tuple[tuple[int, ...], Finished | None]:
        """The new tokens, and the end. Raises the sequence's error."""
        sequence = self._sequence
        if sequence.error:
            raise sequence.error
        ids, sequence.output = tuple(sequence.output), []
        return ids, sequence.finished() if sequence.finish else None

    async def yield_next(self) -> None:
        """Ends it at its next token. See Generation."""
        self._engine.yield_next(self._sequence)

    def pop_held(self) -> SimulatedKv | None:
        """Its KV after it has yielded, once."""
        return self._engine.pop_held(self._sequence)

    async def lend(self, most_tokens: int) -> SimulatedLoan | None:
        """Holds its full blocks. See Generation."""
        return self._engine.lend(self._sequence, most_tokens)
