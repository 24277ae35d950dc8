"""The services of a worker. Every worker has them all; one whose role it lacks answers with RoleMismatch."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from baton.engine.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    handoff_pb2,
    handoff_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

from rpc.serve import Service
from services.aborting import Aborter
from services.calls import Calls
from services.config import WorkerConfig
from services.decode import DecodeServicer
from services.decoding import Decoder
from services.draining import Drainer
from services.engine import Engine
from services.handoff import HandoffServicer
from services.identity import Identity
from services.leases import LeaseTable
from services.owner import OfferedPool, Owner
from services.peers import Peers
from services.prefill import PrefillServicer
from services.prefilling import Prefiller
from services.pull import Puller
from services.transports.factory import offer_pool, open_transports
from services.worker import WorkerServicer

_PREFILL = prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name
_DECODE = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name
_HANDOFF = handoff_pb2.DESCRIPTOR.services_by_name["HandoffService"].full_name
_WORKER = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name

ROLE_SERVICES = (_PREFILL, _DECODE)


@dataclass(frozen=True, slots=True)
class Parts:
    """What the services of one worker share."""

    identity: Identity
    engine: Engine
    leases: LeaseTable
    calls: Calls
    drainer: Drainer


@asynccontextmanager
async def open_services(config: WorkerConfig, parts: Parts) -> AsyncIterator[list[Service]]:
    """The services, with what they need to read other pools and to have their own read."""
    listen_host = config.listen.rpartition(":")[0].strip("[]")
    async with AsyncExitStack() as stack:
        endpoints = await stack.enter_async_context(
            offer_pool(parts.engine.memory, config.transports, listen_host, config.advertised_host)
        )
        transports = stack.enter_context(open_transports(config.transports))
        peers = await stack.enter_async_context(Peers())
        puller = await stack.enter_async_context(Puller(parts.engine, peers, transports))
        owner = Owner(parts.identity, parts.engine.facts.layout)
        pool = OfferedPool(owner, parts.engine.memory.num_blocks, endpoints)
        yield _services(parts, pool, puller)


def _services(parts: Parts, pool: OfferedPool, puller: Puller) -> list[Service]:
    prefiller = Prefiller(parts.engine, parts.leases)
    decoder = Decoder(parts.engine, puller)
    aborter = Aborter(parts.calls, parts.leases, pool.owner.layout.block_tokens)
    prefill = PrefillServicer(pool.owner, parts.calls, prefiller, parts.leases)
    decode = DecodeServicer(parts.identity, parts.calls, decoder)
    handoff = HandoffServicer(pool, parts.leases)
    worker = WorkerServicer(parts.engine, aborter, parts.drainer)
    return [
        Service(_PREFILL, prefill_pb2_grpc.add_PrefillServiceServicer_to_server, prefill),
        Service(_DECODE, decode_pb2_grpc.add_DecodeServiceServicer_to_server, decode),
        Service(_HANDOFF, handoff_pb2_grpc.add_HandoffServiceServicer_to_server, handoff),
        Service(_WORKER, worker_pb2_grpc.add_WorkerServiceServicer_to_server, worker),
    ]
