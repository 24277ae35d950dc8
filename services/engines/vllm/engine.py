"""The vLLM engine: AsyncLLM as an Engine, whose NixlConnector moves the KV under Baton's lease."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from typing_extensions import Self

from baton.errors import HandoffLost, Unsupported
from runtime.aio import timeout
from services.engines.answer import Finished, FinishReason, Tokens
from services.engines.base import EngineLoad
from services.engines.external.engine import CANARY_SALT, ExternalEngine
from services.engines.external.event_reader import EventReader, event_sockets
from services.engines.external.families import PackageFamilies
from services.engines.external.package import shut_down
from services.engines.external.requests import RequestLimits, RunningStream
from services.engines.kv_events import KvChange
from services.engines.kv_transfer import RemoteKv
from services.engines.lora.adapters import LoraAdapters
from services.engines.prompt import Prompt, Sampling
from services.engines.running.generation import Generation
from services.engines.vllm.config import VllmConfig
from services.engines.vllm.handoff import Remembered, read_state
from services.engines.vllm.held_kv import HeldByVllm, VllmHeldKv
from services.engines.vllm.loading import EngineStart, ResolvedVllm, can_hand_over, start, vllm_facts
from services.engines.vllm.lora_slots import CopiedLora, VllmLoraSlots, linear_shapes
from services.engines.vllm.monitoring import metrics
from services.engines.vllm.monitoring.kv_events import vllm_format
from services.engines.vllm.monitoring.metrics import VllmStatistics
from services.engines.vllm.orphans import OrphanWatch
from services.engines.vllm.package import VllmPackage
from services.engines.vllm.requests.builder import Budgeted, VllmRequestBuilder, seeded
from services.engines.vllm.requests.generation import KnownTokensDiffer, VllmGeneration
from services.engines.vllm.requests.inflight import VllmRequests
from services.engines.vllm.requests.sampling import GuideChecks, Plan, behind_emitted, plan
from services.engines.vllm.requests.stream import finished, prefilled
from services.engines.vllm.sleeping import VllmSleep

_FIRST_STEP_SECONDS = 300.0


class VllmEngine(ExternalEngine):
    """An Engine that transfers KV itself. See docs/vllm.md for its limits."""

    _title = "vLLM"
    _requests: VllmRequests
    _held: HeldByVllm

    def __init__(self, config: VllmConfig, effective: ResolvedVllm, package: VllmPackage, roles: Sequence[str]) -> None:
        self._config = config
        self._effective = effective
        self._args = effective.value
        self._package = package
        self._roles = tuple(roles)
        self._statistics = VllmStatistics()
        self._hands_over = can_hand_over(config, roles)
        self._slots: VllmLoraSlots | None = None
        self._loras: LoraAdapters[CopiedLora] | None = None

    async def __aenter__(self) -> Self:
        facts = vllm_facts(self._config, self._args, self._package, takes_handoffs=self._hands_over)
        started = time.monotonic()
        async with AsyncExitStack() as stack:
            watch = stack.enter_context(OrphanWatch())
            sockets = stack.enter_context(event_sockets(self._args.data_parallel_size)) if self._has_events else None
            starting = EngineStart(
                self._roles, facts.max_context_tokens, sockets, facts.images is not None, self._record_step
            )
            loading = asyncio.to_thread(start, self._config, self._effective, self._package, starting)
            self._llm = await self._loaded(loading, self._config.start_seconds)
            stack.push_async_callback(shut_down, self._llm, "vllm")
            watch.started()
            self._facts = replace(
                facts,
                load_seconds=time.monotonic() - started,
                max_context_tokens=int(self._llm.vllm_config.model_config.max_model_len),
            )
            await self._open_loras(stack)
            self._prepare(stack)
            async with timeout(_FIRST_STEP_SECONDS):
                await self._warm_up()
            events = vllm_format(self._facts.layout.block_tokens)
            reader = EventReader(sockets, self._args.data_parallel_size, events)
            self._reader = await stack.enter_async_context(reader)
            await self._open_canary(stack, self._config.canary_seconds, self._config.canary_patience_seconds)
            stack.enter_context(PackageFamilies("vllm:"))
            await stack.enter_async_context(self._sleep)
            self._open = stack.pop_all()
        return self

    def _prepare(self, stack: AsyncExitStack) -> None:
        size = self._facts.layout.block_tokens
        # One block is empty, for vLLM's own use.
        self._blocks = (self._llm.vllm_config.cache_config.num_gpu_blocks or 1) - 1
        self._held = HeldByVllm(self._llm, self._config.handoff.seconds, size)
        stack.callback(self._held.close)
        self._guides = GuideChecks()
        stack.callback(self._guides.close)
        self._builder = VllmRequestBuilder(self._package, self._facts, self._blocks, self._slots)
        most = self._args.max_num_seqs * self._args.data_parallel_size + self._config.max_waiting
        limits = RequestLimits(most, size, self._config.slow_reader_seconds, self._config.abort_seconds)
        self._requests = VllmRequests(self._llm, self._package, limits)
        stack.push_async_callback(self._requests.close)
        self._sleep = VllmSleep(self._llm, self._requests, self._config.sleep_after_seconds)

    async def _open_loras(self, stack: AsyncExitStack) -> None:
        if (options := self._config.lora) is None:
            return
        shapes = await asyncio.to_thread(linear_shapes, self._config.model)
        self._slots = stack.enter_context(VllmLoraSlots(self._llm, self._package, shapes, options.max_rank))
        self._loras = await stack.enter_async_context(LoraAdapters(options, self._slots))

    @property
    def kv_events(self) -> "VllmEngine | None":
        return self if self._has_events else None

    @property
    def loras(self) -> LoraAdapters[CopiedLora] | None:
        """Its adapters; None without `engine.lora`."""
        return self._loras

    @property
    def is_asleep(self) -> bool:
        """True while its GPU's memory is free, until a request has woken it."""
        return self._sleep.is_asleep

    @property
    def releases_memory(self) -> "VllmEngine | None":
        """Itself, if it may sleep (`engine.sleep_after_seconds`)."""
        return self if self._config.sleep_after_seconds is not None else None

    async def release_memory(self) -> bool:
        """Sleeps, with the weights in the host's memory. See ReleasesMemory."""
        return await self._sleep.fall_asleep()

    async def resume_memory(self) -> None:
        """Wakes. See ReleasesMemory."""
        await self._sleep.wake()

    @property
    def healthy(self) -> bool:
        """By vLLM's own word and by its progress, since a core that hangs says nothing."""
        return self._requests.failure is None and not self._llm.errored and not self._canary.is_overdue

    @property
    def fetch_seconds(self) -> float:
        """vLLM's own lease on the blocks of a prefill. See TransfersKv."""
        return self._config.handoff.seconds if self._hands_over else 0.0

    def load(self) -> EngineLoad:
        """Returns requests and KV by our own count, and the queue as vLLM's latest step reported it."""
        here, held = len(self._requests), self._held.blocks
        waiting = min(self._statistics.waiting, here)
        tokens = self._llm.get_num_queued_tokens() if waiting else 0
        total = self._blocks * self._args.data_parallel_size
        return EngineLoad(here - waiting, waiting, tokens, total, min(total, self._requests.blocks + held), held)

    def pool_usage(self) -> float:
        """The used part of the pool by vLLM's own count, held blocks included, as of its latest step."""
        return self._statistics.usage

    def kv_changes(self) -> AsyncGenerator[KvChange, None]:
        """Yields the changes of its prefix cache. See ReportsKvEvents."""
        if not self._has_events:
            raise Unsupported("KV events are off: engine.kv_events or enable_prefix_caching is false")
        return self._reader.kv_changes()

    async def prefill(self, prompt: Prompt, sampling: Sampling) -> VllmHeldKv:
        """Computes the prompt and one id; the KV waits inside vLLM. See PrefillEngine."""
        self._require_transfer()
        await self._check(prompt, sampling)
        chosen = seeded(sampling)
        try:
            return await self._prefilled(prompt, chosen, plan(prompt, chosen), chosen is not sampling)
        except KnownTokensDiffer:
            _count_diverged(sampling)
            return await self._prefilled(prompt, chosen, behind_emitted(prompt), chosen is not sampling)

    async def _prefilled(self, prompt: Prompt, sampling: Sampling, planned: Plan, has_new_seed: bool) -> VllmHeldKv:
        computed = Budgeted(planned, planned.budget(prompt, sampling, self._facts.max_context_tokens))
        asked_at = time.monotonic()
        generation = self._requests.submit(self._builder.prefill(prompt, sampling, computed))
        try:
            await generation.ending()
            remembered = Remembered(len(planned.prompt), sampling.seed if has_new_seed else None)
            follows = remembered if computed.is_handed_over else None
            found = prefilled(generation, prompt, sampling, self._facts, follows)
        finally:
            await self._drop(generation)
        request_id = str((generation.kv_transfer or {}).get("remote_request_id", ""))
        return VllmHeldKv(found, request_id, self._held, asked_at + self._config.handoff.seconds)

    async def decode_remote(self, source: RemoteKv, sampling: Sampling) -> Generation:
        """Fetches the KV, and returns when vLLM has generated the tokens that the client has. See TransfersKv.

        They were computed from the fetched KV, so KV of another prompt is found out here, or by its owner's answer.
        """
        self._require_transfer()
        prompt = source.prompt
        await self._check(prompt, sampling)
        state = read_state(source.state, self._facts.layout.block_tokens, prompt.num_tokens - 1)
        length = state.remembered.prompt_tokens
        if not len(prompt.token_ids) <= length <= source.num_tokens:
            raise HandoffLost(f"the KV is that of {length} tokens, which does not begin this answer")
        planned = Plan(prompt.context[:length], prompt.context[length:])
        chosen = sampling if sampling.seed is not None else replace(sampling, seed=state.remembered.seed)
        computed = Budgeted(planned, planned.budget(prompt, chosen, self._facts.max_context_tokens))
        generation = self._requests.submit(self._builder.following(prompt, chosen, computed, state.params))
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._drop, generation)
            await self._arrived(generation.known(), self._config.handoff.fetch_seconds)
            undo.pop_all()
        return RunningStream(
            self._yielded(generation, prompt, chosen, fetched=True),
            partial(self._drop, generation),
            generation,
            partial(finished, generation, prompt, chosen, self._facts, fetched=True),
        )

    async def _whole(self, prompt: Prompt, sampling: Sampling) -> AsyncGenerator[Tokens | Finished, None]:
        await self._check(prompt, sampling)
        planned = plan(prompt, sampling)
        generation = None
        try:
            if planned.known:
                generation = await self._repeated(prompt, sampling, planned)
            if generation is None:
                planned = behind_emitted(prompt)
                budget = planned.budget(prompt, sampling, self._facts.max_context_tokens)
                if budget.max_tokens < 1:
                    yield Finished(FinishReason.LENGTH, len(prompt.token_ids))
                    return
                await self._sleep.wake()  # it may have fallen asleep while a repeated one was dropped
                request = self._builder.whole(prompt, sampling, Budgeted(planned, budget))
                generation = self._requests.submit(request)
            async for event in self._yielded(generation, prompt, sampling, fetched=False):
                yield event
        finally:
            if generation is not None:
                await self._drop(generation)

    async def _repeated(self, prompt: Prompt, sampling: Sampling, planned: Plan) -> VllmGeneration | None:
        """Generates the emitted tokens once more. None if other tokens came, or if no token may follow them."""
        budget = planned.budget(prompt, sampling, self._facts.max_context_tokens)
        if budget.max_tokens <= len(planned.known):
            return None
        generation = self._requests.submit(self._builder.whole(prompt, sampling, Budgeted(planned, budget)))
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._drop, generation)
            try:
                await generation.known()
            except KnownTokensDiffer:
                _count_diverged(sampling)
                return None
            undo.pop_all()
        return generation

    def _yielded(
        self, generation: VllmGeneration, prompt: Prompt, sampling: Sampling, *, fetched: bool
    ) -> AsyncGenerator[Tokens | Finished, None]:
        return self._events(generation, partial(finished, generation, prompt, sampling, self._facts, fetched=fetched))

    async def _drop(self, generation: VllmGeneration) -> None:
        """Aborts a generation, and returns when its blocks are free."""
        if not generation.has_ended:
            self._give_back(generation)
        await self._requests.drop(generation)

    async def _check(self, prompt: Prompt, sampling: Sampling) -> None:
        self._builder.check(prompt, sampling)
        await self._guides.check(sampling.guide)
        await self._sleep.wake()

    def _require_transfer(self) -> None:
        if not self._hands_over:
            raise Unsupported("engine.whole_requests is set: this vLLM has no connector for KV")

    @property
    def _has_events(self) -> bool:
        return self._config.kv_events and self._args.enable_prefix_caching

    def _record_step(self, rank: int, stats: Any) -> None:
        self._statistics.record(rank, stats)
        self._requests.progressed()

    def _quiet_seconds(self) -> float:
        """Returns the time since the last progress; 0 while held KV may leave no room in the pool, or it may sleep."""
        is_full = bool(self._blocks) and self._held.blocks >= self._blocks // 2
        return 0.0 if is_full or self._sleep.is_idle() else self._requests.quiet_seconds

    async def _warm_up(self) -> None:
        """Generates one token, before the engine is ready and as its canary, with a salt that no client has."""
        sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
        async for _ in self._whole(Prompt((0,), cache_salt=CANARY_SALT), sampling):
            pass


def _count_diverged(sampling: Sampling) -> None:
    """Counts an answer whose tokens did not come again. Raises Unsupported for one that cannot go on behind them."""
    metrics.DIVERGED.inc()
    if sampling.guide is not None:
        raise Unsupported("guided: vLLM cannot continue an answer inside its grammar, and its first tokens differed")
