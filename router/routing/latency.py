"""The recent speed of a worker, measured by this router on its own requests."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.inference.v1 import timing_pb2
from runtime.clock import monotonic

# The time constant of the weights of older measurements, in seconds.
_HORIZON_SECONDS = 10.0
# After this time without a measurement the value is unknown.
_FRESH_SECONDS = 5.0
# With fewer measurements the value is unknown.
_ENOUGH = 4

# A monotonic clock in seconds; tests inject their own.
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens that were sent to be computed, after others: `ahead` counts both."""

    tokens: int
    ahead: int
    began: float


class Throughput:
    """Tokens a second that leave the queue of a worker, as each prompt that was computed has found.

    A prompt's sample is how long it took to be computed after all that was sent before it. Those that were cancelled
    have no sample of their own, and no time of theirs is charged to others.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self.waiting_tokens = 0
        self._clock = clock
        self._tokens = self._seconds = 0.0
        self._count = 0
        self._measured_at = -math.inf

    @property
    def per_second(self) -> float | None:
        """The recent throughput; None if unknown."""
        if self._count < _ENOUGH or self._clock() - self._measured_at > _FRESH_SECONDS:
            return None
        return self._tokens / max(self._seconds, 1e-9)

    def begin(self, tokens: int) -> Work:
        """Notes that work was sent. Give what it returns to `end`."""
        self.waiting_tokens += tokens
        return Work(tokens, self.waiting_tokens, self._clock())

    def end(self, work: Work, *, is_done: bool) -> None:
        """Notes that work has ended, done or not."""
        self.waiting_tokens -= work.tokens
        if not is_done:
            return
        now = self._clock()
        # By time, also without work: what was measured in a bad minute must not outlast it.
        kept = math.exp((self._measured_at - now) / _HORIZON_SECONDS)
        self._tokens = self._tokens * kept + work.ahead
        self._seconds = self._seconds * kept + now - work.began
        self._count += 1
        self._measured_at = now


class Average:
    """A moving average over about the last `of` measurements."""

    def __init__(self, of: int = 8, clock: Clock = monotonic) -> None:
        self._of = of
        self._clock = clock
        self._value = 0.0
        self._count = 0
        self._measured_at = -math.inf

    @property
    def value(self) -> float | None:
        """The average; None if unknown."""
        if self._count < _ENOUGH or self._clock() - self._measured_at > _FRESH_SECONDS:
            return None
        return self._value

    def add(self, value: float, now: float | None = None) -> None:
        """Adds a measurement, of `now` if that is known."""
        self._count += 1
        count, of = self._count, self._of
        self._value += (value - self._value) / (count if count < of else of)  # without a call: for each token
        self._measured_at = self._clock() if now is None else now

    def add_repeated(self, value: float, times: int, now: float) -> None:
        """Adds a measurement so many times, of `now`."""
        while times and self._count < self._of:
            self.add(value, now)
            times -= 1
        if times:
            self._count += times
            self._value = value + (self._value - value) * (1 - 1 / self._of) ** times
            self._measured_at = now


class WorkerLatency:
    """A worker's prefill throughput, its wait before the first decode step, and its inter-token latency.

    `token_seconds` are the worker's own reports of complete answers; `recent_token_seconds` are measured here as tokens
    come.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self.clock = clock
        self.prompts = Throughput(clock)
        self.entry_seconds = Average(clock=clock)
        self.token_seconds = Average(clock=clock)
        self.recent_token_seconds = Average(of=32, clock=clock)


class DecodeTimer:
    """Times one Decode call that starts after `emitted` tokens and runs a prompt of `prompt_tokens`, if any."""

    def __init__(self, latency: WorkerLatency, prompt_tokens: int, emitted: int) -> None:
        self._latency = latency
        self._emitted = emitted
        self._prompt = latency.prompts.begin(prompt_tokens) if prompt_tokens else None  # until it is computed
        self._started = latency.clock()
        self._waiting_since: float | None = None  # for tokens after the first ones

    def accepted(self) -> None:
        """Notes that the worker has taken over the KV. Without a handoff this means nothing yet."""
        if self._prompt is None:
            self._latency.entry_seconds.add(self._latency.clock() - self._started)

    def got_tokens(self, count: int) -> None:
        """Notes tokens, which also end the prompt."""
        if self._waiting_since is not None and count:
            self._latency.recent_token_seconds.add((self._latency.clock() - self._waiting_since) / count)
        if self._prompt is not None:
            self._end_prompt(self._prompt, is_done=True)

    def took_token(self) -> None:
        """Notes one token that is passed on at once."""
        now = self._latency.clock()
        if self._waiting_since is not None:
            self._latency.recent_token_seconds.add(now - self._waiting_since, now)
        self._waiting_since = now

    @property
    def recent_token_seconds(self) -> Average:
        """The average of the time between one token and the next, updated as they come."""
        return self._latency.recent_token_seconds

    def has_waited(self, seconds: float) -> None:
        """Notes that a token was passed on so long ago, which is counted already."""
        self._waiting_since = self._latency.clock() - seconds

    def waits_for_more(self) -> None:
        """Notes that the tokens were passed on: the client's time to read them does not count."""
        self._waiting_since = self._latency.clock()

    def finished(self, timings: Iterable[timing_pb2.StageTiming], generated: int) -> None:
        """Notes the worker's report of the whole answer of `generated` tokens. Slow clients do not affect it."""
        count = generated - self._emitted
        for timing in timings:
            if timing.stage == timing_pb2.STAGE_DECODE and count > 0:
                self._latency.token_seconds.add(timing.duration.ToNanoseconds() / 1e9 / count)

    def end(self) -> None:
        """Notes the end of the call, also after a failure."""
        if self._prompt is not None:
            self._end_prompt(self._prompt, is_done=False)

    def _end_prompt(self, work: Work, *, is_done: bool) -> None:
        self._prompt = None
        self._latency.prompts.end(work, is_done=is_done)
