"""A whole worker, put together: engine, leases, transports, servicers, server, and its record in the registry."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass

import structlog

from discovery.config import open_registry
from discovery.registry import Registry, WorkerRecord
from rpc.access import Access
from rpc.errors import EngineFailed
from rpc.health import Health
from rpc.monitor import Report, status
from rpc.serve import serve
from rpc.tracing.tracer import configure_tracing
from services import metrics
from services.access import RULES
from services.calls import Calls
from services.config import WorkerConfig
from services.draining import Drainer
from services.engine import Engine, EngineLoad
from services.engines.simulated_config import SimulatedConfig
from services.faults import FaultReader
from services.identity import Identity
from services.kv_elsewhere import MovesKv
from services.leases import LeaseTable
from services.registering import Announcement
from services.servicers import ROLE_SERVICES, Parts, open_services
from services.watching import watch
from services.worker_engines import WorkerEngines, open_engines

log = structlog.get_logger(__name__)

_LOOK_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class _State:
    """What the metrics tell of a worker."""

    is_healthy: bool
    load: EngineLoad
    held: int
    embedding_blocks: int
    embedding_blocks_used: int


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker that serves. To end it, leave its context: that drains it."""

    identity: Identity
    engines: WorkerEngines
    leases: LeaseTable
    drainer: Drainer
    health: Health

    @property
    def worker_id(self) -> str:
        return self.identity.worker_id

    @property
    def engine(self) -> Engine:
        return self.engines.engine

    @property
    def address(self) -> str:
        return self.identity.address

    @property
    def epoch(self) -> int:
        return self.identity.epoch

    def report(self) -> Report:
        """What it says of itself at /health."""
        return {
            "status": status(self.health.serving),
            "worker_id": self.worker_id,
            "roles": self.identity.roles,
            "model": self.engine.facts.name,
        }

    async def supervise(self) -> None:
        """Keeps the metrics up to date, until cancelled. Raises EngineFailed once the engine is not healthy."""
        async with aclosing(watch(self._state, _LOOK_SECONDS)) as states:
            async for state in states:
                metrics.observe_load(state.load)
                metrics.HANDOFFS_HELD.set(state.held)
                if self.engines.has_kv:
                    metrics.observe_blocks(state.load)
                metrics.observe_embeddings(state.embedding_blocks, state.embedding_blocks_used)
                if not state.is_healthy:
                    self.health.set("", False)
                    raise EngineFailed("the engine has failed", worker_id=self.worker_id)

    def _state(self) -> _State:
        pool = self.engines.encoding.pool if self.engines.encoding else None
        return _State(
            is_healthy=self.engines.healthy,
            load=self.engines.load(),
            held=len(self.leases),
            embedding_blocks=pool.total if pool else 0,
            embedding_blocks_used=pool.used if pool else 0,
        )


@asynccontextmanager
async def host_worker(config: WorkerConfig, registry: Registry | None = None) -> AsyncIterator[Worker]:
    """A worker of this configuration, ready and registered; in `registry` if one is given.

    Leaving drains it: it is deregistered, refuses what is new, and gives what runs `drain_seconds`, and what is held
    one lease. Raises ConfigError, Unavailable without a registry, and EngineFailed if the model cannot be loaded.
    """
    config = config.named()
    async with AsyncExitStack() as stack:
        if registry is None:
            registry = await stack.enter_async_context(open_registry(config.registry, config.namespace))
        certificate = config.tls.listen.identity if config.tls.listen else ""
        engines = await stack.enter_async_context(open_engines(config, registry))
        identity = Identity(config.worker_id, config.roles, engines.engine.facts.name, certificate=certificate)
        metrics.introduce(config.worker_id, config.roles, engines.engine.facts)
        metrics.MODEL_LOAD_SECONDS.set(engines.load_seconds)
        if engines.has_kv:
            metrics.KV_BLOCK_BYTES.set(engines.engine.facts.layout.block_bytes)
        yield await stack.enter_async_context(_serve(config, registry, engines, identity))


@asynccontextmanager
async def _serve(
    config: WorkerConfig, registry: Registry, engines: WorkerEngines, identity: Identity
) -> AsyncIterator[Worker]:
    announcement, health = Announcement(registry), Health()
    async with AsyncExitStack() as stack:
        leases = await stack.enter_async_context(LeaseTable(config.handoff.lease_seconds))
        calls = Calls(identity, _fault_reader(config))
        fetch_seconds = engines.engine.fetch_seconds if isinstance(engines.engine, MovesKv) else 0.0
        drainer = Drainer(calls, leases, announcement, config.drain_seconds, fetch_seconds)
        worker = Worker(identity, engines, leases, drainer, health)
        services = await stack.enter_async_context(
            open_services(config, Parts(identity, engines, leases, calls, drainer))
        )
        tracing = configure_tracing(config.tracing, _service_name(config), identity.worker_id)
        tracer = await stack.enter_async_context(tracing)
        server = await stack.enter_async_context(
            serve(
                config.listen,
                services,
                health=health,
                tls=config.tls.listen,
                drain_seconds=0,
                tracer=tracer,
                access=Access(RULES) if config.tls.is_mutual else None,
                connections=config.connections,
            )
        )
        identity.address = config.advertise or _address(config.advertised_host, server.port)
        health.set("", True)
        try:
            await announcement.announce(_record(worker))
            log.info("worker ready", worker_id=worker.worker_id, address=worker.address, roles=identity.roles)
            yield worker
        finally:
            await _leave(worker, announcement)


async def _leave(worker: Worker, announcement: Announcement) -> None:
    """Takes no more work, and sees what there is to its end; peers may pull and release all the while."""
    await announcement.withdraw()
    for name in ("", *ROLE_SERVICES):
        worker.health.set(name, False)
    if not worker.engines.healthy:
        return
    async with aclosing(worker.drainer.drain()) as stages:
        async for progress in stages:
            log.info("draining", running=progress.running, handoffs_held=progress.handoffs_held)


def _service_name(config: WorkerConfig) -> str:
    """What traces call it: by its role, as workers of one role are one service."""
    return f"baton-{config.roles[0] if len(config.roles) == 1 else 'worker'}"


def _fault_reader(config: WorkerConfig) -> FaultReader:
    return FaultReader(isinstance(config.engine, SimulatedConfig) and config.engine.allow_faults)


def _record(worker: Worker) -> WorkerRecord:
    facts = worker.engine.facts
    return WorkerRecord(
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        address=worker.address,
        roles=worker.identity.roles,
        model=facts.name,
        engine=facts.engine,
        layout_digest=facts.layout.digest,
        max_context_tokens=facts.max_context_tokens,
        capabilities=worker.engines.capabilities,
        data_parallel_ranks=facts.data_parallel_ranks,
        certificate=worker.identity.certificate,
    )


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
