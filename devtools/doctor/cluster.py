"""Checks of a running cluster: does the router respond, are its workers ready, can they hand over to each other."""

from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field

from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import SecretStr

from baton import AsyncClient
from baton.calls import unary
from baton.connection.settings import DEFAULT_ADDRESS
from baton.enum_names import value_name
from baton.errors import BatonError
from baton.inference.v1 import cluster_service_pb2
from devtools.doctor.finding import Finding, broken, warning, well
from rpc.auth.tls import TlsConfig
from rpc.channels import open_channel
from runtime.network import is_listening

CHECK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class RouterTarget:
    """The router to check: its `host:port`, where that was configured, and the credentials for it."""

    address: str
    source: str
    tls: TlsConfig | None = None
    token: SecretStr = field(default=SecretStr(""))


async def check_cluster(target: RouterTarget) -> AsyncGenerator[Finding, None]:
    """Checks port, health and workers, in this order, up to the first that fails."""
    if not await is_listening(target.address):
        yield _not_running(target)
        return
    try:
        await _expect_serving(target)
        tls = target.tls.for_client() if target.tls else None
        async with AsyncClient(target.address, tls=tls, token=target.token.get_secret_value()) as client:
            workers = await client.workers()
    except BatonError as error:
        remedy = "run `baton logs router` if `baton up` started it; otherwise check that this is a Baton router"
        yield broken(f"the process at {target.address} does not respond like a router: {error.message}", remedy)
        return
    yield well(f"the router at {target.address} ({target.source}) is healthy")
    for finding in check_workers(workers):
        yield finding


def check_workers(workers: Sequence[cluster_service_pb2.Worker]) -> Iterator[Finding]:
    """Checks that each worker is ready, and that the workers of each model can hand over to each other."""
    if not workers:
        yield broken("no worker is registered", "start one with the router's namespace and etcd; see `baton logs`")
    for worker in workers:
        yield _worker(worker)
    by_model = defaultdict(list)
    for worker in workers:
        by_model[worker.model].append(worker)
    for model, serving in by_model.items():
        yield from _roles(model, serving)
        yield from _layouts(model, serving)


def _not_running(target: RouterTarget) -> Finding:
    if target.address == DEFAULT_ADDRESS:
        return warning(f"no cluster is running at {target.address}", "run `make up`, if you expect one")
    remedy = "start the router there, or give another address with --address"
    return broken(f"nothing listens at {target.address} (from {target.source})", remedy)


async def _expect_serving(target: RouterTarget) -> None:
    async with open_channel(target.address, target.tls) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=CHECK_SECONDS)
        answer = await unary(check)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise BatonError(
            f"its health is {value_name(health_pb2.HealthCheckResponse.ServingStatus, answer.status).upper()}"
        )


def _worker(worker: cluster_service_pb2.Worker) -> Finding:
    name = f"{worker.worker_id} ({', '.join(worker.roles)}) at {worker.address}"
    logs = f"baton logs {worker.worker_id}, or the worker's own log"
    match worker.state:
        case cluster_service_pb2.WORKER_STATE_READY if worker.problem:
            return warning(f"{name} is ready, but cannot take part in handoffs: {worker.problem}", logs)
        case cluster_service_pb2.WORKER_STATE_READY:
            layout = "embedding" if _has_no_kv(worker) else "KV"
            return well(f"{name} is ready; its {layout} layout is {worker.layout_digest[:12]}")
        case cluster_service_pb2.WORKER_STATE_DRAINING:
            return warning(f"{name} is draining and accepts no new requests", "nothing, if it is being shut down")
        case _:
            why = f": {worker.problem}" if worker.problem else ""
            return broken(f"{name} is unhealthy{why}", logs)


def _roles(model: str, workers: Sequence[cluster_service_pb2.Worker]) -> Iterator[Finding]:
    roles = {role for worker in workers for role in worker.roles}
    if "decode" not in roles:
        yield broken(f"{model} has no decode worker, so no request can complete", "start a worker with roles=[decode]")
    elif "prefill" not in roles:
        yield warning(
            f"{model} has no prefill worker: prompts run on the decode workers", "nothing, if that is intended"
        )


def _layouts(model: str, workers: Sequence[cluster_service_pb2.Worker]) -> Iterator[Finding]:
    """A handoff needs the same layout on both sides."""
    by_layout = defaultdict(list)
    for worker in workers:
        if _has_no_kv(worker):
            continue
        by_layout[worker.layout_digest].append(worker.worker_id)
    if len(by_layout) > 1:
        groups = "; ".join(f"{digest[:12]}: {', '.join(ids)}" for digest, ids in by_layout.items())
        remedy = "give all workers of a model the same checkpoint, dtype and block_tokens"
        yield broken(f"workers of {model} have different KV layouts and cannot hand over ({groups})", remedy)


def _has_no_kv(worker: cluster_service_pb2.Worker) -> bool:
    """True if it only encodes or embeds: it hands no KV over, and what it holds are embeddings."""
    return {"encode", "embed"}.issuperset(worker.roles)
