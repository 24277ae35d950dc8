"""The answers of a handle on their workers: attached to, told of, and forgotten."""

from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import structlog
from google.protobuf.message import DecodeError

from baton.engine.v1 import decode_pb2, prompt_pb2, resume_pb2
from baton.errors import BatonError, Cancelled, InvalidReply, PositionInvalid, StaleAttempt, StreamLost, Unavailable
from baton.inference.v1 import generate_pb2, sampling_pb2
from router.qos import RequestQos
from router.resume.finding import StreamFinder
from router.resume.handle import Continued, Handle, Keep, answer_call_id, owner_sha256
from router.telemetry import metrics
from router.workers.cluster import Cluster
from router.workers.decode_calls import AdoptedDecode
from router.workers.handle import WorkerHandle
from router.workers.replies import check_attached
from rpc.auth.caller import current_caller
from rpc.channels import best_effort
from runtime.aio import gather_or_cancel, gather_to_completion, timeout

log = structlog.get_logger(__name__)

# A worker that has an answer, and does not tell of it in this time, is not waited for.
_ATTACH_SECONDS = 5.0
# So often an answer that is cancelled is looked for.
_MOST_LOOKS = 4


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """A call of ResumeGeneration, read and checked."""

    message: generate_pb2.ResumeGenerationRequest
    handle: Handle
    qos: RequestQos
    call: Any
    continued: dict[int, Continued] = field(init=False)  # the client's part of each answer

    def __post_init__(self) -> None:
        ids = [each.ids for each in self.message.received]
        parts = {one.index: Continued(one, ids[one.index] if one.index < len(ids) else ()) for one in self.message.have}
        object.__setattr__(self, "continued", parts)

    @property
    def owner(self) -> bytes:
        """The digest of the answers' owner."""
        caller = current_caller()
        return owner_sha256(caller.name if caller else "", self.qos.tenant)

    @property
    def cancelled_answer(self) -> decode_pb2.CancelledAnswer:
        """The answers as workers know them."""
        return decode_pb2.CancelledAnswer(secret_sha256=self.handle.secret_sha256, owner_sha256=self.owner)

    def keep(self, seconds: float, handle: Handle, origin: bytes = b"", *, is_partly_lost: bool = False) -> Keep:
        """The client's parts, for the contexts of its answers."""
        return Keep(seconds, handle, self.message.attempt, is_partly_lost, origin, self.continued)


@dataclass(frozen=True, slots=True)
class Adopted:
    """One answer, with what its worker told of it."""

    record: resume_pb2.ResumeRecord
    decode: AdoptedDecode


@dataclass(frozen=True, slots=True)
class Lost:
    """One of several answers that no worker has: it is computed from the prompt and the sampling of `another`."""

    answer: int
    another: Adopted

    @property
    def record(self) -> resume_pb2.ResumeRecord:
        """The known part of the request."""
        return self.another.record

    @property
    def sampling(self) -> prompt_pb2.Sampling:
        """That of the other answer, with this one's seed."""
        sampling = prompt_pb2.Sampling()
        sampling.CopyFrom(self.another.decode.attached.sampling)
        sampling.ClearField("prompt_logprobs")
        sampling.params.seed = (sampling.params.seed - self.record.answer + self.answer) % 2**64
        return sampling


Answer = Adopted | Lost


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """The known part of an answer, by its worker or by its client."""

    prompt: prompt_pb2.Prompt
    sampling: prompt_pb2.Sampling
    ids: Sequence[int]
    logprobs: Sequence[sampling_pb2.TokenLogprob] = ()


class Attacher:
    """Reads answers on the workers of a cluster."""

    def __init__(self, cluster: Cluster, max_answers: int) -> None:
        self._finder = StreamFinder(cluster)
        self._max_answers = max_answers

    async def attach_all(self, request: ResumeRequest, seconds: float, attached: AsyncExitStack) -> Sequence[Answer]:
        """All answers, attached where a worker has them; none if they all have to be computed again."""
        message = request.message
        try:
            found = await self._attach_each(range(max(1, message.request.sampling.n)), request, seconds, attached)
            first = found[0]
            # Without the request the first one tells how many there are.
            if first is not None and first.record.answers > 1 and not message.HasField("request"):
                found += await self._attach_each(range(1, first.record.answers), request, seconds, attached)
        except PositionInvalid:
            # The client's own copy may do, for log probabilities that the worker has no more.
            if not message.HasField("request"):
                raise
            return ()
        another = next((one for one in found if one is not None), None)
        if another is None or not all(
            one or _is_computable(answer, another, request) for answer, one in enumerate(found)
        ):
            return ()
        return [one or Lost(answer, another) for answer, one in enumerate(found)]

    async def _attach_each(
        self, answers: Sequence[int], request: ResumeRequest, seconds: float, attached: AsyncExitStack
    ) -> list[Adopted | None]:
        call_ids = [answer_call_id(request.handle.call_id, answer) for answer in answers]
        workers = await self._finder.find(call_ids, request.handle)
        attaching = [
            self._attach_if_there(answer, workers.get(call_id), request, seconds, attached)
            for answer, call_id in zip(answers, call_ids, strict=True)
        ]
        return await gather_or_cancel(attaching) if len(attaching) > 1 else [await attaching[0]]

    async def _attach_if_there(
        self, answer: int, worker: WorkerHandle | None, request: ResumeRequest, seconds: float, attached: AsyncExitStack
    ) -> Adopted | None:
        if worker is None:
            return None
        try:
            return await self._attach(worker, _attach_request(answer, request), seconds, attached)
        except StreamLost:
            return None

    async def _attach(
        self, worker: WorkerHandle, asked: decode_pb2.AttachRequest, seconds: float, attached: AsyncExitStack
    ) -> Adopted:
        _keep_open(worker, attached)
        call: Any = worker.decode.Attach(asked, timeout=seconds)
        attached.push_async_callback(call.aclose)
        return self._adopted(worker, asked, await first_of(call), call)

    def _adopted(
        self, worker: WorkerHandle, asked: decode_pb2.AttachRequest, attached: decode_pb2.DecodeAttached, call: Any
    ) -> Adopted:
        """An answer as its worker tells of it. Raises StreamLost for what no worker may tell."""
        try:
            record = resume_pb2.ResumeRecord.FromString(attached.record)
            check_attached(asked, attached, worker)
            if record.answers > self._max_answers:
                raise InvalidReply(f"{record.answers} answers of at most {self._max_answers}")
        except (DecodeError, InvalidReply) as error:
            metrics.WORKER_FAULTS.labels("attach").inc()
            log.warning("invalid reply", worker_id=worker.record.worker_id, stage="attach", reason=str(error))
            raise StreamLost(f"the answer's worker tells of it wrongly: {error}") from None
        # A tenant has not paid for more than there is.
        attached.read_tokens = min(attached.read_tokens, len(attached.token_ids))
        return Adopted(record, AdoptedDecode(worker, attached, call))

    async def peek(
        self, answer: int, request: ResumeRequest, cancelled: Sequence[decode_pb2.CancelledAnswer] = ()
    ) -> Adopted:
        """The state of an answer, as its worker tells it; its reader goes on. Raises StreamLost.

        With `cancelled` answers no worker begins a decode of one any more.
        """
        call_id = answer_call_id(request.handle.call_id, answer)
        workers = await self._finder.find([call_id], request.handle, cancelled)
        if call_id not in workers:
            raise StreamLost("nothing is left of this answer")
        return await self._look(answer, workers[call_id], request)

    async def _look(self, answer: int, worker: WorkerHandle, request: ResumeRequest) -> Adopted:
        asked = _attach_request(answer, request)
        asked.peek = True
        async with AsyncExitStack() as attached:
            _keep_open(worker, attached)
            call: Any = worker.decode.Attach(asked, timeout=_ATTACH_SECONDS)
            attached.push_async_callback(call.aclose)
            return self._adopted(worker, asked, await first_of(call), None)

    async def cancel_all(self, request: ResumeRequest) -> None:
        """Ends all answers, wherever they are, and whichever router reads them. Raises StreamLost if no worker has one,
        and Unavailable if one that may have it does not answer.

        One whose router is between two workers ends with its next decode, in that case too.
        """
        first = await self._cancel(0, request)
        # Of an answer that is lost, the others may go on.
        others = range(1, first.answers if first else self._max_answers)
        found = await gather_to_completion(self._cancel(answer, request) for answer in others)
        if first is None and not any(found):
            raise StreamLost("no worker has this answer; from now on they refuse to go on with it for another router")

    async def _cancel(self, answer: int, request: ResumeRequest) -> resume_pb2.ResumeRecord | None:
        """Ends one answer. Returns its record; None if it is lost.

        Raises Unavailable if a worker that may have it does not answer.

        If it has gone to another worker in between, it is looked for again; so it is after a worker of an earlier
        version, which does nothing if another router has attached to it in between.
        """
        record = None
        for _ in range(_MOST_LOOKS):
            try:
                found = await self.peek(answer, request, [request.cancelled_answer])
            except StreamLost as error:
                if isinstance(error.__cause__, (BatonError, TimeoutError)):
                    raise Unavailable(f"{error.message}: cancel it again") from error
                break
            record = found.record
            if await self._settle(answer, found.decode, request):
                break
        return record

    async def _settle(self, answer: int, found: AdoptedDecode, request: ResumeRequest) -> bool:
        settled = decode_pb2.SettleRequest(
            request_id=answer_call_id(request.handle.call_id, answer),
            attachment=found.reader.attachment,
            execution=found.reader.execution,
            forget=True,
            secret=request.handle.secret,
            owner_sha256=request.owner,
        )
        worker = found.worker
        with suppress(Unavailable), worker.keep_open():
            answered = await best_effort(lambda seconds: worker.decode.Settle(settled, timeout=seconds), healthy=True)
            return answered is not None and answered.is_settled
        return False


def _keep_open(worker: WorkerHandle, attached: AsyncExitStack) -> None:
    """Keeps a worker's channel open while `attached` is. Raises StreamLost if the worker has left."""
    try:
        attached.enter_context(worker.keep_open())
    except Unavailable as error:
        raise StreamLost(f"the answer's worker does not give it: {error}") from error


def _attach_request(answer: int, request: ResumeRequest) -> decode_pb2.AttachRequest:
    return decode_pb2.AttachRequest(
        request_id=answer_call_id(request.handle.call_id, answer),
        secret=request.handle.secret,
        owner_sha256=request.owner,
        attempt=request.message.attempt,
        from_tokens=request.continued[answer].have.tokens if answer in request.continued else 0,
    )


def known_of(one: Answer, continued: Continued) -> KnownAnswer:
    """The known part of an answer."""
    match one:
        case Adopted():
            attached = one.decode.attached
            return KnownAnswer(attached.prompt, attached.sampling, list(attached.token_ids), list(attached.logprobs))
        case Lost():
            return KnownAnswer(one.another.decode.attached.prompt, one.sampling, list(continued.received))


def first_adopted(answers: Sequence[Answer]) -> Adopted:
    """One that a worker has."""
    first = answers[0]
    return first.another if isinstance(first, Lost) else first


def _is_computable(answer: int, another: Adopted, request: ResumeRequest) -> bool:
    """True if a lost answer can be computed from what is known of another, and from what its client sent of it."""
    asked, prompt = another.record.request, another.decode.attached.prompt
    if prompt.media or (answer == 0 and asked.response.HasField("prompt_logprobs")):
        return False
    continued = request.continued.get(answer)
    return continued is None or len(continued.received) == continued.have.tokens


async def first_of(call: Any) -> decode_pb2.DecodeAttached:
    """A worker's report of an answer. Raises StreamLost also if the worker fails."""
    try:
        async with timeout(_ATTACH_SECONDS):
            response = await anext(aiter(call))
    except (StreamLost, StaleAttempt, PositionInvalid, Cancelled):
        raise
    except (BatonError, TimeoutError, StopAsyncIteration) as error:
        raise StreamLost(f"the answer's worker does not give it: {error}") from error
    if response.WhichOneof("event") != "attached":
        raise StreamLost("the answer's worker gives something else")
    attached: decode_pb2.DecodeAttached = response.attached
    return attached
