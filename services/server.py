"""Starts a worker, in the order of `host_worker`: engines, leases, transports, services, server, registration."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial

import structlog

from baton.engine.v1 import handoff_pb2_grpc, worker_pb2_grpc
from discovery.config import open_registry
from discovery.record import MULTIPLEX
from discovery.registry import Registry, WorkerRecord
from engine_protocol.multiplex.service import multiplex
from engine_protocol.roles import load, role_kinds
from rpc.auth.access import Access, Rules
from rpc.auth.caller import Role as CallerRole
from rpc.health import Health
from rpc.server import ServerOptions, Service, serve
from rpc.tracing.tracer import configure_tracing
from services import control
from services.config import WorkerConfig
from services.control import Aborter, Moving, WorkerServicer
from services.handoff import service as handoff
from services.handoff.leases import MONOTONIC, LeaseClock, LeaseTable
from services.handoff.lending import Lender
from services.handoff.opening import PoolOpener
from services.handoff.service import HandoffServicer
from services.identity import Identity, WorkerRegistration, warn_if_unpaired
from services.keeper.client import KeeperClient
from services.keeping import Upgrader, kept_sockets
from services.moving.roles import RoleChanger
from services.moving.running import Shedding
from services.parts import WorkerParts, open_parts
from services.requests.calls import Calls
from services.requests.fault_injection import FaultReader
from services.resume.streams import KeptStreams
from services.sleeping.sleeper import open_sleeper
from services.telemetry import metrics
from services.worker import Drainer, Worker
from services.worker_engines import WorkerEngines, open_engines

log = structlog.get_logger(__name__)

# Beside the roles with KV: what is called for each request, and what tells of load. Images are not: they are large.
_MULTIPLEXED = (handoff.SERVICE_NAME, control.SERVICE_NAME)

_WORKER: frozenset[CallerRole] = frozenset({"worker"})
_BOTH: frozenset[CallerRole] = _WORKER | {"operator"}

# The roles that may call each method under mutual TLS. Routers have the role worker too, and ask for what operators
# want; clients reach routers only.
_ACCESS_RULES: Rules = {
    "/baton.engine.v1.": _WORKER,
    "/baton.engine.v1.HandoffService/List": _BOTH,
    "/baton.engine.v1.WorkerService/Abort": _BOTH,
    "/baton.engine.v1.WorkerService/ChangeRole": _BOTH,
    "/baton.engine.v1.WorkerService/Drain": _BOTH,
    "/baton.engine.v1.WorkerService/GetLoad": _BOTH,
    "/baton.engine.v1.WorkerService/GetModel": _BOTH,
    "/baton.engine.v1.WorkerService/ListLoras": _BOTH,
    "/baton.engine.v1.WorkerService/LoadLora": _BOTH,
    "/baton.engine.v1.WorkerService/Shed": _BOTH,
    "/baton.engine.v1.WorkerService/UnloadLora": _BOTH,
    "/baton.engine.v1.WorkerService/Upgrade": _BOTH,
    "/baton.engine.v1.WorkerService/WatchLoad": _BOTH,
}


@asynccontextmanager
async def host_worker(
    config: WorkerConfig,
    registry: Registry | None = None,
    clock: LeaseClock = MONOTONIC,
    keeper: KeeperClient | None = None,
) -> AsyncIterator[Worker]:
    """Yields a worker that is ready and registered, in `registry` if one is given. `clock` is that of its leases, and
    `keeper` holds what outlives it.

    Leaving drains it: it is deregistered and refuses new requests; running ones have `drain_seconds`, and held blocks
    one lease. Raises ConfigError, Unavailable without a registry, and EngineFailed if the model cannot be loaded.
    """
    config = config.named()
    async with AsyncExitStack() as stack:
        if registry is None:
            registry = await stack.enter_async_context(open_registry(config.registry, config.namespace))
        sleeper = await stack.enter_async_context(open_sleeper(config.sleep, config.worker_id, keeper))
        engines = await stack.enter_async_context(open_engines(config, registry, keeper))
        engines = replace(engines, sleeper=sleeper)
        identity = await _identify(config, registry, engines)
        leases = await stack.enter_async_context(LeaseTable(config.handoff.lease_seconds, clock))
        if sleeper is not None and engines.engine is not None:
            await stack.enter_async_context(sleeper.running(engines.engine, lambda: bool(len(leases))))
        calls = Calls(identity, FaultReader(config.engine.allows_fault_injection), sleeper)
        registration = WorkerRegistration(registry)
        drainer = Drainer(calls, leases, registration, config.drain_seconds, _fetch_seconds(engines))
        kept = await stack.enter_async_context(KeptStreams(config.keep, engines.load, engines.journal))
        worker = Worker(identity, engines, leases, drainer, Health(lambda: engines.responsive), kept)
        parts = await stack.enter_async_context(open_parts(config, worker, calls))
        services = await stack.enter_async_context(_open_services(parts, registration, keeper))
        await stack.enter_async_context(_serve(config, worker, services, keeper))
        await stack.enter_async_context(_opening_ahead(parts, registry))
        await stack.enter_async_context(_registered(worker, registration))
        await warn_if_unpaired(registry, _record(worker))
        yield worker


def prepare_services() -> None:
    """Imports the modules of all roles, as opening their services does."""
    for kind in role_kinds().values():
        load(kind.worker)


async def _identify(config: WorkerConfig, registry: Registry, engines: WorkerEngines) -> Identity:
    certificate = config.tls.listen.identity if config.tls.listen else ""
    epoch = await registry.next_epoch(config.worker_id)
    identity = Identity(config.worker_id, config.roles, engines.facts.name, epoch, certificate=certificate)
    identity.location = config.location.labels
    identity.keeps_streams = config.keep.max_seconds > 0
    identity.outlives_process = identity.keeps_streams and engines.journal is not None
    metrics.introduce(config.worker_id, config.roles, engines.facts)
    metrics.MODEL_LOAD_SECONDS.set(engines.load_seconds)
    if engines.engine is not None:
        # Engines that transfer KV themselves are not checked.
        identity.checks_handoffs = bool(config.handoff.check_every) and engines.engine.memory is not None
        metrics.KV_BLOCK_BYTES.set(engines.engine.facts.layout.block_bytes)
    return identity


@asynccontextmanager
async def _open_services(
    parts: WorkerParts, registration: WorkerRegistration, keeper: KeeperClient | None
) -> AsyncIterator[list[Service]]:
    """Yields all services. Every worker has all of them; the service of a missing role answers RoleMismatch."""
    worker = parts.worker
    async with AsyncExitStack() as stack:
        opened = [load(kind.worker)(parts) for kind in role_kinds().values()]
        services = [await stack.enter_async_context(opening) for opening in opened]
        holder = HandoffServicer(
            worker.identity,
            parts.pools,
            worker.leases,
            parts.prompts,
            Lender(worker.engine, worker.identity, worker.leases),
        )
        moving = Moving(
            Shedding(parts.decodes, parts.calls),
            RoleChanger(worker.identity, registration, partial(_record, worker), parts.calls, worker.leases),
            worker.kept,
            Upgrader(None if worker.engines.sleeper else keeper, worker.engine, parts.calls),
        )
        aborter = Aborter(parts.calls, worker.leases)
        control_servicer = WorkerServicer(worker.epoch, worker.engines, aborter, worker.drainer, moving)
        yield [
            *services,
            Service(handoff.SERVICE_NAME, handoff_pb2_grpc.add_HandoffServiceServicer_to_server, holder),
            Service(control.SERVICE_NAME, worker_pb2_grpc.add_WorkerServiceServicer_to_server, control_servicer),
        ]


@asynccontextmanager
async def _opening_ahead(parts: WorkerParts, registry: Registry) -> AsyncIterator[None]:
    """Opens the pools of prefill workers before their first handoffs, on a worker that reads other workers' KV."""
    worker, engine = parts.worker, parts.worker.engine
    reads_kv = engine is not None and engine.memory is not None and engine.facts.takes_handoffs
    if engine is None or not reads_kv or "decode" not in worker.identity.roles:
        yield
        return
    opener = PoolOpener(parts.peers, parts.transports, engine.facts.layout)
    async with opener.running(registry, _record(worker)):
        yield


@asynccontextmanager
async def _serve(
    config: WorkerConfig, worker: Worker, services: list[Service], keeper: KeeperClient | None
) -> AsyncIterator[None]:
    multiplexed = {*_MULTIPLEXED, *(kind.service for kind in role_kinds().values() if kind.has_kv)}
    async with AsyncExitStack() as stack:
        tracing = configure_tracing(config.tracing, _service_name(config), worker.worker_id)
        options = ServerOptions(
            tls=config.tls.listen,
            access=Access(_access_rules()) if config.tls.is_mutual else None,
            connections=config.connections,
            kind=config.server,
            sockets=kept_sockets(keeper, config.listen),
            tracer=await stack.enter_async_context(tracing),
            around=[multiplex([service for service in services if service.name in multiplexed])],
        )
        server = await stack.enter_async_context(
            serve(config.listen, services, health=worker.health, drain_seconds=0, options=options)
        )
        worker.identity.address = config.advertise or _address(config.advertised_host, server.port)
        yield


@asynccontextmanager
async def _registered(worker: Worker, registration: WorkerRegistration) -> AsyncIterator[None]:
    """Announces the worker while the context is open; leaving drains it."""
    worker.health.set("", True)
    try:
        await registration.register(_record(worker))
        log.info("worker ready", worker_id=worker.worker_id, address=worker.address, roles=worker.identity.roles)
        yield
    finally:
        await _leave(worker, registration)


async def _leave(worker: Worker, registration: WorkerRegistration) -> None:
    """Takes no more work, and finishes what is left; peers may still pull and release."""
    await registration.withdraw()
    for name in ("", *(kind.service for kind in role_kinds().values())):
        worker.health.set(name, False)
    if not worker.engines.healthy:
        return
    async with aclosing(worker.drainer.drain()) as stages:
        async for progress in stages:
            log.info("draining", running=progress.running, handoffs_held=progress.handoffs_held)


def _access_rules() -> Rules:
    return {**{f"/{kind.service}/": _WORKER for kind in role_kinds().values()}, **_ACCESS_RULES}


def _service_name(config: WorkerConfig) -> str:
    """The service's name in traces: workers of one role are one service."""
    return f"baton-{config.roles[0] if len(config.roles) == 1 else 'worker'}"


def _fetch_seconds(engines: WorkerEngines) -> float:
    transfer = engines.engine.kv_transfer if engines.engine else None
    return transfer.fetch_seconds if transfer else 0.0


def _record(worker: Worker) -> WorkerRecord:
    facts = worker.engines.facts
    own = worker.identity.capabilities
    return WorkerRecord(
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        address=worker.address,
        roles=worker.identity.roles,
        model=facts.name,
        engine=facts.engine,
        layout_digest=facts.layout.digest,
        max_context_tokens=facts.max_context_tokens,
        capabilities=(*worker.engines.capabilities, MULTIPLEX, *own),
        data_parallel_ranks=facts.data_parallel_ranks,
        certificate=worker.identity.certificate,
        layout=facts.layout.in_words,
        offers=worker.identity.offers,
        reads=worker.identity.reads,
        location=worker.identity.location,
    )


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
