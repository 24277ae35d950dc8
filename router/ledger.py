"""Where a request's time went: the router's own stages, the workers' as they report them, and what is left."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from baton.inference.v1 import timing_pb2

from router.stages import Attempt, Stage, name_of
from rpc.arrival import arrived_at
from rpc.tracing.span import Span, stage_span


class Ledger:
    """The stages of one request, by the router's monotonic clock, from its call's arrival until `close`.

    What the router does itself, and each of its attempts on workers, are stretches of time that do not overlap; workers
    say what theirs consist of. Only text is made while they compute. So the stages up to the first token sum to its
    time exactly: what none accounts for is a stage of its own, and never negative.
    """

    def __init__(self) -> None:
        self._started = _ns(arrived_at())
        self._stages: list[Stage] = []
        self._attempt: Attempt | None = None
        self._text = _Text()
        self._closed: tuple[Stage, ...] | None = None
        self._total: int | None = None
        self.stage = timing_pb2.STAGE_ADMISSION

    @property
    def stage_name(self) -> str:
        """What the request is at, in lower case, such as prefill_compute."""
        return name_of(self.stage)

    @property
    def total_seconds(self) -> float:
        """How long the request has been here, or was until the ledger's end."""
        return self._elapsed / 1e9

    @property
    def first_token_seconds(self) -> float | None:
        """From arrival until the first token was on its way; None as long as there is none."""
        return None if self._text.first_at is None else (self._text.first_at - self._started) / 1e9

    @property
    def has_sent_first_token(self) -> bool:
        """Whether `first_token_seconds` will not change any more."""
        return self._text.is_sent

    @contextmanager
    def measure(self, stage: timing_pb2.Stage.ValueType) -> Iterator[Span]:
        """Times a stage of the router itself, once: for the ledger and for the span that it gives. Failures count too.

        The first one begins with the call's arrival.
        """
        self.stage = stage
        started = time.perf_counter() if self._stages else self._started / 1e9
        with stage_span(self.stage_name, started=started) as span:
            try:
                yield span
            finally:
                ended = self._note(stage, started)
            span.end(ended)

    @contextmanager
    def attempt(self, stage: timing_pb2.Stage.ValueType, worker_id: str = "") -> Iterator[Attempt]:
        """Times what workers are asked for; they say of what that consists. Failures and cancels count too."""
        self.stage = stage
        attempt = self._attempt = Attempt(stage, worker_id, time.perf_counter_ns())
        if self._text.first_at is not None:
            attempt.first_token_came(self._text.first_at)
        try:
            yield attempt
        finally:
            self._attempt = None
            self._stages += attempt.end(time.perf_counter_ns())

    def detokenized(self, started: float) -> float:
        """Tokens have come, and were turned into text since `started` of time.perf_counter.

        Returns the seconds since the tokens before them; of the first ones, since the call's arrival.
        """
        before = self._started if self._text.first_at is None else self._text.ended
        if self._text.add(_ns(started)) and self._attempt is not None:
            self._attempt.first_token_came(_ns(started))
        return (self._text.ended - before) / 1e9

    def first_token_sent(self) -> None:
        """The connection is given the first token now. What that has waited for is detokenizing too."""
        self._text.sent()

    def trace_detokenizing(self, span: Span) -> None:
        """One span for all of it, from the first token to the last; how much of that it took is an attribute."""
        if self._text.first_at is not None:
            busy = {"baton.detokenize.seconds": self._text.nanoseconds / 1e9}
            span.stage("detokenize", self._text.began / 1e9, self._text.ended / 1e9, busy)

    def close(self) -> tuple[Stage, ...]:
        """All stages, in their order; the last is the time that none accounts for. From now on nothing changes.

        The one source of what is told of them: to clients, in logs, in metrics.
        """
        if self._closed is None:
            self._total = self._elapsed
            self._closed = (*self._stages, *self._text.stages(), self._unattributed())
        return self._closed

    def message(self) -> timing_pb2.Ledger:
        """The closed ledger as it is sent."""
        return timing_pb2.Ledger(stages=[stage.message() for stage in self.close()])

    @property
    def _elapsed(self) -> int:
        return time.perf_counter_ns() - self._started if self._total is None else self._total

    def _note(self, stage: timing_pb2.Stage.ValueType, started: float) -> float:
        """Adds what a stage of the router took until now, to what it took when it was gone through before."""
        ended = time.perf_counter()
        took = _ns(ended) - _ns(started)
        before = took if self._text.first_at is None else 0
        for index, known in enumerate(self._stages):
            if known.stage == stage and not known.worker_id:
                self._stages[index] = known.plus(took, before)
                return ended
        self._stages.append(Stage(stage, took, before))
        return ended

    def _unattributed(self) -> Stage:
        """What is left: of the time to the first token, and of all. Text that was made later overlaps the workers."""
        text = self._text
        first = self._elapsed if text.first_at is None else text.first_at - self._started
        missing_first = first - sum(stage.before_first_token for stage in self._stages) - text.first_nanoseconds
        missing = self._elapsed - sum(stage.nanoseconds for stage in self._stages) - text.first_nanoseconds
        # Rounding to whole nanoseconds may leave -1.
        missing_first = max(0, missing_first)
        return Stage(timing_pb2.STAGE_UNATTRIBUTED, max(missing_first, missing), missing_first)


class _Text:
    """The time that ids took to become text and, the first of them, to be given to the connection. In nanoseconds."""

    def __init__(self) -> None:
        self.began = self.ended = 0
        self.nanoseconds = self.first_nanoseconds = 0
        self.first_at: int | None = None  # since `sent` the time of that
        self.is_sent = False

    def add(self, started: int) -> bool:
        """Some have become text, since then. Whether they were the first."""
        self.ended = time.perf_counter_ns()
        self.nanoseconds += self.ended - started
        if self.first_at is not None:
            return False
        self.began, self.first_at, self.first_nanoseconds = started, self.ended, self.nanoseconds
        return True

    def sent(self) -> None:
        """The first ones are sent."""
        if self.first_at is not None:
            now = time.perf_counter_ns()
            waited, self.first_at = now - self.first_at, now
            self.is_sent = True
            self.nanoseconds += waited
            self.first_nanoseconds += waited
            self.ended = max(self.ended, now)

    def stages(self) -> list[Stage]:
        """One, if there was any."""
        if self.first_at is None:
            return []
        return [Stage(timing_pb2.STAGE_DETOKENIZE, self.nanoseconds, self.first_nanoseconds)]


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
