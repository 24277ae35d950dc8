"""The TensorRT-LLM engine: its LLM API as an Engine. Its own cache transceiver transfers the KV."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from typing_extensions import Self

from baton.errors import EngineFailed, HandoffLost
from runtime.aio import timeout
from services.engines.answer import Finished, FinishReason, Tokens
from services.engines.base import EngineLoad
from services.engines.context import EngineContext
from services.engines.external.engine import CANARY_SALT, ExternalEngine
from services.engines.external.held_kv import ExternalKv, ExternalPrefill, HeldHandoffs
from services.engines.external.package import shut_down
from services.engines.kv_events import KvChange
from services.engines.kv_transfer import RemoteKv
from services.engines.prompt import Prompt, Sampling
from services.engines.running.generation import ClosingStream, Generation
from services.engines.trtllm.config import TrtllmConfig
from services.engines.trtllm.loading import load
from services.engines.trtllm.model_facts import model_facts
from services.engines.trtllm.monitoring import metrics
from services.engines.trtllm.monitoring.metrics import NativeMetrics
from services.engines.trtllm.monitoring.monitor import Listeners, Monitor
from services.engines.trtllm.package import Package
from services.engines.trtllm.requests import results
from services.engines.trtllm.requests.inflight import (
    EngineRequest,
    InflightGeneration,
    InflightLimits,
    InflightRequests,
    Patience,
)
from services.engines.trtllm.requests.multimodal import check_ids
from services.engines.trtllm.requests.request_builder import RequestBuilder
from services.engines.trtllm.resolved_args import ResolvedArgs

_PLAIN_TIMEOUT_SECONDS = 60.0


class TrtllmKv(ExternalKv):
    """KV that TensorRT-LLM holds for another worker, until that one has fetched it or the transfer times out.

    An abort after the prompt has been computed frees nothing.
    """

    def __init__(self, prefilled: ExternalPrefill, held: HeldHandoffs) -> None:
        super().__init__(prefilled)
        self._held_handoffs = held

    async def release(self) -> int:
        """Frees KV that was fetched. Returns its number of blocks, 0 if the timeout will free it."""
        return self._held_handoffs.free(self) if self.is_fetched else 0


class TrtllmEngine(ExternalEngine):
    """An Engine that transfers KV itself. See docs/tensorrt-llm.md for its limits."""

    _requests: InflightRequests

    def __init__(self, config: TrtllmConfig, effective: ResolvedArgs, package: Package, context: EngineContext) -> None:
        self._config = config
        self._node = context.node or int
        self._effective = effective
        self._args = effective.value
        self._package = package
        transceiver = self._args.cache_transceiver_config
        milliseconds = transceiver.kv_transfer_timeout_ms if transceiver else None
        self._transfer_seconds = milliseconds / 1000 if milliseconds else _PLAIN_TIMEOUT_SECONDS

    async def __aenter__(self) -> Self:
        facts = model_facts(self._config, self._args, self._package)
        started = time.monotonic()
        self._llm = await asyncio.to_thread(load, self._config, self._effective, self._package)
        self._facts = replace(facts, load_seconds=time.monotonic() - started)
        size = facts.layout.block_tokens
        self._held = HeldHandoffs(self._transfer_seconds, size)
        self._builder = RequestBuilder(self._config, self._args, self._package, self._facts, self._node)
        patience = Patience(self._config.slow_reader_seconds, self._config.abort_seconds, self._transfer_seconds)
        limits = InflightLimits(self._args.max_batch_size + self._config.max_waiting, size, patience)
        native = NativeMetrics(self._package, self._facts.name)
        self._requests = InflightRequests(self._llm, self._package, limits, native.record_request)
        listeners = Listeners(self._requests.progressed, self._observe)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(shut_down, self._llm, "trtllm")
            stack.push_async_callback(self._requests.close)
            stack.callback(self._held.close)
            await self._warm_up()
            monitor = Monitor(self._llm, self._package.version, self._args.kv_cache_config, native, listeners)
            self._monitor = await stack.enter_async_context(monitor)
            await self._open_canary(stack, self._config.canary_seconds, self._config.canary_patience_seconds)
            self._open = stack.pop_all()
        return self

    @property
    def kv_events(self) -> "TrtllmEngine":
        return self

    @property
    def healthy(self) -> bool:
        """By its own check and by its progress, since an engine may hang and still report that it is healthy."""
        if self._requests.failure is not None or self._requests.stalled_seconds > self._config.stall_seconds:
            return False
        if self._canary.is_overdue:
            return False
        check = getattr(self._llm, "_check_health", None)
        return bool(check()) if check is not None else True

    @property
    def fetch_seconds(self) -> float:
        """The configured deadline of handoffs, below the engine's own timeout. See TransfersKv."""
        return self._config.handoff_deadline_seconds if self._args.can_hand_over else 0.0

    def load(self) -> EngineLoad:
        """Returns requests and held KV by our own count, and the queue and the blocks as the engine reports them."""
        statistics = self._monitor.statistics
        held = self._held.blocks
        total = (
            statistics.blocks_total or (self._args.kv_cache_config.max_tokens or 0) // self._facts.layout.block_tokens
        )
        waiting = min(statistics.waiting, len(self._requests))
        tokens = statistics.waiting_tokens if waiting else 0
        return EngineLoad(len(self._requests) - waiting, waiting, tokens, total, self._requests.blocks + held, held)

    def kv_changes(self) -> AsyncGenerator[KvChange, None]:
        """Yields the changes of its prefix cache. See ReportsKvEvents."""
        return self._monitor.kv_changes()

    async def prefill(self, prompt: Prompt, sampling: Sampling) -> TrtllmKv:
        """Computes the prompt and one id; the KV waits inside the engine. See PrefillEngine."""
        self._builder.check(prompt, is_computed=True)
        self._builder.check_handoff(prompt, sampling, self._held.tokens)
        budget = self._builder.budget(prompt, sampling)
        hands_over = budget.max_tokens > 1
        generation = self._submit(prompt, await self._builder.prefill(prompt, sampling, budget))
        kv: TrtllmKv | None = None
        try:
            await generation.reached()
            prefilled = results.prefilled(generation, prompt, sampling, self._facts, hands_over=hands_over)
            kv = TrtllmKv(prefilled, self._held)
            return kv
        finally:
            if kv is None:
                await self._drop(generation)
            if hands_over and results.holds_kv(generation):
                # Also for a request that has ended or was cancelled: the engine holds KV until it is fetched.
                self._held.hold(kv or generation, generation.tokens)

    async def decode_remote(self, source: RemoteKv, sampling: Sampling) -> Generation:
        """Fetches the KV, and generates from it. See TransfersKv."""
        prompt = source.prompt
        self._builder.check(prompt, is_computed=False)
        self._builder.check_transceiver()
        if not prompt.emitted or prompt.num_tokens != source.num_tokens + 1:
            raise HandoffLost("more than the first token was sent already; the engine continues only after the first")
        params = results.read_state(self._package, source.state, prompt.context[source.num_tokens :])
        before = replace(prompt, emitted=prompt.emitted[:-1])
        generation = self._submit(before, self._builder.following(before, sampling, params))
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._drop, generation)
            await self._arrival(generation)
            undo.pop_all()
        return ClosingStream(self._yielded(generation, prompt, sampling, fetched=True), partial(self._drop, generation))

    async def _arrival(self, generation: InflightGeneration) -> None:
        try:
            async with timeout(self._transfer_seconds):
                await generation.reached(lambda: generation.has_begun)
        except TimeoutError as error:
            raise HandoffLost(f"the KV did not arrive within {self._transfer_seconds} s") from error
        if generation.error is not None:
            raise HandoffLost(f"the KV did not arrive: {generation.error.message}") from generation.error
        generation.changed.set()

    async def _whole(
        self, prompt: Prompt, sampling: Sampling, *, is_test: bool = False
    ) -> AsyncGenerator[Tokens | Finished, None]:
        self._builder.check(prompt, is_computed=True)
        budget = self._builder.budget(prompt, sampling)
        if budget.max_tokens < 1:
            yield Finished(FinishReason.LENGTH, len(prompt.token_ids))
            return
        request = await self._builder.whole(prompt, sampling, budget)
        generation = self._submit(prompt, replace(request, is_test=is_test))
        try:
            async for event in self._yielded(generation, prompt, sampling, fetched=False):
                yield event
        finally:
            await self._drop(generation)

    def _yielded(
        self, generation: InflightGeneration, prompt: Prompt, sampling: Sampling, *, fetched: bool
    ) -> AsyncGenerator[Tokens | Finished, None]:
        finish = partial(results.finished, generation, prompt, sampling, self._facts, fetched=fetched)
        return self._events(generation, finish)

    def _submit(self, prompt: Prompt, request: EngineRequest) -> InflightGeneration:
        generation = self._requests.submit(request)
        if prompt.media and not request.replayed:
            self._check_made(prompt, generation)
        return generation

    def _check_made(self, prompt: Prompt, generation: InflightGeneration) -> None:
        try:
            check_ids(prompt, generation.result.prompt_token_ids)
        except EngineFailed:
            generation.abandon()
            raise

    async def _drop(self, generation: InflightGeneration) -> None:
        """Aborts a generation and waits for its end, unless that may take as long as a transfer of KV."""
        if generation.has_ended or not self._config.abort:
            return
        self._give_back(generation)
        generation.abandon()
        if not generation.is_fetching:
            # Within abort_seconds, by the generation's own timer.
            await generation.ended.wait()

    def _quiet_seconds(self) -> float:
        """Returns the time since the last progress; 0 while the pool may be full of KV that others have not fetched
        yet.
        """
        load = self.load()
        is_full = bool(load.blocks_total) and load.blocks_used >= load.blocks_total
        waits_for_room = bool(self._held.tokens and len(self._requests))
        return 0.0 if is_full or waits_for_room else self._requests.quiet_seconds

    def _observe(self) -> None:
        metrics.OUTSTANDING.set(len(self._held))
        metrics.OUTSTANDING_TOKENS.set(self._held.tokens)
        metrics.OLDEST_SECONDS.set(self._held.oldest_seconds)

    async def _warm_up(self) -> None:
        """Generates one token, before the engine is ready and as its canary.

        Its salt keeps it from sharing cached blocks with clients, and TensorRT-LLM's metrics do not count it.
        """
        salt = CANARY_SALT if "cache_salt" in self._package.generate_arguments else ""
        sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
        async for _ in self._whole(Prompt((0,), cache_salt=salt), sampling, is_test=True):
            pass
