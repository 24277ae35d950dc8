"""Measures requests for Prometheus: their tokens as they come, everything else at their end."""

from collections import defaultdict
from functools import cache
from typing import Protocol

from baton.inference.v1 import sampling_pb2, timing_pb2

from router import metrics
from router.account import Account
from router.stages import name_of
from rpc.outcomes import OK, outcome_of

# By the tokens of the prompt. Requests with images are a class of their own.
_SHORT_TOKENS = 1024
_MEDIUM_TOKENS = 8192

_TOKEN_KINDS = ("prompt", "cached", "media", "completion")


class Latencies(Protocol):
    """When the tokens of one request come."""

    def saw(self, seconds: float, tokens: int) -> None:
        """Tokens have come, `seconds` after those before them; the first ones, after the request's arrival."""


class Meter(Protocol):
    """Whether and how requests are measured."""

    def begin(self) -> None:
        """One more runs."""

    def latencies(self, account: Account) -> Latencies:
        """For the tokens of a request of which all is known now but its answer."""

    def end(self, account: Account) -> None:
        """It has ended."""


class Unmeasured:
    """A Meter and Latencies for routers that serve no metrics."""

    def begin(self) -> None:
        """Nothing."""

    def latencies(self, account: Account) -> "Unmeasured":
        """None are measured."""
        del account
        return self

    def saw(self, seconds: float, tokens: int) -> None:
        """Nothing."""

    def end(self, account: Account) -> None:
        """Nothing."""


class Measured:
    """A Meter that feeds router/metrics.py."""

    def begin(self) -> None:
        """One more runs."""
        metrics.RUNNING.inc()

    def latencies(self, account: Account) -> "MeasuredLatencies":
        """For its model and class."""
        return MeasuredLatencies(_series(account.model, request_class(account)), account)

    def end(self, account: Account) -> None:
        """Counts it, and its tokens. How long it took counts only if it ended well: failures are fast for nothing."""
        metrics.RUNNING.dec()
        measured_as = request_class(account)
        metrics.REQUESTS.labels(account.model, measured_as, outcome_of(account.outcome), _reason(account)).inc()
        if account.prompt_tokens:
            series = _series(account.model, measured_as)
            series.count_tokens(account)
            series.time_first_token(account)
            if account.outcome == OK:
                series.time(account)


class MeasuredLatencies:
    """The latencies of one request."""

    __slots__ = ("_account", "_has_first", "_inter_token", "_series")

    def __init__(self, series: "_ClassSeries", account: Account) -> None:
        self._series = series
        self._inter_token = series.inter_token
        self._account = account
        self._has_first = False

    def saw(self, seconds: float, tokens: int) -> None:
        """Called for every message with tokens, so that it has to be quick."""
        if not self._has_first:
            self._has_first = True
            return
        if not self._account.is_first_token_timed and self._account.ledger.has_sent_first_token:
            # An answer may go on for minutes from here.
            self._series.time_first_token(self._account)
        if tokens:
            self._inter_token.observe(seconds / tokens, tokens)


def request_class(account: Account) -> str:
    """What to compare a request with: of four kinds, or unknown before it is tokenized."""
    if account.media_tokens:
        return "image"
    if not account.prompt_tokens:
        return "unknown"
    if account.prompt_tokens < _SHORT_TOKENS:
        return "short"
    return "medium" if account.prompt_tokens < _MEDIUM_TOKENS else "long"


class _ClassSeries:
    """The series of one model and class. To look them up by their labels takes longer than to count."""

    def __init__(self, model: str, measured_as: str) -> None:
        self._first_token = metrics.TTFT.labels(model, measured_as)
        self.inter_token = metrics.INTER_TOKEN_LATENCY.labels(model, measured_as)
        self._seconds = metrics.REQUEST_SECONDS.labels(model, measured_as)
        self._stages = {
            number: metrics.STAGE_SECONDS.labels(model, measured_as, name_of(number))
            for number in timing_pb2.Stage.values()[1:]
        }
        self._tokens = {kind: metrics.TOKENS.labels(model, measured_as, kind) for kind in _TOKEN_KINDS}

    def count_tokens(self, account: Account) -> None:
        usage = account.usage()
        self._tokens["prompt"].inc(usage.prompt_tokens)
        self._tokens["cached"].inc(usage.cached_tokens)
        self._tokens["media"].inc(usage.media_tokens)
        self._tokens["completion"].inc(usage.completion_tokens)

    def time_first_token(self, account: Account) -> None:
        """Once, if there was one."""
        seconds = account.ledger.first_token_seconds
        if seconds is not None and not account.is_first_token_timed:
            account.is_first_token_timed = True
            self._first_token.observe(seconds)

    def time(self, account: Account) -> None:
        """Once for each stage: one that was gone through several times is the sum."""
        self._seconds.observe(account.ledger.total_seconds)
        stages: defaultdict[timing_pb2.Stage.ValueType, float] = defaultdict(float)
        for stage in account.ledger.close():
            stages[stage.stage] += stage.seconds
        for number, seconds in stages.items():
            self._stages[number].observe(seconds)


@cache  # as many as there are models and classes
def _series(model: str, measured_as: str) -> _ClassSeries:
    return _ClassSeries(model, measured_as)


def _reason(account: Account) -> str:
    """Why a request ended: the error's reason, or the answer's finish reason."""
    if account.outcome != OK:
        return account.outcome
    return sampling_pb2.FinishReason.Name(account.finish_reason).removeprefix("FINISH_REASON_")
