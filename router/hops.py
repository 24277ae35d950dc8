"""The calls of one request to its workers: bounded by its deadline, counted as load, with errors that say where."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass

from baton.engine.v1 import decode_pb2, handoff_pb2, prefill_pb2
from baton.inference.v1 import timing_pb2
from opentelemetry.trace import SpanContext, SpanKind

from router import traces
from router.aborts import abort_unanswered
from router.deadline import Deadline
from router.fault_plan import plan_metadata
from router.faults import located
from router.ledger import Ledger
from router.requests import RunningRequest
from router.stages import Attempt, name_of
from router.standing import standing_metadata
from router.worker import Worker
from rpc.calls import stream, unary
from rpc.errors import BatonError, DeadlineExceeded
from rpc.tracing.span import stage_span

_RELEASE_SECONDS = 2.0
_RELEASE_TO_ILL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """A decode that runs: what its worker answers, and the part of the ledger that it accounts for."""

    responses: AsyncGenerator[decode_pb2.DecodeResponse, None]
    attempt: Attempt


class Hops:
    """One request's way to workers. Leaving or cancelling a call stops it on the worker."""

    def __init__(self, running: RunningRequest, ledger: Ledger, deadline: Deadline, session_key: str = "") -> None:
        self._session_key = session_key
        self._running = running
        self._ledger = ledger
        self._deadline = deadline
        self._prefills = self._decodes = 0
        self._prefill_span: SpanContext | None = None

    async def prefill(self, worker: Worker, request: prefill_pb2.PrefillRequest) -> prefill_pb2.PrefillResponse:
        """Runs the prompt. The blocks that the answer names are held for whoever releases them."""
        tokens = len(request.prompt.token_ids)
        with (
            self._at(timing_pb2.STAGE_PREFILL_COMPUTE, worker) as attempt,
            stage_span("prefill", traces.worker(worker), kind=SpanKind.CLIENT) as span,
            worker.carrying(tokens),
            worker.pace.prompts.computing(tokens),
            worker.ranks.taking(self._session_key) as rank,
        ):
            if rank is not None:
                request.data_parallel_rank = rank
            seconds = self._deadline.remaining_seconds
            self._prefills += 1
            metadata = (*plan_metadata(self._prefills), *standing_metadata())
            try:
                async with worker.answering():
                    response = await unary(worker.prefill.Prefill(request, timeout=seconds, metadata=metadata))
            except (asyncio.CancelledError, DeadlineExceeded):
                await abort_unanswered(worker, self._running.request_id)
                raise
            span.set(traces.prefilled(response))
            self._prefill_span = span.context
            attempt.report(response.timings)
            attempt.is_complete = True
        return response

    @asynccontextmanager
    async def decode(self, worker: Worker, request: decode_pb2.DecodeRequest) -> AsyncGenerator[DecodeCall, None]:
        """The worker's responses, for as long as the context is open."""
        tokens = 0 if request.HasField("handoff") else len(request.prompt.token_ids)
        with (
            self._at(timing_pb2.STAGE_DECODE, worker) as attempt,
            stage_span("decode", traces.worker(worker), kind=SpanKind.CLIENT) as span,
            worker.carrying(tokens),
            worker.ranks.taking(self._session_key) as rank,
        ):
            if rank is not None:
                request.data_parallel_rank = rank
            if request.HasField("handoff"):
                span.link(self._prefill_span, "prefill")
            seconds = self._deadline.remaining_seconds
            self._decodes += 1
            metadata = (*plan_metadata(self._decodes), *standing_metadata())
            call = worker.decode.Decode(request, timeout=seconds, metadata=metadata)
            async with worker.answering(), aclosing(stream(call)) as responses:
                yield DecodeCall(responses, attempt)

    async def release(self, owner: Worker, handoff: handoff_pb2.KvHandoff) -> None:
        """Gives a handoff's blocks back, now and in spite of a cancellation. The lease is the backstop."""
        releasing = asyncio.ensure_future(self._release(owner, handoff))
        try:
            await asyncio.shield(releasing)
        except asyncio.CancelledError:
            await asyncio.wait([releasing], timeout=_RELEASE_SECONDS)
            raise

    async def _release(self, owner: Worker, handoff: handoff_pb2.KvHandoff) -> None:
        request = handoff_pb2.ReleaseRequest(
            handoff_id=handoff.handoff_id, epoch=handoff.epoch, reader=f"router:{self._running.request_id}"
        )
        try:
            # Nobody is to wait for one that hangs.
            seconds = _RELEASE_TO_ILL_SECONDS if owner.problem else _RELEASE_SECONDS
            await unary(owner.handoff.Release(request, timeout=seconds))
        except BatonError:
            # The owner is away, and will find out by the lease.
            return

    @contextmanager
    def _at(self, stage: timing_pb2.Stage.ValueType, worker: Worker) -> Iterator[Attempt]:
        """A call of this stage. Errors say where they happened."""
        self._running.visit(worker)
        try:
            with self._ledger.attempt(stage, worker.record.worker_id) as attempt, located(name_of(stage), worker):
                yield attempt
        except DeadlineExceeded:
            raise self._deadline.exceeded(worker.record.worker_id) from None
