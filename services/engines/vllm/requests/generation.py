"""The output of one request of vLLM, followed to its end at the engine's pace, however slow its reader is."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from baton.errors import EngineFailed, HandoffLost, Overloaded
from services.engines.answer import PromptLogprobs, TokenLogprob, Tokens
from services.engines.external.requests import ExternalGeneration, prompt_logprobs, token_logprob
from services.engines.vllm.monitoring import metrics
from services.engines.vllm.requests.sampling import Plan

_FAILED = "error"


class KnownTokensDiffer(HandoffLost):
    """vLLM generated other tokens than those that the client has."""


@dataclass(frozen=True, slots=True)
class VllmRequest:
    """The arguments of one call of `generate`, what it computes, and how many log probabilities each token gets, and
    each of the first `reported` tokens of the prompt. One that is not `recomputable` has images without embeddings.
    """

    plan: Plan
    arguments: Mapping[str, Any] = field(repr=False)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    reported: int = 0
    recomputable: bool = True


@dataclass(frozen=True, slots=True)
class Stages:
    """The seconds of a request's stages, by vLLM's own clock."""

    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


class VllmGeneration(ExternalGeneration):
    """The output of a request, the first tokens of which may be known."""

    def __init__(self, request: VllmRequest, reader_seconds: float) -> None:
        super().__init__("vLLM", reader_seconds)
        self.request = request
        self.kv_transfer: Mapping[str, Any] | None = None
        self.cached_tokens = 0
        self.prompt_logprobs: PromptLogprobs | None = None
        self.ids: list[int] = []
        self._reports: list[TokenLogprob] = []
        self._read = len(request.plan.known)
        self._timestamps: Any = None

    @property
    def num_tokens(self) -> int:
        """Tokens with KV: those of vLLM's prompt and the generated ones."""
        return len(self.request.plan.prompt) + len(self.ids)

    @property
    def has_known_tokens(self) -> bool:
        """True if every token that the client has already was generated, and at least one token at all."""
        return len(self.ids) >= max(1, len(self.request.plan.known))

    async def known(self) -> None:
        """Waits until the known tokens, and one at least, are there, or the end. Raises what ended it early."""
        await self.reached(lambda: self.has_known_tokens)
        if self.error is not None:
            raise self.error
        self._wake()

    def start(self, outputs: Any, progressed: Callable[[], None]) -> "asyncio.Task[None]":
        """Begins to read. The task ends when vLLM has, and raises what vLLM raised."""
        self._following = asyncio.create_task(self._follow(outputs, progressed))
        return self._following

    async def _follow(self, outputs: Any, progressed: Callable[[], None]) -> None:
        async with aclosing(outputs):
            async for output in outputs:
                progressed()
                self._note(output)
                self._reader.has_output()
                self._wake()

    def _note(self, output: Any) -> None:
        completion = output.outputs[0]
        self._timestamps = output.metrics or self._timestamps
        self._check(completion)
        self.ids += completion.token_ids
        if self.request.logprobs is not None and completion.logprobs:
            pairs = zip(completion.token_ids, completion.logprobs, strict=True)
            self._reports += [token_logprob(token_id, each, self.request.logprobs) for token_id, each in pairs]
        self._record_prompt(output)
        self.finish_reason = completion.finish_reason or self.finish_reason
        self.kv_transfer = output.kv_transfer_params or self.kv_transfer
        self.cached_tokens = max(self.cached_tokens, output.num_cached_tokens or 0)

    def _check(self, completion: Any) -> None:
        """Raises what makes these tokens wrong, before anyone can read them: an error is seen only later."""
        before, known, stamps = len(self.ids), self.request.plan.known, self._timestamps
        if completion.finish_reason == _FAILED:
            raise EngineFailed("vLLM ended the request by an error; if it waited for KV, that did not arrive")
        if stamps is not None and stamps.num_preemptions and not self.request.recomputable:
            raise HandoffLost("vLLM preempted the request, and has no images to compute its prompt again")
        again = tuple(completion.token_ids)[: max(0, len(known) - before)]
        if again != known[before : before + len(again)]:
            raise KnownTokensDiffer("vLLM generated other tokens than those that were sent already")

    def _record_prompt(self, output: Any) -> None:
        top, reports = self.request.prompt_logprobs, output.prompt_logprobs
        if top is not None and reports and self.prompt_logprobs is None:
            token_ids = self.request.plan.prompt[: self.request.reported]
            self.prompt_logprobs = prompt_logprobs(token_ids, reports, top)

    def pull(self) -> Tokens | None:
        """All ids that were not pulled yet, without the known ones."""
        self._reader.has_read()
        ids = tuple(self.ids[self._read :])
        if not ids:
            return None
        reports = tuple(self._reports[self._read : self._read + len(ids)])
        is_first = self._read == len(self.request.plan.known)
        self._read += len(ids)
        return Tokens(ids, reports, self.prompt_logprobs if is_first else None)

    def first(self) -> tuple[int, TokenLogprob | None]:
        """The first token that is not known, of a prefill."""
        position = len(self.request.plan.known)
        if len(self.ids) != position + 1:
            raise EngineFailed("a prefill of vLLM must answer one token")
        return self.ids[position], self._reports[position] if self._reports else None

    def stages(self) -> Stages:
        """The seconds of its stages; 0 where vLLM has not said them."""
        stamps = self._timestamps
        if stamps is None:
            return Stages()
        queued, scheduled = stamps.queued_ts, stamps.scheduled_ts
        first, last = stamps.first_token_ts, stamps.last_token_ts
        return Stages(_between(queued, scheduled), _between(scheduled, first), _between(first, last))

    def stop(self) -> None:
        """Stops following; closing vLLM's generator is its abort."""
        if self._following is not None:
            self._following.cancel()

    def _give_up(self, error: Overloaded) -> None:
        """Frees its place in the batch and its blocks for requests that are read."""
        metrics.STALLED_READERS.inc()
        self.end(error)
        self.stop()


def _between(start: float, end: float) -> float:
    return max(0.0, end - start) if start and end else 0.0
