"""The requests inside SGLang: submitted, followed to their end, aborted and counted."""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.errors import BatonError, EngineFailed, HandoffLost, InvalidRequest, Overloaded
from runtime.aio import timeout
from services.engines.answer import Finished, FinishReason, TokenLogprob, Tokens
from services.engines.base import ModelFacts
from services.engines.external.requests import ExternalGeneration, ExternalRequests, RequestLimits, text_of
from services.engines.prompt import Prompt, Sampling
from services.engines.sglang import metrics
from services.engines.sglang.package import SglangPackage

_ABORTED = "abort"
_ABORT_AGAIN_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class SglangRequest:
    """A prompt, the arguments of its GenerateReqInput, and how many alternatives each token's report has."""

    prompt: tuple[int, ...]
    arguments: Mapping[str, Any] = field(repr=False)
    logprobs: int | None = None


class SglangGeneration(ExternalGeneration):
    """The output of a request. SGLang sends all ids so far each time."""

    def __init__(self, request: SglangRequest, name: str, reader_seconds: float) -> None:
        super().__init__("SGLang", reader_seconds)
        self.request = request
        self.name = name
        self.cached_tokens = 0
        self.ids: list[int] = []
        self.known = 0
        self.message = ""
        self._reports: list[TokenLogprob] = []
        self._read = 0
        self._abort: Callable[[], None] = lambda: None

    @property
    def num_tokens(self) -> int:
        """Tokens with KV: those of the prompt and the generated ones."""
        return len(self.request.prompt) + len(self.ids)

    @property
    def was_aborted(self) -> bool:
        """True if SGLang ended it early, of itself or by our word."""
        return self.finish_reason == _ABORTED

    async def first_ids(self, known: tuple[int, ...]) -> None:
        """Waits until SGLang has generated the ids that the client has, which are not yielded again.

        Raises HandoffLost if it generated others, or ended before.
        """
        await self.reached(lambda: len(self.ids) >= len(known))
        if self.error is not None:
            raise self.error
        if tuple(self.ids[: len(known)]) != known:
            raise HandoffLost("SGLang did not go on from the tokens that were sent already")
        self._read = self.known = len(known)
        self._wake()

    def start(self, outputs: Any, progressed: Callable[[], None], abort: Callable[[], None]) -> "asyncio.Task[None]":
        """Begins to read. The task ends when SGLang has, and raises what SGLang raised."""
        self._abort = abort
        self._following = asyncio.create_task(self._follow(outputs, progressed))
        return self._following

    async def _follow(self, outputs: Any, progressed: Callable[[], None]) -> None:
        async for output in outputs:
            progressed()
            self._note(output)
            self._reader.has_output()
            self._wake()
        if self.was_aborted:
            raise EngineFailed(f"SGLang aborted the request: {self.message or 'without a reason'}")

    def _note(self, output: Mapping[str, Any]) -> None:
        told = output["meta_info"]
        new = output.get("output_ids", ())[len(self.ids) :]
        if self.request.logprobs is not None and new:
            self._reports += _reports(told, len(self.ids), len(new), self.request.logprobs)
        self.ids += new
        self.cached_tokens = max(self.cached_tokens, int(told.get("cached_tokens") or 0))
        if (finish := told.get("finish_reason")) is not None:
            self.finish_reason = str(finish["type"])
            self.message = str(finish.get("message") or "")

    def pull(self) -> Tokens | None:
        """All ids that were not pulled yet, without the known ones."""
        self._reader.has_read()
        ids = tuple(self.ids[self._read :])
        if not ids:
            return None
        reports = tuple(self._reports[self._read : self._read + len(ids)])
        self._read += len(ids)
        return Tokens(ids, reports)

    def only(self) -> tuple[int, TokenLogprob | None]:
        """The only token of a prefill. An aborted one may end without an error, and then has none."""
        if len(self.ids) != 1 or self.was_aborted:
            raise EngineFailed(f"a prefill of SGLang must answer one token, and answered {len(self.ids)}")
        return self.ids[0], self._reports[0] if self._reports else None

    def _give_up(self, error: Overloaded) -> None:
        """Frees its place in the batch and its blocks for requests that are read."""
        metrics.STALLED_READERS.inc()
        self.end(error)
        self._abort()


class SglangRequests(ExternalRequests[SglangGeneration]):
    """The requests of one engine. Names have equal lengths: an abort ends each whose name begins with the given one."""

    def __init__(self, llm: Any, package: SglangPackage, limits: RequestLimits) -> None:
        super().__init__("SGLang", limits.requests, limits.block_tokens)
        self._manager = llm.tokenizer_manager
        self._package = package
        self._limits = limits
        self._numbers = itertools.count()

    def submit(self, request: SglangRequest) -> SglangGeneration:
        """Submits a request. Raises Overloaded if too many are here, and Unavailable after a fatal error."""
        self.require_capacity()
        name = f"baton-{next(self._numbers):016d}"
        asked = self._package.generate_request(
            rid=name,
            input_ids=list(request.prompt),
            stream=True,
            return_logprob=request.logprobs is not None,
            top_logprobs_num=request.logprobs or 0,
            **request.arguments,
        )
        generation = SglangGeneration(request, name, self._limits.reader_seconds)
        outputs = self._manager.generate_request(asked, None)
        task = generation.start(outputs, self.progressed, lambda: self._manager.abort_request(name))
        return self.follow(generation, task)

    async def drop(self, generation: SglangGeneration) -> None:
        """Aborts a request, and returns when SGLang has ended it, within `abort_seconds`.

        SGLang does nothing at an abort of a request that has not reached its scheduler, or that moves between two
        queues, so the abort is repeated. The task that follows it is not cancelled before: SGLang would forget it.
        """
        task = self._tasks.get(generation)
        if task is None:
            return
        metrics.ABORTS.inc()
        try:
            async with timeout(self._limits.abort_seconds):
                while not task.done():
                    if self.failure is not None:
                        break
                    self._manager.abort_request(generation.name)
                    await asyncio.wait([task], timeout=_ABORT_AGAIN_SECONDS)
        except TimeoutError:
            metrics.UNANSWERED_ABORTS.inc()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])

    def fail(self, error: BaseException) -> None:
        """Notes a fatal error, and ends every request."""
        self._fail(error)
        for task in self._tasks.values():
            task.cancel()

    def _ended(self, generation: SglangGeneration, task: "asyncio.Task[None]") -> None:
        if task.cancelled() and self.failure is not None:
            generation.end(self.failure)
        super()._ended(generation, task)

    def _converted(self, error: BaseException) -> BatonError:
        if isinstance(error, ValueError):
            return InvalidRequest.of("prompt", str(error))
        return EngineFailed(f"SGLang failed: {text_of(error)}")


def finish_reason(generation: SglangGeneration, sampling: Sampling, facts: ModelFacts) -> FinishReason:
    """Converts the reason of the end. Raises EngineFailed for one that no request should end by."""
    if generation.finish_reason == "length":
        return FinishReason.LENGTH
    if generation.finish_reason != "stop":
        raise EngineFailed(f"SGLang ended the request by {generation.finish_reason!r}")
    return reason_of(generation.ids[-1], sampling, facts) or FinishReason.STOP_TOKEN


def reason_of(token_id: int, sampling: Sampling, facts: ModelFacts) -> FinishReason | None:
    """The reason for which a token ends an answer; None if it does not."""
    if token_id in facts.eos_token_ids and not sampling.ignore_eos:
        return FinishReason.END_OF_SEQUENCE
    return FinishReason.STOP_TOKEN if token_id in sampling.stop_token_ids else None


def finished(generation: SglangGeneration, prompt: Prompt, sampling: Sampling, facts: ModelFacts) -> Finished:
    """Returns the end of an answer."""
    return Finished(
        reason=finish_reason(generation, sampling, facts),
        prompt_tokens=len(prompt.token_ids),
        # With KV of another worker SGLang counts what was cached there.
        cached_tokens=0 if generation.known else min(generation.cached_tokens, len(prompt.token_ids)),
    )


def _reports(told: Mapping[str, Any], start: int, count: int, top: int) -> list[TokenLogprob]:
    """SGLang's reports of the tokens from `start` on: triples of log probability, id and text."""
    chosen = told["output_token_logprobs"][start : start + count]
    likeliest = told.get("output_top_logprobs", ())[start : start + count] if top else [()] * count
    return [
        TokenLogprob(int(token_id), float(logprob), tuple((int(each), float(value)) for value, each, _ in others or ()))
        for (logprob, token_id, _), others in zip(chosen, likeliest, strict=True)
    ]
