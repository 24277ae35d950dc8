"""A router in this process: assembles it, serves it, and reports its health."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from baton.inference.v1 import (
    cluster_service_pb2,
    cluster_service_pb2_grpc,
    inference_service_pb2,
    inference_service_pb2_grpc,
)
from discovery.config import open_registry
from discovery.registry import Registry
from engine_protocol.multiplex.peer_stream import StreamDialer, stream_dialer
from media.loader import MediaLoader
from router.admission.controller import AdmissionController
from router.admission.peers import ALONE
from router.admission.quotas import Quotas
from router.config import RouterConfig
from router.context import ContextFactory, RequestTable
from router.embedding.calls import EmbedCalls
from router.embedding.pipeline import EmbedPipeline
from router.execution import Executor
from router.explain import RouteExplainer, RoutingRequests
from router.kserve.service import NAME as KSERVE
from router.kserve.service import KServeServicer, add_kserve
from router.multimodal.cache import EmbeddingCache
from router.multimodal.encode import Embedder
from router.multimodal.processor import MultimodalProcessor
from router.openai.app import PREFIX, OpenAIApp
from router.peers.service import follow_peers, serve_peers
from router.picker.picks import EndpointPicker
from router.picker.server import PickerServer, serve_picker
from router.pipeline import Pipeline
from router.placement.encoders import Encoders
from router.placement.kv_events import KvSubscriber
from router.placement.placer import Placer
from router.processes.siblings import NoSiblings, Siblings
from router.routing.policies import load_policy
from router.routing.prefix.predicted import PredictedSeconds
from router.routing.retry import Retries
from router.service import ClusterServicer, InferenceServicer
from router.telemetry import metrics
from router.telemetry.request_metrics import NoMetrics, RecordedMetrics
from router.text.grammar_check import GrammarCheck
from router.text_limits import LongestTexts
from router.tokenization import Tokenization
from router.workers.cluster import Cluster, watch_cluster
from router.workers.offer import DeploymentOffer
from rpc.auth.access import Rules, open_access
from rpc.auth.caller import Role
from rpc.channels import dialer
from rpc.health import Health
from rpc.server import Service, SharedLimits, serve
from rpc.tracing.tracer import configure_tracing
from runtime.aio import TaskGroup, ungrouped
from runtime.lasting import lasting
from runtime.monitor import Report, status

if TYPE_CHECKING:
    from router.openai.server import OpenAIServer

_INFERENCE = inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
_CLUSTER = cluster_service_pb2.DESCRIPTOR.services_by_name["ClusterService"].full_name

_OPERATOR: frozenset[Role] = frozenset({"operator"})
_CLIENT_OR_OPERATOR: frozenset[Role] = frozenset({"client", "operator"})
# The roles that may call each service if callers are authenticated.
RULES: Rules = {
    f"/{_INFERENCE}/": _CLIENT_OR_OPERATOR,
    f"/{_CLUSTER}/": _OPERATOR,
    f"/{KSERVE}/": _CLIENT_OR_OPERATOR,
    f"{PREFIX}/": _CLIENT_OR_OPERATOR,
}


@dataclass(frozen=True, slots=True)
class Router:
    """A router that is listening at `address`; the other addresses are empty if they are not served."""

    address: str
    cluster: Cluster
    health: Health
    requests: RequestTable
    explainer: RouteExplainer
    openai_address: str = ""
    picker_address: str = ""

    def report(self) -> Report:
        """The report at /health."""
        workers = self.cluster.workers
        views = {worker.record.worker_id: metrics.CACHE_VIEWS[self.explainer.cache_view(worker)] for worker in workers}
        return {"status": status(self.health.serving), **self.cluster.summary(), "cache_views": views}


@asynccontextmanager
async def host_router(
    config: RouterConfig,
    registry: Registry | None = None,
    *,
    siblings: Siblings | None = None,
    shares_port: bool = False,
    before_listening: Callable[[], Awaitable[None]] | None = None,
) -> AsyncGenerator[Router, None]:
    """Runs a router while the context is open, on `registry` or on the one that the configuration names.

    As one of several processes it has `siblings`, shares its ports with them, and awaits `before_listening`. It is
    SERVING while any model has a ready decode worker. Raises ConfigError, before anything listens.
    """
    access = open_access(config.auth, RULES, mutual_tls=config.tls.is_mutual)
    policy = load_policy(config.routing)
    async with AsyncExitStack() as stack:
        stack.enter_context(ungrouped())
        if registry is None:
            registry = await stack.enter_async_context(open_registry(config.registry, config.namespace))
        cluster = await stack.enter_async_context(
            watch_cluster(
                registry,
                config.probe,
                dialer(config.tls.call),
                _stream_dialer(config),
                config.routing.handoff_within,
            )
        )
        health = Health()
        group = await stack.enter_async_context(TaskGroup())
        reporting = group.create_task(lasting("health", partial(_report_health, cluster, health)))
        stack.callback(reporting.cancel)
        tracer = await stack.enter_async_context(configure_tracing(config.tracing, "baton-router", config.router_id))
        loader = await stack.enter_async_context(MediaLoader(config.media))
        # Inside the cluster: leased embeddings are released before the channels close.
        embeddings = await stack.enter_async_context(EmbeddingCache(config.embeddings))
        peers = await stack.enter_async_context(follow_peers(config, registry)) if config.shares_with_peers else None
        quotas, retries = Quotas(config.quotas, peers=peers or ALONE), Retries(config.retry)
        tokenization = await stack.enter_async_context(Tokenization(cluster, quotas, config.limits))
        admission = AdmissionController(
            cluster, config.admission, quotas, fairness=config.fairness, peers=peers or ALONE
        )
        following = group.create_task(lasting("admission", admission.follow))
        stack.callback(following.cancel)
        if config.fairness != "none":
            watching = group.create_task(lasting("tenants", admission.watch_tenants))
            stack.callback(watching.cancel)
        processor = MultimodalProcessor(
            loader, Embedder(Encoders(cluster, config.routing), retries, embeddings), config.limits.max_loading_images
        )
        if isinstance(policy, PredictedSeconds):
            subscriber = KvSubscriber(cluster, policy.caches, policy.forget)
            subscribing = group.create_task(lasting("kv_subscriptions", subscriber.follow))
            stack.callback(subscribing.cancel)
        placer = Placer(cluster, config.routing, policy)
        # Metrics that are not served are not measured.
        executor = Executor(placer, retries, RecordedMetrics() if config.metrics_listen else NoMetrics())
        grammars = stack.enter_context(GrammarCheck(config.limits.grammar_seconds))
        pipeline = Pipeline(cluster, admission, processor, executor, config.limits, grammars)
        requests = RoutingRequests(cluster, placer, config.limits)
        explainer = RouteExplainer(placer, requests, config.routing.policy)
        contexts = ContextFactory(config.limits, config.allow_faults, frozenset(config.auth.proxies))
        embed_calls = EmbedCalls(cluster, retries)
        embed_pipeline = EmbedPipeline(contexts, cluster, admission, embed_calls, pipeline.requests, executor.metrics)
        shared = SharedLimits.of(config.connections)
        texts = LongestTexts(cluster, config.limits.max_embed_inputs, config.media.max_bytes)
        app = OpenAIApp(
            contexts,
            pipeline,
            embed_pipeline,
            cluster,
            access=access,
            tracer=tracer,
            texts=texts,
            max_body_bytes=config.openai.max_body_bytes,
            input=shared.input,
        )
        if peers is not None:
            await stack.enter_async_context(serve_peers(config, registry, peers, admission))
        if before_listening is not None:
            await before_listening()
        openai = await _serve_openai(stack, config, app, shared, shares_port=shares_port)
        endpoints = EndpointPicker(cluster, placer, requests, config.picker)
        picker = await _serve_picker(stack, config, endpoints, cluster, shares_port=shares_port)
        offer = DeploymentOffer(config, cluster, openai.address if openai else "")
        inference = InferenceServicer(
            contexts, pipeline, embed_pipeline, tokenization, cluster, siblings or NoSiblings(), offer
        )
        services = _services(
            inference,
            KServeServicer(contexts, pipeline, embed_pipeline, cluster),
            ClusterServicer(cluster, explainer, admission, peers),
        )
        server = await stack.enter_async_context(
            serve(
                config.listen,
                services,
                health=health,
                tls=config.tls.listen,
                announce_seconds=config.announce_seconds,
                drain_seconds=config.drain_seconds,
                tracer=tracer,
                access=access,
                connections=config.connections,
                kind=config.server,
                shared=shared,
                shares_port=shares_port,
                texts=texts.limits,
            )
        )
        if openai is not None:
            # Together with the drain of gRPC's server, not after it.
            stack.callback(openai.stop_after, config.announce_seconds)
        if picker is not None:
            stack.callback(picker.stop)
        others = (openai.address if openai else "", picker.address if picker else "")
        yield Router(server.address, cluster, health, pipeline.requests, explainer, *others)


def _stream_dialer(config: RouterConfig) -> StreamDialer | None:
    """The dialer of the streams that calls to a worker share; None if each is a call of its own. Raises ConfigError."""
    return stream_dialer(config.worker_streams or config.server, config.tls.call) if config.multiplex else None


async def _serve_openai(
    stack: AsyncExitStack, config: RouterConfig, app: OpenAIApp, shared: SharedLimits, *, shares_port: bool
) -> "OpenAIServer | None":
    """Serves OpenAI's API until the stack is closed, if the configuration asks for it. Raises ConfigError."""
    if not config.openai.listen:
        return None
    # An extra: not every router has it.
    from router.openai.server import serve_openai

    serving = serve_openai(config.openai, app, shared, config.drain_seconds, shares_port=shares_port)
    return await stack.enter_async_context(serving)


async def _serve_picker(
    stack: AsyncExitStack, config: RouterConfig, picker: EndpointPicker, cluster: Cluster, *, shares_port: bool
) -> PickerServer | None:
    """Serves the endpoint picker until the stack is closed, if the configuration asks for it. Raises ConfigError."""
    if not config.picker.listen:
        return None
    return await stack.enter_async_context(serve_picker(config, picker, cluster, shares_port=shares_port))


def _services(inference: InferenceServicer, kserve: KServeServicer, operators: ClusterServicer) -> list[Service]:
    return [
        Service(_INFERENCE, inference_service_pb2_grpc.add_InferenceServiceServicer_to_server, inference),
        Service(KSERVE, add_kserve, kserve),
        Service(_CLUSTER, cluster_service_pb2_grpc.add_ClusterServiceServicer_to_server, operators),
    ]


async def _report_health(cluster: Cluster, health: Health) -> None:
    async for ready in cluster.readiness():
        health.set("", ready)
        health.set(_INFERENCE, ready)
        health.set(KSERVE, ready)
