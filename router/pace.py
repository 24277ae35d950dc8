"""How fast a worker computes, as this router sees it: measured from the requests that it sent there, of late."""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from baton.inference.v1 import timing_pb2

# Older measurements count less, by the seconds in which there was work.
_HORIZON_SECONDS = 10.0
# What was not measured for so long is not known any more: then requests go through, and are measured.
_FRESH_SECONDS = 5.0
# From so many measurements on they are believed.
_ENOUGH = 4


class Throughput:
    """Tokens a second while there is any work. Requests side by side are one stretch of work, not several."""

    def __init__(self) -> None:
        self.waiting_tokens = 0
        self._running = 0
        self._since = 0.0
        self._tokens = self._seconds = 0.0
        self._count = 0
        self._measured_at = -math.inf

    @property
    def per_second(self) -> float | None:
        """None as long as it is not known."""
        if self._count < _ENOUGH or time.monotonic() - self._measured_at > _FRESH_SECONDS:
            return None
        return self._tokens / max(self._seconds, 1e-9)

    def begin(self, tokens: int) -> None:
        """Work has been sent."""
        if not self._running:
            self._since = time.monotonic()
        self._running += 1
        self.waiting_tokens += tokens

    def end(self, tokens: int, *, is_done: bool) -> None:
        """It has come back, done or not."""
        self._running -= 1
        self.waiting_tokens -= tokens
        if not is_done:
            return
        now = time.monotonic()
        elapsed, self._since = now - self._since, now
        kept = math.exp(-elapsed / _HORIZON_SECONDS)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + elapsed
        self._count += 1
        self._measured_at = now

    @contextmanager
    def computing(self, tokens: int) -> Iterator[None]:
        """The time of such work."""
        self.begin(tokens)
        is_done = False
        try:
            yield
            is_done = True
        finally:
            self.end(tokens, is_done=is_done)


class Average:
    """A value that changes slowly, of the last `of` measurements or so. None as long as it is not known."""

    def __init__(self, of: int = 8) -> None:
        self._of = of
        self._value = 0.0
        self._count = 0
        self._measured_at = -math.inf

    @property
    def value(self) -> float | None:
        if self._count < _ENOUGH or time.monotonic() - self._measured_at > _FRESH_SECONDS:
            return None
        return self._value

    def add(self, value: float) -> None:
        """One more measurement."""
        self._count += 1
        self._value += (value - self._value) / min(self._count, self._of)
        self._measured_at = time.monotonic()


class Pace:
    """A worker's: prompts, the wait for a decode's first step, and the seconds from token to token.

    These are known of whole answers from the worker itself, and of the last tokens from how long they were waited for.
    """

    def __init__(self) -> None:
        self.prompts = Throughput()
        self.entry_seconds = Average()
        self.token_seconds = Average()
        self.recent_token_seconds = Average(of=32)


class DecodeTimer:
    """Times one decode, which begins after `emitted` tokens. With `prompt_tokens` the prompt is run there too."""

    def __init__(self, pace: Pace, prompt_tokens: int, emitted: int) -> None:
        self._pace = pace
        self._emitted = emitted
        self._prompt_tokens = prompt_tokens
        self._started = time.monotonic()
        self._waiting_since = 0.0  # for tokens after the first ones
        if prompt_tokens:
            pace.prompts.begin(prompt_tokens)

    def accepted(self) -> None:
        """The worker begins to decode what it pulled; without a handoff that says nothing yet."""
        if not self._prompt_tokens:
            self._pace.entry_seconds.add(time.monotonic() - self._started)

    def got_tokens(self, count: int) -> None:
        """So the prompt is done."""
        if self._waiting_since and count:
            self._pace.recent_token_seconds.add((time.monotonic() - self._waiting_since) / count)
        if self._prompt_tokens:
            self._end_prompt(is_done=True)

    def waits_for_more(self) -> None:
        """The tokens have been passed on, however long our reader took."""
        self._waiting_since = time.monotonic()

    def finished(self, timings: Iterable[timing_pb2.StageTiming], generated: int) -> None:
        """After so many tokens in all. How long they took is the worker's to say: our reader may be slow."""
        count = generated - self._emitted
        for timing in timings:
            if timing.stage == timing_pb2.STAGE_DECODE and count > 0:
                self._pace.token_seconds.add(timing.duration.ToNanoseconds() / 1e9 / count)

    def end(self) -> None:
        """It is over, however it ended."""
        if self._prompt_tokens:
            self._end_prompt(is_done=False)

    def _end_prompt(self, *, is_done: bool) -> None:
        tokens, self._prompt_tokens = self._prompt_tokens, 0
        self._pace.prompts.end(tokens, is_done=is_done)
