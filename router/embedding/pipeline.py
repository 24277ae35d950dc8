"""The life of a request for embeddings, top to bottom: validate, tokenize, admit, embed."""

import asyncio
from collections.abc import Sequence

from baton.errors import Cancelled
from baton.inference.v1 import embed_pb2, generate_pb2, timing_pb2
from router.admission.controller import AdmissionController
from router.admission.predictor import RequestEstimate
from router.context import ContextFactory, RequestContext, RequestTable
from router.embedding import inputs
from router.embedding.calls import ROLE, EmbedCalls, WantedVectors
from router.embedding.inputs import EmbeddingModel
from router.pipeline import note_passed_deadline
from router.telemetry.request_metrics import RequestMetrics, record_request
from router.telemetry.spans import set_embed_attributes
from router.text.request_input import unsupported
from router.workers.cluster import Cluster
from rpc.tracing.span import stage_span


class EmbedPipeline:
    """Runs requests for embeddings on a cluster. `requests` are those that run, of all kinds."""

    def __init__(
        self,
        contexts: ContextFactory,
        cluster: Cluster,
        admission: AdmissionController,
        calls: EmbedCalls,
        requests: RequestTable,
        metrics: RequestMetrics,
    ) -> None:
        self._contexts = contexts
        self._cluster = cluster
        self._admission = admission
        self._calls = calls
        self._requests = requests
        self._metrics = metrics

    async def run(self, request: embed_pb2.EmbedRequest, call: object) -> embed_pb2.EmbedResponse:
        """Answers a call. Raises a BatonError if it fails. A cancellation of the caller means that the client left."""
        same = generate_pb2.GenerateRequest(request_id=request.request_id, model=request.model)
        ctx = self._contexts.create(same, call)
        ctx.stats.operation = "embed"
        response = embed_pb2.EmbedResponse(request_id=ctx.request_id)
        with (
            stage_span("baton.embed") as span,
            self._requests.enter(ctx),
            record_request(ctx.stats, ctx.call_id, self._metrics),
        ):
            set_embed_attributes(request, span)
            try:
                await ctx.cancellation.run(self._answer(ctx, request, response), ctx.deadline.remaining_seconds)
            except TimeoutError:
                raise ctx.deadline.exceeded(ctx.timings.stage_name) from None
            except (asyncio.CancelledError, Cancelled):
                note_passed_deadline(ctx, span)
                raise
        response.timings.extend(ctx.timings.message().stages)
        return response

    async def _answer(
        self, ctx: RequestContext, request: embed_pb2.EmbedRequest, response: embed_pb2.EmbedResponse
    ) -> None:
        """Fills the response, within the tenant's quota."""
        async with self._admission.track_tenant(ctx):
            target = await self._validate(ctx, request)
            texts = await self._tokenize(ctx, request, target)
            tokens = ctx.stats.prompt_tokens = sum(len(one.ids) for one in texts)
            async with self._admission.admit(ctx, RequestEstimate(target.model.name, tokens, None, ROLE)):
                response.embeddings.extend(await self._embed(ctx, request, target, texts))
        response.model = target.model.name
        response.usage.prompt_tokens = tokens

    async def _validate(self, ctx: RequestContext, request: embed_pb2.EmbedRequest) -> EmbeddingModel:
        with ctx.timings.measure(timing_pb2.STAGE_ADMISSION):
            await ctx.inject("admission")
            target = self._target(request.model)
            ctx.stats.model = target.model.name
            if ctx.is_large:
                await asyncio.to_thread(inputs.check, request, target, self._contexts.limits.max_embed_inputs)
            else:
                inputs.check(request, target, self._contexts.limits.max_embed_inputs)
        return target

    def _target(self, name: str) -> EmbeddingModel:
        """Raises ModelNotFound, NoWorker, or Unsupported if no worker of the model has the role."""
        model = self._cluster.model(name)
        for worker in self._cluster.workers:
            if worker.record.model == model.name and worker.model is not None and worker.model.embedding is not None:
                return EmbeddingModel(worker.model, worker.model.embedding)
        raise unsupported("embeddings, since no worker has the role embed", model)

    async def _tokenize(
        self, ctx: RequestContext, request: embed_pb2.EmbedRequest, target: EmbeddingModel
    ) -> Sequence[generate_pb2.TokenIds]:
        with ctx.timings.measure(timing_pb2.STAGE_TOKENIZE):
            await ctx.inject("tokenize")
            if ctx.is_large:
                return await asyncio.to_thread(inputs.tokenize, request, target)
            return inputs.tokenize(request, target)

    async def _embed(
        self,
        ctx: RequestContext,
        request: embed_pb2.EmbedRequest,
        target: EmbeddingModel,
        texts: Sequence[generate_pb2.TokenIds],
    ) -> Sequence[embed_pb2.TextEmbedding]:
        wanted = WantedVectors(
            target.model.name,
            request.dimensions if request.HasField("dimensions") else None,
            request.normalize if request.HasField("normalize") else None,
        )
        with ctx.timings.measure(timing_pb2.STAGE_EMBED):
            return await self._calls.embed(ctx, wanted, texts)
