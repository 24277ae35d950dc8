"""The entries of a ledger, and how an attempt on workers is divided into what they say of it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from baton.inference.v1 import timing_pb2
from google.protobuf.duration_pb2 import Duration


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stage took, and how much of that before the first token was on its way. Both in nanoseconds."""

    stage: timing_pb2.Stage.ValueType
    nanoseconds: int
    before_first_token: int
    worker_id: str = ""  # empty for the router
    num_bytes: int = 0
    transport: str = ""

    @property
    def name(self) -> str:
        """In lower case, such as prefill_compute."""
        return name_of(self.stage)

    @property
    def seconds(self) -> float:
        """What it took."""
        return self.nanoseconds / 1e9

    def plus(self, nanoseconds: int, before_first_token: int) -> "Stage":
        """The same stage, which has gone on for so long."""
        before = self.before_first_token + before_first_token
        return replace(self, nanoseconds=self.nanoseconds + nanoseconds, before_first_token=before)

    def message(self) -> timing_pb2.StageTiming:
        """As it is sent."""
        return timing_pb2.StageTiming(
            stage=self.stage,
            duration=_duration(self.nanoseconds),
            worker_id=self.worker_id,
            num_bytes=self.num_bytes,
            transport=self.transport,
            before_first_token=_duration(self.before_first_token),
        )


class Attempt:
    """What one call to a worker took, as the router saw it, and what of it the worker accounts for.

    A worker may report more than once. What it leaves open is unattributed if it `is_complete`: it has said all. Of an
    attempt that ended otherwise the rest belongs to the attempt's own stage. More than the call took is never believed.
    """

    def __init__(self, stage: timing_pb2.Stage.ValueType, worker_id: str, started: int) -> None:
        self.is_complete = False
        self.worker_id = worker_id
        self._stage = stage
        self._started = started
        self._first_token_at: int | None = None
        self._reported: list[timing_pb2.StageTiming] = []

    def report(self, timings: Iterable[timing_pb2.StageTiming]) -> None:
        """Takes what the worker says of the stages that it went through, in their order."""
        self._reported += timings

    def first_token_came(self, at: int) -> None:
        """The answer's first token came then: within this attempt, or before it."""
        self._first_token_at = at

    def end(self, ended: int) -> list[Stage]:
        """Its stages. Together they are at most as long as the attempt."""
        left = ended - self._started
        first = left if self._first_token_at is None else max(0, self._first_token_at - self._started)
        division = _Division(left, first, has_first=self._first_token_at is not None)
        stages = [division.cut(_reported(timing, self.worker_id)) for timing in self._reported]
        if self.is_complete:
            return stages
        if self._first_token_at is not None and division.left_first:
            # No word of the worker, but the first token's coming parts the prompt from the rest.
            prompt = Stage(timing_pb2.STAGE_PREFILL_COMPUTE, division.left_first, 0, self.worker_id)
            stages.append(division.cut(prompt))
        return [*stages, division.cut(Stage(self._stage, division.left, 0, self.worker_id))]


class _Division:
    """What is left to be accounted for: of an attempt, and of the part before the first token."""

    def __init__(self, left: int, left_first: int, *, has_first: bool) -> None:
        self.left = left
        self.left_first = left_first
        self._has_first = has_first

    def cut(self, stage: Stage) -> Stage:
        """The next stage, no longer than what is left. Decoding is what comes after the first token."""
        nanoseconds = min(stage.nanoseconds, self.left)
        is_after = self._has_first and stage.stage == timing_pb2.STAGE_DECODE
        first = 0 if is_after else min(nanoseconds, self.left_first)
        self.left -= nanoseconds
        self.left_first -= first
        return replace(stage, nanoseconds=nanoseconds, before_first_token=first)


def name_of(stage: timing_pb2.Stage.ValueType) -> str:
    """A stage in lower case, such as prefill_compute."""
    return timing_pb2.Stage.Name(stage).removeprefix("STAGE_").lower()


def _reported(timing: timing_pb2.StageTiming, worker_id: str) -> Stage:
    nanoseconds = max(0, timing.duration.ToNanoseconds())
    return Stage(timing.stage, nanoseconds, 0, timing.worker_id or worker_id, timing.num_bytes, timing.transport)


def _duration(nanoseconds: int) -> Duration:
    seconds, nanos = divmod(nanoseconds, 1_000_000_000)
    return Duration(seconds=seconds, nanos=nanos)
