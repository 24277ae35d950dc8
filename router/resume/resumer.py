"""ResumeGeneration: finds an answer by its handle, and goes on with it, from its worker or from its client's copy."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from baton.engine.v1 import decode_pb2, resume_pb2
from baton.errors import (
    BatonError,
    Cancelled,
    FieldViolation,
    InvalidRequest,
    PositionInvalid,
    StaleAttempt,
    StreamLost,
)
from baton.inference.v1 import generate_pb2
from baton_http2.server.reply import Reply
from router.answers import SharedReply, write_answer
from router.cancellation import Cancellation
from router.context import ContextFactory, Deadline, RequestContext, RequestQos
from router.multimodal.prompt import AdoptedPrompt
from router.pipeline import Pipeline
from router.resume.execution import ResumedExecution
from router.resume.finding import StreamFinder
from router.resume.handle import Handle, answer_call_id, owner_sha256
from router.resume.keep import Continued, Keep, keep_seconds
from router.resume.replay import ReplayedCompletion
from router.stream.reply import end_reply
from router.stream.writer import StreamWriter
from router.telemetry.spans import set_request_attributes
from router.telemetry.stats import RequestStats
from router.telemetry.timings import Timings
from router.text.served_model import ServedModel
from router.workers.calls import AdoptedDecode
from router.workers.handle import WorkerHandle
from rpc.auth.caller import current_caller
from rpc.best_effort import best_effort
from rpc.interceptors.arrival import arrived_at
from rpc.metadata import remaining_seconds
from runtime.aio import gather_or_cancel, timeout

# A worker that has an answer and does not tell of it in this time is not waited for.
_ATTACH_SECONDS = 2.0
# More ids than this are replayed in a thread.
_MANY_IDS = 4096


ReplyTo = Callable[[resume_pb2.ResumeRecord], Reply]


@dataclass(frozen=True, slots=True)
class _Request:
    """A call of ResumeGeneration, read and checked."""

    message: generate_pb2.ResumeGenerationRequest
    handle: Handle
    qos: RequestQos
    call: Any

    @property
    def owner(self) -> bytes:
        """The digest of the answers' owner."""
        caller = current_caller()
        return owner_sha256(caller.name if caller else "", self.qos.tenant)

    def keep(self, seconds: float, handle: Handle) -> Keep:
        """The client's parts, for the contexts of its answers."""
        return Keep(seconds, handle, self.message.attempt, continued=_continued(self.message))


@dataclass(frozen=True, slots=True)
class _Adopted:
    """One answer, with what its worker told of it; without a `decode` its ids alone are known, and it is complete."""

    record: resume_pb2.ResumeRecord
    decode: AdoptedDecode


class Resumer:
    """Goes on with answers whose streams were lost."""

    def __init__(self, contexts: ContextFactory, pipeline: Pipeline) -> None:
        self._contexts = contexts
        self._pipeline = pipeline
        self._finder = StreamFinder(pipeline.cluster)

    async def run(self, message: generate_pb2.ResumeGenerationRequest, call: Any) -> None:
        """Sends what a client lacks of its answers, to their end.

        Raises StreamLost, StaleAttempt, PositionInvalid and InvalidRequest, and what a request itself raises.
        """
        if not message.attempt:
            raise InvalidRequest.of("attempt", "is 0 or unset; the first one is 1")
        reply = call.reply()
        if await self.adopt(message, call, lambda _record: reply):
            return
        if not message.HasField("request"):
            raise StreamLost("nothing is left of this answer: resume it with its request, or send that again")
        await self._pipeline.run(self._context_again(self._read(message, call)), reply)

    async def adopt(self, message: generate_pb2.ResumeGenerationRequest, call: Any, reply_to: ReplyTo) -> bool:
        """Sends what a client lacks, to the end, from the workers that have the answers. False if none has them.

        Raises as `run`. An attempt of 0 is the next one, whatever came before. `reply_to` gives the way back, once the
        record is known.
        """
        request = self._read(message, call)
        async with AsyncExitStack() as attached:
            answers = await self._attach_all(request, attached)
            if not answers:
                return False
            ctx, reply = self._context(request, answers[0]), reply_to(answers[0].record)
            describe = partial(set_request_attributes, ctx.request)
            answer = partial(self._answer_adopted, answers, ctx, reply)
            ended = partial(end_reply, reply, ctx.timings)
            await self._pipeline.running.run(ctx, "baton.resume", describe, answer, ended)
        return True

    async def cancel(self, handle: Handle, qos: RequestQos) -> None:
        """Ends a kept answer, wherever it is. Raises StreamLost."""
        request = _Request(generate_pb2.ResumeGenerationRequest(), handle, qos, None)
        first = await self._peek(handle.call_id, request)
        record = resume_pb2.ResumeRecord.FromString(first.attached.record)
        await self._forget(handle.call_id, first)
        for answer in range(1, record.answers):
            call_id = answer_call_id(handle.call_id, answer)
            try:
                await self._forget(call_id, await self._peek(call_id, request))
            except StreamLost:
                continue

    def _read(self, message: generate_pb2.ResumeGenerationRequest, call: Any) -> _Request:
        handle = Handle.parse(message.handle)
        indices = [position.index for position in message.have]
        if len(set(indices)) < len(indices):
            raise InvalidRequest.of("have", "has an answer twice")
        most = self._pipeline.limits.max_answers
        if max(len(message.received), *indices, 0) > most or len(indices) > most:
            raise InvalidRequest.of("have", f"is of more than {most} answers")
        for index, tokens in enumerate(message.received):
            if len(tokens.ids) != next((one.tokens for one in message.have if one.index == index), 0):
                violation = FieldViolation(f"received[{index}]", "has other ids than `have` says")
                raise PositionInvalid([violation])
        return _Request(message, handle, self._contexts.read_qos(call), call)

    # From the workers that have the answers.

    async def _attach_all(self, request: _Request, attached: AsyncExitStack) -> Sequence[_Adopted]:
        """All answers, attached; none if one of them is lost: then they are computed again."""
        message, handle = request.message, request.handle
        answers = max(1, message.request.sampling.n)
        for _ in range(2):
            call_ids = [answer_call_id(handle.call_id, answer) for answer in range(answers)]
            workers = await self._finder.find(call_ids, handle)
            if handle.call_id in workers and answers == 1 and not message.HasField("request"):
                found = await self._look(handle.call_id, workers[handle.call_id], request)
                answers = max(1, resume_pb2.ResumeRecord.FromString(found.record).answers)
                if answers > 1:
                    continue
            break
        if len(workers) < len(call_ids):
            return ()
        try:
            return await gather_or_cancel(
                self._attach(answer, workers[call_id], request, attached) for answer, call_id in enumerate(call_ids)
            )
        except StreamLost:
            return ()
        except PositionInvalid:
            # The client's own copy may do, for log probabilities that the worker has no more.
            if not message.HasField("request"):
                raise
            return ()

    async def _attach(self, answer: int, worker: WorkerHandle, request: _Request, attached: AsyncExitStack) -> _Adopted:
        have = request.keep(0, request.handle).of(answer).have
        asked = self._attach_request(answer_call_id(request.handle.call_id, answer), request)
        asked.from_tokens = have.tokens
        seconds = self._remaining(request)
        attached.enter_context(worker.keep_open())
        call: Any = worker.decode.Attach(asked, timeout=seconds)
        attached.push_async_callback(call.aclose)
        found = await _first(call)
        return _Adopted(resume_pb2.ResumeRecord.FromString(found.record), AdoptedDecode(worker, found, call))

    async def _peek(self, call_id: str, request: _Request) -> AdoptedDecode:
        workers = await self._finder.find([call_id], request.handle)
        if call_id not in workers:
            raise StreamLost("nothing is left of this answer")
        worker = workers[call_id]
        return AdoptedDecode(worker, await self._look(call_id, worker, request), None)  # type: ignore[arg-type]

    async def _look(self, call_id: str, worker: WorkerHandle, request: _Request) -> decode_pb2.DecodeAttached:
        asked = self._attach_request(call_id, request)
        asked.peek = True
        with worker.keep_open():
            call: Any = worker.decode.Attach(asked, timeout=_ATTACH_SECONDS)
            try:
                return await _first(call)
            finally:
                await call.aclose()

    async def _forget(self, call_id: str, found: AdoptedDecode) -> None:
        settled = decode_pb2.SettleRequest(request_id=call_id, attachment=found.attachment, forget=True)
        worker = found.worker
        with worker.keep_open():
            await best_effort(lambda seconds: worker.decode.Settle(settled, timeout=seconds), healthy=True)

    def _attach_request(self, call_id: str, request: _Request) -> decode_pb2.AttachRequest:
        return decode_pb2.AttachRequest(
            request_id=call_id,
            secret=request.handle.secret,
            owner_sha256=request.owner,
            attempt=request.message.attempt,
        )

    def _remaining(self, request: _Request) -> float:
        return Deadline.of(remaining_seconds(request.call), self._pipeline.limits).remaining_seconds

    def _context(self, request: _Request, first: _Adopted) -> RequestContext:
        """The context of answers that run on their workers."""
        record, attached = first.record, first.decode.attached
        asked = record.request
        if record.answers > 1:
            asked.sampling.n = record.answers
        seconds = self._remaining(request)
        if attached.HasField("remaining"):
            seconds = min(seconds, attached.remaining.ToNanoseconds() / 1e9)
        stats = RequestStats(record.request_id, Timings(arrived_at()))
        kept = record.started.resumption.keep.ToNanoseconds() / 1e9
        return RequestContext(
            request=asked,
            request_id=record.request_id,
            caller=current_caller(),
            message_bytes=0,
            qos=RequestQos(record.tenant, record.priority),
            deadline=Deadline(seconds),
            stats=stats,
            faults=self._contexts.read_faults(request.call),
            cancellation=Cancellation(request.handle.call_id),
            keep=replace(request.keep(kept, request.handle), origin=record.origin),
        )

    async def _answer_adopted(self, answers: Sequence[_Adopted], ctx: RequestContext, reply: Reply) -> None:
        model = self._pipeline.cluster.model(answers[0].decode.worker.record.model)
        ctx.stats.model = model.name
        admission = self._pipeline.admission
        async with admission.track_tenant(ctx):
            with admission.count_running(ctx, model.name):
                await self._answer(answers, ctx, model, reply)

    async def _answer(self, answers: Sequence[_Adopted], ctx: RequestContext, model: ServedModel, reply: Reply) -> None:
        if len(answers) > 1:
            await self._answer_several(answers, ctx, model, reply)
            return
        completion, prompt = await self._replay(answers[0], ctx, model)
        async with self._pipeline.writer(ctx, reply) as stream:
            await self._go_on(answers[0], ctx, prompt, completion, stream)

    async def _answer_several(
        self, answers: Sequence[_Adopted], ctx: RequestContext, model: ServedModel, reply: Reply
    ) -> None:
        shared = SharedReply(reply)
        parts = [ctx, *(ctx.part(answer) for answer in range(1, len(answers)))]
        try:
            replays = [await self._replay(one, part, model) for one, part in zip(answers, parts, strict=True)]
            await gather_or_cancel(
                write_answer(
                    part,
                    completion,
                    shared,
                    self._pipeline.limits,
                    partial(self._go_on, one, part, prompt, completion),
                    asyncio.Event(),
                )
                for one, part, (completion, prompt) in zip(answers, parts, replays, strict=True)
            )
        finally:
            for part in parts[1:]:
                part.cancellation.close()
                ctx.stats.add_answer(part.stats)
        await shared.finish()

    async def _replay(
        self, one: _Adopted, ctx: RequestContext, model: ServedModel
    ) -> tuple[ReplayedCompletion, AdoptedPrompt]:
        """The answer as far as its worker has it. Raises PositionInvalid."""
        attached = one.decode.attached
        ctx.stats.restore(one.record.finished)
        prompt = self._pipeline.processor.adopted(ctx, model, attached.prompt)
        assert ctx.keep is not None
        have = ctx.keep.of(ctx.answer).have
        completion = ReplayedCompletion(ctx.request, attached.sampling, model, prompt.answer_parser(model), have)
        if len(attached.token_ids) > _MANY_IDS:
            await asyncio.to_thread(completion.replay, list(attached.token_ids), list(attached.logprobs))
        else:
            completion.replay(list(attached.token_ids), list(attached.logprobs))
        ctx.stats.completion_tokens = len(completion.token_ids)
        return completion, prompt

    async def _go_on(
        self,
        one: _Adopted,
        ctx: RequestContext,
        prompt: AdoptedPrompt,
        completion: ReplayedCompletion,
        stream: StreamWriter,
    ) -> None:
        await ResumedExecution(self._pipeline.executor, ctx, prompt, completion, stream, one.decode).run()

    # From the client's own copy.

    def _context_again(self, request: _Request) -> RequestContext:
        again = request.message.request
        ctx = self._contexts.create(again, request.call)
        seconds = keep_seconds(again.response, self._pipeline.limits.max_keep_seconds)
        return replace(ctx, keep=request.keep(seconds, Handle.new(ctx.call_id)))


def _continued(message: generate_pb2.ResumeGenerationRequest) -> Mapping[int, Continued]:
    """The client's part of each answer."""
    received = message.received
    return {
        position.index: Continued(position, received[position.index].ids if position.index < len(received) else ())
        for position in message.have
    }


async def _first(call: Any) -> decode_pb2.DecodeAttached:
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
