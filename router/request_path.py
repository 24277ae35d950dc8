"""The parts of a router behind its listeners, which answer requests by whatever protocol they come."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from media.loader import MediaLoader, MediaStore
from router.admission.controller import AdmissionController
from router.admission.peers import ALONE
from router.admission.quotas import Quotas
from router.config import RouterConfig
from router.context import ContextFactory, RunningRequests
from router.decoding.state import Executor
from router.embedding.calls import EmbedCalls
from router.embedding.pipeline import EmbedPipeline
from router.moving.decodes import ReadDecodes
from router.moving.mover import Mover
from router.multimodal.cache import EmbeddingCache
from router.multimodal.encode import Embedder
from router.multimodal.prompt import MultimodalProcessor
from router.peers.membership import RegisteredPeers
from router.pipeline import Pipeline
from router.placement.encoders import Encoders, RoleWorkers
from router.placement.kv_events import KvSubscriber
from router.placement.placer import Placer
from router.qos import UnauthenticatedTenants
from router.recording.recorder import Recorder
from router.routing.policy import Policy
from router.routing.prefix.predicted import PredictedSeconds
from router.routing.retry import Retries
from router.sessions import SessionEnds
from router.text.grammar_check import GrammarCheck
from router.tokenization import Tokenization
from router.workers.cluster import Cluster
from runtime.lasting import lasting_tasks


@dataclass(frozen=True, slots=True)
class RequestPath:
    """The parts that a servicer needs.

    Those of every kind of request: `contexts` reads a call, `running` runs it, `admission` admits it, `workers` and
    `retries` choose among workers of a role. The pipelines are of generation and of embeddings.
    """

    cluster: Cluster
    contexts: ContextFactory
    running: RunningRequests
    admission: AdmissionController
    workers: RoleWorkers
    retries: Retries
    pipeline: Pipeline
    embed_pipeline: EmbedPipeline
    tokenization: Tokenization
    sessions: SessionEnds
    placer: Placer
    peers: RegisteredPeers | None  # other routers, if this one shares anything with them
    recorder: Recorder | None  # if any request is recorded
    store: MediaStore  # where pictures may be written


@asynccontextmanager
async def open_request_path(
    config: RouterConfig, cluster: Cluster, policy: Policy, peers: RegisteredPeers | None
) -> AsyncIterator[RequestPath]:
    """Opens the request path on a cluster. Leaving it releases leased embeddings, before the channels close."""
    limits, retries, workers = config.limits, Retries(config.retry), RoleWorkers(cluster)
    sharing = peers if peers is not None and config.shares_limits else ALONE
    quotas = Quotas(config.quotas, peers=sharing)
    admission = AdmissionController(cluster, config.admission, quotas, fairness=config.fairness, peers=sharing)
    async with AsyncExitStack() as stack:
        processor = await stack.enter_async_context(_open_processor(config, cluster, retries))
        tokenization = await stack.enter_async_context(Tokenization(cluster, quotas, limits))
        await stack.enter_async_context(_following(config, cluster, policy, admission))
        grammars = stack.enter_context(GrammarCheck(limits.grammar_seconds))
        running = RunningRequests()
        unauthenticated = UnauthenticatedTenants(config.admission.unauthenticated_tenants, config.quotas.tenants)
        contexts = ContextFactory(limits, config.allow_faults, frozenset(config.auth.proxies), unauthenticated)
        recorder = _recorder(config, cluster)
        if recorder is not None:
            running.record, contexts = recorder.ended, replace(contexts, begin_notes=recorder.begin)
            await stack.enter_async_context(lasting_tasks({"records": recorder.run}))
        executor = Executor(Placer(cluster, config.routing, policy), retries, ReadDecodes())
        if config.moving.at_once:
            mover = Mover(cluster, executor.placer, executor.decodes, config.moving)
            await stack.enter_async_context(lasting_tasks({"moves": mover.follow}))
        yield RequestPath(
            cluster,
            contexts,
            running,
            admission,
            workers,
            retries,
            Pipeline(running, cluster, admission, processor, executor, limits, grammars),
            EmbedPipeline(running, contexts, cluster, admission, EmbedCalls(workers, retries)),
            tokenization,
            SessionEnds(cluster, quotas),
            executor.placer,
            peers,
            recorder,
            MediaStore(config.media),
        )


def _following(
    config: RouterConfig, cluster: Cluster, policy: Policy, admission: AdmissionController
) -> AbstractAsyncContextManager[None]:
    """The tasks by which admission and routing follow the cluster."""
    following = {"admission": admission.follow}
    if config.fairness != "none":
        following["tenants"] = admission.watch_tenants
    if isinstance(policy, PredictedSeconds):
        following["kv_subscriptions"] = KvSubscriber(cluster, policy.caches, policy.forget).follow
    return lasting_tasks(following)


def _recorder(config: RouterConfig, cluster: Cluster) -> Recorder | None:
    """Records requests as the configuration says; None if it records none. Raises ConfigError."""
    if not config.records.are_kept:
        return None
    return Recorder(config.records, config.router_id, config.routing.policy, lambda: cluster.workers)


@asynccontextmanager
async def _open_processor(
    config: RouterConfig, cluster: Cluster, retries: Retries
) -> AsyncIterator[MultimodalProcessor]:
    async with MediaLoader(config.media) as loader, EmbeddingCache(config.embeddings) as embeddings:
        embedder = Embedder(Encoders(cluster, config.routing), retries, embeddings)
        yield MultimodalProcessor(loader, embedder, config.limits.max_loading_images)
