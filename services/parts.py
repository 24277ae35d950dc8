"""The parts of a worker that the services of its roles are made of."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import structlog

from rpc.channels import dialer
from services.config import WorkerConfig
from services.engines.kv import BlockMemory, KvLayout
from services.handoff.borrowing import PrefixBorrower
from services.handoff.early import PromptsInProgress
from services.handoff.peers import Peers
from services.handoff.service import ExposedPool, HandoffOwner
from services.identity import Identity
from services.moving.running import RunningDecodes
from services.multimodal.embedding_pull import EmbeddingPuller
from services.multimodal.media_resolver import MediaResolver
from services.requests.calls import Calls
from services.transports.base import Exposure, Transport, transport_of
from services.transports.registry import offer_pool, open_transports
from services.worker import Worker
from services.worker_engines import WorkerEngines

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """A worker, its running calls, and what its services share: how others' blocks come here, and its own leave."""

    config: WorkerConfig
    worker: Worker
    calls: Calls
    transports: Sequence[Transport]
    pools: Sequence[ExposedPool]
    peers: Peers
    media: MediaResolver
    prompts: PromptsInProgress
    decodes: RunningDecodes
    borrower: PrefixBorrower


@asynccontextmanager
async def open_parts(config: WorkerConfig, worker: Worker, calls: Calls) -> AsyncIterator[WorkerParts]:
    """Opens the transports, and offers the worker's pools by them."""
    engines, engine = worker.engines, worker.engine
    async with AsyncExitStack() as stack:
        memory = engine.memory if engine is not None else None
        opening = open_transports(config.transports, config.transport_options, config.tls.call, memory)
        transports = await stack.enter_async_context(opening)
        pools = [await _open_pool(config, worker, transports, layout, pool) for layout, pool in _pools(engines)]
        if engines.sleeper is not None:
            worker.identity.offers = worker.identity.reads = ()  # no worker hands over to it, nor it to others
        elif memory is not None:
            _record_transports(worker.identity, transports, pools[0])
        peers = await stack.enter_async_context(Peers(dialer(config.tls.call)))
        facts = engine.facts if engine is not None else engines.facts
        media = MediaResolver(facts, EmbeddingPuller(facts, peers, transports))
        prompts = PromptsInProgress(worker.leases, facts.layout.digest)
        decodes = RunningDecodes(HandoffOwner(worker.identity, facts.layout), worker.leases)
        borrower = await stack.enter_async_context(PrefixBorrower(engine, peers, transports))
        yield WorkerParts(config, worker, calls, transports, pools, peers, media, prompts, decodes, borrower)


def _pools(engines: WorkerEngines) -> list[tuple[KvLayout, BlockMemory]]:
    """Returns the pools to offer: of KV, if the engine has one, and of embeddings."""
    pools = []
    if engines.engine is not None and engines.engine.memory is not None:
        pools.append((engines.engine.facts.layout, engines.engine.memory))
    if engines.encoding is not None:
        pools.append((engines.encoding.pool.layout, engines.encoding.pool.memory))
    return pools


async def _open_pool(
    config: WorkerConfig, worker: Worker, transports: Sequence[Transport], layout: KvLayout, memory: BlockMemory
) -> ExposedPool:
    listen_host = config.listen.rpartition(":")[0].strip("[]")
    guard = worker.leases.guard(layout.digest)
    endpoints = await offer_pool(
        transports, memory, Exposure(listen_host, config.advertised_host, guard, config.tls.listen)
    )
    return ExposedPool(HandoffOwner(worker.identity, layout), memory.num_blocks, endpoints)


def _record_transports(identity: Identity, transports: Sequence[Transport], pool: ExposedPool) -> None:
    """Records by which transports the worker's KV can be handed over, and logs those that cannot offer it."""
    identity.offers = tuple(map(transport_of, pool.endpoints))
    identity.reads = tuple(transport.name for transport in transports)
    left_out = [name for name in identity.reads if name not in identity.offers]
    if "prefill" in identity.roles and not identity.offers:
        log.warning("no transport can offer this worker's KV: it is never paired", transports=identity.reads)
    elif left_out:
        log.info("transports that cannot offer this worker's KV", left_out=left_out, offered=identity.offers)
