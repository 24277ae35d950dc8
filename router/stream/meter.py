"""The counters and timers of a request's tokens, as they come."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine_protocol.lane import StepCounter
from router.routing.latency import Average, DecodeTimer
from router.telemetry.request_metrics import TokenLatencies
from router.telemetry.stats import RequestStats
from runtime.clock import monotonic
from runtime.telemetry.frequent_metrics import Series


@dataclass(frozen=True, slots=True)
class _SharedLatencies:
    """The places where the latency of a token is counted that came alone, which many requests to a worker share."""

    recent: Average  # of the worker
    of_class: Series  # the metric of the model and the class of the request

    def count(self, seconds: float, tokens: int, now: float) -> None:
        """Counts tokens that came one by one, as engine_protocol.lane.Latencies does."""
        self.recent.add_repeated(seconds, tokens, now)
        self.of_class.observe(seconds, tokens)


class TokenMeter:
    """Counts and times the tokens of one request: for its stats, its timings, the metrics and its worker's latency.

    Tokens that are pushed one by one are settled later, all at once: by `end_call`, and by everything else here that
    would otherwise count with an old value. The latencies of plain ones are counted with those of other calls, once two
    have come in steps after each other. `token_ids` are those of the completion.
    """

    __slots__ = (
        "_latencies",
        "_pushed_at",
        "_recent",
        "_shared",
        "_stats",
        "_steps",
        "_timer",
        "_timings",
        "_token_ids",
        "detokenizing",
    )

    def __init__(self, stats: RequestStats, latencies: TokenLatencies, token_ids: Sequence[int]) -> None:
        self._stats = stats
        self._timings = stats.timings
        self._latencies = latencies
        self._shared: _SharedLatencies | None = None  # of the call, once all that a token needs is counted there
        self._steps: StepCounter | None = None  # while it counts the tokens that are pushed
        self._token_ids = token_ids
        self._timer: DecodeTimer | None = None  # of the running decode call
        self._recent: Average | None = None  # of the worker of that call
        self._pushed_at: float | None = None  # of the last token that was pushed, in seconds of time.monotonic
        self.detokenizing = 0  # nanoseconds, of the token that is being pushed; plain ones take none

    def begin_call(self, timer: DecodeTimer) -> None:
        """Times a decode call, until `end_call`."""
        self._timer, self._recent, self._shared = timer, timer.recent_token_seconds, None

    def end_call(self) -> None:
        """Counts all tokens, and ends the timing of the call, also after a failure."""
        if self._pushed_at is not None:
            self.settle()
        self._stats.completion_tokens = len(self._token_ids)
        self.detokenizing = 0
        if self._timer is not None:
            self._timer.end()
            self._timer = None

    # Tokens that are pushed, one by one.

    def detokenized_for(self, nanoseconds: int) -> None:
        """Notes what finding the text of the token that is being pushed took; plain ones have theirs."""
        if self._pushed_at is not None:
            self.settle()
        self.detokenizing += nanoseconds

    def count(self, now: float, steps: StepCounter | None) -> bool:
        """Counts and times a token that was sent. See SinkMeter."""
        if self._steps is not None:
            return True
        before, shared = self._pushed_at, self._shared
        if before is None or shared is None:
            self._count_detokenized(now)
            return False
        self._pushed_at = now
        shared.count(now - before, 1, now)
        if steps is None or before != steps.previous_at:
            return False
        steps.join(shared)
        self._steps = steps
        return True

    def leave(self) -> None:
        """Times the next token by itself. See SinkMeter."""
        steps, self._steps = self._steps, None
        if steps is not None and self._shared is not None:
            self._pushed_at = steps.counted_at
            steps.leave(self._shared)

    def _count_detokenized(self, now: float) -> None:
        took, self.detokenizing = self.detokenizing, 0
        assert self._timer is not None
        self._timer.took_token()
        self._stats.completion_tokens = len(self._token_ids)
        self._latencies.observe(self._timings.detokenized_for(took), 1)
        single = self._latencies.single
        if single is not None:
            assert self._recent is not None
            self._shared = self._shared or _SharedLatencies(self._recent, single)
            self._pushed_at = now

    def settle(self) -> None:
        """Counts all tokens that were pushed; the next one is timed by itself."""
        self.leave()
        pushed_at, self._pushed_at = self._pushed_at, None
        if pushed_at is not None and self._timer is not None:
            ago = monotonic() - pushed_at
            self._stats.completion_tokens = len(self._token_ids)
            self._timer.has_waited(ago)
            self._timings.token_came(ago)

    # Tokens of a response.

    def arrived(self, count: int) -> None:
        """Times tokens of the running call that have come together."""
        if self._pushed_at is not None:
            self.settle()
        assert self._timer is not None
        self._timer.got_tokens(count)

    def detokenized(self, started: int, count: int) -> None:
        """Counts tokens of a response that were turned into text since `started`, of time.perf_counter_ns."""
        if self._pushed_at is not None:
            self.settle()
        self._stats.completion_tokens = len(self._token_ids)
        self._latencies.observe(self._timings.detokenized(started), count)

    def passed_on(self) -> None:
        """Notes that the client has been sent them: its time to read them is not the worker's."""
        if self._timer is not None:
            self._timer.waits_for_more()
