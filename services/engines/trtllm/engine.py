"""The TensorRT-LLM engine: its LLM API behind our Protocols; KV moves by its own cache transceiver."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType

from typing_extensions import Self

from rpc.aio import timeout
from rpc.errors import EngineFailed, HandoffLost, Unsupported
from services.answer import Finished, FinishReason, Tokens
from services.engine import EngineLoad, ModelFacts
from services.engines.closing_stream import ClosingStream
from services.engines.purpose import Purpose
from services.engines.trtllm import answers, metrics, state
from services.engines.trtllm.canary import Canary
from services.engines.trtllm.config import TrtllmConfig
from services.engines.trtllm.effective import Effective
from services.engines.trtllm.facts import model_facts
from services.engines.trtllm.generation import Generation
from services.engines.trtllm.illustration import check_ids
from services.engines.trtllm.loading import load, shut_down
from services.engines.trtllm.native import NativeMetrics
from services.engines.trtllm.nothing import NoMemory
from services.engines.trtllm.orders import Orders
from services.engines.trtllm.package import Package
from services.engines.trtllm.pinned import Pinned, TrtllmKv
from services.engines.trtllm.running import Order, Running
from services.engines.trtllm.telling import Listeners, Telling
from services.footprint import current_footprint
from services.kv import PulledKv, Reservation
from services.kv_elsewhere import HandedKv
from services.kv_events import KvChange
from services.prompt import Prompt, Sampling

_PLAIN_TIMEOUT_SECONDS = 60.0
_ABORT_SECONDS = 5.0


class TrtllmEngine:
    """An Engine that MovesKv. See services/engine.py for the contract, docs/tensorrt-llm.md for what it cannot do."""

    def __init__(self, config: TrtllmConfig, effective: Effective, package: Package, purpose: Purpose) -> None:
        self._config = config
        self._node = purpose.node or int
        # A decode worker shows by its traffic that it works: there is no handoff that it could be tried with.
        self._is_tried = "prefill" in purpose.roles or not effective.value.can_hand_over
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
        self._pinned = Pinned(self._transfer_seconds, size)
        self._orders = Orders(self._config, self._args, self._package, self._facts, self._node)
        limit = self._args.max_batch_size + self._config.max_waiting
        native = NativeMetrics(self._package, self._facts.name)
        self._running = Running(self._llm, self._package, limit, size, native.note_request)
        listeners = Listeners(self._running.progressed, self._observe)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(shut_down, self._llm)
            stack.push_async_callback(self._running.close)
            stack.callback(self._pinned.close)
            telling = Telling(self._llm, self._args.kv_cache_config, native, listeners)
            self._telling = await stack.enter_async_context(telling)
            await self._warm_up()
            interval = self._config.canary_seconds if self._is_tried else None
            canary = Canary(
                self._warm_up, lambda: self._running.idle_seconds, interval, self._config.canary_patience_seconds
            )
            self._canary = await stack.enter_async_context(canary)
            self._open = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.healthy:
            await self._pinned.outlived(self.fetch_seconds)
        await self._open.aclose()

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def memory(self) -> NoMemory:
        return NoMemory(self._facts.layout.block_bytes)

    @property
    def healthy(self) -> bool:
        """By its own check, and by its progress: an engine can say that it is well and do nothing for ever."""
        if self._running.failure is not None or self._running.stalled_seconds > self._config.stall_seconds:
            return False
        if self._canary.is_overdue:
            return False
        check = getattr(self._llm, "_check_health", None)
        return bool(check()) if check is not None else True

    @property
    def fetch_seconds(self) -> float:
        """By the setting that the engine's own timeout must be over. See MovesKv."""
        return self._config.handoff_deadline_seconds if self._args.can_hand_over else 0.0

    def load(self) -> EngineLoad:
        """What runs and what is held by our own book; what of it waits, and how many blocks there are, as it says."""
        told = self._telling.statistics
        held = self._pinned.blocks
        total = told.blocks_total or (self._args.kv_cache_config.max_tokens or 0) // self._facts.layout.block_tokens
        waiting = min(told.waiting, len(self._running))
        tokens = told.waiting_tokens if waiting else 0
        return EngineLoad(len(self._running) - waiting, waiting, tokens, total, self._running.blocks + held, held)

    def kv_changes(self) -> AsyncGenerator[KvChange, None]:
        """What its prefix cache holds. See TellsKv."""
        return self._telling.kv_changes()

    async def prefill(self, prompt: Prompt, sampling: Sampling) -> TrtllmKv:
        """Computes the prompt and one id; the KV waits inside the engine. See PrefillEngine."""
        self._orders.check(prompt, is_computed=True)
        self._orders.check_handoff(prompt, sampling, self._pinned.tokens)
        budget = self._orders.budget(prompt, sampling)
        hands_over = budget.max_tokens > 1
        generation = self._submit(prompt, await self._orders.prefill(prompt, sampling, budget))
        kv: TrtllmKv | None = None
        try:
            while not generation.has_ended:
                await generation.changed.wait()
                generation.changed.clear()
            kv = self._held(generation, hands_over)
            return kv
        finally:
            if kv is None:
                await self._drop(generation)
                if hands_over and generation.finish_reason in answers.COMMITTED:
                    self._pinned.pin(generation, generation.tokens)

    async def reserve(self, prompt: Prompt, num_tokens: int) -> Reservation:
        """Refuses: there is no pool to pull into."""
        del prompt
        raise Unsupported(f"the trtllm engine takes no {num_tokens} tokens into a pool: it fetches KV itself")

    def decode(self, source: Prompt | PulledKv, sampling: Sampling) -> AsyncGenerator[Tokens | Finished, None]:
        """Generates to the end. See DecodeEngine."""
        if isinstance(source, PulledKv):
            raise Unsupported("the trtllm engine decodes no pulled blocks: it fetches KV itself")
        return self._whole(source, sampling)

    async def take_over(self, source: HandedKv, sampling: Sampling) -> AsyncGenerator[Tokens | Finished, None]:
        """Fetches the KV, and generates from it. See MovesKv."""
        prompt = source.prompt
        self._orders.check(prompt, is_computed=False)
        self._orders.check_transceiver()
        if not prompt.emitted or len(prompt.context) != source.num_tokens + 1:
            raise HandoffLost("more than the first token was sent already, and the engine can continue behind it only")
        params = state.read(self._package, source.state, prompt.context[source.num_tokens :])
        before = replace(prompt, emitted=prompt.emitted[:-1])
        generation = self._submit(before, self._orders.following(before, sampling, params))
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._drop, generation)
            await self._arrival(generation)
            undo.pop_all()
        return ClosingStream(self._events(generation, prompt, fetched=True), partial(self._drop, generation))

    async def _arrival(self, generation: Generation) -> None:
        try:
            async with timeout(self._transfer_seconds):
                while not (generation.has_begun or generation.has_ended):
                    await generation.changed.wait()
                    generation.changed.clear()
        except TimeoutError as error:
            raise HandoffLost(f"the KV did not arrive within {self._transfer_seconds} s") from error
        if generation.error is not None:
            raise HandoffLost(f"the KV did not arrive: {generation.error.message}") from generation.error
        generation.changed.set()

    async def _whole(self, prompt: Prompt, sampling: Sampling) -> AsyncGenerator[Tokens | Finished, None]:
        self._orders.check(prompt, is_computed=True)
        budget = self._orders.budget(prompt, sampling)
        if budget.max_tokens < 1:
            yield Finished(FinishReason.LENGTH, len(prompt.token_ids), 0, 0.0, 0.0, 0.0)
            return
        generation = self._submit(prompt, await self._orders.whole(prompt, sampling, budget))
        try:
            async for event in self._events(generation, prompt, fetched=False):
                yield event
        finally:
            await self._drop(generation)

    async def _events(
        self, generation: Generation, prompt: Prompt, *, fetched: bool
    ) -> AsyncGenerator[Tokens | Finished, None]:
        while True:
            await generation.changed.wait()
            generation.changed.clear()
            if generation.error is not None:
                raise generation.error
            has_ended = generation.has_ended
            if tokens := generation.take():
                yield tokens
            if has_ended:
                yield answers.finished(generation, prompt, self._facts, fetched=fetched)
                return

    def _submit(self, prompt: Prompt, order: Order) -> Generation:
        generation = self._running.submit(order)
        if prompt.media and not order.replayed:
            self._check_made(prompt, generation)
        return generation

    def _check_made(self, prompt: Prompt, generation: Generation) -> None:
        try:
            check_ids(prompt, generation.result.prompt_token_ids)
        except EngineFailed:
            generation.abandon()
            raise

    def _held(self, generation: Generation, hands_over: bool) -> TrtllmKv:
        prefilled = answers.prefilled(generation, self._facts, hands_over=hands_over)
        if hands_over:
            # Also of a request that has ended: the engine holds what nobody will fetch.
            self._pinned.pin(prefilled, generation.tokens)
        return TrtllmKv(prefilled, self._pinned)

    async def _drop(self, generation: Generation) -> None:
        """Ends it, and waits until the engine says so, unless that may take a whole transfer."""
        if generation.has_ended or not self._config.abort:
            return
        current_footprint().give_back(
            generation.num_tokens, -(-generation.num_tokens // self._facts.layout.block_tokens)
        )
        generation.abandon()
        if generation.is_fetching:
            return
        with contextlib.suppress(TimeoutError):
            async with timeout(_ABORT_SECONDS):
                await generation.ended.wait()

    def _observe(self) -> None:
        metrics.OUTSTANDING.set(len(self._pinned))
        metrics.OUTSTANDING_TOKENS.set(self._pinned.tokens)
        metrics.OLDEST_SECONDS.set(self._pinned.oldest_seconds)

    async def _warm_up(self) -> None:
        """One token, before anybody is told that the engine is ready."""
        sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
        async for _ in self._whole(Prompt((0,)), sampling):
            pass
