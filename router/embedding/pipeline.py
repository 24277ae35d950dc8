"""The life of a request for embeddings, top to bottom: validate, tokenize, admit, embed."""

import asyncio
from collections.abc import Sequence
from functools import partial

from baton.inference.v1 import embed_pb2, generate_pb2, timing_pb2
from router.admission.controller import AdmissionController
from router.admission.predictor import RequestEstimate
from router.context import ContextFactory, RequestContext
from router.embedding import inputs
from router.embedding.calls import ROLE, EmbedCalls, WantedVectors
from router.embedding.inputs import EmbeddingModel
from router.running import RunningRequests
from router.telemetry.spans import set_embed_attributes
from router.workers.cluster import Cluster


class EmbedPipeline:
    """Runs requests for embeddings on a cluster."""

    def __init__(
        self,
        running: RunningRequests,
        contexts: ContextFactory,
        cluster: Cluster,
        admission: AdmissionController,
        calls: EmbedCalls,
    ) -> None:
        self._running = running
        self._contexts = contexts
        self._cluster = cluster
        self._admission = admission
        self._calls = calls

    async def run(self, request: embed_pb2.EmbedRequest, call: object) -> embed_pb2.EmbedResponse:
        """Answers a call. Raises a BatonError if it fails. A cancellation of the caller means that the client left."""
        same = generate_pb2.GenerateRequest(request_id=request.request_id, model=request.model)
        ctx = self._contexts.create(same, call)
        ctx.stats.operation = ROLE
        response = embed_pb2.EmbedResponse(request_id=ctx.request_id)
        answer = partial(self._answer, ctx, request, response)
        await self._running.run(ctx, "baton.embed", partial(set_embed_attributes, request), answer)
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
            target = inputs.find_model(self._cluster, request.model)
            ctx.stats.model = target.model.name
            if ctx.is_large:
                await asyncio.to_thread(inputs.check, request, target, self._contexts.limits.max_embed_inputs)
            else:
                inputs.check(request, target, self._contexts.limits.max_embed_inputs)
        return target

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
