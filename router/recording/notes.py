"""Notes of a request while it runs: its placements and the calls to its workers. Its tokens do not pass here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from baton.engine.v1 import handoff_pb2
from baton.errors import BatonError
from baton.inference.v1 import record_pb2
from discovery.registry import WorkerRecord
from router.routing.policy import Placement, RoutingRequest, WorkerView
from router.telemetry.stages import StageTiming
from router.text.completion import Completion
from rpc.status import OK
from runtime.clock import perf_counter

YIELDED = "YIELDED"
_MOST_LOADS = 16
# Of an answer's placements, and of its attempts: the first ones, and the latest.
_FIRST_KEPT, _MOST_KEPT = 4, 16

Note = TypeVar("Note")


class LoadNote(NamedTuple):
    """A worker as the router saw it at a placement."""

    worker_id: str
    requests: float
    waiting_tokens: float
    problem: str


@dataclass(slots=True)
class PlacementNote:
    """A choice of workers, at a number of tokens of the answer."""

    at: float
    tokens: int
    placement: Placement[Any]
    loads: Sequence[LoadNote]
    workers: int


@dataclass(slots=True)
class AttemptNote:
    """A call to a worker. The numbers of tokens are of the answer, before and after it."""

    call: str
    worker: WorkerRecord
    at: float
    tokens_before: int
    tokens_after: int = 0
    took: float = 0.0
    outcome: str = ""
    error: BaseException | None = None
    held_bytes: int = 0
    held_blocks: int = 0
    stages: Sequence[StageTiming] = ()

    def holds(self, handoff: handoff_pb2.KvHandoff) -> None:
        """Notes the KV that the worker holds for the next one."""
        self.held_bytes, self.held_blocks = handoff.num_bytes, len(handoff.block_ids)


@dataclass(slots=True, eq=False)
class AnswerNotes:
    """The notes of one answer; `parts` are those of the request's other answers. `workers` gives all that are known.

    `cause` is set if the record is kept however the request ends. `is_taken_over` says that another router has the
    request itself, and this one only what a worker told of it.
    """

    workers: Callable[[], Sequence[WorkerView]]
    cause: record_pb2.RecordCause.ValueType = record_pb2.RECORD_CAUSE_UNSPECIFIED
    placements: list[PlacementNote] = field(default_factory=list)
    attempts: list[AttemptNote] = field(default_factory=list)
    left_out: int = 0
    prompt: RoutingRequest | None = None  # unless the request has ended before it was placed
    completion: Completion | None = None
    resumed_tokens: int = 0
    is_adopted: bool = False
    is_taken_over: bool = False
    parts: list["AnswerNotes"] = field(default_factory=list)

    def part(self) -> "AnswerNotes":
        """The notes of another answer to the same request."""
        other = AnswerNotes(self.workers, self.cause)
        self.parts.append(other)
        return other

    def runs(self, prompt: RoutingRequest, completion: Completion) -> None:
        """Notes what is run. An answer that is taken over has tokens already."""
        self.prompt, self.completion, self.resumed_tokens = prompt, completion, len(completion.token_ids)

    def placed(self, placement: Placement[Any]) -> None:
        """Notes a choice of workers, and the load of some of them at this moment."""
        workers = self.workers()
        chosen = [one for one in (placement.prefill, placement.decode) if one is not None]
        others = [one for one in workers[:_MOST_LOADS] if one not in chosen]
        loads = [
            LoadNote(one.record.worker_id, one.requests, one.waiting_tokens, one.problem) for one in (*chosen, *others)
        ]
        self._keep(self.placements, PlacementNote(perf_counter(), self._tokens, placement, loads, len(workers)))

    def began(self, call: str, worker: WorkerRecord) -> AttemptNote:
        """Notes a call to a worker."""
        self.is_adopted = self.is_adopted or call == "attach"
        note = AttemptNote(call, worker, perf_counter(), self._tokens)
        self._keep(self.attempts, note)
        return note

    def ended(self, note: AttemptNote, stages: Sequence[StageTiming], error: BaseException | None) -> None:
        """Notes the end of a call."""
        note.took, note.tokens_after = perf_counter() - note.at, self._tokens
        note.stages, note.error, note.outcome = stages, error, note.outcome or outcome_of(error)

    def yielded(self, handoff: handoff_pb2.KvHandoff | None) -> None:
        """Notes that the running decode goes on elsewhere, with its KV unless that is None."""
        self.attempts[-1].outcome = YIELDED
        if handoff is not None:
            self.attempts[-1].holds(handoff)

    @property
    def _tokens(self) -> int:
        return len(self.completion.token_ids) if self.completion is not None else 0

    def _keep(self, kept: list[Note], note: Note) -> None:
        if len(kept) >= _MOST_KEPT:
            del kept[_FIRST_KEPT]
            self.left_out += 1
        kept.append(note)


def outcome_of(error: BaseException | None) -> str:
    """OK, or the reason of an error."""
    match error:
        case None:
            return OK
        case BatonError():
            return error.reason
        case Exception():
            return BatonError.reason
    return "CANCELLED"
