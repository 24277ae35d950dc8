"""The TensorRT-LLM engine: its LLM API behind our Protocols; KV moves by its own cache transceiver."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

from typing_extensions import Self

from rpc.aio import timeout
from rpc.errors import EngineFailed, HandoffLost, InvalidRequest, Overloaded, Unsupported
from services.engine import (
    EngineLoad,
    Finished,
    FinishReason,
    HandedKv,
    ModelFacts,
    Prompt,
    PulledKv,
    Reservation,
    Sampling,
    Tokens,
)
from services.engines.trtllm import state
from services.engines.trtllm.asking import Budget, sampling_params
from services.engines.trtllm.config import TrtllmConfig
from services.engines.trtllm.effective import Effective
from services.engines.trtllm.facts import model_facts
from services.engines.trtllm.generation import Generation
from services.engines.trtllm.loading import load
from services.engines.trtllm.nothing import NoMemory
from services.engines.trtllm.package import Package
from services.engines.trtllm.pinned import Pinned, Prefilled, TrtllmKv
from services.engines.trtllm.running import Running
from services.engines.trtllm.stream import TrtllmStream
from services.footprint import current_footprint

_PLAIN_TIMEOUT_SECONDS = 60.0
_ABORT_SECONDS = 5.0
# How prompts end whose KV is then held, whatever is asked of the engine after that.
_COMMITTED = ("length", "not_finished", "stop")


class TrtllmEngine:
    """An Engine that MovesKv. See services/engine.py for the contract, docs/tensorrt-llm.md for what it cannot do."""

    def __init__(self, config: TrtllmConfig, effective: Effective, package: Package) -> None:
        self._config = config
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
        limit = self._args.max_batch_size + self._config.max_waiting
        self._running = Running(self._llm, self._package, limit, size)
        await self._warm_up()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._running.close()
        self._pinned.close()
        await asyncio.to_thread(self._llm.shutdown)

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
        check = getattr(self._llm, "_check_health", None)
        return bool(check()) if check is not None else True

    def load(self) -> EngineLoad:
        """By our own book. What waits is not known of single requests, and counts as running."""
        held = self._pinned.blocks
        total = (self._args.kv_cache_config.max_tokens or 0) // self._facts.layout.block_tokens
        return EngineLoad(len(self._running), 0, 0, total, self._running.blocks + held, held)

    async def prefill(self, prompt: Prompt, sampling: Sampling) -> TrtllmKv:
        """Computes the prompt and one id; the KV waits inside the engine. See PrefillEngine."""
        self._check(prompt)
        self._check_handoff(prompt, sampling)
        budget = self._budget(prompt, sampling)
        hands_over = budget.max_tokens > 1
        params = self._context_only() if hands_over else None
        first = Budget(1, min(1, budget.min_tokens))
        generation = self._submit(prompt, 0, sampling, first, params)
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
                if hands_over and generation.finish_reason in _COMMITTED:
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
        self._check(prompt)
        if not self._args.can_hand_over:
            raise Unsupported("cache_transceiver_config is unset: this worker runs whole requests only")
        if not prompt.emitted or len(prompt.context) != source.num_tokens + 1:
            raise HandoffLost("more than the first token was sent already, and the engine can continue behind it only")
        params = state.read(self._package, source.state, prompt.context[source.num_tokens :])
        before = replace(prompt, emitted=prompt.emitted[:-1])
        budget = self._budget(before, sampling)
        generation = self._submit(before, 1, sampling, budget, params)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._drop, generation)
            await self._arrival(generation)
            undo.pop_all()
        return TrtllmStream(self._events(generation, prompt, fetched=True), partial(self._drop, generation))

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
        self._check(prompt)
        budget = self._budget(prompt, sampling)
        if budget.max_tokens < 1:
            yield Finished(FinishReason.LENGTH, len(prompt.token_ids), 0, 0.0, 0.0, 0.0)
            return
        generation = self._submit(prompt, 0, sampling, budget, None)
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
                yield self._finished(generation, prompt, fetched=fetched)
                return

    def _submit(self, prompt: Prompt, replayed: int, sampling: Sampling, budget: Budget, params: Any) -> Generation:
        return self._running.submit(
            prompt.context,
            replayed,
            sampling.logprobs,
            sampling_params=sampling_params(self._package, sampling, budget, self._facts.eos_token_ids),
            streaming=params is None or params.request_type != "context_only",
            disaggregated_params=params,
            cache_salt=prompt.cache_salt or None,
        )

    def _context_only(self) -> Any:
        """Each time with a new id: one that is used twice is another request's KV."""
        params = self._package.disaggregated_params(request_type="context_only")
        if "disagg_request_id" in self._package.handoff_fields:
            assert self._config.node_id is not None
            params.disagg_request_id = self._package.new_handoff_id(self._config.node_id)
        return params

    def _held(self, generation: Generation, hands_over: bool) -> TrtllmKv:
        if generation.error is not None:
            raise generation.error
        tokens = generation.take()
        if tokens is None or len(tokens.ids) != 1:
            raise EngineFailed("a prefill of TensorRT-LLM must answer one token")
        reason = self._reason(generation) if self._is_over(generation) or not hands_over else None
        output = generation.output
        if reason is None and output.disaggregated_params is None:
            raise EngineFailed("a prefill of TensorRT-LLM did not say where its KV is")
        prefilled = Prefilled(
            first_token=tokens.ids[0],
            logprob=tokens.logprobs[0] if tokens.logprobs else None,
            finish_reason=reason,
            num_tokens=generation.tokens,
            cached_tokens=self._cached_tokens(generation),
            compute_seconds=(generation.ended_at or generation.submitted_at) - generation.submitted_at,
            state=state.write(output.disaggregated_params) if reason is None else b"",
        )
        if hands_over:
            # Also of a request that has ended: the engine holds what nobody will fetch.
            self._pinned.pin(prefilled, generation.tokens)
        return TrtllmKv(prefilled, self._pinned)

    async def _drop(self, generation: Generation) -> None:
        """Ends it, and waits until the engine says so, unless that may take a whole transfer."""
        if generation.has_ended or not self._config.abort:
            return
        current_footprint().give_back(generation.num_tokens, -(-generation.num_tokens // self._block_tokens))
        generation.abandon()
        if generation.is_fetching:
            return
        with contextlib.suppress(TimeoutError):
            async with timeout(_ABORT_SECONDS):
                await generation.ended.wait()

    @property
    def _block_tokens(self) -> int:
        return self._facts.layout.block_tokens

    def _is_over(self, generation: Generation) -> bool:
        return generation.finish_reason not in ("length", "not_finished")

    def _reason(self, generation: Generation) -> FinishReason:
        if not self._is_over(generation):
            return FinishReason.LENGTH
        if generation.finish_reason != "stop":
            raise EngineFailed(f"TensorRT-LLM ended the request by {generation.finish_reason!r}")
        stop = generation.output.stop_reason
        ended = stop is None or stop in self._facts.eos_token_ids
        return FinishReason.END_OF_SEQUENCE if ended else FinishReason.STOP_TOKEN

    def _finished(self, generation: Generation, prompt: Prompt, *, fetched: bool) -> Finished:
        ended = generation.ended_at or generation.submitted_at
        first = generation.first_at or ended
        waiting = first - generation.submitted_at
        return Finished(
            reason=self._reason(generation),
            prompt_tokens=len(prompt.token_ids),
            cached_tokens=self._cached_tokens(generation),
            queue_seconds=0.0,
            prefill_seconds=0.0 if fetched else waiting,
            decode_seconds=ended - first,
        )

    def _cached_tokens(self, generation: Generation) -> int:
        metrics = getattr(generation.output, "request_perf_metrics", None)
        cache = getattr(metrics, "kv_cache_metrics", None)
        reused = int(getattr(cache, "num_reused_blocks", 0) or 0)
        return min(generation.tokens, reused * self._block_tokens)

    def _budget(self, prompt: Prompt, sampling: Sampling) -> Budget:
        room = self._facts.max_context_tokens - len(prompt.context)
        left = sampling.max_tokens - len(prompt.emitted)
        return Budget(min(left, room), max(0, sampling.min_tokens - len(prompt.emitted)))

    def _check(self, prompt: Prompt) -> None:
        if prompt.media:
            raise Unsupported("the trtllm engine takes no media yet")
        if prompt.cache_salt and "cache_salt" not in self._package.generate_arguments:
            raise Unsupported(f"TensorRT-LLM {self._package.version} has no cache_salt")
        if not prompt.token_ids:
            raise InvalidRequest.of("prompt", "has no tokens")
        if max(prompt.context) >= self._facts.vocab_size:
            raise InvalidRequest.of("prompt", f"{max(prompt.context)} is outside the vocabulary")
        limit = self._facts.max_context_tokens
        if len(prompt.context) >= limit:
            raise InvalidRequest.of("prompt", f"leaves no room in a context of {limit} tokens")
        step = self._args.max_num_tokens
        if len(prompt.context) > step and not self._args.enable_chunked_prefill:
            raise InvalidRequest.of("prompt", f"is over max_num_tokens, {step}, and enable_chunked_prefill is off")

    def _check_handoff(self, prompt: Prompt, sampling: Sampling) -> None:
        if not self._args.can_hand_over:
            raise Unsupported("cache_transceiver_config is unset: this worker runs whole requests only")
        if sampling.logprobs is not None and "first_gen_log_probs" not in self._package.handoff_fields:
            raise Unsupported(f"TensorRT-LLM {self._package.version} cannot hand log probabilities over")
        limit, held = self._config.max_handoff_tokens, self._pinned.tokens
        if limit is not None and held + len(prompt.context) > limit:
            raise Overloaded(f"{held} tokens wait to be fetched; {limit} may", retry_after_seconds=1.0)

    async def _warm_up(self) -> None:
        """One token, before anybody is told that the engine is ready."""
        sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
        async for _ in self._whole(Prompt((0,)), sampling):
            pass
