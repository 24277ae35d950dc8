"""Several answers to one prompt: the first runs until its prompt is computed, then the others find that in a cache.

Each answer is an execution of its own (execution.py), with its own handoff, workers and recovery: a handoff belongs to
one reader and has one first token, and each answer draws its own. The answers share a session, which keeps them on the
workers whose prefix cache has the prompt, so that only what is left of its last block is computed again.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial

from baton.inference.v1 import generate_pb2, timing_pb2
from baton_http2.server.reply import Reply
from router import validation
from router.admission.controller import Admission, AdmissionController
from router.admission.predictor import RequestEstimate
from router.config import LimitsConfig
from router.context import RequestContext
from router.decoding.state import Executor
from router.execution import execute
from router.multimodal.prompt import MultimodalPrompt
from router.resume.execution import completion_of, resume
from router.stream.general import FillFinished, Pace
from router.stream.writer import StreamWriter
from router.text.completion import Completion, TokenDelta
from router.text.served_model import ServedModel
from rpc.tracing.span import stage_span
from runtime.aio import gather_or_cancel
from runtime.entropy import token_hex


def keep_together(request: generate_pb2.GenerateRequest) -> None:
    """Makes the answers to a request one session, unless it belongs to one."""
    request.routing.session_key = request.routing.session_key or token_hex(16)


def draw_seed(request: generate_pb2.GenerateRequest, model: ServedModel) -> None:
    """Draws the seed that all answers' seeds follow from, so that any of them can be computed again."""
    if not request.sampling.HasField("seed") and "seed" not in model.capabilities.unsupported_sampling:
        request.sampling.seed = random.getrandbits(64)


@dataclass(slots=True)
class SeveralAnswers:
    """The answers to one request, which has been admitted for the first one; each other one is admitted here."""

    executor: Executor
    admission: AdmissionController
    limits: LimitsConfig
    ctx: RequestContext
    model: ServedModel
    estimate: RequestEstimate
    _is_computed: asyncio.Event = field(default_factory=asyncio.Event)
    _others_ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, prompt: MultimodalPrompt, reply: Reply, admission: Admission) -> None:
        """Runs all answers to their ends, and sends their messages. The first failure ends them all.

        `admission` is the first answer's, which leaves it at its end: the others may wait for its place.
        """
        shared = SharedReply(reply)
        others = [self.ctx.part(answer) for answer in range(1, self.ctx.request.sampling.n)]
        try:
            first = self._run_first(prompt, shared, admission)
            await gather_or_cancel([first, self._run_others(others, prompt, shared)])
        finally:
            for part in others:
                self.ctx.stats.add_answer(part.stats)
        await shared.finish()

    async def _run_first(self, prompt: MultimodalPrompt, shared: "SharedReply", admission: Admission) -> None:
        try:
            await self._run_answer(self.ctx, prompt, shared)
        finally:
            admission.leave()
        # The rest of the request's time is that of the longest answer.
        with self.ctx.stats.timings.measure_call(timing_pb2.STAGE_DECODE):
            await self._others_ended.wait()

    async def _run_others(self, parts: list[RequestContext], prompt: MultimodalPrompt, shared: "SharedReply") -> None:
        try:
            await self._is_computed.wait()
            await gather_or_cancel(
                self._run_another(part, prompt.for_answer(part, self.model), shared) for part in parts
            )
        finally:
            for part in parts:
                part.cancellation.close()
            self._others_ended.set()

    async def _run_another(self, part: RequestContext, prompt: MultimodalPrompt, shared: "SharedReply") -> None:
        await part.cancellation.run(self._admit_and_run(part, prompt, shared))

    async def _admit_and_run(self, part: RequestContext, prompt: MultimodalPrompt, shared: "SharedReply") -> None:
        with stage_span("answer", {"baton.answer": part.answer}):
            async with self.admission.admit(part, replace(self.estimate, is_part=True)):
                with prompt:
                    await prompt.embed()
                    await self._run_answer(part, prompt, shared)

    async def _run_answer(self, ctx: RequestContext, prompt: MultimodalPrompt, shared: "SharedReply") -> None:
        sampling = validation.resolve_sampling(ctx.request, prompt, self.model, ctx.answer)
        run: Callable[[StreamWriter], Awaitable[None]]
        if ctx.keep is None or not ctx.keep.is_resumed:
            completion = Completion(ctx.request, sampling, self.model, prompt.answer_parser(self.model))
            run = partial(execute, self.executor, ctx, prompt, completion)
        else:
            completion = replayed = completion_of(ctx, sampling, self.model, prompt)
            run = partial(resume, self.executor, ctx, prompt, replayed)
        await write_answer(ctx, completion, shared, self.limits, run, self._is_computed)


async def write_answer(
    ctx: RequestContext,
    completion: Completion,
    shared: "SharedReply",
    limits: LimitsConfig,
    run: Callable[[StreamWriter], Awaitable[None]],
    is_computed: asyncio.Event,
) -> None:
    """Runs one of several answers, and sends its messages. `is_computed` is set with its first token."""
    answer = _Answer(ctx, completion, shared, is_computed)
    writer = _AnswerWriter(
        ctx.request_id,
        Reply(answer.send, lambda _trailer: None),
        limits.max_waiting_tokens,
        limits.slow_reader_seconds,
        ctx.stats.timings.first_token_sent,
        pace=Pace.of(ctx.request.response),
    )
    try:
        async with writer as stream:
            await run(stream)
        if ctx.answer == 0:
            shared.fill_finished = writer.fill_finished
    finally:
        # It refers to the execution, which refers to its writer.
        writer.fill_finished = None


class _AnswerWriter(StreamWriter):
    """Keeps the end of the stream for when all answers have ended: filling it ends the request's timings."""

    fill_finished: FillFinished | None = None

    def finish(self, last: TokenDelta, fill_finished: FillFinished) -> None:
        """Adds what was held back until now, and the end of this answer."""
        self.fill_finished = fill_finished
        super().finish(last, lambda _finished: None)


@dataclass(slots=True)
class _Answer:
    """One answer's part of the stream. `is_computed` is set with its first token."""

    ctx: RequestContext
    completion: Completion
    shared: "SharedReply"
    is_computed: asyncio.Event

    async def send(self, message: generate_pb2.GenerateResponse) -> None:
        """Sends the next message of this answer, in the stream of all."""
        match message.WhichOneof("event"):
            case "started" | "resumed":
                if self.ctx.answer == 0:
                    await self.shared.send(message)
            case "token":
                self.is_computed.set()
                message.token.index = self.ctx.answer
                await self.shared.send(message)
            case "finished":
                self.is_computed.set()
                if not self._is_known:
                    message.answer_finished.CopyFrom(self._finished())
                    await self.shared.send(message)

    @property
    def _is_known(self) -> bool:
        """True if the client has the end of this answer already."""
        keep = self.ctx.keep
        return keep is not None and keep.is_resumed and keep.of(self.ctx.answer).have.is_finished

    def _finished(self) -> generate_pb2.AnswerFinished:
        finish = self.completion.finished
        assert finish is not None
        return generate_pb2.AnswerFinished(
            index=self.ctx.answer,
            reason=finish.reason,
            stop_string=finish.stop_string,
            stop_token_id=finish.stop_token_id,
            completion_tokens=len(self.completion.token_ids),
            cached_tokens=self.ctx.stats.cached_tokens,
        )


class SharedReply:
    """The way back to the client, for one message at a time. `fill_finished` fills the last one."""

    def __init__(self, reply: Reply) -> None:
        self.fill_finished: FillFinished | None = None
        self._send = reply.write
        self._sending = asyncio.Lock()
        self._sequence = 0
        self._request_id = ""

    async def send(self, message: generate_pb2.GenerateResponse) -> None:
        """Sends a message of one of the answers, numbered among those of all."""
        async with self._sending:
            self._request_id = message.request_id
            message.sequence = self._sequence
            self._sequence += 1
            await self._send(message)

    async def finish(self) -> None:
        """Sends the end of the stream."""
        fill_finished, self.fill_finished = self.fill_finished, None
        assert fill_finished is not None
        message = generate_pb2.GenerateResponse(request_id=self._request_id)
        fill_finished(message.finished)
        await self.send(message)
