"""A whole router in this process: what it watches, what it serves, and when it says that it is ready."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from baton.inference.v1 import (
    cluster_service_pb2,
    cluster_service_pb2_grpc,
    inference_service_pb2,
    inference_service_pb2_grpc,
)

from discovery.config import open_registry
from discovery.registry import Registry
from media.loader import MediaLoader
from router.access import RULES
from router.cluster import Cluster, watch_cluster
from router.config import RouterConfig
from router.embedder import Embedder
from router.embeddings import EmbeddingCache
from router.encoders import Encoders
from router.gate import Gate
from router.illustrator import Illustrator
from router.meter import Measured, Unmeasured
from router.pipeline import Pipeline
from router.placement import Placer
from router.quotas import Quotas
from router.race import Track
from router.retry import Retries
from router.service import ClusterServicer, InferenceServicer
from router.tokenization import Tokenization
from rpc.access import open_access
from rpc.aio import TaskGroup
from rpc.channels import dialer
from rpc.health import Health
from rpc.monitor import Report, status
from rpc.serve import Service, serve
from rpc.tracing.tracer import configure_tracing

_INFERENCE = inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
_CLUSTER = cluster_service_pb2.DESCRIPTOR.services_by_name["ClusterService"].full_name


@dataclass(frozen=True, slots=True)
class Router:
    """A router that is listening at `address`."""

    address: str
    cluster: Cluster
    health: Health

    def report(self) -> Report:
        """What it says of itself at /health."""
        return {"status": status(self.health.serving), **self.cluster.summary()}


@asynccontextmanager
async def host_router(config: RouterConfig, registry: Registry | None = None) -> AsyncGenerator[Router, None]:
    """Runs a router until the context is left, on the registry given, or else on the one that `config` names.

    It is SERVING while any model has a ready decode worker. Raises ConfigError, before anything listens.
    """
    access = open_access(config.auth, RULES, mutual_tls=config.tls.is_mutual)
    async with AsyncExitStack() as stack:
        if registry is None:
            registry = await stack.enter_async_context(open_registry(config.registry, config.namespace))
        cluster = await stack.enter_async_context(watch_cluster(registry, config.probe, dialer(config.tls.call)))
        health = Health()
        group = await stack.enter_async_context(TaskGroup())
        reporting = group.create_task(_report_health(cluster, health))
        stack.callback(reporting.cancel)
        tracer = await stack.enter_async_context(configure_tracing(config.tracing, "baton-router", config.router_id))
        loader = await stack.enter_async_context(MediaLoader(config.media))
        # Inside the cluster: what is leased is given back before the channels close.
        embeddings = await stack.enter_async_context(EmbeddingCache(config.embeddings))
        services = _services(config, cluster, loader, embeddings)
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
            )
        )
        yield Router(server.address, cluster, health)


def _services(config: RouterConfig, cluster: Cluster, loader: MediaLoader, embeddings: EmbeddingCache) -> list[Service]:
    retries = Retries(config.retry)
    embedder = Embedder(Encoders(cluster, config.routing), retries, embeddings)
    illustrator = Illustrator(loader, embedder, config.limits.max_loading_images)
    gate = Gate(cluster, config.admission, Quotas(config.quotas))
    # What nobody can read is not measured.
    meter = Measured() if config.metrics_listen else Unmeasured()
    track = Track(Placer(cluster, config.routing), retries, meter)
    pipeline = Pipeline(cluster, gate, illustrator, track, config.limits)
    inference = InferenceServicer(
        pipeline, Tokenization(cluster), cluster, allow_faults=config.allow_faults, proxies=config.auth.proxies
    )
    return [
        Service(_INFERENCE, inference_service_pb2_grpc.add_InferenceServiceServicer_to_server, inference),
        Service(_CLUSTER, cluster_service_pb2_grpc.add_ClusterServiceServicer_to_server, ClusterServicer(cluster)),
    ]


async def _report_health(cluster: Cluster, health: Health) -> None:
    async for ready in cluster.readiness():
        health.set("", ready)
        health.set(_INFERENCE, ready)
