"""A router in this process: assembles it, serves it, and reports its health."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from baton.inference.v1 import (
    cluster_service_pb2,
    cluster_service_pb2_grpc,
    inference_service_pb2,
    inference_service_pb2_grpc,
)
from discovery.config import open_registry
from discovery.registry import Registry
from engine_protocol.multiplex.peer_stream import stream_dialer
from engine_protocol.roles import load, role_kinds
from router.anthropic.endpoints import MessagesEndpoints
from router.anthropic.errors import ANTHROPIC
from router.config import RouterConfig
from router.context import RequestTable
from router.kserve.service import NAME as KSERVE
from router.kserve.service import KServeServicer, add_kserve
from router.openai.app import OPENAI, OpenAIApp
from router.openai.stored.service import ResponseService
from router.operators.explain import RouteExplainer, RoutingRequests
from router.operators.service import ClusterServicer
from router.peers.membership import RegisteredPeers
from router.peers.service import follow_peers, serve_peers
from router.picker.picks import EndpointPicker
from router.picker.service import serve_picker
from router.processes.siblings import NoSiblings, Siblings
from router.recording.recorder import find_here
from router.request_path import RequestPath, open_request_path
from router.routing.policies import load_policy
from router.service import InferenceServicer
from router.telemetry import metrics
from router.workers.cluster import Cluster, watch_cluster
from router.workers.offer import DeploymentOffer
from router.workers.text_limits import LongestTexts
from rpc.auth.access import Access, Rules, open_access
from rpc.auth.caller import Role
from rpc.channels import dialer
from rpc.health import Health
from rpc.server import Server, ServerOptions, Service, SharedLimits, serve
from rpc.tracing.tracer import Tracer, configure_tracing
from runtime.aio import ungrouped
from runtime.lasting import lasting_tasks
from runtime.telemetry.monitor import Report, status

_INFERENCE = inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
_CLUSTER = cluster_service_pb2.DESCRIPTOR.services_by_name["ClusterService"].full_name

_OPERATOR: frozenset[Role] = frozenset({"operator"})
_CLIENT_OR_OPERATOR: frozenset[Role] = frozenset({"client", "operator"})


def access_rules() -> Rules:
    """The roles that may call each service if callers are authenticated."""
    of_roles = (service.name for kind in role_kinds().values() for service in kind.client_services)
    of_clients = (_INFERENCE, KSERVE, *of_roles)
    return {
        **{f"/{name}/": _CLIENT_OR_OPERATOR for name in of_clients},
        f"/{_CLUSTER}/": _OPERATOR,
        **{f"{api.prefix}/": _CLIENT_OR_OPERATOR for api in (OPENAI, ANTHROPIC)},
    }


@dataclass(frozen=True, slots=True)
class Router:
    """A router that is listening at `address`; the other addresses are empty if they are not served."""

    path: RequestPath
    health: Health
    address: str
    openai_address: str = ""
    picker_address: str = ""

    @property
    def cluster(self) -> Cluster:
        """The workers, as the router sees them."""
        return self.path.cluster

    @property
    def requests(self) -> RequestTable:
        """The running requests."""
        return self.path.running.table

    def report(self) -> Report:
        """The report at /health."""
        workers, placer = self.cluster.workers, self.path.placer
        views = {worker.record.worker_id: metrics.CACHE_VIEWS[placer.cache_view(worker)] for worker in workers}
        return {"status": status(self.health.serving), **self.cluster.summary(), "cache_views": views}


@dataclass(frozen=True, slots=True)
class _Edge:
    """The parts that all listeners of a router share."""

    access: Access | None
    tracer: Tracer
    shared: SharedLimits
    texts: LongestTexts
    shares_port: bool


@dataclass(frozen=True, slots=True)
class _Facade:
    """A listener beside gRPC's own, and how it stops: together with the drain of gRPC's server, not after it."""

    address: str
    stop: Callable[[], None]


@asynccontextmanager
async def host_router(
    config: RouterConfig,
    registry: Registry | None = None,
    *,
    siblings: Siblings | None = None,
    shares_port: bool = False,
    before_listening: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[Router]:
    """Runs a router while the context is open, on `registry` or on the one that the configuration names.

    As one of several processes it has `siblings`, shares its ports with them, and awaits `before_listening`. It is
    SERVING while any model has a ready decode worker. Raises ConfigError, before anything listens.
    """
    access = open_access(config.auth, access_rules(), mutual_tls=config.tls.is_mutual)
    policy = load_policy(config.routing)
    health = Health()
    async with AsyncExitStack() as stack:
        stack.enter_context(ungrouped())
        if registry is None:
            registry = await stack.enter_async_context(open_registry(config.registry, config.namespace))
        cluster = await stack.enter_async_context(_open_cluster(config, registry, health))
        tracer = await stack.enter_async_context(configure_tracing(config.tracing, "baton-router", config.router_id))
        peers = await stack.enter_async_context(follow_peers(config, registry)) if config.shares_with_peers else None
        path = await stack.enter_async_context(open_request_path(config, cluster, policy, peers))
        texts = LongestTexts(cluster, config.limits.max_embed_inputs, config.media.max_bytes)
        edge = _Edge(access, tracer, SharedLimits.of(config.connections), texts, shares_port)
        if peers is not None:
            await stack.enter_async_context(_serve_peers(config, registry, peers, path))
        if before_listening is not None:
            await before_listening()
        openai = await stack.enter_async_context(_open_openai(config, path, edge))
        picker = await stack.enter_async_context(_open_picker(config, path, edge))
        offer = DeploymentOffer(config, cluster, openai.address)
        services = _services(config, path, InferenceServicer(path, siblings or NoSiblings(), offer))
        server = await stack.enter_async_context(_open_server(config, services, health, edge))
        stack.callback(openai.stop)
        stack.callback(picker.stop)
        addresses = (server.address, openai.address, picker.address)
        yield Router(path, health, *addresses)


def _serve_peers(
    config: RouterConfig, registry: Registry, peers: RegisteredPeers, path: RequestPath
) -> AbstractAsyncContextManager[None]:
    lent = path.recorder if config.shares_records else None
    return serve_peers(config, registry, peers, path.admission, partial(find_here, recorder=lent))


@asynccontextmanager
async def _open_cluster(config: RouterConfig, registry: Registry, health: Health) -> AsyncIterator[Cluster]:
    """The cluster's view, which the health follows. Calls of requests share a stream to their worker, if configured."""
    streams = stream_dialer(config.worker_streams or config.server, config.tls.call) if config.multiplex else None
    async with AsyncExitStack() as stack:
        within = config.routing.handoff_within
        watching = watch_cluster(registry, config.probe, dialer(config.tls.call), streams, within)
        cluster = await stack.enter_async_context(watching)
        await stack.enter_async_context(lasting_tasks({"health": partial(_report_health, cluster, health)}))
        yield cluster


@asynccontextmanager
async def _open_openai(config: RouterConfig, path: RequestPath, edge: _Edge) -> AsyncIterator[_Facade]:
    """Serves OpenAI's API, if the configuration asks for it. Raises ConfigError."""
    if not config.openai.listen:
        yield _NO_FACADE
        return
    # An extra: not every router has it.
    from router.openai.server import serve_openai

    async with ResponseService(path, config.openai.responses) as responses:
        app = OpenAIApp(
            path,
            access=edge.access,
            tracer=edge.tracer,
            texts=edge.texts,
            max_body_bytes=config.openai.max_body_bytes,
            input=edge.shared.input,
            responses=responses,
            beside=(MessagesEndpoints,),
        )
        serving = serve_openai(config.openai, app, edge.shared, config.drain_seconds, shares_port=edge.shares_port)
        async with serving as server:
            yield _Facade(server.address, partial(server.stop_after, config.announce_seconds))


@asynccontextmanager
async def _open_picker(config: RouterConfig, path: RequestPath, edge: _Edge) -> AsyncIterator[_Facade]:
    """Serves the endpoint picker, if the configuration asks for it. Raises ConfigError."""
    if not config.picker.listen:
        yield _NO_FACADE
        return
    requests = RoutingRequests(path.cluster, path.placer, config.limits)
    picker = EndpointPicker(path.cluster, path.placer, requests, config.picker)
    async with serve_picker(config, picker, path.cluster, shares_port=edge.shares_port) as server:
        yield _Facade(server.address, server.stop)


@asynccontextmanager
async def _open_server(
    config: RouterConfig, services: Sequence[Service], health: Health, edge: _Edge
) -> AsyncIterator[Server]:
    options = ServerOptions(
        tls=config.tls.listen,
        access=edge.access,
        connections=config.connections,
        shared=edge.shared,
        kind=config.server,
        shares_port=edge.shares_port,
        tracer=edge.tracer,
        texts=edge.texts.limits,
    )
    serving = serve(
        config.listen,
        services,
        health=health,
        announce_seconds=config.announce_seconds,
        drain_seconds=config.drain_seconds,
        options=options,
    )
    async with serving as server:
        yield server


_NO_FACADE = _Facade("", lambda: None)


def _services(config: RouterConfig, path: RequestPath, inference: InferenceServicer) -> list[Service]:
    requests = RoutingRequests(path.cluster, path.placer, config.limits)
    operators = ClusterServicer(path, RouteExplainer(path.placer, requests, config.routing.policy))
    return [
        Service(_INFERENCE, inference_service_pb2_grpc.add_InferenceServiceServicer_to_server, inference),
        Service(KSERVE, add_kserve, KServeServicer(path)),
        Service(_CLUSTER, cluster_service_pb2_grpc.add_ClusterServiceServicer_to_server, operators),
        *(load(service.router)(path) for kind in role_kinds().values() for service in kind.client_services),
    ]


async def _report_health(cluster: Cluster, health: Health) -> None:
    async for ready in cluster.readiness():
        health.set("", ready)
        health.set(_INFERENCE, ready)
        health.set(KSERVE, ready)
