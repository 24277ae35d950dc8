"""The router's side of the role rerank: a request, top to bottom, and its call to a worker."""

import math
from functools import partial
from typing import Any

import rerank_pb2
import rerank_pb2_grpc
from rerank_role import KIND, ROLE

from baton.calls import unary
from baton.errors import FieldViolation, InvalidReply, InvalidRequest
from baton.inference.v1 import embed_pb2, generate_pb2, timing_pb2
from router.admission.predictor import RequestEstimate
from router.context import RequestContext
from router.embedding import pipeline
from router.embedding.pipeline import EmbeddingModel
from router.request_path import RequestPath
from router.routing.filters import Constraints
from router.workers.handle import WorkerHandle
from router.workers.role_calls import Metadata, RoleCall, call_with_retries
from rpc.server import Service
from rpc.tracing.span import Span
from rpc.violations import renamed

_MOST_DOCUMENTS = 256


def service(path: RequestPath) -> Service:
    """The router's service for clients."""
    add = rerank_pb2_grpc.add_RerankServiceServicer_to_server
    return Service(KIND.client_services[0].name, add, RerankServicer(path))


class RerankServicer(rerank_pb2_grpc.RerankServiceServicer):
    """RerankService."""

    def __init__(self, path: RequestPath) -> None:
        self._path = path

    async def Rerank(self, request: rerank_pb2.RerankRequest, context: Any) -> rerank_pb2.RerankResponse:
        same = generate_pb2.GenerateRequest(request_id=request.request_id, model=request.model)
        ctx, response = self._path.contexts.create(same, context), rerank_pb2.RerankResponse()
        ctx.stats.operation = ROLE
        describe = partial(_describe, request)
        await self._path.running.run(ctx, "example.rerank", describe, partial(self._answer, ctx, request, response))
        response.timings.extend(ctx.stats.timings.message().stages)
        return response

    async def _answer(
        self, ctx: RequestContext, request: rerank_pb2.RerankRequest, response: rerank_pb2.RerankResponse
    ) -> None:
        """Validates, tokenizes, admits and scores, within the tenant's quota."""
        path = self._path
        async with path.admission.track_tenant(ctx):
            target, texts = _read(ctx, request, path)
            tokens = ctx.stats.prompt_tokens = sum(len(one.ids) for one in texts)
            async with path.admission.admit(ctx, RequestEstimate(target.model.name, tokens, None, ROLE)):
                path.retries.earn()
                with ctx.stats.timings.measure(timing_pb2.STAGE_EMBED):
                    scores = await call_with_retries(ctx, path.retries, _ScoreCall(path, ctx, target, texts))
        ranked = sorted(enumerate(scores), key=lambda one: -one[1])[: request.top or None]
        response.results.extend(rerank_pb2.Ranked(index=index, score=score) for index, score in ranked)


class _ScoreCall(RoleCall[list[float]]):
    """The call that scores all documents."""

    role = ROLE
    tokens = 0

    def __init__(
        self, path: RequestPath, ctx: RequestContext, target: EmbeddingModel, texts: list[generate_pb2.TokenIds]
    ) -> None:
        self._path = path
        self._ctx = ctx
        self._model = target.model.name
        self._texts = texts
        self.tokens = ctx.stats.prompt_tokens

    def place(self, tried: frozenset[str]) -> WorkerHandle:
        return self._path.workers.place(Constraints(ROLE, self._model, context_tokens=0, tried=tried), self.tokens)

    def begin(self, worker: WorkerHandle) -> str:
        self._ctx.cancellation.add_worker(worker)
        return self._ctx.call_id

    async def run(self, worker: WorkerHandle, seconds: float, metadata: Metadata) -> list[float]:
        query, *documents = self._texts
        request = rerank_pb2.ScoreRequest(
            request_id=self._ctx.call_id, model=self._model, query=query, documents=documents
        )
        stub = worker.stub(rerank_pb2_grpc.ScoreServiceStub)
        found = list((await unary(stub.Score(request, timeout=seconds, metadata=metadata))).scores)
        if len(found) != len(documents) or not all(map(math.isfinite, found)):
            raise InvalidReply(f"the worker returned {len(found)} scores of {len(documents)} documents")
        return found


def _read(
    ctx: RequestContext, request: rerank_pb2.RerankRequest, path: RequestPath
) -> tuple[EmbeddingModel, list[generate_pb2.TokenIds]]:
    """The model, and the ids of the query and of each document. Raises InvalidRequest naming every wrong field."""
    with ctx.stats.timings.measure(timing_pb2.STAGE_TOKENIZE):
        target = pipeline.find_model(path.cluster, request.model)
        ctx.stats.model = target.model.name
        texts = [embed_pb2.EmbedInput(text=text) for text in (request.query, *request.documents)]
        same = embed_pb2.EmbedRequest(request_id=request.request_id, inputs=texts)
        try:
            pipeline.check(same, target, _MOST_DOCUMENTS + 1)
            return target, pipeline.tokenize(same, target)
        except InvalidRequest as error:
            raise renamed(error, _in_client_request) from error


def _in_client_request(violation: FieldViolation) -> FieldViolation:
    """The violation of an input, of which the query is the first, with its field in the client's request."""
    number, _, rest = violation.field.removeprefix("inputs[").partition("]")
    if violation.field == "inputs":
        return FieldViolation("documents", violation.description)
    if not number.isdecimal():
        return violation
    return FieldViolation(f"documents[{int(number) - 1}]{rest}" if int(number) else "query", violation.description)


def _describe(request: rerank_pb2.RerankRequest, span: Span) -> None:
    """Sets what the request asks for. Its texts are never recorded."""
    span.set({"gen_ai.operation.name": "rerank", "example.rerank.documents": len(request.documents)})
