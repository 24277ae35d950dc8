"""Checks of a running cluster: is the router there, are its workers ready, can they hand over to one another."""

from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Sequence

from baton.inference.v1 import cluster_service_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from client.address import DEFAULT_ADDRESS, Address
from client.api import Client
from client.credentials import Credentials
from client.doctor.finding import Finding, broken, warning, well
from client.local.readiness import is_listening
from rpc.calls import unary
from rpc.channels import open_channel
from rpc.errors import BatonError

CHECK_SECONDS = 5.0


async def check_cluster(address: Address, credentials: Credentials) -> AsyncGenerator[Finding, None]:
    """From the outside in: port, health, workers. Stops at the first thing that is not there."""
    if not await is_listening(address.value):
        yield _not_running(address)
        return
    try:
        await _expect_serving(address.value, credentials)
        token = credentials.token.get_secret_value()
        async with Client(address.value, credentials.tls, token=token) as client:
            workers = await client.workers()
    except BatonError as error:
        remedy = "baton logs router, if it is of `baton up`; else look whether this is a Baton router at all"
        yield broken(f"what listens at {address.value} does not answer as a router: {error.message}", remedy)
        return
    yield well(f"the router at {address.value} ({address.source}) is healthy")
    for finding in check_workers(workers):
        yield finding


def check_workers(workers: Sequence[cluster_service_pb2.Worker]) -> Iterator[Finding]:
    """Whether each worker is ready, and whether those of one model can work together."""
    if not workers:
        yield broken("no worker is registered", "start one with the router's namespace and etcd; see baton logs")
    for worker in workers:
        yield _worker(worker)
    by_model = defaultdict(list)
    for worker in workers:
        by_model[worker.model].append(worker)
    for model, serving in by_model.items():
        yield from _roles(model, serving)
        yield from _layouts(model, serving)


def _not_running(address: Address) -> Finding:
    if address.value == DEFAULT_ADDRESS:
        return warning(f"no cluster is running at {address.value}", "make up, if one should")
    remedy = "start the router there, or name another with --address"
    return broken(f"nothing listens at {address.value} (from {address.source})", remedy)


async def _expect_serving(address: str, credentials: Credentials) -> None:
    async with open_channel(address, credentials.tls) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=CHECK_SECONDS)
        answer = await unary(check)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise BatonError(f"its health is {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}")


def _worker(worker: cluster_service_pb2.Worker) -> Finding:
    name = f"{worker.worker_id} ({', '.join(worker.roles)}) at {worker.address}"
    match worker.state:
        case cluster_service_pb2.WORKER_STATE_READY:
            layout = "embedding" if _only_encodes(worker) else "KV"
            return well(f"{name} is ready; its {layout} layout is {worker.layout_digest[:12]}")
        case cluster_service_pb2.WORKER_STATE_DRAINING:
            return warning(f"{name} is draining and takes no new work", "nothing, if it is being shut down")
        case _:
            return broken(f"{name} is registered and fails its health check", f"baton logs {worker.worker_id}")


def _roles(model: str, workers: Sequence[cluster_service_pb2.Worker]) -> Iterator[Finding]:
    roles = {role for worker in workers for role in worker.roles}
    if "decode" not in roles:
        yield broken(f"{model} has no decode worker, so no request can end", "start a worker with roles=[decode]")
    elif "prefill" not in roles:
        yield warning(f"{model} has no prefill worker: prompts run on the decode workers", "nothing, if that is meant")


def _layouts(model: str, workers: Sequence[cluster_service_pb2.Worker]) -> Iterator[Finding]:
    """A handoff needs equal layouts on both sides."""
    by_layout = defaultdict(list)
    for worker in workers:
        if _only_encodes(worker):
            continue
        by_layout[worker.layout_digest].append(worker.worker_id)
    if len(by_layout) > 1:
        groups = "; ".join(f"{digest[:12]}: {', '.join(ids)}" for digest, ids in by_layout.items())
        remedy = "give all workers of a model the same checkpoint, dtype and block_tokens"
        yield broken(f"workers of {model} have different KV layouts and cannot hand over ({groups})", remedy)


def _only_encodes(worker: cluster_service_pb2.Worker) -> bool:
    """Such a worker has no KV: its pool is of embeddings."""
    return list(worker.roles) == ["encode"]
