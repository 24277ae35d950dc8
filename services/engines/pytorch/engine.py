"""The embedded engine: asynchronous calls into the engine's thread, and their abort."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

import torch
from typing_extensions import Self

from baton.errors import BatonError, InvalidRequest, Unsupported
from runtime.aio import retrieved
from runtime.threads import of_many
from services.engines.base import Engine, EngineLoad, ModelFacts, PromptProgress
from services.engines.context import KeptMemory
from services.engines.guidance.compiler import GrammarCompiler
from services.engines.journal.journal import Journal, RecoveredDecode
from services.engines.kv import BlockMemory, HeldKv, PulledKv
from services.engines.kv_events import KvChange, KvPublisher
from services.engines.lora.adapters import LoraAdapters
from services.engines.lora.peft_folder import LowRank
from services.engines.memory.allocation import UNSHARED, AllocationRules
from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.engine_loop import EngineLoop
from services.engines.pytorch.failures import StallDetector
from services.engines.pytorch.kv_cache.blocks import HashChain
from services.engines.pytorch.kv_cache.events import CacheEvents
from services.engines.pytorch.kv_cache.held_kv import HeldPrompt, Loan, ReservedBlocks, hold_prefix, lend
from services.engines.pytorch.kv_cache.memory import DeviceMemory
from services.engines.pytorch.lora.layers import NO_SLOT
from services.engines.pytorch.lora.slots import EmbeddedLoraSlots
from services.engines.pytorch.parallel.followers import Followers
from services.engines.pytorch.parallel.local_follower import LocalFollowers
from services.engines.pytorch.parallel.messages import Ready
from services.engines.pytorch.parallel.multi_node.leader import gather
from services.engines.pytorch.runners.runner import StepRunner
from services.engines.pytorch.sequence import Event, Failed, Held, TokenSequence
from services.engines.pytorch.steps.tier_loads import BlockReservation
from services.engines.pytorch.stream import DecodeStream, EventQueue, Queued
from services.engines.pytorch.validation import check_prompt, check_sampling
from services.engines.running.canary import Canary
from services.engines.running.request_context import FreedKv, current_freed_kv


class PyTorchEngine(Engine):
    """An Engine: a Hugging Face model with a paged KV cache and continuous batching."""

    def __init__(
        self, config: PyTorchConfig, rules: AllocationRules = UNSHARED, kept: KeptMemory | None = None
    ) -> None:
        self._config = config
        self._kept = kept
        self._publisher = KvPublisher()
        self._cache_events = CacheEvents(self._publisher)
        self._rules = rules
        self._is_asleep = False

    async def __aenter__(self) -> Self:
        remote = await gather(self._config)
        try:
            self._core = await asyncio.to_thread(self._build, remote)
        except asyncio.CancelledError:
            if remote is not None:
                remote.close()  # which ends the waits of the thread
            raise
        stall_detector = StallDetector(self._core.module, self._config.stall_seconds)
        self._loop = EngineLoop(self._core, self._config.threads, stall_detector)
        self._cache_events.notify = self._loop.notify
        for link in self._core.recovered:
            self._publisher.stored(link)
        await self._loop.__aenter__()
        interval, patience = self._config.canary_seconds, self._config.canary_patience_seconds
        vocabulary = self._core.vocabulary
        self._grammars = GrammarCompiler(vocabulary) if vocabulary else None
        self._loras = await self._open_loras()
        self._canary = await Canary(self._ask, self._quiet_seconds, interval, patience).__aenter__()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self._canary.__aexit__(kind, error, trace)
        if self._loras is not None:
            await self._loras.__aexit__(kind, error, trace)
        await self._loop.__aexit__(kind, error, trace)
        if self._grammars is not None:
            self._grammars.close()
        self._core.close()

    @property
    def facts(self) -> ModelFacts:
        """The model and its limits."""
        return self._core.facts

    @property
    def module(self) -> torch.nn.Module:
        """The language model, which belongs to the engine's thread."""
        return self._core.module

    @property
    def runner(self) -> StepRunner:
        """The runner of the steps, which belongs to the engine's thread."""
        return self._core.runner

    @property
    def memory(self) -> BlockMemory | None:
        """The block pool's memory; None where it has not the KV of all heads, and cannot be handed over."""
        return self._core.memory if self._core.exposes_kv else None

    @property
    def healthy(self) -> bool:
        """False after a fatal error, after the end of another rank's process, and while the engine hangs."""
        followers = self._core.followers
        if followers is not None and followers.failure is not None:
            return False
        return self._loop.healthy and not self._canary.is_overdue

    @property
    def responsive(self) -> bool:
        """False also while a test request takes far longer than usual."""
        return self.healthy and not self._canary.is_late

    @property
    def journal(self) -> Journal | None:
        """The journal by which its decodes outlive its process; None if they do not."""
        return self._core.journal

    def end_process(self) -> None:
        """Kills this process between two steps. See Engine."""
        self._loop.post(lambda _: os.kill(os.getpid(), signal.SIGKILL))

    def pop_recovered(self) -> Sequence[RecoveredDecode]:
        """The decodes that the worker's last process has left, once. See Engine."""
        return [
            RecoveredDecode(
                left.found.slot,
                left.found.record,
                left.found.ids,
                ReservedBlocks(self._loop, left.reservation) if left.reservation else None,
            )
            for left in self._core.pop_decodes()
        ]

    @property
    def loras(self) -> LoraAdapters[dict[str, LowRank]] | None:
        """Its adapters; None without `engine.lora`."""
        return self._loras

    @property
    def kv_events(self) -> "PyTorchEngine":
        """Itself: it reports its prefix cache."""
        return self

    def kv_changes(self) -> AsyncGenerator[KvChange, None]:
        """Yields the changes of the prefix cache. See ReportsKvEvents."""
        if not self._config.prefix_cache:
            raise Unsupported("the engine is configured without a prefix cache")
        return self._publisher.changes()

    @property
    def moves_decodes(self) -> bool:
        """True if its memory has the KV of all heads, and can be handed over."""
        return self._core.exposes_kv

    async def end_session(self, key: bytes) -> int:
        """Lets blocks be evicted first that no session has but this one. Returns how many."""
        return await self._loop.call(lambda core: core.end_session(key))

    @property
    def prefixes(self) -> "PyTorchEngine | None":
        """Itself, if it has a prefix cache whose blocks contain the KV of all heads."""
        return self if self._config.prefix_cache and self._core.exposes_kv else None

    async def lend_prefix(self, block_hashes: Sequence[bytes], rank: int) -> Loan | None:
        """Holds blocks of the prefix cache, and copies of those in host memory. See LendsPrefixes."""
        del rank  # there is one
        return await lend(self._loop, hold_prefix(self._loop, block_hashes))

    def digest(self, block_ids: Sequence[int]) -> list[int]:
        """The digests of blocks, computed where they are. See Engine."""
        memory = self._core.memory
        return memory.digest(block_ids) if isinstance(memory, DeviceMemory) else super().digest(block_ids)

    def load(self) -> EngineLoad:
        """Returns the load at the end of the last step."""
        return self._loop.load

    @property
    def progress(self) -> "PyTorchEngine | None":
        """Itself; None for a model that is split over ranks, whose steps end here before they do elsewhere."""
        return self if self._core.followers is None else None

    async def prefill(self, prompt: Prompt, sampling: Sampling) -> HeldKv:
        """Computes the KV of `prompt.context`, samples one token, and holds the blocks."""
        return await self.prefill_reporting(prompt, sampling, None)

    async def prefill_reporting(self, prompt: Prompt, sampling: Sampling, progress: PromptProgress | None) -> HeldKv:
        """Computes a prompt as `prefill` does, with progress (ReportsProgress)."""
        assert prompt.is_computable
        await of_many(prompt.num_tokens, partial(check_prompt, prompt, self.facts))
        check_sampling(sampling, self.facts)
        if prompt.num_tokens >= self.facts.max_context_tokens or len(prompt.emitted) >= sampling.max_tokens:
            raise InvalidRequest.of("emitted", "leaves no token to be generated")
        events = EventQueue()
        sequence = self._sequence(prompt, sampling, events, hold=True)
        if progress is not None:
            sequence.on_progress = lambda blocks: self._loop.notify(partial(_report, progress, blocks))
        await self._guide(sequence)
        try:
            await self._loop.call(lambda core: core.submit(sequence))
            [event] = await events.pull()
        except asyncio.CancelledError:
            await self._loop.run_shielded(partial(_abort, current_freed_kv(), sequence))
            raise
        return self._held(sequence, event)

    async def reserve(self, prompt: Prompt, num_tokens: int) -> ReservedBlocks:
        """Reserves blocks for a pull of `num_tokens` tokens of `prompt.context`. See DecodeEngine."""
        await of_many(prompt.num_tokens, partial(check_prompt, prompt, self.facts))
        if not self.facts.takes_handoffs:
            raise Unsupported(
                "engine.tensor_parallel_size: a split model without a shared pool cannot receive KV from other workers"
            )
        if not 0 < num_tokens <= prompt.num_tokens:
            raise InvalidRequest.of("handoff.num_tokens", f"must be 1 to {prompt.num_tokens}, as the prompt has")
        if num_tokens >= self.facts.max_context_tokens:
            raise InvalidRequest.of("prompt", f"leaves no room for an answer within {self.facts.max_context_tokens}")
        granted: asyncio.Future[None] = retrieved(asyncio.get_running_loop().create_future())
        chain = HashChain(prompt.cache_salt, self.facts.layout.block_tokens, prompt.media, prompt.chain_seed)
        hashes = await of_many(num_tokens, lambda: chain.upto(prompt.context, num_tokens))

        def settled(error: BatonError | None) -> None:
            self._loop.notify(partial(_settle, granted, error))

        blocks = BlockReservation(num_tokens, hashes, settled)
        try:
            await self._loop.call(lambda core: core.reserve(blocks))
            while not granted.done():
                await asyncio.wait([granted], timeout=self._rules.held_wait_seconds)
                if not granted.done():
                    await self._loop.call(lambda core: core.give_up_if_held_up(blocks))
            granted.result()
        except asyncio.CancelledError:
            await self._loop.run_shielded(lambda core: core.abort(blocks))
            raise
        return ReservedBlocks(self._loop, blocks)

    def decode(self, source: Prompt | PulledKv, sampling: Sampling) -> DecodeStream:
        """Generates until the end. Takes ownership of the reservation, also when it raises."""
        events = EventQueue()
        prompt = source if isinstance(source, Prompt) else source.prompt
        assert isinstance(source, PulledKv) or prompt.is_computable
        sequence = self._sequence(prompt, sampling, events, hold=False)

        def submit(core: EngineCore) -> None:
            check_prompt(prompt, core.facts)
            check_sampling(sampling, core.facts)
            if isinstance(source, PulledKv):
                core.submit_pulled(sequence, _blocks(source))
            else:
                core.submit(sequence)

        freed_kv = current_freed_kv()

        def abort(core: EngineCore) -> int:
            blocks = _abort(freed_kv, sequence, core)
            return blocks + (core.abort(_blocks(source)) if isinstance(source, PulledKv) else 0)

        prepare = partial(self._guide, sequence) if sampling.guide is not None else None
        return DecodeStream(self._loop, Queued(sequence, events), submit, abort, prepare)

    def generation(self, source: Prompt | PulledKv, sampling: Sampling) -> DecodeStream:
        """The same as `decode`."""
        return self.decode(source, sampling)

    async def _guide(self, sequence: TokenSequence) -> None:
        """Gives a guided request its place in its grammar. Raises InvalidRequest, Unsupported and Overloaded."""
        guide = sequence.sampling.guide
        if guide is None:
            return
        if self._grammars is None:
            raise Unsupported(f"{self.facts.name} has no guided decoding")
        sequence.sampler.guidance = await self._grammars.guidance(guide, sequence.prompt.emitted)

    @property
    def releases_memory(self) -> "PyTorchEngine | None":
        """Itself, on a CPU alone."""
        return self if self._core.can_release_memory else None

    async def release_memory(self) -> bool:
        """Frees the pool. The weights stay in the host's memory, from which a CPU reads them. See ReleasesMemory."""
        self._is_asleep = True  # before: no test is to begin meanwhile
        is_released = False
        try:
            is_released = await self._loop.call(lambda core: core.release_memory())
        finally:
            self._is_asleep = is_released
        return is_released

    async def resume_memory(self) -> None:
        """Lets requests write into the pool again."""
        self._is_asleep = False

    def _quiet_seconds(self) -> float:
        return 0.0 if self._is_asleep else self._loop.quiet_seconds

    async def _ask(self) -> None:
        """Generates a token; if that could wait for blocks, only checks that the thread answers."""
        load = self.load()
        if load.running or load.waiting or load.blocks_used >= load.blocks_total:
            await self._loop.call(lambda _core: None)
            return
        sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
        async with aclosing(self.decode(Prompt((0,)), sampling)) as events:
            async for _ in events:
                pass

    def _build(self, remote: Followers | None) -> EngineCore:
        if self._config.threads is not None:
            torch.set_num_threads(self._config.threads)
        with torch.inference_mode():
            followers = remote
            if followers is None and self._config.tensor_parallel_size > 1:
                followers = LocalFollowers(self._config)
            try:
                core = EngineCore(self._config, self._cache_events, self._rules, followers, self._kept)
                if followers is not None:
                    followers.send(Ready())
                return core
            except BaseException:
                if followers is not None:
                    followers.close()
                raise

    def _sequence(self, prompt: Prompt, sampling: Sampling, events: EventQueue, *, hold: bool) -> TokenSequence:
        def sink(event: Event) -> None:
            self._loop.notify(partial(events.put, event))

        return self._core.new_sequence(prompt, sampling, sink, hold=hold, lora_slot=self._lora_slot(prompt))

    async def _open_loras(self) -> LoraAdapters[dict[str, LowRank]] | None:
        options, layers = self._config.lora, self._core.lora
        if options is None or layers is None:
            return None

        slots = EmbeddedLoraSlots(self._loop, layers, options.max_rank)
        try:
            return await LoraAdapters(options, slots).__aenter__()
        except BaseException:
            await self._loop.__aexit__(None, None, None)
            self._core.close()
            raise

    def _lora_slot(self, prompt: Prompt) -> int:
        if prompt.lora is None:
            return NO_SLOT
        if self._loras is None:
            raise Unsupported("the engine is configured without adapters (engine.lora)")
        return self._loras.slot_of(prompt.lora)

    def _held(self, sequence: TokenSequence, event: Event) -> HeldPrompt:
        if isinstance(event, Failed):
            raise event.error
        assert isinstance(event, Held)
        return HeldPrompt(self._loop, sequence, event)


def _report(progress: PromptProgress, blocks: Sequence[int]) -> None:
    if blocks:
        progress.computed(blocks)
    else:
        progress.lost()


def _settle(granted: "asyncio.Future[None]", error: BatonError | None) -> None:
    if granted.done():
        return
    if error is None:
        granted.set_result(None)
    else:
        granted.set_exception(error)


def _abort(freed_kv: FreedKv, sequence: TokenSequence, core: EngineCore) -> int:
    tokens = sequence.computed
    blocks = core.abort(sequence)
    freed_kv.give_back(tokens, blocks)
    return blocks


def _blocks(source: PulledKv) -> BlockReservation:
    assert isinstance(source.reservation, ReservedBlocks)
    return source.reservation.blocks
