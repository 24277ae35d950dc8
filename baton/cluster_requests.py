"""The methods of both clients for operators: calls on workers, tenants, adapters and routes of the cluster."""

from collections.abc import Sequence

from baton.connection.settings import CALL_SECONDS
from baton.inference.v1 import cluster_service_pb2, generate_pb2, lora_pb2
from baton.requests import UnaryCall, whole


def workers(*, timeout_seconds: float | None = CALL_SECONDS) -> UnaryCall[list[cluster_service_pb2.Worker]]:
    """Lists the workers as the router sees them: state, load, layout. Operators only, where access is restricted."""
    message = cluster_service_pb2.ListWorkersRequest()
    return UnaryCall("ClusterService/ListWorkers", message, lambda it: list(it.workers), timeout_seconds)


def move_streams(worker_id: str, *, streams: int = 0, timeout_seconds: float | None = CALL_SECONDS) -> UnaryCall[int]:
    """Moves answers that a worker decodes to others, all of them if `streams` is 0, and returns how many it will be.

    Nothing is computed again, and their readers notice nothing. Operators only, where access is restricted.
    """
    message = cluster_service_pb2.MoveStreamsRequest(worker_id=worker_id, streams=streams)
    return UnaryCall("ClusterService/MoveStreams", message, lambda it: it.streams, timeout_seconds)


def drain_worker(
    worker_id: str, *, grace_seconds: float | None = None, timeout_seconds: float | None = None
) -> UnaryCall[None]:
    """Gives a worker no more work, moves its answers to others, and returns when its process ends.

    What still runs after the grace, or after the worker's `drain_seconds`, is stopped there and continued elsewhere.
    Operators only, where access is restricted.
    """
    message = cluster_service_pb2.DrainWorkerRequest(worker_id=worker_id)
    if grace_seconds is not None:
        message.grace.FromNanoseconds(int(grace_seconds * 1e9))
    return UnaryCall("ClusterService/DrainWorker", message, lambda _: None, timeout_seconds)


def change_role(worker_id: str, role: str, *, timeout_seconds: float | None = None) -> UnaryCall[None]:
    """Changes a worker's role to prefill or decode while it serves, and returns when nothing of the other is left.

    No request ends by it. Operators only, where access is restricted.
    """
    message = cluster_service_pb2.ChangeRoleRequest(worker_id=worker_id, role=role)
    return UnaryCall("ClusterService/ChangeRole", message, lambda _: None, timeout_seconds)


def upgrade_worker(worker_id: str, *, timeout_seconds: float | None = None) -> UnaryCall[None]:
    """Replaces a worker's process by one of the code that is installed now, which goes on with its kept answers and KV.

    Returns when it serves. Raises LayoutMismatch with the reason if it does not fit: then the worker goes on as it is.
    Operators only, where access is restricted.
    """
    message = cluster_service_pb2.UpgradeWorkerRequest(worker_id=worker_id)
    return UnaryCall("ClusterService/UpgradeWorker", message, lambda _: None, timeout_seconds)


def tenants(*, timeout_seconds: float | None = CALL_SECONDS) -> UnaryCall[cluster_service_pb2.ListTenantsResponse]:
    """Returns the usage of each tenant, at all routers of the fleet. Operators only, where access is restricted."""
    message = cluster_service_pb2.ListTenantsRequest()
    return UnaryCall("ClusterService/ListTenants", message, whole, timeout_seconds)


def loras(model: str = "", *, timeout_seconds: float | None = CALL_SECONDS) -> UnaryCall[list[lora_pb2.WorkerLoras]]:
    """Lists the adapters on each worker of a model. Operators only, where access is restricted."""
    message = lora_pb2.ListLorasRequest(model=model)
    return UnaryCall("ClusterService/ListLoras", message, lambda it: list(it.workers), timeout_seconds)


def load_lora(
    name: str, *, model: str = "", worker_ids: Sequence[str] = (), timeout_seconds: float | None = CALL_SECONDS
) -> UnaryCall[list[lora_pb2.WorkerLoras]]:
    """Loads an adapter from the workers' folders, on these workers or on all of a model.

    Returns what each worker has then, or its problem; raises the error of one if none could load it. Operators only,
    where access is restricted.
    """
    message = lora_pb2.LoadLoraRequest(name=name, model=model, worker_ids=worker_ids)
    return UnaryCall("ClusterService/LoadLora", message, lambda it: list(it.workers), timeout_seconds)


def unload_lora(
    name: str, *, model: str = "", worker_ids: Sequence[str] = (), timeout_seconds: float | None = CALL_SECONDS
) -> UnaryCall[list[lora_pb2.WorkerLoras]]:
    """Removes an adapter from these workers or from all of a model, once the requests that use it have ended.

    Returns and raises as `load_lora`. New requests for the adapter are refused at once, also if the time runs out.
    """
    message = lora_pb2.UnloadLoraRequest(name=name, model=model, worker_ids=worker_ids)
    return UnaryCall("ClusterService/UnloadLora", message, lambda it: list(it.workers), timeout_seconds)


def explain_route(
    request: generate_pb2.GenerateRequest, *, timeout_seconds: float | None = CALL_SECONDS
) -> UnaryCall[cluster_service_pb2.ExplainRouteResponse]:
    """Returns where a request would run now, and why. Operators only, where access is restricted."""
    message = cluster_service_pb2.ExplainRouteRequest(request=request)
    return UnaryCall("ClusterService/ExplainRoute", message, whole, timeout_seconds)
