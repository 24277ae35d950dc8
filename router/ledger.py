"""Where a request's time went: the router's own stages, the workers' as they report them, and what is left."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from baton.inference.v1 import timing_pb2
from google.protobuf.duration_pb2 import Duration

from rpc.tracing.span import Span, stage_span


class Ledger:
    """The stages of one request, timed from its creation by the monotonic clock."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._timings: list[timing_pb2.StageTiming] = []
        self.stage = timing_pb2.STAGE_ADMISSION
        self._detokenize_seconds = 0.0
        self._detokenizing = (0.0, 0.0)  # when it began, and when it last ended
        self.first_token_seconds: float | None = None

    @property
    def stage_name(self) -> str:
        """What the request is at, in lower case, such as prefill_compute."""
        return timing_pb2.Stage.Name(self.stage).removeprefix("STAGE_").lower()

    @property
    def total_seconds(self) -> float:
        """How long the request has been here."""
        return time.perf_counter() - self._started

    @contextmanager
    def measure(self, stage: timing_pb2.Stage.ValueType) -> Iterator[Span]:
        """Times a stage of the router itself, once: for the ledger and for the span that it gives."""
        self.stage = stage
        started = time.perf_counter()
        with stage_span(self.stage_name, started=started) as span:
            yield span
            ended = time.perf_counter()
            self._timings.append(_timing(stage, ended - started))
            span.end(ended)

    def add(self, timings: Iterable[timing_pb2.StageTiming], worker_id: str) -> None:
        """Appends what a worker reports."""
        for timing in timings:
            timing.worker_id = timing.worker_id or worker_id
            self._timings.append(timing)

    def detokenized(self, started: float) -> float:
        """Tokens have come, and were turned into text since `started` of time.perf_counter.

        Returns the seconds since the tokens before them; of the first ones, since the ledger's creation.
        """
        now = time.perf_counter()
        seconds = now - (self._started if self.first_token_seconds is None else self._detokenizing[1])
        self._detokenize_seconds += now - started
        if self.first_token_seconds is None:
            self.first_token_seconds = now - self._started
            self._detokenizing = (started, now)
        self._detokenizing = (self._detokenizing[0], now)
        return seconds

    def trace_detokenizing(self, span: Span) -> None:
        """One span for all of it, from the first token to the last; how much of that it took is an attribute."""
        if self.first_token_seconds is not None:
            busy = {"baton.detokenize.seconds": self._detokenize_seconds}
            span.stage("detokenize", *self._detokenizing, busy)

    def timings(self) -> list[timing_pb2.StageTiming]:
        """All stages, and last the time that none of them accounts for. Stages overlap; that is never negative."""
        timings = [*self._timings, _timing(timing_pb2.STAGE_DETOKENIZE, self._detokenize_seconds)]
        rest = self.total_seconds - sum(_seconds(timing.duration) for timing in timings)
        return [*timings, _timing(timing_pb2.STAGE_UNATTRIBUTED, max(0.0, rest))]


def _timing(stage: timing_pb2.Stage.ValueType, seconds: float) -> timing_pb2.StageTiming:
    whole = int(seconds)
    return timing_pb2.StageTiming(stage=stage, duration=Duration(seconds=whole, nanos=int((seconds - whole) * 1e9)))


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
