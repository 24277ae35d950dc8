"""The calls of one request to its workers: built here, bounded by the deadline, counted as load, errors annotated."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from opentelemetry.trace import SpanContext, SpanKind
from typing_extensions import Self

from baton.calls import cancel, unary
from baton.engine.v1 import decode_pb2, handoff_pb2, prefill_pb2, prompt_pb2
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    EngineFailed,
    Overloaded,
    Unavailable,
)
from baton.inference.v1 import timing_pb2
from router.context import RequestContext
from router.recording.notes import AttemptNote
from router.routing.policy import Placement
from router.telemetry.stages import CallTiming, name_of
from router.workers.cancellation import abort_unanswered
from router.workers.decode_calls import NO_READER, AdoptedDecode, DecodeCall, KeptReader
from router.workers.destinations import Destination, DestinationLost, prefix_source
from router.workers.handle import WorkerHandle
from router.workers.replies import is_lost_by, of_this_worker
from router.workers.serialized_prompt import SerializedPrompt
from router.workers.spans import prefill_attributes, worker_attributes
from router.workers.watching.waiting_calls import Waiting
from rpc.channels import best_effort
from rpc.tracing.span import NO_SPAN, Span, optional_attempt, stage_span
from runtime.entropy import token_bytes

# Another worker may succeed. Errors about the request itself are never among these.
RETRYABLE = (Unavailable, Overloaded, EngineFailed)
Answer = TypeVar("Answer")

_EXECUTION_BYTES = 8


class WorkerCalls:
    """Calls workers for one request. Leaving or cancelling a call stops it on the worker."""

    def __init__(
        self,
        ctx: RequestContext,
        model: str,
        sampling: prompt_pb2.Sampling,
        serialized: SerializedPrompt | None = None,
    ) -> None:
        """`serialized` are the bytes of a long prompt."""
        self._ctx = ctx
        self._serialized = serialized
        self._model = model
        self._sampling = sampling
        self._prefills = self._decodes = 0
        self._keep: decode_pb2.StreamKeep | None = None  # of the next decode
        self.reader = NO_READER
        self._computed_by: SpanContext | None = None  # the span of the last call, whose KV the next one may take over

    async def allocate(
        self, placement: Placement[WorkerHandle], prompt: prompt_pb2.Prompt, waiting: Waiting
    ) -> Destination:
        """Allocates on the decode worker before the prompt is computed. The caller releases the destination, unless a
        decode has taken it. Raises DestinationLost.
        """
        worker, prefill = placement.decode, placement.prefill
        assert prefill is not None
        request = decode_pb2.AllocateRequest(
            request_id=self._ctx.call_id,
            model=self._model,
            sampling=self._sampling,
            data_parallel_rank=placement.decode_rank,
            prefill_address=prefill.record.address,
        )
        seconds, metadata = self._ctx.deadline.remaining_seconds, self._ctx.worker_metadata(1)
        try:
            with _Calling(self._ctx, timing_pb2.STAGE_HANDOFF_WAIT, "allocate", worker, 0):
                asked = self._with_prompt(request, prompt)
                call: Any = worker.decode.Allocate(asked, timeout=seconds, metadata=metadata)
                # Not by a kept answer's id, which the next router's decode has, too: its blocks go with their lease.
                response = await answer_of(unary(call), worker, self._ctx.prompt_call_id, waiting)
        except DeadlineExceeded:
            raise
        except BatonError as error:
            raise DestinationLost(error) from error
        return Destination(response.destination, worker)

    async def prefetch(self, placement: Placement[WorkerHandle], prompt: prompt_pb2.Prompt) -> None:
        """Lets the decode worker read KV while the prompt is computed, until its decode takes over what it has read.

        Cancelling it frees what has not been taken. Raises BatonError.
        """
        worker, prefill = placement.decode, placement.prefill
        assert prefill is not None
        request = decode_pb2.PrefetchRequest(
            request_id=self._ctx.prompt_call_id,
            model=self._model,
            prefill_worker_id=prefill.record.worker_id,
            prefill_epoch=prefill.record.epoch,
            prefill_address=prefill.record.address,
        )
        # Faults are planned for the attempt to decode that follows.
        seconds, metadata = self._ctx.deadline.remaining_seconds, self._ctx.worker_metadata(self._decodes + 1)
        with (
            worker.keep_open(),
            stage_span("prefetch", worker_attributes(worker), kind=SpanKind.CLIENT) as span,
            optional_attempt(),
        ):
            asked = self._with_prompt(request, prompt)
            response = await unary(worker.decode.Prefetch(asked, timeout=seconds, metadata=metadata))
            span.set({"baton.handoff.early_bytes": response.num_bytes})

    async def prefill(
        self,
        worker: WorkerHandle,
        prompt: prompt_pb2.Prompt,
        placement: Placement[WorkerHandle],
        waiting: Waiting,
        destination: Destination | None = None,
        sent: Callable[[], None] = lambda: None,
    ) -> handoff_pb2.KvHandoff:
        """Runs the prompt. The caller releases the handoff, which only the placement's decode worker may read.

        `sent` is called when the worker has the request, before its answer.
        """
        tokens = len(prompt.token_ids)
        with _Calling(self._ctx, timing_pb2.STAGE_PREFILL_COMPUTE, "prefill", worker, tokens) as calling:
            request = prefill_pb2.PrefillRequest(
                request_id=self._ctx.prompt_call_id,
                model=self._model,
                reader=placement.decode.record.certificate,
                data_parallel_rank=calling.begin_rank(placement.rank),
                destination=destination.message if destination else None,
                prefix_source=prefix_source(placement, worker),
            )
            # Messages as arguments are copied in twice the time.
            request.sampling.CopyFrom(self._sampling)
            work, is_done = worker.latency.prompts.begin(tokens), False
            try:
                response = await self._prefilled(worker, self._with_prompt(request, prompt), waiting, sent)
                is_done = True
            finally:
                worker.latency.prompts.end(work, is_done=is_done)
            if calling.span.is_recording:
                calling.span.set(prefill_attributes(response))
            self._computed_by = calling.span.context
            calling.timing.report(response.timings)
            calling.timing.is_complete = True
            if calling.note is not None:
                calling.note.holds(response.handoff)
        return response.handoff

    async def _prefilled(
        self, worker: WorkerHandle, asked: prefill_pb2.PrefillRequest, waiting: Waiting, sent: Callable[[], None]
    ) -> prefill_pb2.PrefillResponse:
        self._prefills += 1
        seconds, metadata = self._ctx.deadline.remaining_seconds, self._ctx.worker_metadata(self._prefills)
        call: Any = worker.prefill.Prefill(asked, timeout=seconds, metadata=metadata)
        try:
            sent()
        except BaseException:
            cancel(call)
            raise
        answer: Awaitable[prefill_pb2.PrefillResponse] = unary(call)
        return await answer_of(answer, worker, self._ctx.prompt_call_id, waiting)

    async def decode(
        self,
        placement: Placement[WorkerHandle],
        prompt: prompt_pb2.Prompt,
        handoff: handoff_pb2.KvHandoff | None,
        emitted: Sequence[int],
        read: Callable[[DecodeCall], Awaitable[None]],
        waiting: Waiting,
        destination: Destination | None = None,
    ) -> None:
        """Decodes from a handoff, or from the prompt and the ids emitted so far, while `read` reads the call."""
        worker, tokens = placement.decode, 0 if handoff else len(prompt.token_ids)
        with _Calling(self._ctx, timing_pb2.STAGE_DECODE, "decode", worker, tokens) as calling:
            request = decode_pb2.DecodeRequest(
                request_id=self._ctx.call_id,
                model=self._model,
                emitted=emitted,
                data_parallel_rank=calling.begin_rank(placement.decode_rank),
                destination_id=destination.message.destination_id if destination else "",
                prefix_source=None if handoff else prefix_source(placement, worker),
            )
            request.sampling.CopyFrom(self._sampling)
            if handoff:
                request.handoff.CopyFrom(handoff)
                calling.span.link(self._computed_by, "prefill" if self._decodes == 0 else "decode")
            self._decodes += 1
            self.reader = NO_READER
            if self._keep is not None:
                request.keep.CopyFrom(self._keep)
                self.reader = KeptReader(1, int.from_bytes(token_bytes(_EXECUTION_BYTES), "little"))
                request.keep.hop, request.keep.execution = self._decodes, self.reader.execution
            seconds, metadata = self._ctx.deadline.remaining_seconds, self._ctx.worker_metadata(self._decodes)
            asked = self._with_prompt(request, prompt)
            call: Any = worker.decode.Decode(asked, timeout=seconds, metadata=metadata)
            with worker.calls.interruptible(waiting):
                try:
                    await read(DecodeCall(call, calling.timing))
                finally:
                    await call.aclose()
            self._computed_by = calling.span.context

    def _with_prompt(self, request: Any, prompt: prompt_pb2.Prompt) -> Any:
        """The request with its prompt, or its bytes where the prompt's are known."""
        if self._serialized is not None and self._serialized.message is prompt:
            return self._serialized.within(request, "prompt")
        request.prompt.CopyFrom(prompt)
        return request

    def keep_next(self, keep: decode_pb2.StreamKeep | None) -> None:
        """Lets the next decode go on without this router; without `keep` it does not."""
        self._keep = keep

    async def go_on(
        self, adopted: AdoptedDecode, read: Callable[[DecodeCall], Awaitable[None]], waiting: Waiting
    ) -> None:
        """Reads a decode that runs already, for another router until now."""
        self._decodes, self.reader = adopted.hop, adopted.reader
        worker = adopted.worker
        with (
            _Calling(self._ctx, timing_pb2.STAGE_DECODE, "attach", worker, 0) as calling,
            worker.calls.interruptible(waiting),
        ):
            try:
                await read(DecodeCall(adopted.responses, calling.timing))
            finally:
                await adopted.responses.aclose()
            self._computed_by = calling.span.context

    async def settle(self, worker: WorkerHandle) -> None:
        """Ends the generation of a kept answer that has ended here. If that fails it ends with its grace."""
        await self._settle(worker, self.reader)

    async def forget(self, adopted: AdoptedDecode) -> None:
        """Ends a kept answer that cannot go on, and has its worker forget it. If that fails it ends with its grace."""
        await self._settle(adopted.worker, adopted.reader, forget=True)

    async def _settle(self, worker: WorkerHandle, reader: KeptReader, *, forget: bool = False) -> None:
        request = decode_pb2.SettleRequest(
            request_id=self._ctx.call_id, attachment=reader.attachment, execution=reader.execution, forget=forget
        )
        await best_effort(lambda seconds: worker.decode.Settle(request, timeout=seconds), healthy=not worker.problem)

    async def has_begun(self, worker: WorkerHandle) -> bool:
        """True if a worker says that it has the latest decode, which goes on without this call."""
        request = decode_pb2.FindStreamsRequest(request_ids=[self._ctx.call_id])
        answer = await best_effort(
            lambda seconds: worker.decode.FindStreams(request, timeout=seconds), healthy=not worker.problem
        )
        return answer is not None and any(one.hop == self._decodes for one in answer.found)

    async def release_destination(self, destination: Destination) -> None:
        """Frees what no decode has taken. See Destination.release."""
        await destination.release(f"router:{self._ctx.call_id}")

    async def release(self, owner: WorkerHandle, handoff: handoff_pb2.KvHandoff) -> None:
        """Frees a handoff's blocks, even during a cancellation. If that fails they are freed with the lease."""
        request = handoff_pb2.ReleaseRequest(
            handoff_id=handoff.handoff_id, epoch=handoff.epoch, reader=f"router:{self._ctx.call_id}"
        )
        await best_effort(lambda seconds: owner.handoff.Release(request, timeout=seconds), healthy=not owner.problem)

    @property
    def next_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """The metadata of a call before the next decode."""
        return self._ctx.worker_metadata(self._decodes + 1)


class _Calling:
    """A call to a worker while the context is open: registered, timed, traced, counted as load; errors say where.

    Not a generator, and not five of them: each takes eight calls, and a request makes two calls to workers.
    """

    __slots__ = ("_ctx", "_entered", "_name", "_rank", "_stage", "_tokens", "_worker", "note", "span", "timing")

    timing: CallTiming
    span: Span
    note: AttemptNote | None

    def __init__(
        self, ctx: RequestContext, stage: timing_pb2.Stage.ValueType, name: str, worker: WorkerHandle, tokens: int
    ) -> None:
        self._ctx = ctx
        self._stage = stage
        self._name = name
        self._worker = worker
        self._tokens = tokens
        self._rank: int | None = None  # of the worker, if it has several
        self._entered: stage_span | None = None  # if the request is traced
        self.span = NO_SPAN

    def __enter__(self) -> Self:
        worker, timings = self._worker, self._ctx.stats.timings
        # Keeps the worker's channel open, too.
        self._ctx.cancellation.add_worker(worker)
        self.timing = timings.begin_call(self._stage, worker.record.worker_id)
        if timings.is_traced:
            self._entered = stage_span(self._name, kind=SpanKind.CLIENT)
            self.span = self._entered.__enter__()
            if self.span.is_recording:
                self.span.set(worker_attributes(worker))
        worker.add_load(self._tokens)
        notes = self._ctx.notes
        self.note = notes.began(self._name, worker.record) if notes is not None else None
        return self

    def begin_rank(self, chosen: int | None) -> int | None:
        """A data-parallel rank of the worker until the end of the call; None if it has only one."""
        worker = self._worker
        if worker.record.data_parallel_ranks > 1:
            self._rank = worker.ranks.begin(self._ctx.request.routing.session_key, chosen)
        return self._rank

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        ctx, worker = self._ctx, self._worker
        worker.remove_load(self._tokens)
        if self._rank is not None:
            worker.ranks.end(self._rank)
        if self._entered is not None:
            self._entered.__exit__(kind, error, trace)
        stages = ctx.stats.timings.end_call(self.timing)
        if self.note is not None and ctx.notes is not None:
            ctx.notes.ended(self.note, stages, error)
        if error is None:
            worker.refusals = 0
        if isinstance(error, BatonError):
            found = of_this_worker(error, worker, ctx.deadline.remaining_seconds)
            if isinstance(found, DeadlineExceeded):
                raise ctx.deadline.exceeded(ctx.stats.timings.stage_name, worker.record.worker_id) from None
            _annotate(found, name_of(self._stage), worker)
            if found is not error:
                raise found from error


async def answer_of(answer: Awaitable[Answer], worker: WorkerHandle, call_id: str, waiting: Waiting) -> Answer:
    """Waits for the answer to a call unless the worker is found to hang. Stops a call whose answer will not be read."""
    try:
        with worker.calls.interruptible(waiting):
            return await answer
    except (asyncio.CancelledError, DeadlineExceeded):
        waiting.give_up()
        await abort_unanswered(worker, call_id)
        raise


@contextmanager
def annotate_worker_errors(stage: str, worker: WorkerHandle, ctx: RequestContext) -> Iterator[None]:
    """Adds the stage and the worker to errors. Marks a worker that is unavailable as unhealthy.

    Errors that a worker may not give are InvalidReplies; see `of_this_worker`.
    """
    try:
        yield
        worker.refusals = 0
    except BatonError as error:
        found = of_this_worker(error, worker, ctx.deadline.remaining_seconds)
        _annotate(found, stage, worker)
        if found is not error:
            raise found from error
        raise


def _annotate(error: BatonError, stage: str, worker: WorkerHandle) -> None:
    error.stage = error.stage or stage
    error.worker_id = error.worker_id or worker.record.worker_id
    if is_lost_by(error):
        worker.health.mark_unhealthy(f"a call to it failed: {error.message}")
