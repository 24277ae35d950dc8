"""The router's gRPC services: InferenceService for clients, ClusterService for operators."""

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration
from grpc import aio

from baton.errors import Unsupported
from baton.inference.v1 import (
    cluster_service_pb2,
    cluster_service_pb2_grpc,
    embed_pb2,
    generate_pb2,
    inference_service_pb2_grpc,
    lora_pb2,
    model_pb2,
    record_pb2,
    server_info_pb2,
    tokenize_pb2,
)
from baton_http2.server.reply import Reply
from discovery.record import WorkerRecord
from router.explain import RouteExplainer
from router.peers.tenants import all_tenants
from router.processes.siblings import Siblings, stop_everywhere
from router.recording.recorder import find_everywhere
from router.request_path import RequestPath
from router.resume.handle import Handle
from router.resume.resumer import Resumer
from router.stream.collector import UnaryCollector
from router.workers.handle import WorkerHandle
from router.workers.offer import DeploymentOffer, model_message, model_messages
from router.workers.operations import LoraOperations, WorkerOperations, read_change
from rpc.auth.caller import current_caller
from rpc.metadata import remaining_seconds

Context = aio.ServicerContext[Any, Any]

_STATES = {
    "ready": cluster_service_pb2.WORKER_STATE_READY,
    "unhealthy": cluster_service_pb2.WORKER_STATE_UNHEALTHY,
    "draining": cluster_service_pb2.WORKER_STATE_DRAINING,
}


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
        requests, caller = self._path.running.table, current_caller()
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


class ClusterServicer(cluster_service_pb2_grpc.ClusterServiceServicer):
    """The state of the cluster, for operators."""

    def __init__(self, path: RequestPath) -> None:
        self._path = path
        self._cluster, self._explainer = path.cluster, path.explainer
        self._loras = LoraOperations(path.cluster)
        self._workers = WorkerOperations(path.cluster)

    async def ExplainRoute(
        self, request: cluster_service_pb2.ExplainRouteRequest, _context: Context
    ) -> cluster_service_pb2.ExplainRouteResponse:
        return await self._explainer.explain(request.request)

    async def ListWorkers(
        self, _request: cluster_service_pb2.ListWorkersRequest, _context: Context
    ) -> cluster_service_pb2.ListWorkersResponse:
        workers = sorted(self._cluster.workers, key=lambda worker: worker.record.worker_id)
        pairing = await self._cluster.pairing_problems()
        return cluster_service_pb2.ListWorkersResponse(
            workers=[_worker_message(worker, self._explainer, pairing) for worker in workers]
        )

    async def ListTenants(
        self, _request: cluster_service_pb2.ListTenantsRequest, _context: Context
    ) -> cluster_service_pb2.ListTenantsResponse:
        return await all_tenants(self._path.admission, self._path.peers.links if self._path.peers else ())

    async def MoveStreams(
        self, request: cluster_service_pb2.MoveStreamsRequest, context: Context
    ) -> cluster_service_pb2.MoveStreamsResponse:
        return await self._workers.move(request, remaining_seconds(context))

    async def DrainWorker(
        self, request: cluster_service_pb2.DrainWorkerRequest, context: Context
    ) -> cluster_service_pb2.DrainWorkerResponse:
        return await self._workers.drain(request, remaining_seconds(context))

    async def ChangeRole(
        self, request: cluster_service_pb2.ChangeRoleRequest, context: Context
    ) -> cluster_service_pb2.ChangeRoleResponse:
        return await self._workers.change_role(request, remaining_seconds(context))

    async def ListLoras(self, request: lora_pb2.ListLorasRequest, context: Context) -> lora_pb2.ListLorasResponse:
        return lora_pb2.ListLorasResponse(workers=await self._loras.report(request.model, remaining_seconds(context)))

    async def LoadLora(self, request: lora_pb2.LoadLoraRequest, context: Context) -> lora_pb2.LoadLoraResponse:
        workers = await self._loras.load(read_change(request), remaining_seconds(context))
        return lora_pb2.LoadLoraResponse(workers=workers)

    async def UnloadLora(self, request: lora_pb2.UnloadLoraRequest, context: Context) -> lora_pb2.UnloadLoraResponse:
        workers = await self._loras.unload(read_change(request), remaining_seconds(context))
        return lora_pb2.UnloadLoraResponse(workers=workers)


def _worker_message(
    worker: WorkerHandle, explainer: RouteExplainer, pairing: Mapping[str, Sequence[str]]
) -> cluster_service_pb2.Worker:
    """A worker as this router sees it now."""
    record = worker.record
    age = Duration()
    age.FromNanoseconds(int(worker.load_age_seconds * 1e9))
    return cluster_service_pb2.Worker(
        worker_id=record.worker_id,
        address=record.address,
        roles=record.roles,
        model=record.model,
        state=_STATES[worker.state],
        engine=record.engine,
        layout_digest=record.layout_digest,
        epoch=record.epoch,
        load=worker.load,
        load_age=age,
        problem=worker.problem or worker.unpaired,
        cache_view=explainer.cache_view(worker),
        transports=_transports(record),
        pairing_problems=_pairing_problems(worker, pairing),
        location=cluster_service_pb2.WorkerLocation(
            zone=record.location.zone, rack=record.location.rack, host=record.location.host
        ),
    )


def _pairing_problems(worker: WorkerHandle, pairing: Mapping[str, Sequence[str]]) -> list[str]:
    """All that is not said by `problem` already."""
    hidden = [worker.unpaired] if worker.unpaired and worker.problem else []
    return [*hidden, *pairing.get(worker.record.process, ())]


def _transports(record: WorkerRecord) -> cluster_service_pb2.WorkerTransports | None:
    """None if the worker does not say."""
    if record.offers is None or record.reads is None:
        return None
    return cluster_service_pb2.WorkerTransports(offers=record.offers, reads=record.reads)
