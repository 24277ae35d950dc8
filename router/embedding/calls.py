"""The calls of a request for embeddings: its inputs in parts, each on the least busy worker, or another if it fails."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from baton.calls import unary
from baton.engine.v1 import embed_pb2, embed_pb2_grpc
from baton.errors import FieldViolation, InvalidRequest
from baton.inference.v1 import embed_pb2 as inference_pb2
from baton.inference.v1 import generate_pb2
from router.context import RequestContext
from router.placement.encoders import RoleWorkers
from router.routing.filters import Constraints
from router.routing.retry import Retries
from router.workers.handle import WorkerHandle
from router.workers.replies import check_vectors
from router.workers.role_calls import Metadata, RoleCall, call_with_retries
from rpc.violations import renamed
from runtime.aio import gather_or_cancel

ROLE = "embed"
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

    def __init__(self, workers: RoleWorkers, retries: Retries) -> None:
        self._workers = workers
        self._retries = retries

    async def embed(
        self, ctx: RequestContext, wanted: WantedVectors, inputs: Sequence[generate_pb2.TokenIds]
    ) -> list[inference_pb2.TextEmbedding]:
        """The vectors, in order. As many parts run at once as workers are ready; the first failure ends all.

        Raises NoWorker, or the error of the last attempt.
        """
        self._retries.earn()
        ready = self._workers.ready(Constraints(ROLE, wanted.model, context_tokens=0))
        slots = asyncio.Semaphore(max(1, len(ready)))
        found = await gather_or_cancel(
            self._embed_in_turn(ctx.part(), wanted, part, slots) for part in in_parts(inputs)
        )
        return [one for of_part in found for one in of_part]

    async def _embed_in_turn(
        self, ctx: RequestContext, wanted: WantedVectors, part: Part, slots: asyncio.Semaphore
    ) -> Sequence[inference_pb2.TextEmbedding]:
        try:
            async with slots:
                return await call_with_retries(ctx, self._retries, _EmbedCall(self._workers, ctx, wanted, part))
        except InvalidRequest as error:
            raise renamed(error, partial(_in_client_request, part.first)) from error
        finally:
            ctx.cancellation.close()


class _EmbedCall(RoleCall[Sequence[inference_pb2.TextEmbedding]]):
    """The call for one part."""

    role = ROLE
    tokens = 0

    def __init__(self, workers: RoleWorkers, ctx: RequestContext, wanted: WantedVectors, part: Part) -> None:
        self.tokens = part.tokens
        self._workers = workers
        self._ctx = ctx
        self._wanted = wanted
        self._part = part

    def place(self, tried: frozenset[str]) -> WorkerHandle:
        constraints = Constraints(ROLE, self._wanted.model, context_tokens=0, tried=tried)
        return self._workers.place(constraints, self.tokens)

    def begin(self, worker: WorkerHandle) -> str:
        self._ctx.cancellation.add_worker(worker)
        return self._ctx.call_id

    async def run(
        self, worker: WorkerHandle, seconds: float, metadata: Metadata
    ) -> Sequence[inference_pb2.TextEmbedding]:
        wanted, inputs = self._wanted, self._part.inputs
        request = embed_pb2.EmbedRequest(
            request_id=self._ctx.call_id,
            model=wanted.model,
            inputs=inputs,
            dimensions=wanted.dimensions,
            normalize=wanted.normalize,
        )
        stub = worker.stub(embed_pb2_grpc.EmbedServiceStub)
        response = await unary(stub.Embed(request, timeout=seconds, metadata=metadata))
        check_vectors(response.embeddings, inputs, wanted.dimensions)
        embeddings: Sequence[inference_pb2.TextEmbedding] = response.embeddings
        return embeddings


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


def _in_client_request(first: int, violation: FieldViolation) -> FieldViolation:
    """The violation, with the inputs of a part counted as in the client's request."""
    number, bracket, rest = violation.field.removeprefix("inputs[").partition("]")
    if not bracket or not number.isdecimal():
        return violation
    return FieldViolation(f"inputs[{int(number) + first}]{rest}", violation.description)
