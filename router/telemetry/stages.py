"""The entries of Timings, and how the time of a call is divided into the stages that its worker reports."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from baton.enum_names import value_name
from baton.inference.v1 import timing_pb2

_SECOND = 1_000_000_000  # in nanoseconds
_MOST_STAGES = 32  # of one call: a worker reports fewer than ten


@dataclass(slots=True)  # not frozen: a request makes about twenty, and freezing takes a call for each field
class StageTiming:
    """The duration of one stage, and its part before the first token was sent, both in nanoseconds."""

    stage: timing_pb2.Stage.ValueType
    nanoseconds: int
    before_first_token: int
    worker_id: str = ""  # empty for the router
    num_bytes: int = 0
    transport: str = ""
    cached_bytes: int = 0  # that did not have to move

    @property
    def name(self) -> str:
        """The stage in lower case, such as prefill_compute."""
        return name_of(self.stage)

    @property
    def seconds(self) -> float:
        """The duration in seconds."""
        return self.nanoseconds / 1e9

    def plus(self, nanoseconds: int, before_first_token: int) -> "StageTiming":
        """The same stage with more time."""
        return replace(
            self,
            nanoseconds=self.nanoseconds + nanoseconds,
            before_first_token=self.before_first_token + before_first_token,
        )

    def fill(self, message: timing_pb2.StageTiming) -> None:
        """Makes an empty message the entry."""
        # Set in place: with messages as arguments it takes three times as long, and each request has about seven.
        message.stage = self.stage
        duration, first = message.duration, message.before_first_token
        duration.nanos, first.nanos = self.nanoseconds % _SECOND, self.before_first_token % _SECOND
        if self.nanoseconds >= _SECOND:
            duration.seconds, first.seconds = self.nanoseconds // _SECOND, self.before_first_token // _SECOND
        if self.worker_id:
            message.worker_id = self.worker_id
        if self.transport:
            message.transport = self.transport
        if self.num_bytes or self.cached_bytes:
            message.num_bytes, message.cached_bytes = self.num_bytes, self.cached_bytes


def timings_message(stages: Iterable[StageTiming]) -> timing_pb2.Timings:
    """All entries as one message."""
    message = timing_pb2.Timings()
    add = message.stages.add
    for stage in stages:
        stage.fill(add())
    return message


class CallTiming:
    """The time of one call to a worker, divided into the stages that the worker reports, once or more often.

    The rest is unattributed if the call `is_complete`; otherwise it belongs to the call's own stage. Reports that
    exceed the time of the call are cut.
    """

    def __init__(self, stage: timing_pb2.Stage.ValueType, worker_id: str, started: int) -> None:
        self.is_complete = False
        self.worker_id = worker_id
        self._stage = stage
        self._started = started
        self._first_token_at: int | None = None
        self._reported: list[timing_pb2.StageTiming] = []

    def report(self, timings: Iterable[timing_pb2.StageTiming]) -> None:
        """Adds the worker's stages, in their order."""
        self._reported += timings

    def first_token_came(self, at: int) -> None:
        """Notes when the first token came: during this call, or before it."""
        self._first_token_at = at

    def end(self, ended: int) -> list[StageTiming]:
        """Ends the call, and returns its stages. Together they are no longer than the call."""
        left = ended - self._started
        first = left if self._first_token_at is None else max(0, self._first_token_at - self._started)
        division = _Division(left, first, has_first=self._first_token_at is not None)
        stages = [division.cut(_reported(timing, self.worker_id)) for timing in self._reported[:_MOST_STAGES]]
        if self.is_complete:
            return stages
        if self._first_token_at is not None and division.left_first:
            # Without a report, the arrival of the first token separates prefill from decode.
            prompt = StageTiming(timing_pb2.STAGE_PREFILL_COMPUTE, division.left_first, 0, self.worker_id)
            stages.append(division.cut(prompt))
        return [*stages, division.cut(StageTiming(self._stage, division.left, 0, self.worker_id))]


class _Division:
    """The time of a call that no stage has taken yet, in all and before the first token."""

    def __init__(self, left: int, left_first: int, *, has_first: bool) -> None:
        self.left = left
        self.left_first = left_first
        self._has_first = has_first

    def cut(self, stage: StageTiming) -> StageTiming:
        """Cuts the next stage to the time left. Decoding counts after the first token."""
        if stage.nanoseconds > self.left:
            stage.nanoseconds = self.left
        if not (self._has_first and stage.stage == timing_pb2.STAGE_DECODE):
            first = stage.nanoseconds
            stage.before_first_token = first if first < self.left_first else self.left_first
        self.left -= stage.nanoseconds
        self.left_first -= stage.before_first_token
        return stage


@lru_cache(64)
def name_of(stage: timing_pb2.Stage.ValueType) -> str:
    """A stage in lower case, such as prefill_compute; `unknown` for one of a newer version."""
    return value_name(timing_pb2.Stage, stage)


def _reported(timing: timing_pb2.StageTiming, worker_id: str) -> StageTiming:
    duration = timing.duration
    nanoseconds = duration.seconds * _SECOND + duration.nanos
    return StageTiming(
        timing.stage,
        nanoseconds if nanoseconds > 0 else 0,
        0,
        timing.worker_id or worker_id,
        timing.num_bytes,
        timing.transport,
        timing.cached_bytes,
    )
