"""Starts a worker, in the order of `host_worker`: engines, leases, transports, services, server, registration."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import structlog

from baton.engine.v1 import (
    decode_pb2_grpc,
    embed_pb2_grpc,
    encode_pb2_grpc,
    handoff_pb2_grpc,
    prefill_pb2_grpc,
    worker_pb2_grpc,
)
from discovery.config import open_registry
from discovery.record import KEEPS_STREAMS, MULTIPLEX, MULTIPLEXED_LOAD
from discovery.registry import Registry, WorkerRecord
from discovery.roles import ROLE_KINDS
from engine_protocol.multiplex.service import multiplex
from rpc.auth.access import Access, Rules
from rpc.auth.caller import Role as CallerRole
from rpc.channels import dialer
from rpc.health import Health
from rpc.server import Service, serve
from rpc.tracing.tracer import configure_tracing
from services import control, decode, embed, encode, prefill
from services.config import WorkerConfig
from services.control import Aborter, WorkerServicer
from services.decode import Decoder, DecodeServicer
from services.embed import EmbedServicer, open_vector_maker
from services.encode import EncodeServicer, open_media_encoder
from services.engines.kv import BlockMemory, KvLayout
from services.handoff import service as handoff
from services.handoff.destinations import Allocator
from services.handoff.early import PromptsInProgress
from services.handoff.fetcher import Fetcher
from services.handoff.leases import MONOTONIC, LeaseClock, LeaseTable
from services.handoff.peers import Peers
from services.handoff.pull import Puller
from services.handoff.service import HandoffOwner, HandoffServicer, OfferedPool
from services.identity import Identity, WorkerRegistration, warn_if_unpaired
from services.multimodal.embedding_pull import EmbeddingPuller
from services.multimodal.media_resolver import MediaResolver
from services.prefill import Prefiller, PrefillServicer
from services.requests.calls import Calls
from services.requests.fault_injection import FaultReader
from services.resume.streams import KeptStreams
from services.telemetry import metrics
from services.transports.base import Exposure, Transport, transport_of
from services.transports.registry import offer_pool, open_transports
from services.worker import Drainer, Worker
from services.worker_engines import WorkerEngines, open_engines

log = structlog.get_logger(__name__)

ROLE_SERVICES = tuple(f"baton.engine.v1.{kind.service}" for kind in ROLE_KINDS)

# What routers call for each request, and what tells of load. Images are large, and not multiplexed.
_MULTIPLEXED = (prefill.SERVICE_NAME, decode.SERVICE_NAME, handoff.SERVICE_NAME, control.SERVICE_NAME)

_WORKER: frozenset[CallerRole] = frozenset({"worker"})
_OPERATOR: frozenset[CallerRole] = frozenset({"operator"})
_BOTH = _WORKER | _OPERATOR

# The roles that may call each method under mutual TLS. Routers have the role worker too; clients reach routers only.
_ACCESS_RULES: Rules = {
    "/baton.engine.v1.": _WORKER,
    "/baton.engine.v1.HandoffService/List": _BOTH,
    "/baton.engine.v1.WorkerService/Abort": _BOTH,
    "/baton.engine.v1.WorkerService/Drain": _OPERATOR,
    "/baton.engine.v1.WorkerService/GetLoad": _BOTH,
    "/baton.engine.v1.WorkerService/GetModel": _BOTH,
    "/baton.engine.v1.WorkerService/ListLoras": _BOTH,
    "/baton.engine.v1.WorkerService/LoadLora": _BOTH,
    "/baton.engine.v1.WorkerService/UnloadLora": _BOTH,
    "/baton.engine.v1.WorkerService/WatchLoad": _BOTH,
}


@asynccontextmanager
async def host_worker(
    config: WorkerConfig, registry: Registry | None = None, clock: LeaseClock = MONOTONIC
) -> AsyncIterator[Worker]:
    """Yields a worker that is ready and registered, in `registry` if one is given. `clock` is that of its leases.

    Leaving drains it: it is deregistered and refuses new requests; running ones have `drain_seconds`, and held blocks
    one lease. Raises ConfigError, Unavailable without a registry, and EngineFailed if the model cannot be loaded.
    """
    config = config.named()
    async with AsyncExitStack() as stack:
        if registry is None:
            registry = await stack.enter_async_context(open_registry(config.registry, config.namespace))
        engines = await stack.enter_async_context(open_engines(config, registry))
        identity = await _identify(config, registry, engines)
        leases = await stack.enter_async_context(LeaseTable(config.handoff.lease_seconds, clock))
        calls = Calls(identity, FaultReader(config.engine.allows_fault_injection))
        registration = WorkerRegistration(registry)
        drainer = Drainer(calls, leases, registration, config.drain_seconds, _fetch_seconds(engines))
        kept = await stack.enter_async_context(KeptStreams(config.keep, engines.load))
        worker = Worker(identity, engines, leases, drainer, Health(), kept)
        services = await stack.enter_async_context(_open_services(config, worker, calls))
        await stack.enter_async_context(_serve(config, worker, services))
        await stack.enter_async_context(_registered(worker, registration))
        await warn_if_unpaired(registry, _record(worker))
        yield worker


async def _identify(config: WorkerConfig, registry: Registry, engines: WorkerEngines) -> Identity:
    certificate = config.tls.listen.identity if config.tls.listen else ""
    epoch = await registry.next_epoch(config.worker_id)
    identity = Identity(config.worker_id, config.roles, engines.facts.name, epoch, certificate=certificate)
    identity.location = config.location.labels
    identity.keeps_streams = config.keep.max_seconds > 0 and "decode" in config.roles
    metrics.introduce(config.worker_id, config.roles, engines.facts)
    metrics.MODEL_LOAD_SECONDS.set(engines.load_seconds)
    if engines.engine is not None:
        metrics.KV_BLOCK_BYTES.set(engines.engine.facts.layout.block_bytes)
    return identity


@asynccontextmanager
async def _open_services(config: WorkerConfig, worker: Worker, calls: Calls) -> AsyncIterator[list[Service]]:
    """Yields all services. Every worker has all of them; the service of a missing role answers RoleMismatch."""
    identity, engines, engine, leases = worker.identity, worker.engines, worker.engine, worker.leases
    async with AsyncExitStack() as stack:
        memory = engine.memory if engine is not None else None
        opening = open_transports(config.transports, config.transport_options, config.tls.call, memory)
        transports = await stack.enter_async_context(opening)
        pools = [await _offer(config, worker, transports, layout, memory) for layout, memory in _pools(engines)]
        if memory is not None:
            _note_transports(identity, transports, pools[0])
        peers = await stack.enter_async_context(Peers(dialer(config.tls.call)))
        facts = engine.facts if engine is not None else engines.facts
        media = MediaResolver(facts, EmbeddingPuller(facts, peers, transports))
        media_encoder = await stack.enter_async_context(open_media_encoder(config, engines.encoding, leases))
        prompts = PromptsInProgress(leases, facts.layout.digest)
        prefiller = decoder = None
        if engine is not None:
            prefiller = Prefiller(engine, identity, leases, prompts)
            puller = await stack.enter_async_context(Puller(engine, peers, transports))
            transfer = engine.kv_transfer
            fetcher = Fetcher(transfer, engine.facts.layout, peers) if transfer else None
            decoder = Decoder(engine, puller, fetcher, Allocator(engine, identity, leases))
        yield [
            Service(
                encode.SERVICE_NAME,
                encode_pb2_grpc.add_EncodeServiceServicer_to_server,
                EncodeServicer(identity, calls, media_encoder, leases),
            ),
            Service(
                prefill.SERVICE_NAME,
                prefill_pb2_grpc.add_PrefillServiceServicer_to_server,
                PrefillServicer(calls, media, prefiller),
            ),
            Service(
                decode.SERVICE_NAME,
                decode_pb2_grpc.add_DecodeServiceServicer_to_server,
                DecodeServicer(identity, calls, media, decoder, worker.kept),
            ),
            Service(
                embed.SERVICE_NAME,
                embed_pb2_grpc.add_EmbedServiceServicer_to_server,
                EmbedServicer(identity, calls, open_vector_maker(config, engines.embedder)),
            ),
            Service(
                handoff.SERVICE_NAME,
                handoff_pb2_grpc.add_HandoffServiceServicer_to_server,
                HandoffServicer(identity, pools, leases, prompts),
            ),
            Service(
                control.SERVICE_NAME,
                worker_pb2_grpc.add_WorkerServiceServicer_to_server,
                WorkerServicer(identity.epoch, engines, Aborter(calls, leases), worker.drainer),
            ),
        ]


def _pools(engines: WorkerEngines) -> list[tuple[KvLayout, BlockMemory]]:
    """Returns the pools to offer: of KV, if the engine has one, and of embeddings."""
    pools = []
    if engines.engine is not None and engines.engine.memory is not None:
        pools.append((engines.engine.facts.layout, engines.engine.memory))
    if engines.encoding is not None:
        pools.append((engines.encoding.pool.layout, engines.encoding.pool.memory))
    return pools


async def _offer(
    config: WorkerConfig, worker: Worker, transports: Sequence[Transport], layout: KvLayout, memory: BlockMemory
) -> OfferedPool:
    listen_host = config.listen.rpartition(":")[0].strip("[]")
    guard = worker.leases.guard(layout.digest)
    endpoints = await offer_pool(
        transports, memory, Exposure(listen_host, config.advertised_host, guard, config.tls.listen)
    )
    return OfferedPool(HandoffOwner(worker.identity, layout), memory.num_blocks, endpoints)


def _note_transports(identity: Identity, transports: Sequence[Transport], pool: OfferedPool) -> None:
    """Records by which transports the worker's KV can be handed over, and logs those that cannot offer it."""
    identity.offers = tuple(map(transport_of, pool.endpoints))
    identity.reads = tuple(transport.name for transport in transports)
    left_out = [name for name in identity.reads if name not in identity.offers]
    if "prefill" in identity.roles and not identity.offers:
        log.warning("no transport can offer this worker's KV: it is never paired", transports=identity.reads)
    elif left_out:
        log.info("transports that cannot offer this worker's KV", left_out=left_out, offered=identity.offers)


@asynccontextmanager
async def _serve(config: WorkerConfig, worker: Worker, services: list[Service]) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        tracing = configure_tracing(config.tracing, _service_name(config), worker.worker_id)
        server = await stack.enter_async_context(
            serve(
                config.listen,
                services,
                health=worker.health,
                tls=config.tls.listen,
                drain_seconds=0,
                tracer=await stack.enter_async_context(tracing),
                access=Access(_ACCESS_RULES) if config.tls.is_mutual else None,
                connections=config.connections,
                kind=config.server,
                around=[multiplex([service for service in services if service.name in _MULTIPLEXED])],
            )
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
    for name in ("", *ROLE_SERVICES):
        worker.health.set(name, False)
    if not worker.engines.healthy:
        return
    async with aclosing(worker.drainer.drain()) as stages:
        async for progress in stages:
            log.info("draining", running=progress.running, handoffs_held=progress.handoffs_held)


def _service_name(config: WorkerConfig) -> str:
    """The service's name in traces: workers of one role are one service."""
    return f"baton-{config.roles[0] if len(config.roles) == 1 else 'worker'}"


def _fetch_seconds(engines: WorkerEngines) -> float:
    transfer = engines.engine.kv_transfer if engines.engine else None
    return transfer.fetch_seconds if transfer else 0.0


def _record(worker: Worker) -> WorkerRecord:
    facts = worker.engines.facts
    kept = (KEEPS_STREAMS,) if worker.identity.keeps_streams else ()
    return WorkerRecord(
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        address=worker.address,
        roles=worker.identity.roles,
        model=facts.name,
        engine=facts.engine,
        layout_digest=facts.layout.digest,
        max_context_tokens=facts.max_context_tokens,
        capabilities=(*worker.engines.capabilities, MULTIPLEX, MULTIPLEXED_LOAD, *kept),
        data_parallel_ranks=facts.data_parallel_ranks,
        certificate=worker.identity.certificate,
        layout=facts.layout.in_words,
        offers=worker.identity.offers,
        reads=worker.identity.reads,
        location=worker.identity.location,
    )


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
