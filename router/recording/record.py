"""Makes the record of a request that has ended, without what the operator does not allow to be kept."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from google.protobuf.duration_pb2 import Duration

from baton import records
from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    HandoffLost,
    InvalidRequest,
    LayoutMismatch,
    MediaUnavailable,
    Overloaded,
    QuotaExceeded,
    SlowReader,
    StaleEpoch,
    Unavailable,
)
from baton.inference.v1 import cluster_service_pb2, generate_pb2, record_pb2
from baton.version import __version__
from discovery.record import nearness
from router.context import RequestContext
from router.recording.notes import AnswerNotes, AttemptNote, PlacementNote
from router.routing.policy import Prediction, W
from runtime.entropy import token_hex

_MOST_CANDIDATES = 8
_LONGEST_ERROR = 500  # characters
_LONGEST_ID = 256
_NOTE_SIZE = 512
# Errors whose messages Baton writes, of workers and times. Those of others may repeat what a client wrote.
_TELLING = (
    Unavailable,
    Overloaded,
    QuotaExceeded,
    DeadlineExceeded,
    HandoffLost,
    StaleEpoch,
    LayoutMismatch,
    SlowReader,
    Cancelled,
)


@dataclass(frozen=True)
class Ended:
    """A request that has ended, its notes, and when it came, by the wall clock in nanoseconds."""

    ctx: RequestContext
    notes: AnswerNotes
    cause: record_pb2.RecordCause.ValueType
    error: BaseException | None
    arrived_ns: int

    @cached_property
    def size(self) -> int:
        """About how many bytes and ids its record is made from."""
        answers = list(_answers(self.notes))
        ids = sum(len(one.completion.token_ids) for one in answers if one.completion is not None)
        notes = sum(len(one.placements) + len(one.attempts) for one in answers)
        return self.ctx.message_bytes + self.ctx.stats.prompt_tokens + ids + notes * _NOTE_SIZE


@dataclass(frozen=True, slots=True)
class RecordMaker:
    """Makes records. With `keeps_prompts` they have what clients wrote and answers' ids, up to `most_bytes` of both."""

    router_id: str
    policy: str
    keeps_prompts: bool
    most_bytes: int

    def make(self, ended: Ended) -> record_pb2.RequestRecord:
        """The record. Takes time for large requests and answers."""
        ctx, stats = ended.ctx, ended.ctx.stats
        record = record_pb2.RequestRecord(
            record_id=token_hex(16),
            request_id=ctx.request_id[:_LONGEST_ID],
            call_id=ctx.call_id,
            tenant=ctx.qos.tenant,
            priority=ctx.qos.priority,
            cause=ended.cause,
            router_id=self.router_id,
            baton_version=__version__,
            outcome=stats.outcome,
            policy=self.policy,
            total=_duration(stats.timings.total_seconds),
        )
        record.arrived.FromNanoseconds(ended.arrived_ns)
        stats.fill(record.finished)
        if (first := stats.timings.first_token_seconds) is not None:
            record.first_token.CopyFrom(_duration(first))
        if isinstance(ended.error, BatonError):
            record.error_stage, record.error_worker_id = ended.error.stage, ended.error.worker_id
        record.error = self._message(ended.error)
        self._fill_request(record, ended)
        ids = 0
        for index, notes in enumerate(_answers(ended.notes)):
            answer = record.answers.add(index=index)
            self._fill_answer(answer, notes, stats.timings.began)
            if notes.completion is not None and self.keeps_prompts:
                ids += answer.tokens
                if 4 * ids <= self.most_bytes:
                    answer.token_ids.extend(notes.completion.token_ids)
        return record

    def _fill_request(self, record: record_pb2.RequestRecord, ended: Ended) -> None:
        notes, ids = ended.notes, _prompt_ids(ended.notes)
        request = _as_told(ended.ctx.request, notes, ids) if notes.is_taken_over else ended.ctx.request
        if ids:
            record.prompt_digest = records.ids_digest(ids)
        content = records.content_of(request)
        record.request.CopyFrom(records.options_of(request))
        completion = notes.completion
        if completion is not None and completion.sampling.params.HasField("seed"):
            record.request.sampling.seed = completion.sampling.params.seed
        if self.keeps_prompts and content.ByteSize() <= self.most_bytes:
            record.request.MergeFrom(content)
        else:
            record.redacted.extend(records.parts_of(content))
        if notes.is_taken_over and completion is not None and completion.sampling.bad_sequences:
            record.redacted.append("sampling.bad_words")  # of which only their ids are known
        else:
            record.content_digest = records.content_digest(content)

    def _fill_answer(self, answer: record_pb2.RecordedAnswer, notes: AnswerNotes, began: float) -> None:
        answer.left_out, answer.resumed_tokens, answer.adopted = notes.left_out, notes.resumed_tokens, notes.is_adopted
        answer.placements.extend(_placement(one, began) for one in notes.placements)
        answer.attempts.extend(self._attempt(one, began) for one in notes.attempts)
        completion = notes.completion
        if completion is None:
            return
        ids = completion.token_ids
        answer.tokens, answer.digest_tokens = len(ids), records.tokens_a_digest(len(ids))
        answer.digests.extend(records.digests(ids, answer.digest_tokens))
        answer.seed = completion.sampling.params.seed
        if completion.finished is not None:
            answer.reason = completion.finished.reason

    def _attempt(self, note: AttemptNote, began: float) -> record_pb2.RecordedAttempt:
        attempt = record_pb2.RecordedAttempt(
            call=note.call,
            worker_id=note.worker.worker_id,
            epoch=note.worker.epoch,
            engine=note.worker.engine,
            layout_digest=note.worker.layout_digest,
            at=_duration(note.at - began),
            took=_duration(note.took),
            tokens_before=note.tokens_before,
            tokens_after=note.tokens_after,
            outcome=note.outcome,
            error=self._message(note.error),
            held_bytes=note.held_bytes,
            held_blocks=note.held_blocks,
        )
        for stage in note.stages:
            stage.fill(attempt.stages.add())
        return attempt

    def _message(self, error: BaseException | None) -> str:
        if not isinstance(error, BatonError):
            return ""
        if self.keeps_prompts or (isinstance(error, _TELLING) and not isinstance(error, MediaUnavailable)):
            return error.message[:_LONGEST_ERROR]
        if isinstance(error, InvalidRequest):
            fields = dict.fromkeys(one.field.partition(".")[0].partition("[")[0] for one in error.violations)
            return f"wrong fields: {', '.join(fields)}"[:_LONGEST_ERROR]
        return ""


def _as_told(
    request: generate_pb2.GenerateRequest, notes: AnswerNotes, ids: Sequence[int]
) -> generate_pb2.GenerateRequest:
    """A request that was taken over, from what its worker told: the ids of its prompt, and how they are sampled."""
    told = generate_pb2.GenerateRequest(token_ids=generate_pb2.TokenIds(ids=ids))
    told.MergeFrom(records.options_of(request))
    told.stopping.CopyFrom(request.stopping)
    if notes.completion is not None:
        told.sampling.CopyFrom(notes.completion.sampling.params)
        if notes.completion.sampling.HasField("guided"):
            told.guided.CopyFrom(notes.completion.sampling.guided)
    if notes.parts:
        told.sampling.n = 1 + len(notes.parts)
    return told


def _answers(notes: AnswerNotes) -> Iterable[AnswerNotes]:
    return (notes, *notes.parts)


def _prompt_ids(notes: AnswerNotes) -> Sequence[int]:
    if notes.prompt is None:
        return ()
    return notes.prompt.token_ids or notes.prompt.prompt.token_ids


def _placement(note: PlacementNote, began: float) -> record_pb2.RecordedPlacement:
    placement = note.placement
    return record_pb2.RecordedPlacement(
        at=_duration(note.at - began),
        tokens=note.tokens,
        prefill_worker_id=placement.prefill.record.worker_id if placement.prefill else "",
        decode_worker_id=placement.decode.record.worker_id,
        cache_view=placement.cache_view,
        candidates=[candidate_message(one) for one in placement.candidates(_MOST_CANDIDATES)],
        loads=[
            record_pb2.RecordedLoad(
                worker_id=one.worker_id,
                requests=max(0, round(one.requests)),
                waiting_tokens=max(0, round(one.waiting_tokens)),
                problem=one.problem[:_LONGEST_ERROR],
            )
            for one in note.loads
        ],
        workers=note.workers,
    )


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(max(0, round(seconds * 1e9)))
    return duration


def candidate_message(prediction: Prediction[W]) -> cluster_service_pb2.RouteCandidate:
    """A place to run a request, with the terms of its predicted cost."""
    prefill, decode, peer = prediction.prefill_worker, prediction.decode_worker, prediction.load.peer
    return cluster_service_pb2.RouteCandidate(
        prefill_worker_id=prefill.record.worker_id if prefill else "",
        decode_worker_id=decode.record.worker_id,
        total_seconds=prediction.total,
        wait_seconds=prediction.wait,
        prefill_seconds=prediction.prefill,
        transfer_seconds=prediction.transfer,
        decode_seconds=prediction.decode,
        stall_seconds=prediction.stall,
        cached_tokens=prediction.cached_tokens,
        uncached_tokens=prediction.uncached_tokens,
        has_kv_events=prediction.has_kv_events,
        distance_seconds=prediction.distance,
        load_seconds=prediction.load.seconds,
        host_tokens=prediction.load.host_tokens,
        disk_tokens=prediction.load.disk_tokens,
        peer_tokens=peer.tokens if peer else 0,
        peer_worker_id=peer.record.worker_id if peer else "",
        nearness=nearness(prefill.record.known_location, decode.record.known_location) if prefill else "",
    )
