"""A request's time by its parts: the router's stages, the stages that workers report, and the unattributed rest.

At its end they go out as trailing metadata.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from baton.connection.credentials import TIMINGS_KEY
from baton.inference.v1 import timing_pb2
from baton_http2.server.reply import Reply
from router.telemetry.stages import CallTiming, StageTiming, name_of, timings_message
from rpc.tracing.span import NO_SPAN, Span, stage_span
from runtime.clock import perf_counter, perf_counter_ns

# HTTP/2 peers drop trailers over 8 KiB, and a status may have 7 of them (rpc/status.py). In base64 this is under one.
_MAX_TRAILER_BYTES = 640


class Timings:
    """The stages of one request, from `started` until `close`, in seconds of time.perf_counter.

    The router's own stages and its calls to workers do not overlap; workers report the stages within their calls. Only
    detokenizing runs while they compute. So the stages before the first token add up to its latency exactly: the rest
    is a stage of its own, STAGE_UNATTRIBUTED, and never negative.
    """

    def __init__(self, started: float | None = None) -> None:
        self._started = _ns(perf_counter() if started is None else started)
        self._stages: list[StageTiming] = []
        self._call: CallTiming | None = None
        self._text = _Text()
        self._closed: tuple[StageTiming, ...] | None = None
        self._total: int | None = None
        self._message: timing_pb2.Timings | None = None
        self.stage = timing_pb2.STAGE_ADMISSION
        # False spares the stages of a request the look at its span.
        self.is_traced = True

    @property
    def stage_name(self) -> str:
        """The present stage in lower case, such as prefill_compute."""
        return name_of(self.stage)

    @property
    def began(self) -> float:
        """The request's arrival, of time.perf_counter."""
        return self._started / 1e9

    @property
    def total_seconds(self) -> float:
        """The request's age, or its age at `close`."""
        return self._elapsed / 1e9

    @property
    def first_token_seconds(self) -> float | None:
        """From arrival until the first token was sent; None before that."""
        return None if self._text.first_at is None else (self._text.first_at - self._started) / 1e9

    @property
    def has_sent_first_token(self) -> bool:
        """True if `first_token_seconds` is final."""
        return self._text.is_sent

    def measure(self, stage: timing_pb2.Stage.ValueType) -> "_MeasuredStage":
        """Times a stage of the router, and opens a span for it. Failures count, too.

        The first stage begins with the call's arrival.
        """
        self.stage = stage
        return _MeasuredStage(self, stage, perf_counter_ns() if self._stages else self._started)

    @contextmanager
    def measure_call(self, stage: timing_pb2.Stage.ValueType) -> Iterator[CallTiming]:
        """Times a call to a worker, whose report divides it into stages. Failures and cancellations count, too."""
        call = self.begin_call(stage, "")
        try:
            yield call
        finally:
            self.end_call(call)

    def begin_call(self, stage: timing_pb2.Stage.ValueType, worker_id: str) -> CallTiming:
        """Begins the measurement of a call, as `measure_call` does."""
        self.stage = stage
        call = self._call = CallTiming(stage, worker_id, perf_counter_ns())
        if self._text.first_at is not None:
            call.first_token_came(self._text.first_at)
        return call

    def end_call(self, call: CallTiming) -> list[StageTiming]:
        """Ends the measurement of a call, as `measure_call` does. Returns its stages."""
        self._call = None
        stages = call.end(perf_counter_ns())
        self._stages += stages
        return stages

    def detokenized(self, started: int) -> float:
        """Notes that tokens were turned into text between `started`, of time.perf_counter_ns, and now.

        Returns the seconds since the previous tokens, or since the call's arrival for the first ones.
        """
        text = self._text
        if text.first_at is not None:
            return text.add(perf_counter_ns() - started)
        text.add_first(started)
        if self._call is not None:
            self._call.first_token_came(started)
        return (text.ended - self._started) / 1e9

    def detokenized_for(self, nanoseconds: int) -> float:
        """Counts later tokens as `detokenized` does, at less cost: by the nanoseconds that they took."""
        return self._text.add(nanoseconds)

    def token_came(self, ago: float) -> None:
        """Notes that the last token came so many seconds ago. Finding its text took no time that would count."""
        self._text.ended = max(self._text.ended, perf_counter_ns() - _ns(ago))

    def first_token_sent(self) -> None:
        """Notes that the first token is written now. The time that it waited counts as detokenizing."""
        self._text.sent()

    def trace_detokenizing(self, span: Span) -> None:
        """Adds one span from the first token to the last, with the time spent detokenizing as an attribute."""
        if self._text.first_at is not None:
            busy = {"baton.detokenize.seconds": self._text.nanoseconds / 1e9}
            span.stage("detokenize", self._text.began / 1e9, self._text.ended / 1e9, busy)

    def close(self) -> tuple[StageTiming, ...]:
        """All stages in their order, the unattributed time last. The first call fixes the result.

        Clients, logs and metrics all get the stages from here.
        """
        if self._closed is None:
            total = self._total = self._elapsed
            self._closed = (*self._stages, *self._text.stages(), self._unattributed(total))
        return self._closed

    def message(self) -> timing_pb2.Timings:
        """The closed timings as a message, which is made once."""
        if self._message is None:
            self._message = timings_message(self.close())
        return self._message

    @property
    def _elapsed(self) -> int:
        return perf_counter_ns() - self._started if self._total is None else self._total

    def record(self, stage: timing_pb2.Stage.ValueType, started: int) -> int:
        """Adds the time since `started`, in nanoseconds, to a stage of the router, which may have run before.

        Returns the time now.
        """
        ended = perf_counter_ns()
        took = ended - started
        before = took if self._text.first_at is None else 0
        for index, known in enumerate(self._stages):
            if known.stage == stage and not known.worker_id:
                self._stages[index] = StageTiming(stage, known.nanoseconds + took, known.before_first_token + before)
                return ended
        self._stages.append(StageTiming(stage, took, before))
        return ended

    def _unattributed(self, total: int) -> StageTiming:
        """The rest, before the first token and in all. Detokenizing after it overlaps the workers' stages."""
        text = self._text
        missing_first = total if text.first_at is None else text.first_at - self._started
        missing_first -= text.first_nanoseconds
        missing = total - text.first_nanoseconds
        for stage in self._stages:
            missing_first -= stage.before_first_token
            missing -= stage.nanoseconds
        # Rounding to whole nanoseconds may leave -1.
        missing_first = max(0, missing_first)
        return StageTiming(timing_pb2.STAGE_UNATTRIBUTED, max(missing_first, missing), missing_first)


class _MeasuredStage:
    """Times a stage while the context is open. Not a generator: a request has several."""

    __slots__ = ("_span", "_stage", "_started", "_timings")

    def __init__(self, timings: Timings, stage: timing_pb2.Stage.ValueType, started: int) -> None:
        self._timings = timings
        self._stage = stage
        self._started = started
        self._span: stage_span | None = None

    def __enter__(self) -> Span:
        if not self._timings.is_traced:
            return NO_SPAN
        self._span = stage_span(name_of(self._stage), started=self._started / 1e9)
        return self._span.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        ended = self._timings.record(self._stage, self._started)
        if self._span is not None:
            self._span.ended = ended / 1e9
            self._span.__exit__(kind, error, trace)


class _Text:
    """The time spent detokenizing, including the first token's wait for the connection. In nanoseconds."""

    __slots__ = ("began", "ended", "first_at", "first_nanoseconds", "is_sent", "nanoseconds")

    def __init__(self) -> None:
        self.began = self.ended = 0
        self.nanoseconds = self.first_nanoseconds = 0
        self.first_at: int | None = None  # after `sent`, the time it was sent
        self.is_sent = False

    def add_first(self, started: int) -> None:
        """Adds the time since `started`, of the first tokens."""
        self.ended = perf_counter_ns()
        self.nanoseconds += self.ended - started
        self.began, self.first_at, self.first_nanoseconds = started, self.ended, self.nanoseconds

    def add(self, nanoseconds: int) -> float:
        """Adds the time that later tokens took until now. Returns the seconds since those before them."""
        before, now = self.ended, perf_counter_ns()
        self.ended = now
        self.nanoseconds += nanoseconds
        return (now - before) / 1e9

    def sent(self) -> None:
        """Notes that the first tokens are sent."""
        if self.first_at is not None:
            now = perf_counter_ns()
            waited, self.first_at = now - self.first_at, now
            self.is_sent = True
            self.nanoseconds += waited
            self.first_nanoseconds += waited
            self.ended = max(self.ended, now)

    def stages(self) -> list[StageTiming]:
        """The detokenizing stage, if there was one."""
        if self.first_at is None:
            return []
        return [StageTiming(timing_pb2.STAGE_DETOKENIZE, self.nanoseconds, self.first_nanoseconds)]


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def end_reply(reply: Reply, timings: Timings) -> None:
    """Puts the timings into the trailing metadata, at the end of the request, also if it fails."""
    trailer = timings.message().SerializeToString()
    if len(trailer) > _MAX_TRAILER_BYTES:
        trailer = timings_trailer(timings.close())
    reply.set_trailing_metadata(((TIMINGS_KEY, trailer),))


def timings_trailer(stages: tuple[StageTiming, ...]) -> bytes:
    """A serialized Timings of bounded size. The shortest stages are added to the last one, the unattributed."""
    kept = list(stages)
    message = timings_message(kept)
    while message.ByteSize() > _MAX_TRAILER_BYTES:
        least = min(kept[:-1], key=lambda stage: stage.nanoseconds)
        kept.remove(least)
        kept[-1] = kept[-1].plus(least.nanoseconds, least.before_first_token)
        message = timings_message(kept)
    return message.SerializeToString()
