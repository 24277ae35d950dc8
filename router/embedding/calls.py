"""The calls of a request for embeddings: its inputs in parts, each on the least busy worker, or another if it fails."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from opentelemetry.trace import SpanKind

from baton.calls import unary
from baton.engine.v1 import embed_pb2
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    EngineFailed,
    FieldViolation,
    InvalidRequest,
    NoWorker,
    Overloaded,
    Unavailable,
)
from baton.inference.v1 import embed_pb2 as inference_pb2
from baton.inference.v1 import generate_pb2
from router.context import RequestContext
from router.routing.filters import Constraints, filter_workers
from router.routing.retry import Attempts, Retries
from router.routing.scoring import Preferences, pick, score_workers
from router.workers.aborts import abort_unanswered
from router.workers.calls import annotate_worker_errors
from router.workers.cluster import Cluster
from router.workers.handle import Waiting, WorkerHandle
from router.workers.replies import Suspects, check_vectors
from router.workers.spans import worker_attributes
from rpc.tracing.span import stage_span
from runtime.aio import gather_or_cancel

ROLE: Literal["embed"] = "embed"
# Of one part: larger ones would delay other requests, and hold the event loop while they are read.
_PART_INPUTS = 64
_PART_TOKENS = 32_768


@dataclass(slots=True)
class Part:
    """Some of a request's inputs, the first of which is `inputs[first]` to the client."""

    first: int
    inputs: list[generate_pb2.TokenIds] = field(default_factory=list)
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class WantedVectors:
    """The vectors that a client wants, besides the inputs. None: as the model says."""

    model: str
    dimensions: int | None
    normalize: bool | None


class EmbedCalls:
    """Calls workers for requests for embeddings."""

    def __init__(self, cluster: Cluster, retries: Retries) -> None:
        self._cluster = cluster
        self.retries = retries
        self._turns = itertools.count()

    async def embed(
        self, ctx: RequestContext, wanted: WantedVectors, inputs: Sequence[generate_pb2.TokenIds]
    ) -> list[inference_pb2.TextEmbedding]:
        """The vectors, in order. As many parts run at once as workers are ready; the first failure ends all.

        Raises NoWorker, or the error of the last attempt.
        """
        self.retries.earn()
        room = asyncio.Semaphore(max(1, len(self.ready(wanted.model, frozenset()))))
        found = await gather_or_cancel(self._embed_in_turn(ctx.part(), wanted, part, room) for part in in_parts(inputs))
        return [one for of_part in found for one in of_part]

    async def _embed_in_turn(
        self, ctx: RequestContext, wanted: WantedVectors, part: Part, room: asyncio.Semaphore
    ) -> Sequence[inference_pb2.TextEmbedding]:
        try:
            async with room:
                return await self._embed_with_retries(ctx, wanted, part)
        except InvalidRequest as error:
            raise _renamed(error, part.first) from error
        finally:
            ctx.cancellation.close()

    async def _embed_with_retries(
        self, ctx: RequestContext, wanted: WantedVectors, part: Part
    ) -> Sequence[inference_pb2.TextEmbedding]:
        attempts, suspects = self.retries.attempts(ROLE), Suspects()
        failure: BatonError | None = None
        while True:
            worker = self._place(wanted.model, part, attempts.tried, failure)
            try:
                found = await self._call(ctx, worker, wanted, part, attempts)
                suspects.answered(worker)
                return found
            except (Unavailable, Overloaded, EngineFailed) as error:
                suspects.add(worker, ROLE, error)
                attempts.allow(error)
                failure = error
            attempts.exclude(worker.record.process)
            self._place(wanted.model, part, attempts.tried, failure)
            await attempts.pause(failure, ctx.deadline.remaining_seconds)

    def _place(self, model: str, part: Part, tried: frozenset[str], failure: BatonError | None) -> WorkerHandle:
        """The least busy worker. Raises the failure of the last one, or NoWorker with the reason for each."""
        workers = self.ready(model, tried)
        if not workers:
            if failure is not None:
                raise failure
            reasons = filter_workers(self._cluster.workers, _constraints(model, tried)).reasons()
            raise NoWorker(f"no {ROLE} worker of {model} is ready: {reasons}")
        preferences = Preferences(prompt_tokens=max(1, part.tokens), turn=next(self._turns))
        return pick(score_workers(workers, preferences), preferences)

    def ready(self, model: str, tried: frozenset[str]) -> Sequence[WorkerHandle]:
        """The workers that are ready for a model, but for the processes that were tried."""
        return filter_workers(self._cluster.workers, _constraints(model, tried)).eligible

    async def _call(
        self, ctx: RequestContext, worker: WorkerHandle, wanted: WantedVectors, part: Part, attempts: Attempts
    ) -> Sequence[inference_pb2.TextEmbedding]:
        ctx.cancellation.add_worker(worker)
        request = embed_pb2.EmbedRequest(
            request_id=ctx.call_id,
            model=wanted.model,
            inputs=part.inputs,
            dimensions=wanted.dimensions,
            normalize=wanted.normalize,
        )
        waiting = _Embedding(self, ctx, wanted, part, attempts)
        with (
            annotate_worker_errors(ROLE, worker, ctx),
            stage_span(ROLE, worker_attributes(worker), kind=SpanKind.CLIENT),
            worker.track_load(part.tokens),
        ):
            seconds = ctx.deadline.remaining_seconds
            metadata = (*ctx.worker_metadata(attempts.number), *ctx.qos.metadata())
            try:
                with worker.fail_if_hung(waiting):
                    response = await unary(worker.embed.Embed(request, timeout=seconds, metadata=metadata))
            except (asyncio.CancelledError, DeadlineExceeded):
                await abort_unanswered(worker, ctx.call_id)
                raise
            check_vectors(response.embeddings, part.inputs, wanted.dimensions)
        embeddings: Sequence[inference_pb2.TextEmbedding] = response.embeddings
        return embeddings


class _Embedding(Waiting):
    """A part, while it waits for a worker."""

    def __init__(
        self, calls: EmbedCalls, ctx: RequestContext, wanted: WantedVectors, part: Part, attempts: Attempts
    ) -> None:
        self._calls = calls
        self._ctx = ctx
        self._model = wanted.model
        self._attempts = attempts
        self.awaits_answer, self.tokens = True, part.tokens

    def answer_seconds(self) -> float:
        return self._calls.retries.answer_seconds(self._ctx.deadline.remaining_seconds)

    def another_can(self, worker: WorkerHandle) -> bool:
        tried = self._attempts.tried | {worker.record.process}
        return self._attempts.has_another and bool(self._calls.ready(self._model, tried))


def in_parts(inputs: Sequence[generate_pb2.TokenIds]) -> list[Part]:
    """The inputs, divided in order."""
    parts = [Part(0)]
    for index, one in enumerate(inputs):
        tokens = len(one.ids)
        is_full = len(parts[-1].inputs) == _PART_INPUTS or parts[-1].tokens + tokens > _PART_TOKENS
        if parts[-1].inputs and is_full:
            parts.append(Part(index))
        parts[-1].inputs.append(one)
        parts[-1].tokens += tokens
    return parts


def _constraints(model: str, tried: frozenset[str]) -> Constraints:
    return Constraints(ROLE, model, context_tokens=0, tried=tried)


def _renamed(error: InvalidRequest, first: int) -> InvalidRequest:
    """The worker's error, with the inputs counted as in the client's request."""

    def renamed(violation: FieldViolation) -> FieldViolation:
        number, bracket, rest = violation.field.removeprefix("inputs[").partition("]")
        if not bracket or not number.isdecimal():
            return violation
        return FieldViolation(f"inputs[{int(number) + first}]{rest}", violation.description)

    violations = [renamed(violation) for violation in error.violations]
    return InvalidRequest(violations, stage=error.stage, worker_id=error.worker_id)
