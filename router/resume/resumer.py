"""ResumeGeneration: finds an answer by its handle, and goes on with it, from its worker or from its client's copy."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from baton.engine.v1 import resume_pb2
from baton.errors import (
    FieldViolation,
    InvalidRequest,
    NoWorker,
    PositionInvalid,
    StreamLost,
)
from baton.inference.v1 import generate_pb2, timing_pb2
from baton_http2.server.reply import Reply
from router.answers import SharedReply, write_answer
from router.context import ContextFactory, Deadline, RequestContext
from router.multimodal.prompt import AdoptedPrompt
from router.pipeline import Pipeline
from router.qos import RequestQos
from router.resume.attaching import Adopted, Answer, Attacher, Lost, ResumeRequest, first_adopted, known_of
from router.resume.execution import ResumedExecution
from router.resume.handle import Handle, keep_seconds
from router.resume.record import owner_of
from router.resume.replay import ReplayedCompletion
from router.stream.writer import StreamWriter
from router.telemetry import metrics
from router.telemetry.spans import set_adopted_attributes
from router.telemetry.stats import RequestStats
from router.telemetry.timings import Timings, end_reply
from router.text.served_model import ServedModel
from router.workers.cancellation import Cancellation
from rpc.auth.caller import current_caller
from rpc.interceptors.calls import arrived_at
from rpc.metadata import remaining_seconds
from runtime.aio import gather_or_cancel

# More ids than this are replayed in a thread.
_MANY_IDS = 4096


ReplyTo = Callable[[resume_pb2.ResumeRecord], Reply]


class Resumer:
    """Goes on with answers whose streams were lost."""

    def __init__(self, contexts: ContextFactory, pipeline: Pipeline) -> None:
        self._contexts = contexts
        self._pipeline = pipeline
        self._attacher = Attacher(pipeline.cluster, pipeline.limits.max_answers)

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
        request, timings = self._read(message, call), Timings(arrived_at())
        self._require_workers()
        async with AsyncExitStack() as attached:
            with timings.measure(timing_pb2.STAGE_ADOPT) as span:
                answers = await self._attacher.attach_all(request, self._remaining(request), attached)
                span.set({"baton.adopted": sum(isinstance(one, Adopted) for one in answers)})
            if not answers:
                self._count_missing(message)
                return False
            metrics.RESUMPTIONS.labels("adopted").inc()
            ctx, reply = self._context(request, answers, timings), reply_to(answers[0].record)
            describe = partial(set_adopted_attributes, ctx.request)
            answer = partial(self._answer_adopted, answers, ctx, reply)
            ended = partial(end_reply, reply, ctx.stats.timings)
            await self._pipeline.running.run(ctx, "baton.resume", describe, answer, ended)
        return True

    def _count_missing(self, message: generate_pb2.ResumeGenerationRequest) -> None:
        """Counts an answer that no worker has. One that is only looked up by an id, without an attempt, is not lost."""
        if message.HasField("request"):
            metrics.RESUMPTIONS.labels("computed_again").inc()
        elif message.attempt:
            metrics.RESUMPTIONS.labels("lost").inc()

    def _require_workers(self) -> None:
        """Raises NoWorker on a router that has just started: that it finds no answer tells nothing yet."""
        workers = self._pipeline.cluster.workers
        if not any("decode" in worker.record.roles and not worker.problem for worker in workers):
            raise NoWorker("no decode worker is ready, as this router sees it")

    async def progress(self, handle: Handle, qos: RequestQos) -> generate_pb2.GetGenerationProgressResponse:
        """The tokens of a kept answer so far, as its workers tell them; nothing changes. Raises StreamLost."""
        request = ResumeRequest(generate_pb2.ResumeGenerationRequest(), handle, qos, None)
        found = generate_pb2.GetGenerationProgressResponse()
        first = await self._attacher.peek(0, request)
        attached = first.decode.attached
        found.answers.add(tokens=len(attached.token_ids), is_over=attached.is_over)
        for answer in range(1, first.record.answers):
            with suppress(StreamLost):
                attached = (await self._attacher.peek(answer, request)).decode.attached
                found.answers.add(index=answer, tokens=len(attached.token_ids), is_over=attached.is_over)
        return found

    async def cancel(self, handle: Handle, qos: RequestQos) -> None:
        """Ends a kept answer, wherever it is. Raises StreamLost."""
        request = ResumeRequest(generate_pb2.ResumeGenerationRequest(), handle, qos, None)
        running = self._pipeline.running.table.find_kept(handle)
        if running is None or owner_of(running) != request.owner:
            await self._attacher.cancel_all(request)
            return
        # It may be between two workers, where none has it; and one that was lost may still have it.
        await running.cancellation.cancel("the answer was cancelled by its handle")
        with suppress(StreamLost):
            await self._attacher.cancel_all(request)

    def _read(self, message: generate_pb2.ResumeGenerationRequest, call: Any) -> ResumeRequest:
        handle = Handle.parse(message.handle)
        indices = [position.index for position in message.have]
        if len(set(indices)) < len(indices):
            raise InvalidRequest.of("have", "has an answer twice")
        most = self._pipeline.limits.max_answers
        if max(len(message.received), *indices, 0) > most or len(indices) > most:
            raise InvalidRequest.of("have", f"is of more than {most} answers")
        if (answers := message.request.sampling.n) > most:
            raise InvalidRequest.of("request.sampling.n", f"must be in [1, {most}], is {answers}")
        for index, tokens in enumerate(message.received):
            if len(tokens.ids) != next((one.tokens for one in message.have if one.index == index), 0):
                violation = FieldViolation(f"received[{index}]", "has other ids than `have` says")
                raise PositionInvalid([violation])
        return ResumeRequest(message, handle, self._contexts.read_qos(call), call)

    # From the workers that have the answers.

    def _remaining(self, request: ResumeRequest) -> float:
        return Deadline.of(remaining_seconds(request.call), self._pipeline.limits).remaining_seconds

    def _context(self, request: ResumeRequest, answers: Sequence[Answer], timings: Timings) -> RequestContext:
        """The context of answers that run on their workers."""
        first = first_adopted(answers)
        record = first.record
        is_partly_lost = any(isinstance(one, Lost) for one in answers)
        asked = record.request
        if record.answers > 1:
            asked.sampling.n = record.answers
        seconds = self._remaining(request)
        for each in (one.decode.attached for one in answers if isinstance(one, Adopted)):
            if each.HasField("remaining") and not each.is_over:
                seconds = min(seconds, each.remaining.ToNanoseconds() / 1e9)
        stats = RequestStats(record.request_id, timings)
        kept = record.started.resumption.keep.ToNanoseconds() / 1e9
        notes = self._contexts.begin_notes(request.call.invocation_metadata())
        if notes is not None:
            notes.is_taken_over = True
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
            keep=request.keep(kept, request.handle, record.origin, is_partly_lost=is_partly_lost),
            notes=notes,
        )

    async def _answer_adopted(self, answers: Sequence[Answer], ctx: RequestContext, reply: Reply) -> None:
        model = self._pipeline.cluster.model(first_adopted(answers).decode.worker.record.model)
        ctx.stats.model = model.name
        # To its worker this router has read them: they are charged even if the request is refused now.
        adopted = [one.decode.attached for one in answers if isinstance(one, Adopted)]
        ctx.stats.completion_tokens = sum(len(one.token_ids) for one in adopted)
        ctx.stats.charged_tokens = sum(one.read_tokens for one in adopted)
        admission = self._pipeline.admission
        async with admission.track_tenant(ctx, requests=0):
            with admission.count_running(ctx, model.name):
                await self._answer(answers, ctx, model, reply)

    async def _answer(self, answers: Sequence[Answer], ctx: RequestContext, model: ServedModel, reply: Reply) -> None:
        if len(answers) > 1:
            await self._answer_several(answers, ctx, model, reply)
            return
        completion, prompt = await self._replay(answers[0], ctx, model)
        async with self._pipeline.writer(ctx, reply) as stream:
            await self._go_on(answers[0], ctx, prompt, completion, stream)

    async def _answer_several(
        self, answers: Sequence[Answer], ctx: RequestContext, model: ServedModel, reply: Reply
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
        self, one: Answer, ctx: RequestContext, model: ServedModel
    ) -> tuple[ReplayedCompletion, AdoptedPrompt]:
        """The answer as far as its worker has it, or its client. Raises PositionInvalid."""
        assert ctx.keep is not None
        continued = ctx.keep.of(ctx.answer)
        known = known_of(one, continued)
        ctx.stats.restore(one.record.finished)
        prompt = self._pipeline.processor.adopted(ctx, model, known.prompt)
        parser = prompt.answer_parser(model)
        completion = ReplayedCompletion(ctx.request, known.sampling, model, parser, continued.have)
        if len(known.ids) > _MANY_IDS:
            await asyncio.to_thread(completion.replay, known.ids, known.logprobs)
        else:
            completion.replay(known.ids, known.logprobs)
        ctx.stats.completion_tokens = len(completion.token_ids)
        return completion, prompt

    async def _go_on(
        self,
        one: Answer,
        ctx: RequestContext,
        prompt: AdoptedPrompt,
        completion: ReplayedCompletion,
        stream: StreamWriter,
    ) -> None:
        adopted = one if isinstance(one, Adopted) else None
        await ResumedExecution(self._pipeline.executor, ctx, prompt, completion, stream, adopted).run()

    # From the client's own copy.

    def _context_again(self, request: ResumeRequest) -> RequestContext:
        again = request.message.request
        ctx = self._contexts.create(again, request.call)
        seconds = keep_seconds(again.response, self._pipeline.limits.max_keep_seconds)
        return replace(ctx, keep=request.keep(seconds, Handle.new(ctx.call_id)))
