"""The recent speed of a worker, measured by this router on its own requests."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from baton.inference.v1 import timing_pb2
from runtime.clock import monotonic

# The time constant of the weights of older measurements, in seconds.
_HORIZON_SECONDS = 10.0
# After this time without a measurement the value is unknown.
_FRESH_SECONDS = 5.0
# With fewer measurements the value is unknown.
_ENOUGH = 4
# A prompt that is so many times as long as those that were measured is not predicted by them.
_LONGER = 16.0
# Samples of less variance, as a part of their mean square, do not tell a prompt's time from its tokens'.
_LEAST_SPREAD = 0.1

# A monotonic clock in seconds; tests inject their own.
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens that were sent to be computed, after others: `ahead` and `prompts_ahead` count both."""

    tokens: int
    ahead: int
    prompts_ahead: int
    predicted_tokens: float
    began: float


class _Sums(NamedTuple):
    """Weighted sums of the samples' prompts ahead, tokens ahead, seconds, and own lengths."""

    tokens: float = 0.0
    seconds: float = 0.0
    prompts_squared: float = 0.0
    prompts_by_tokens: float = 0.0
    tokens_squared: float = 0.0
    prompts_by_seconds: float = 0.0
    tokens_by_seconds: float = 0.0
    lengths: float = 0.0
    lengths_squared: float = 0.0


class Throughput:
    """The speed at which prompts leave the queue of a worker, as each one that was computed has found.

    A prompt's sample is how long it took to be computed after all that was sent before it. Those that were cancelled
    have no sample of their own, and no time of theirs is charged to others. Any prompt takes some time however short it
    is: the samples' least squares tell the seconds of a prompt from those of a token.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self.waiting_tokens = 0
        self._waiting_prompts, self._predicted_tokens = 0, 0.0  # the latter are the waiting ones, as they are predicted
        self._clock = clock
        self._sums = _Sums()
        self._count = 0
        self._measured_at = -math.inf

    @property
    def per_second(self) -> float | None:
        """The recent throughput in tokens; None if unknown."""
        if self._count < _ENOUGH or self._clock() - self._measured_at > _FRESH_SECONDS:
            return None
        return self._sums.tokens / max(self._sums.seconds, 1e-9)

    def seconds(self, tokens: int) -> float | None:
        """The time until a prompt of so many tokens is computed, after all that waits; None if unknown.

        At most what the throughput says. A prompt far longer than those measured is taken for one of them, so that it
        is let in and measured.
        """
        speed = self.per_second
        if not speed:
            return None
        tokens_ahead = self._predicted_tokens + self._predicted(tokens)
        of_prompt, of_token = self._costs()
        by_costs = of_prompt * (self._waiting_prompts + 1) + of_token * tokens_ahead
        return min(tokens_ahead / speed, by_costs)

    def begin(self, tokens: int) -> Work:
        """Notes that work was sent. Give what it returns to `end`."""
        self.waiting_tokens += tokens
        self._waiting_prompts += 1
        predicted = self._predicted(tokens)
        self._predicted_tokens += predicted
        return Work(tokens, self.waiting_tokens, self._waiting_prompts, predicted, self._clock())

    def end(self, work: Work, *, is_done: bool) -> None:
        """Notes that work has ended, done or not."""
        self.waiting_tokens -= work.tokens
        self._waiting_prompts -= 1
        # Sums of floats do not come back to zero by themselves.
        self._predicted_tokens = self._predicted_tokens - work.predicted_tokens if self._waiting_prompts else 0.0
        if not is_done:
            return
        now = self._clock()
        # By time, also without work: what was measured in a bad minute must not outlast it.
        kept = math.exp((self._measured_at - now) / _HORIZON_SECONDS)
        own, tokens, prompts, seconds = work.tokens, work.ahead, work.prompts_ahead, now - work.began
        products = (prompts * prompts, prompts * tokens, tokens * tokens, prompts * seconds, tokens * seconds)
        sample = (tokens, seconds, *products, own, own * own)
        self._sums = _Sums(*(kept * total + one for total, one in zip(self._sums, sample, strict=True)))
        self._count += 1
        self._measured_at = now

    def _predicted(self, tokens: int) -> float:
        """The tokens for which a prompt counts: its own, unless it is far longer than those that were measured."""
        sums = self._sums
        if not sums.lengths:
            return tokens
        usual = max(sums.lengths_squared / sums.lengths, sums.tokens_squared / sums.prompts_by_tokens)
        return tokens if tokens <= _LONGER * usual else usual

    def _costs(self) -> tuple[float, float]:
        """The seconds of a prompt and of a token, neither negative. Samples that are all alike tell tokens alone."""
        sums = self._sums
        whole = sums.prompts_squared * sums.tokens_squared
        spread = whole - sums.prompts_by_tokens**2
        if spread <= _LEAST_SPREAD * whole:
            return 0.0, sums.seconds / sums.tokens
        prompts, tokens = sums.prompts_by_seconds, sums.tokens_by_seconds
        of_prompt = (prompts * sums.tokens_squared - tokens * sums.prompts_by_tokens) / spread
        of_token = (tokens * sums.prompts_squared - prompts * sums.prompts_by_tokens) / spread
        if of_prompt < 0:
            return 0.0, tokens / sums.tokens_squared
        return (of_prompt, of_token) if of_token >= 0 else (prompts / sums.prompts_squared, 0.0)


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
