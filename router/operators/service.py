"""ClusterService, the router's gRPC service for operators: workers and tenants, and what can be changed of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration
from grpc import aio

from baton.inference.v1 import cluster_service_pb2, cluster_service_pb2_grpc, lora_pb2
from discovery.record import WorkerRecord
from router.operators.explain import RouteExplainer
from router.operators.loras import LoraOperations, read_change
from router.operators.workers import WorkerOperations
from router.peers.tenants import all_tenants
from router.request_path import RequestPath
from router.workers.handle import WorkerHandle
from rpc.metadata import remaining_seconds

Context = aio.ServicerContext[Any, Any]

_STATES = {
    "ready": cluster_service_pb2.WORKER_STATE_READY,
    "unhealthy": cluster_service_pb2.WORKER_STATE_UNHEALTHY,
    "draining": cluster_service_pb2.WORKER_STATE_DRAINING,
}


class ClusterServicer(cluster_service_pb2_grpc.ClusterServiceServicer):
    """The state of the cluster, for operators."""

    def __init__(self, path: RequestPath, explainer: RouteExplainer) -> None:
        self._path = path
        self._cluster, self._explainer = path.cluster, explainer
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

    async def UpgradeWorker(
        self, request: cluster_service_pb2.UpgradeWorkerRequest, context: Context
    ) -> cluster_service_pb2.UpgradeWorkerResponse:
        return await self._workers.upgrade(request, remaining_seconds(context))

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
