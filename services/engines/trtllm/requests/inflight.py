"""The requests inside TensorRT-LLM: submitted, followed to their end, aborted and counted."""

import asyncio
import inspect
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from baton.errors import BatonError, EngineFailed, InvalidRequest, Overloaded
from services.engines.answer import Tokens
from services.engines.external.requests import ExternalGeneration, ExternalRequests, text_of, token_logprob
from services.engines.trtllm.monitoring import metrics
from services.engines.trtllm.package import Package

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """The seconds that a generation waits.

    `reader` limits the wait for its reader, `abort` the wait for the engine to end an aborted request, and `fetch` the
    wait for KV, during which nothing is aborted.
    """

    reader: float = math.inf
    abort: float = 5.0
    fetch: float = 60.0


class InflightGeneration(ExternalGeneration):
    """Follows a result until it ends. `changed` is set whenever there is more; `error` says why it ended early.

    The first `replayed` ids are those that the client has already. They are skipped by position, never by value.
    A generation that is abandoned ends within its patience, whether or not the engine answers the abort: up to 1.3 an
    engine drops a request that was aborted in its queue without an answer.
    """

    def __init__(
        self, result: Any, tokens: int, replayed: int, logprobs: int | None, patience: Patience = Patience()
    ) -> None:
        super().__init__("TensorRT-LLM", patience.reader)
        self.result = result
        self.tokens = tokens
        self.has_begun = False
        self.is_unanswered = self.is_test = False
        self.keeps: object = None
        self.submitted_at = time.monotonic()
        self.first_at: float | None = None
        self._replayed = self._read = replayed
        self._logprobs = logprobs
        self._patience = patience
        self._abort_at_first = False
        self._unanswered: asyncio.TimerHandle | None = None
        self._aborted = False

    @property
    def output(self) -> Any:
        """The only completion."""
        return self.result.outputs[0]

    @property
    def num_tokens(self) -> int:
        """Tokens with KV: those of the context and the generated ones."""
        return self.tokens + len(self.output.token_ids)

    def start(self, progressed: Callable[[], None]) -> "asyncio.Task[None]":
        """Begins to read the result. The task ends with it."""
        self._following = asyncio.create_task(self._follow(progressed))
        return self._following

    async def _follow(self, progressed: Callable[[], None]) -> None:
        """Reads the result to its end at the engine's pace, however slow the reader is."""
        async for _ in self.result:
            progressed()
            self.first_at = self.first_at or time.monotonic()
            self.has_begun = True
            self.keeps = None
            if self._abort_at_first and not self._aborted:
                self._abort()
            self._reader.has_output()
            self._wake()
        self.finish_reason = self.output.finish_reason

    def end(self, error: BatonError | None = None) -> None:
        self.keeps = None
        super().end(error)

    def pull(self) -> Tokens | None:
        """All ids that were not taken yet."""
        self._reader.has_read()
        ids = tuple(self.output.token_ids[self._read :])
        if not ids:
            return None
        reports = () if self._logprobs is None else self.output.logprobs[self._read : self._read + len(ids)]
        self._read += len(ids)
        pairs = zip(ids, reports, strict=False)
        return Tokens(ids, tuple(token_logprob(token_id, report, self._logprobs or 0) for token_id, report in pairs))

    def abandon(self) -> None:
        """Aborts it inside the engine: at once, or, while KV is being fetched, as soon as the fetch is over.

        Engines have broken when they were aborted in the middle of a transfer.
        """
        if self.has_ended or self._aborted:
            return
        if self.is_fetching:
            self._abort_at_first = True
            self._await_answer(self._patience.fetch + self._patience.abort)
        else:
            self._abort()

    @property
    def is_fetching(self) -> bool:
        """True if KV may be on its way to here."""
        return self._replayed > 0 and not (self.has_begun or self.has_ended)

    def _give_up(self, error: Overloaded) -> None:
        """Frees its batch slot and its blocks for requests that are read."""
        metrics.STALLED_READERS.inc()
        self.abandon()
        self.end(error)

    def _abort(self) -> None:
        self._aborted = True
        metrics.ABORTS.labels("decoding" if self.has_begun else "waiting").inc()
        self._await_answer(self._patience.abort)
        try:
            self.result.abort()
        except (RuntimeError, AttributeError, TypeError, AssertionError) as error:
            # An engine that is shutting down has no executor any more. Its own check tells what this means for it.
            log.warning("trtllm abort failed", error=str(error))

    def _await_answer(self, seconds: float) -> None:
        if self._unanswered is not None:
            self._unanswered.cancel()
        self._unanswered = asyncio.get_running_loop().call_later(seconds, self._stop_following)

    def _stop_following(self) -> None:
        """Stops waiting for a request that the engine has not ended in time."""
        if self._following is None or self._following.done():
            return
        metrics.UNANSWERED_ABORTS.inc()
        self.is_unanswered = True
        self.end(EngineFailed("TensorRT-LLM did not end an aborted request in time"))
        self._following.cancel()


# Besides RequestError, a submission raises these for a request that it refuses.
_REFUSALS = (ValueError, TypeError, AssertionError, NotImplementedError)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """Arguments of one `generate_async` call: `inputs`, which are `tokens` long, and named `arguments`.

    The first `replayed` ids of the answer are known. `keeps` is kept until the answer has begun.
    """

    inputs: Any
    tokens: int
    replayed: int
    logprobs: int | None
    arguments: Mapping[str, Any]
    keeps: object = None
    is_test: bool = False  # which no metric counts


@dataclass(frozen=True, slots=True)
class InflightLimits:
    """Limits: the requests that may run and wait, and the patience of each."""

    requests: int
    block_tokens: int
    patience: Patience


class InflightRequests(ExternalRequests[InflightGeneration]):
    """The requests of one LLM."""

    def __init__(self, llm: Any, package: Package, limits: InflightLimits, on_end: Callable[[Any], None]) -> None:
        super().__init__("TensorRT-LLM", limits.requests, limits.block_tokens)
        self._llm = llm
        self._package = package
        self._patience = limits.patience
        self._on_end = on_end

    def submit(self, request: EngineRequest) -> InflightGeneration:
        """Submits a request to the engine. Raises Overloaded, InvalidRequest, or EngineFailed."""
        self.require_capacity()
        generation = InflightGeneration(
            self._ask(request), request.tokens, request.replayed, request.logprobs, self._patience
        )
        generation.keeps, generation.is_test = request.keeps, request.is_test
        return self.follow(generation, generation.start(self.progressed))

    def _ask(self, request: EngineRequest) -> Any:
        known = {name: value for name, value in request.arguments.items() if value is not None}
        if unknown := sorted(set(known) - self._package.generate_arguments):
            raise EngineFailed(f"TensorRT-LLM {self._package.version} does not take {', '.join(unknown)}")
        self._check_call(request.inputs, known)
        try:
            return self._llm.generate_async(request.inputs, **known)
        except (self._package.request_error, *_REFUSALS) as error:
            # Caught before RuntimeError, since two of them are subclasses of it.
            raise InvalidRequest.of("prompt", str(error) or type(error).__name__) from error
        except RuntimeError as error:
            self._fail(error)
            raise EngineFailed(f"TensorRT-LLM has ended: {error}") from error

    def _check_call(self, inputs: Any, known: Mapping[str, Any]) -> None:
        """Checks that the installed version accepts the call. Every later TypeError is the request's fault."""
        try:
            inspect.signature(self._llm.generate_async).bind(inputs, **known)
        except TypeError as error:
            raise EngineFailed(f"TensorRT-LLM {self._package.version} does not take the call: {error}") from error

    def _record_end(self, generation: InflightGeneration) -> None:
        if not generation.is_unanswered:
            self.progressed()
        if generation.error is None and not generation.is_test:
            self._on_end(generation.result)

    def _converted(self, error: BaseException) -> BatonError:
        if not isinstance(error, self._package.request_error):
            self._fail(error)
        return EngineFailed(f"TensorRT-LLM failed: {text_of(error)}")
