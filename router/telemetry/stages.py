"""The entries of Timings, and how the time of a call is divided into the stages that its worker reports."""

from collections.abc import Callable, Iterable
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


def timings_message(stages: Iterable[StageTiming]) -> timing_pb2.Timings:
    """All entries as one message."""
    message = timing_pb2.Timings()
    add_stages(message.stages.add, stages)
    return message


def add_stages(add: Callable[[], timing_pb2.StageTiming], stages: Iterable[StageTiming]) -> None:
    """Fills a new message, as `add` makes it, for each entry."""
    for stage in stages:
        # Set in place: with messages as arguments it takes three times as long, and each request has about seven.
        message, nanoseconds, before = add(), stage.nanoseconds, stage.before_first_token
        message.stage = stage.stage
        duration, first = message.duration, message.before_first_token
        duration.nanos, first.nanos = nanoseconds % _SECOND, before % _SECOND
        if nanoseconds >= _SECOND:
            duration.seconds, first.seconds = nanoseconds // _SECOND, before // _SECOND
        if stage.worker_id:
            message.worker_id = stage.worker_id
        if stage.transport:
            message.transport = stage.transport
        if stage.num_bytes or stage.cached_bytes:
            message.num_bytes, message.cached_bytes = stage.num_bytes, stage.cached_bytes


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
        left, has_first = ended - self._started, self._first_token_at is not None
        left_first = left if self._first_token_at is None else max(0, self._first_token_at - self._started)
        stages = _reported(self._reported[:_MOST_STAGES], self.worker_id)
        left, left_first = _cut(stages, left, left_first, has_first)
        if self.is_complete:
            return stages
        rest = [StageTiming(self._stage, left, 0, self.worker_id)]
        if has_first and left_first:
            # Without a report, the arrival of the first token separates prefill from decode.
            rest.insert(0, StageTiming(timing_pb2.STAGE_PREFILL_COMPUTE, left_first, 0, self.worker_id))
        _cut(rest, left, left_first, has_first)
        return [*stages, *rest]


def _cut(stages: Iterable[StageTiming], left: int, left_first: int, has_first: bool) -> tuple[int, int]:
    """Cuts stages to the time of a call that is left, in all and before the first token. Returns what is left then.

    Decoding counts after the first token.
    """
    for stage in stages:
        if stage.nanoseconds > left:
            stage.nanoseconds = left
        if not (has_first and stage.stage == timing_pb2.STAGE_DECODE):
            first = stage.nanoseconds
            stage.before_first_token = first if first < left_first else left_first
        left -= stage.nanoseconds
        left_first -= stage.before_first_token
    return left, left_first


@lru_cache(64)
def name_of(stage: timing_pb2.Stage.ValueType) -> str:
    """A stage in lower case, such as prefill_compute; `unknown` for one of a newer version."""
    return value_name(timing_pb2.Stage, stage)


def _reported(timings: Iterable[timing_pb2.StageTiming], worker_id: str) -> list[StageTiming]:
    stages = []
    for timing in timings:
        duration = timing.duration
        nanoseconds = duration.seconds * _SECOND + duration.nanos
        stage = StageTiming(timing.stage, nanoseconds if nanoseconds > 0 else 0, 0, timing.worker_id or worker_id)
        if timing.num_bytes or timing.transport or timing.cached_bytes:
            stage.num_bytes, stage.transport = timing.num_bytes, timing.transport
            stage.cached_bytes = timing.cached_bytes
        stages.append(stage)
    return stages
