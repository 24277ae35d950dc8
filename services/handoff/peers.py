"""The workers that this one reads from: a channel to each, and its pools, opened once an epoch."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import structlog
from typing_extensions import Self

from baton.calls import unary
from baton.engine.v1 import handoff_pb2, handoff_pb2_grpc
from baton.errors import BatonError, HandoffLost, LayoutMismatch, StaleEpoch
from rpc.channels import Dial
from rpc.timeouts import GET_POOL_SECONDS
from runtime.aio import TaskGroup
from runtime.clock import monotonic
from runtime.lasting import lasting
from services.engines.kv import KvLayout
from services.handoff.remote_handoff import LeasedBlocks
from services.transports.base import PoolReader, PoolShape, Transport, TransportUnavailable, transport_of

log = structlog.get_logger(__name__)

_SWEEP_SECONDS = 5.0
_IDLE_SECONDS = 300.0
_MOST_ENDPOINTS = 16


@dataclass(frozen=True, slots=True)
class Pool:
    """Another worker's pool, with the transport and the reader that can read it."""

    shape: PoolShape
    transport: str
    reader: PoolReader


class OwnerConnection:
    """Another worker in one of its epochs."""

    def __init__(self, address: str, dial: Dial) -> None:
        self.users = 0
        self.used_at = monotonic()
        self.forgotten = asyncio.Event()
        self._channel = dial(address)
        self.stub = handoff_pb2_grpc.HandoffServiceStub(self._channel)
        self._opening = asyncio.Lock()
        self._pools: dict[str, Pool] = {}

    async def pool(self, leased: LeasedBlocks, transports: Sequence[Transport], layout: KvLayout) -> Pool:
        """Returns a reader of the pool with this layout; `leased` may be without a lease.

        Raises StaleEpoch, LayoutMismatch, and HandoffLost for other failures.
        """
        async with self._opening:
            if layout.digest not in self._pools:
                request = handoff_pb2.GetPoolRequest(
                    epoch=leased.epoch, layout_digest=layout.digest, handoff_id=leased.handoff_id
                )
                offer = await self._offer(request, leased)
                _check(offer, leased, layout)
                self._pools[layout.digest] = await _open(
                    offer, transports, PoolShape(offer.num_blocks, layout.block_bytes)
                )
            return self._pools[layout.digest]

    async def _offer(self, request: handoff_pb2.GetPoolRequest, leased: LeasedBlocks) -> handoff_pb2.GetPoolResponse:
        try:
            return await unary(self.stub.GetPool(request, timeout=GET_POOL_SECONDS))
        except (StaleEpoch, LayoutMismatch, HandoffLost):
            raise
        except BatonError as error:
            text = f"worker {leased.worker_id} does not say how to read its pool: {error.message}"
            raise HandoffLost(text) from error

    async def close(self) -> None:
        """Closes the pools and the channel."""
        for pool in self._pools.values():
            pool.reader.close()
        await self._channel.close(None)


class Peers:
    """The peers by address and epoch. An async context manager, which closes them.

    A peer that is unused for a while is closed: a mapped pool takes memory, even after its owner has ended.
    """

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._peers: dict[tuple[str, int], OwnerConnection] = {}
        self._forgotten: list[OwnerConnection] = []
        self._resources = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._group = await self._resources.enter_async_context(TaskGroup())
        self._sweeping = self._group.create_task(lasting("peers", self._sweep))
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._sweeping.cancel()
        await self._resources.aclose()
        for peer in [*self._forgotten, *self._peers.values()]:
            await peer.close()

    @asynccontextmanager
    async def use(self, leased: LeasedBlocks) -> AsyncIterator[OwnerConnection]:
        """Yields the peer that granted a lease; it stays open while it is used."""
        key = (leased.address, leased.epoch)
        peer = self._peers.get(key)
        if peer is None:
            peer = self._peers[key] = OwnerConnection(leased.address, self._dial)
        peer.users += 1
        try:
            yield peer
        finally:
            peer.users -= 1
            peer.used_at = monotonic()

    def forget(self, leased: LeasedBlocks) -> None:
        """Forgets a peer, so that the next use opens it again: its process may have ended."""
        peer = self._peers.pop((leased.address, leased.epoch), None)
        if peer is not None:
            peer.forgotten.set()
            self._forgotten.append(peer)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            before = monotonic() - _IDLE_SECONDS
            idle = [key for key, peer in self._peers.items() if not peer.users and peer.used_at < before]
            self._forgotten += [self._peers.pop(key) for key in idle]
            closing = [peer for peer in self._forgotten if not peer.users]
            self._forgotten = [peer for peer in self._forgotten if peer.users]
            for peer in closing:
                await peer.close()


def _check(offer: handoff_pb2.GetPoolResponse, leased: LeasedBlocks, layout: KvLayout) -> None:
    """Raises if the pool is not the one that the lease names. That is not the client's fault."""
    if offer.epoch != leased.epoch:
        raise StaleEpoch(f"{leased.address} is in epoch {offer.epoch}; the lease is of {leased.epoch}")
    if offer.layout.digest != layout.digest:
        raise LayoutMismatch(
            f"the pool at {leased.address} has layout {offer.layout.digest}; here it is {layout.digest}"
        )
    if not offer.num_blocks or offer.layout.block_bytes != layout.block_bytes:
        raise HandoffLost(f"the pool at {leased.address} has {offer.num_blocks} x {offer.layout.block_bytes} bytes")


async def _open(offer: handoff_pb2.GetPoolResponse, transports: Sequence[Transport], shape: PoolShape) -> Pool:
    """Opens the first of the owner's endpoints that works here."""
    known = {transport.name: transport for transport in transports}
    refusals = []
    for endpoint in offer.endpoints[:_MOST_ENDPOINTS]:
        name = transport_of(endpoint)
        if name not in known:
            refusals.append(f"{name[:80]}: not supported here")
            continue
        try:
            reader = await known[name].open(endpoint, shape)
        except TransportUnavailable as error:
            refusals.append(f"{name}: {error}")
            continue
        log.info("opened a pool", owner=offer.worker_id, transport=name, refused=refusals)
        return Pool(shape, name, reader)
    raise HandoffLost(f"the pool of {offer.worker_id[:80]} cannot be read: {'; '.join(refusals)}")
