"""One request inside TensorRT-LLM, as it is read: outputs there are cumulative, and here come piece by piece."""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

import structlog

from rpc.errors import BatonError, EngineFailed, Overloaded
from services.answer import TokenLogprob, Tokens
from services.engines.trtllm import metrics

log = structlog.get_logger(__name__)


class Generation:
    """Follows a result until it ends. `changed` is set whenever there is more; `error` is why there will be no more.

    `replayed` ids come first that the client has already: they are counted off by position, never by value.
    """

    def __init__(self, result: Any, tokens: int, replayed: int, logprobs: int | None) -> None:
        self.result = result
        self.tokens = tokens
        self.changed = asyncio.Event()
        self.ended = asyncio.Event()
        self.has_begun = False
        self.keeps: object = None
        self.reader_seconds = math.inf
        self.error: BatonError | None = None
        self.finish_reason: str | None = None
        self.submitted_at = time.monotonic()
        self.first_at: float | None = None
        self.ended_at: float | None = None
        self._replayed = self._read = replayed
        self._logprobs = logprobs
        self._abort_at_first = False
        self._unread: asyncio.TimerHandle | None = None
        self._aborted = False

    @property
    def output(self) -> Any:
        """The only completion."""
        return self.result.outputs[0]

    @property
    def has_ended(self) -> bool:
        return self.ended_at is not None

    @property
    def num_tokens(self) -> int:
        """Tokens with KV: the context's, and what was generated."""
        return self.tokens + len(self.output.token_ids)

    async def follow(self, progressed: Callable[[], None]) -> None:
        """Reads the result to its end, which keeps its queue empty whoever else is slow."""
        async for _ in self.result:
            progressed()
            self.first_at = self.first_at or time.monotonic()
            self.has_begun = True
            self.keeps = None
            if self._abort_at_first and not self._aborted:
                self._abort()
            self._await_reader()
            self.changed.set()
        self.finish_reason = self.output.finish_reason

    def end(self, error: BatonError | None = None) -> None:
        """Nothing more will come."""
        if self.has_ended:
            return
        self.ended_at = time.monotonic()
        self.keeps = None
        self._has_reader()
        self.error = error
        if error is None and self.finish_reason is None:
            self.error = EngineFailed("TensorRT-LLM ended the request without a reason")
        self.changed.set()
        self.ended.set()

    def take(self) -> Tokens | None:
        """All ids that nobody has taken yet."""
        self._has_reader()
        ids = tuple(self.output.token_ids[self._read :])
        if not ids:
            return None
        reports = () if self._logprobs is None else self.output.logprobs[self._read : self._read + len(ids)]
        self._read += len(ids)
        pairs = zip(ids, reports, strict=False)
        return Tokens(ids, tuple(token_logprob(token_id, report, self._logprobs or 0) for token_id, report in pairs))

    def abandon(self) -> None:
        """Ends it inside the engine: at once, or, while KV is being fetched, as soon as that is over.

        An abort in the middle of a transfer is what engines have been seen to break by.
        """
        if self.has_ended or self._aborted:
            return
        if self.is_fetching:
            self._abort_at_first = True
        else:
            self._abort()

    @property
    def is_fetching(self) -> bool:
        """Whether KV may be on its way to here."""
        return self._replayed > 0 and not (self.has_begun or self.has_ended)

    def _await_reader(self) -> None:
        if self._unread is None and self.reader_seconds < math.inf:
            self._unread = asyncio.get_running_loop().call_later(self.reader_seconds, self._give_up)

    def _has_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _give_up(self) -> None:
        """Its batch slot and its blocks are for those who read."""
        metrics.STALLED_READERS.inc()
        self.abandon()
        self.end(Overloaded(f"nobody has read the answer for {self.reader_seconds} s", retry_after_seconds=1.0))

    def _abort(self) -> None:
        self._aborted = True
        metrics.ABORTS.labels("decoding" if self.has_begun else "waiting").inc()
        try:
            self.result.abort()
        except RuntimeError as error:
            # Some builds do; whatever it means for the engine, its own check will tell.
            log.warning("trtllm abort failed", error=str(error))


def token_logprob(token_id: int, report: Any, rivals: int) -> TokenLogprob:
    """Of either shape: a number, or the likeliest tokens and the sampled one."""
    if isinstance(report, float):
        return TokenLogprob(token_id, report)
    ranked = sorted(report.items(), key=lambda item: -item[1].logprob)
    top = tuple((rival, float(value.logprob)) for rival, value in ranked[:rivals])
    return TokenLogprob(token_id, float(report[token_id].logprob), top)
