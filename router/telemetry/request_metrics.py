"""Measures requests for Prometheus: inter-token latency as tokens come, everything else at the end."""

from functools import cache, lru_cache, partial

from baton.enum_names import UNKNOWN, value_name
from baton.inference.v1 import sampling_pb2, timing_pb2
from router.telemetry import metrics
from router.telemetry.stages import name_of
from router.telemetry.stats import GENERATE, RequestStats
from rpc.status import OK, outcome_of
from runtime.telemetry.frequent_metrics import Count, Series

# Bounds of the request classes, in prompt tokens. Requests with images have a class of their own.
_SHORT_TOKENS = 1024
_MEDIUM_TOKENS = 8192

_TOKEN_KINDS = ("prompt", "cached", "media", "completion")


def began() -> None:
    """Counts a request that begins to run."""
    metrics.RUNNING.inc()


def ended(stats: RequestStats) -> None:
    """Counts a request that has ended, and its tokens. Its duration counts only if it succeeded: failures are often
    fast.
    """
    metrics.RUNNING.dec()
    measured_as = request_class(stats)
    _ended(stats.model, measured_as, stats.outcome, _reason(stats)).inc()
    if stats.prompt_tokens:
        series = _series(stats.model, measured_as)
        series.count_tokens(stats)
        series.time_first_token(stats)
        if stats.outcome == OK:
            series.time(stats)


class TokenLatencies:
    """The token latencies of one request whose model and prompt length are known."""

    __slots__ = ("_has_first", "_inter_token", "_is_settled", "_series", "_stats")

    def __init__(self, stats: RequestStats) -> None:
        self._series = series = _series(stats.model, request_class(stats))
        self._inter_token = series.inter_token
        self._stats = stats
        self._has_first = False
        self._is_settled = False

    @property
    def single(self) -> Series | None:
        """The counter of tokens that come alone, once nothing else is left to count; None before that."""
        return self._inter_token if self._is_settled else None

    def observe(self, seconds: float, tokens: int) -> None:
        """Counts tokens. Called for each message with tokens: it must be quick."""
        if self._is_settled and tokens == 1:
            self._inter_token.observe(seconds)
            return
        if not self._has_first:
            self._has_first = True
            return
        if not self._stats.is_first_token_timed and self._stats.timings.has_sent_first_token:
            # Do not wait for the end of the request, which may take minutes.
            self._series.time_first_token(self._stats)
        self._is_settled = self._stats.is_first_token_timed
        if tokens:
            self._inter_token.observe(seconds / tokens, tokens)


def request_class(stats: RequestStats) -> str:
    """The label `request_class`: a role such as embed, or image, short, medium, long; unknown until it is tokenized."""
    if stats.operation != GENERATE:
        return stats.operation
    if stats.media_tokens:
        return "image"
    if not stats.prompt_tokens:
        return "unknown"
    if stats.prompt_tokens < _SHORT_TOKENS:
        return "short"
    return "medium" if stats.prompt_tokens < _MEDIUM_TOKENS else "long"


class _ClassSeries:
    """The series of one model and class. Looking them up by labels would take longer than counting."""

    def __init__(self, model: str, measured_as: str) -> None:
        self._first_token = metrics.TTFT.labels(model, measured_as)
        self.inter_token = metrics.INTER_TOKEN_LATENCY.labels(model, measured_as)
        self._seconds = metrics.REQUEST_SECONDS.labels(model, measured_as)
        self._stages = {
            number: metrics.STAGE_SECONDS.labels(model, measured_as, name_of(number))
            for number in timing_pb2.Stage.values()[1:]
        }
        self._unknown_stage = partial(metrics.STAGE_SECONDS.labels, model, measured_as, UNKNOWN)
        self._tokens = [metrics.TOKENS.labels(model, measured_as, kind) for kind in _TOKEN_KINDS]

    def count_tokens(self, stats: RequestStats) -> None:
        counts = (stats.prompt_tokens, stats.cached_tokens, stats.media_tokens, stats.completion_tokens)
        for counter, count in zip(self._tokens, counts, strict=True):
            if count:
                counter.inc(count)

    def time_first_token(self, stats: RequestStats) -> None:
        """Observes the time to the first token, once, if there was one."""
        seconds = stats.timings.first_token_seconds
        if seconds is not None and not stats.is_first_token_timed:
            stats.is_first_token_timed = True
            self._first_token.observe(seconds)

    def time(self, stats: RequestStats) -> None:
        """Observes the total and each stage. A stage that ran several times counts as the sum."""
        self._seconds.observe(stats.timings.total_seconds)
        stages: dict[timing_pb2.Stage.ValueType, int] = {}
        for stage in stats.timings.close():
            number = stage.stage
            stages[number] = stages[number] + stage.nanoseconds if number in stages else stage.nanoseconds
        for number, nanoseconds in stages.items():
            # A worker of a newer version has stages without a name here.
            series = self._stages[number] if number in self._stages else self._unknown_stage()
            series.observe(nanoseconds / 1e9)


@cache  # bounded by the number of models and classes
def _series(model: str, measured_as: str) -> _ClassSeries:
    return _ClassSeries(model, measured_as)


@cache  # bounded like those, and by the number of reasons
def _ended(model: str, measured_as: str, outcome: str, reason: str) -> Count:
    return metrics.REQUESTS.labels(model, measured_as, outcome_of(outcome), reason)


def _reason(stats: RequestStats) -> str:
    """The error's reason, or the finish reason."""
    if stats.outcome != OK or stats.operation != GENERATE:
        return stats.outcome
    return _finish_name(stats.finish_reason)


@lru_cache(64)
def _finish_name(reason: sampling_pb2.FinishReason.ValueType) -> str:
    return value_name(sampling_pb2.FinishReason, reason).upper()
