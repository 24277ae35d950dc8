"""The calls of one request to its workers: built here, bounded by the deadline, counted as load, errors annotated."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from opentelemetry.trace import SpanContext, SpanKind

from baton.calls import stream, unary
from baton.engine.v1 import decode_pb2, handoff_pb2, prefill_pb2, prompt_pb2
from baton.errors import BatonError, DeadlineExceeded, Draining, LoraNotHere, NoWorker, Unavailable
from baton.inference.v1 import timing_pb2
from router.context import RequestContext
from router.routing.policy import Placement
from router.telemetry.spans import prefill_attributes, worker_attributes
from router.telemetry.stages import CallTiming, name_of
from router.workers.aborts import abort_unanswered
from router.workers.handle import WorkerHandle
from rpc.best_effort import best_effort
from rpc.multiplex.replies import MultiplexedCall
from rpc.tracing.span import stage_span


class TokenFeed(Protocol):
    """A call that gives tokens as they come."""

    def listen(self, take_token: Callable[[int], bool]) -> None:
        """Gives each token to `take_token` while the responses are waited for; if it returns False, as a response."""

    def stop(self) -> None:
        """Ends the responses, and the call."""


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """A running Decode call: the worker's responses, and the timing that takes its report."""

    responses: AsyncGenerator[decode_pb2.DecodeResponse, None]
    timing: CallTiming
    feed: TokenFeed | None = None  # gives tokens without a step of the task that reads; None if the call cannot


class WorkerCalls:
    """Calls workers for one request. Leaving or cancelling a call stops it on the worker."""

    def __init__(self, ctx: RequestContext, model: str, sampling: prompt_pb2.Sampling) -> None:
        self._ctx = ctx
        self._model = model
        self._sampling = sampling
        self._prefills = self._decodes = 0
        self._prefill_span: SpanContext | None = None

    async def prefill(
        self, worker: WorkerHandle, prompt: prompt_pb2.Prompt, placement: Placement[WorkerHandle]
    ) -> handoff_pb2.KvHandoff:
        """Runs the prompt. The caller releases the handoff, which only the placement's decode worker may read."""
        tokens = len(prompt.token_ids)
        with (
            self._call(timing_pb2.STAGE_PREFILL_COMPUTE, worker) as timing,
            stage_span("prefill", worker_attributes(worker), kind=SpanKind.CLIENT) as span,
            worker.track_load(tokens),
            worker.latency.prompts.computing(tokens),
            worker.ranks.taking(self._session_key, placement.rank) as rank,
        ):
            request = prefill_pb2.PrefillRequest(
                request_id=self._ctx.call_id,
                model=self._model,
                prompt=prompt,
                sampling=self._sampling,
                reader=placement.decode.record.certificate,
                data_parallel_rank=rank,
            )
            self._prefills += 1
            seconds, metadata = self._ctx.deadline.remaining_seconds, self._metadata(self._prefills)
            try:
                async with worker.fail_if_hung():
                    response = await unary(worker.prefill.Prefill(request, timeout=seconds, metadata=metadata))
            except (asyncio.CancelledError, DeadlineExceeded):
                await abort_unanswered(worker, self._ctx.call_id)
                raise
            span.set(prefill_attributes(response))
            self._prefill_span = span.context
            timing.report(response.timings)
            timing.is_complete = True
        return response.handoff

    @asynccontextmanager
    async def decode(
        self,
        placement: Placement[WorkerHandle],
        prompt: prompt_pb2.Prompt,
        handoff: handoff_pb2.KvHandoff | None,
        emitted: Sequence[int],
    ) -> AsyncGenerator[DecodeCall, None]:
        """Decodes from a handoff, or from the prompt and the ids emitted so far, while the context is open."""
        worker, tokens = placement.decode, 0 if handoff else len(prompt.token_ids)
        with (
            self._call(timing_pb2.STAGE_DECODE, worker) as timing,
            stage_span("decode", worker_attributes(worker), kind=SpanKind.CLIENT) as span,
            worker.track_load(tokens),
            worker.ranks.taking(self._session_key, placement.decode_rank) as rank,
        ):
            request = decode_pb2.DecodeRequest(
                request_id=self._ctx.call_id,
                model=self._model,
                prompt=prompt,
                handoff=handoff,
                emitted=emitted,
                sampling=self._sampling,
                data_parallel_rank=rank,
            )
            if handoff:
                span.link(self._prefill_span, "prefill")
            self._decodes += 1
            seconds, metadata = self._ctx.deadline.remaining_seconds, self._metadata(self._decodes)
            call: Any = worker.decode.Decode(request, timeout=seconds, metadata=metadata)
            async with worker.fail_if_hung(), aclosing(stream(call)) as responses:
                yield DecodeCall(responses, timing, call if isinstance(call, MultiplexedCall) else None)

    async def release(self, owner: WorkerHandle, handoff: handoff_pb2.KvHandoff) -> None:
        """Frees a handoff's blocks, even during a cancellation. If that fails they are freed with the lease."""
        request = handoff_pb2.ReleaseRequest(
            handoff_id=handoff.handoff_id, epoch=handoff.epoch, reader=f"router:{self._ctx.call_id}"
        )
        await best_effort(lambda seconds: owner.handoff.Release(request, timeout=seconds), healthy=not owner.problem)

    @property
    def _session_key(self) -> str:
        return self._ctx.request.routing.session_key

    def _metadata(self, attempt: int) -> tuple[tuple[str, str | bytes], ...]:
        return (*self._ctx.worker_metadata(attempt), *self._ctx.qos.metadata())

    @contextmanager
    def _call(self, stage: timing_pb2.Stage.ValueType, worker: WorkerHandle) -> Iterator[CallTiming]:
        """Registers and times a call."""
        self._ctx.cancellation.add_worker(worker)
        try:
            with (
                self._ctx.timings.measure_call(stage, worker.record.worker_id) as timing,
                annotate_worker_errors(name_of(stage), worker),
            ):
                yield timing
        except DeadlineExceeded:
            raise self._ctx.deadline.exceeded(self._ctx.timings.stage_name, worker.record.worker_id) from None


@contextmanager
def annotate_worker_errors(stage: str, worker: WorkerHandle) -> Iterator[None]:
    """Adds the stage and the worker to errors. Marks a worker that is unavailable as unhealthy."""
    try:
        yield
    except BatonError as error:
        error.stage = error.stage or stage
        error.worker_id = error.worker_id or worker.record.worker_id
        if isinstance(error, Unavailable) and not isinstance(error, (Draining, LoraNotHere, NoWorker)):
            worker.mark_unhealthy(f"a call to it failed: {error.message}")
        raise
