"""InferenceService, the router's gRPC service for clients."""

from typing import Any

from grpc import aio

from baton.errors import InvalidRequest, Unsupported
from baton.inference.v1 import (
    embed_pb2,
    generate_pb2,
    inference_service_pb2_grpc,
    model_pb2,
    record_pb2,
    server_info_pb2,
    tokenize_pb2,
)
from baton_http2.server.reply import Reply
from router.processes.siblings import Siblings, stop_everywhere
from router.recording.recorder import find_everywhere
from router.request_path import RequestPath
from router.resume.handle import Handle
from router.resume.resumer import Resumer
from router.stream.collector import UnaryCollector
from router.workers.offer import DeploymentOffer, model_message, model_messages

Context = aio.ServicerContext[Any, Any]


class InferenceServicer(inference_service_pb2_grpc.InferenceServiceServicer):
    """Generation, tokenization and models, for clients."""

    def __init__(self, path: RequestPath, siblings: Siblings, offer: DeploymentOffer) -> None:
        self._path = path
        self._offer = offer
        self._siblings = siblings
        self._resumer = Resumer(path.contexts, path.pipeline)

    # Writes instead of yielding: waiting tokens become one message, and a client that leaves stops everything at once.
    async def Generate(self, request: generate_pb2.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        ctx = self._path.contexts.create(request, context)
        await self._path.pipeline.run(ctx, context.reply())

    async def ResumeGeneration(  # type: ignore[override]
        self, request: generate_pb2.ResumeGenerationRequest, context: Any
    ) -> None:
        await self._resumer.run(request, context)

    async def GetGenerationProgress(
        self, request: generate_pb2.GetGenerationProgressRequest, context: Context
    ) -> generate_pb2.GetGenerationProgressResponse:
        return await self._resumer.progress(Handle.parse(request.handle), self._path.contexts.read_qos(context))

    async def GenerateUnary(
        self, request: generate_pb2.GenerateUnaryRequest, context: Context
    ) -> generate_pb2.GenerateUnaryResponse:
        if request.request.response.HasField("keep"):
            raise Unsupported("response.keep: an answer in one message cannot be resumed; use Generate")
        ctx, collector = self._path.contexts.create(request.request, context), UnaryCollector()
        await self._path.pipeline.run(ctx, Reply(collector.send, context.set_trailing_metadata))
        return collector.response

    async def CancelGeneration(
        self, request: generate_pb2.CancelGenerationRequest, context: Context
    ) -> generate_pb2.CancelGenerationResponse:
        if request.handle:
            await self._resumer.cancel(Handle.parse(request.handle), self._path.contexts.read_qos(context))
            return generate_pb2.CancelGenerationResponse()
        if not request.request_id:
            raise InvalidRequest.of("request_id", "is empty, and so is handle")
        requests, caller = self._path.running.table, self._path.contexts.read_asker(context)
        receipts = await stop_everywhere(requests, self._siblings, request.request_id, caller)
        return generate_pb2.CancelGenerationResponse(receipts=receipts)

    async def EndSession(
        self, request: generate_pb2.EndSessionRequest, context: Context
    ) -> generate_pb2.EndSessionResponse:
        tenant = self._path.contexts.read_qos(context).tenant
        return generate_pb2.EndSessionResponse(released_blocks=await self._path.sessions.end(request, tenant))

    async def Embed(self, request: embed_pb2.EmbedRequest, context: Context) -> embed_pb2.EmbedResponse:
        return await self._path.embed_pipeline.run(request, context)

    async def Tokenize(self, request: tokenize_pb2.TokenizeRequest, context: Context) -> tokenize_pb2.TokenizeResponse:
        return await self._path.tokenization.tokenize(request, self._path.contexts.read_qos(context).account)

    async def Detokenize(
        self, request: tokenize_pb2.DetokenizeRequest, context: Context
    ) -> tokenize_pb2.DetokenizeResponse:
        return await self._path.tokenization.detokenize(request, self._path.contexts.read_qos(context).account)

    async def ListModels(
        self, _request: model_pb2.ListModelsRequest, _context: Context
    ) -> model_pb2.ListModelsResponse:
        self._path.cluster.require_registry()
        return model_pb2.ListModelsResponse(models=model_messages(self._path.cluster))

    async def GetModel(self, request: model_pb2.GetModelRequest, _context: Context) -> model_pb2.GetModelResponse:
        served = self._path.cluster.model(request.name)
        adapter = self._path.cluster.lora(generate_pb2.GenerateRequest(model=request.name), served)
        return model_pb2.GetModelResponse(model=model_message(served, self._path.cluster, adapter))

    async def GetServerInfo(
        self, _request: server_info_pb2.GetServerInfoRequest, _context: Context
    ) -> server_info_pb2.GetServerInfoResponse:
        return self._offer.message()

    async def GetRecords(
        self, request: record_pb2.GetRecordsRequest, context: Context
    ) -> record_pb2.GetRecordsResponse:
        path, tenant = self._path, self._path.contexts.read_qos(context).tenant
        return await find_everywhere(request.request_id, tenant, path.recorder, path.peers.links if path.peers else ())
