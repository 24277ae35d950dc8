"""Finds the workers that have kept answers: all that ask at about the same time ask each worker once."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.calls import unary
from baton.engine.v1 import decode_pb2
from baton.errors import BatonError, DeadlineExceeded, Unavailable
from discovery.record import KEEPS_STREAMS
from router.resume.handle import Handle
from router.workers.cluster import Cluster
from router.workers.handle import WorkerHandle

# After the loss of a router, all of its clients ask at once.
_TOGETHER_SECONDS = 0.005
# A worker that does not answer in this time is asked again, so often in all, if it may have the answer and has no known
# problem: if a busy one is not waited for, it gets the answer to compute again, too.
_ANSWER_SECONDS, _ROUNDS = 1.0, 4


@dataclass(frozen=True, slots=True)
class Found:
    """A kept answer, as a worker tells of it."""

    worker: WorkerHandle
    hop: int
    tokens: int
    has_yielded: bool


@dataclass(slots=True)
class _Answers:
    """The streams that workers have told of, by id, and the workers that told nothing in time, or at all."""

    found: dict[str, list[Found]] = field(default_factory=dict)
    silent: list[WorkerHandle] = field(default_factory=list)
    failed: list[WorkerHandle] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Question:
    """The ids that are asked for together, the cancelled ones of their answers, and who has them."""

    call_ids: dict[str, None] = field(default_factory=dict)
    cancelled: list[decode_pb2.CancelledAnswer] = field(default_factory=list)
    answers: "asyncio.Task[_Answers] | None" = None


class StreamFinder:
    """Asks the decode workers of a cluster which of them have kept answers."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._next: _Question | None = None

    async def find(
        self, call_ids: Sequence[str], handle: Handle, cancelled: Sequence[decode_pb2.CancelledAnswer] = ()
    ) -> dict[str, WorkerHandle]:
        """The worker of each answer that one has; of several, that of the latest decode, or of the most tokens.

        All workers are told of `cancelled` answers: raises Unavailable if one that was not may have an answer.
        """
        found: dict[str, list[Found]] = {}
        answers = _Answers()
        for _ in range(_ROUNDS):
            answers = await self._answers(call_ids, cancelled)
            found = answers.found
            may_have = [one for one in answers.silent if len(call_ids) > 1 or handle.hints_at(one.record.worker_id)]
            if all(call_id in found for call_id in call_ids) or all(worker.problem for worker in may_have):
                break
        untold = [worker.record.worker_id for worker in (*answers.silent, *answers.failed)]
        if cancelled and untold and len(found.keys() & set(call_ids)) < len(set(call_ids)):
            raise Unavailable(f"worker {untold[0]} has not answered, and may have this answer: cancel it again")
        best = {
            call_id: max(found[call_id], key=lambda one: _rank(one, handle)) for call_id in call_ids if call_id in found
        }
        return {call_id: one.worker for call_id, one in best.items()}

    async def _answers(self, call_ids: Sequence[str], cancelled: Sequence[decode_pb2.CancelledAnswer]) -> _Answers:
        question = self._next
        if question is None:
            question = self._next = _Question()
            question.answers = asyncio.create_task(self._ask(question))
        question.call_ids.update(dict.fromkeys(call_ids))
        question.cancelled += [one for one in cancelled if one not in question.cancelled]
        assert question.answers is not None
        return await asyncio.shield(question.answers)

    async def _ask(self, question: _Question) -> _Answers:
        await asyncio.sleep(_TOGETHER_SECONDS)
        self._next = None
        request = decode_pb2.FindStreamsRequest(request_ids=question.call_ids, cancelled=question.cancelled)
        workers = [worker for worker in self._cluster.workers if KEEPS_STREAMS in worker.record.capabilities]
        answers = _Answers()
        await self._ask_all([worker for worker in workers if not worker.problem], request, answers)
        others = [worker for worker in workers if worker.problem]
        # What has yielded may go on at one of those.
        settled = [streams for streams in answers.found.values() if not all(one.has_yielded for one in streams)]
        if others and (question.cancelled or len(settled) < len(question.call_ids)):
            await self._ask_all(others, request, answers)
        return answers

    async def _ask_all(
        self, workers: Sequence[WorkerHandle], request: decode_pb2.FindStreamsRequest, answers: _Answers
    ) -> None:
        told = await asyncio.gather(*(_ask_one(worker, request) for worker in workers))
        for worker, streams in zip(workers, told, strict=True):
            if isinstance(streams, BatonError):
                is_late = isinstance(streams, DeadlineExceeded)
                (answers.silent if is_late else answers.failed).append(worker)
                continue
            for stream in streams:
                one = Found(worker, stream.hop, stream.tokens, stream.has_yielded)
                answers.found.setdefault(stream.request_id, []).append(one)


async def _ask_one(
    worker: WorkerHandle, request: decode_pb2.FindStreamsRequest
) -> Sequence[decode_pb2.FoundStream] | BatonError:
    """The streams of a worker, or why it does not tell."""
    try:
        worker.add_user()
    except Unavailable:
        return ()  # it has left
    try:
        answer = await unary(worker.decode.FindStreams(request, timeout=_ANSWER_SECONDS))
    except BatonError as error:
        return error
    finally:
        worker.remove_user()
    return answer.found


def _rank(found: Found, handle: Handle) -> tuple[int, int, bool]:
    return found.hop, found.tokens, handle.hints_at(found.worker.record.worker_id)
