"""The services of a worker. Every worker has them all; one whose role it lacks answers with RoleMismatch."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from baton.engine.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    encode_pb2,
    encode_pb2_grpc,
    handoff_pb2,
    handoff_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

from media.loader import MediaLoader
from rpc.channels import dialer
from rpc.serve import Service
from services.aborting import Aborter
from services.calls import Calls
from services.config import WorkerConfig
from services.decode import DecodeServicer
from services.decoding import Decoder
from services.draining import Drainer
from services.embedding_pull import EmbeddingPuller
from services.encode import EncodeServicer
from services.encoding import EmbeddingStore, MediaEncoder
from services.fetching import Fetcher
from services.handoff import HandoffServicer
from services.identity import Identity
from services.kv import BlockMemory, KvLayout
from services.kv_elsewhere import MovesKv
from services.leases import LeaseTable
from services.owner import OfferedPool, Owner
from services.peers import Peers
from services.prefill import PrefillServicer
from services.prefilling import Prefiller
from services.pull import Puller
from services.resolving import MediaResolver
from services.transports.factory import Exposure, offer_pool, open_transports
from services.worker import WorkerServicer
from services.worker_engines import WorkerEngines

_ENCODE = encode_pb2.DESCRIPTOR.services_by_name["EncodeService"].full_name
_PREFILL = prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name
_DECODE = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name
_HANDOFF = handoff_pb2.DESCRIPTOR.services_by_name["HandoffService"].full_name
_WORKER = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name

ROLE_SERVICES = (_ENCODE, _PREFILL, _DECODE)


@dataclass(frozen=True, slots=True)
class Parts:
    """What the services of one worker share."""

    identity: Identity
    engines: WorkerEngines
    leases: LeaseTable
    calls: Calls
    drainer: Drainer


@dataclass(frozen=True, slots=True)
class Reach:
    """How blocks get from worker to worker: the pools offered here, and the ways to read others'."""

    pools: Sequence[OfferedPool]
    kv: Puller
    fetcher: Fetcher | None
    media: MediaResolver


@asynccontextmanager
async def open_services(config: WorkerConfig, parts: Parts) -> AsyncIterator[list[Service]]:
    """The services, with what they need to read other pools and to have their own read."""
    async with _open_reach(config, parts) as reach, AsyncExitStack() as stack:
        encoder = None
        if (encoding := parts.engines.encoding) is not None:
            loader = await stack.enter_async_context(MediaLoader(config.media))
            store = EmbeddingStore(encoding.pool, parts.leases, config.encode.inline_bytes)
            encoder = MediaEncoder(encoding.encoder, loader, store)
        encode = EncodeServicer(parts.identity, parts.calls, encoder, parts.leases, config.encode.max_items)
        yield [Service(_ENCODE, encode_pb2_grpc.add_EncodeServiceServicer_to_server, encode), *_services(parts, reach)]


@asynccontextmanager
async def _open_reach(config: WorkerConfig, parts: Parts) -> AsyncIterator[Reach]:
    engine = parts.engines.engine
    async with AsyncExitStack() as stack:
        pools = [await stack.enter_async_context(_offer(config, parts.identity, *pool)) for pool in _pools(parts)]
        transports = stack.enter_context(open_transports(config.transports, config.tls.call, config.nixl.devices))
        peers = await stack.enter_async_context(Peers(dialer(config.tls.call)))
        puller = await stack.enter_async_context(Puller(engine, peers, transports))
        fetcher = Fetcher(engine, engine.facts.layout, peers) if isinstance(engine, MovesKv) else None
        yield Reach(
            pools, puller, fetcher, MediaResolver(engine.facts, EmbeddingPuller(engine.facts, peers, transports))
        )


def _pools(parts: Parts) -> list[tuple[KvLayout, BlockMemory]]:
    """What is offered: the engine's pool, and that of the embeddings where it is another one."""
    engine, encoding = parts.engines.engine, parts.engines.encoding
    pools = [(engine.facts.layout, engine.memory)]
    if encoding is not None and encoding.pool.memory is not engine.memory:
        pools.append((encoding.pool.layout, encoding.pool.memory))
    return pools


@asynccontextmanager
async def _offer(
    config: WorkerConfig, identity: Identity, layout: KvLayout, memory: BlockMemory
) -> AsyncIterator[OfferedPool]:
    listen_host = config.listen.rpartition(":")[0].strip("[]")
    exposure = Exposure(listen_host, config.advertised_host, config.tls.listen, config.nixl.devices)
    async with offer_pool(memory, config.transports, exposure) as endpoints:
        yield OfferedPool(Owner(identity, layout), memory.num_blocks, endpoints)


def _services(parts: Parts, reach: Reach) -> list[Service]:
    engine = parts.engines.engine
    owner = reach.pools[0].owner
    aborter = Aborter(parts.calls, parts.leases)
    prefill = PrefillServicer(owner, parts.calls, reach.media, Prefiller(engine, parts.leases), parts.leases)
    decode = DecodeServicer(parts.identity, parts.calls, reach.media, Decoder(engine, reach.kv, reach.fetcher))
    handoff = HandoffServicer(parts.identity, reach.pools, parts.leases)
    worker = WorkerServicer(parts.identity.epoch, parts.engines, aborter, parts.drainer)
    return [
        Service(_PREFILL, prefill_pb2_grpc.add_PrefillServiceServicer_to_server, prefill),
        Service(_DECODE, decode_pb2_grpc.add_DecodeServiceServicer_to_server, decode),
        Service(_HANDOFF, handoff_pb2_grpc.add_HandoffServiceServicer_to_server, handoff),
        Service(_WORKER, worker_pb2_grpc.add_WorkerServiceServicer_to_server, worker),
    ]
