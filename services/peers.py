"""The workers whose blocks are read here: a channel to each, and its pools, opened once an epoch."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType

import structlog
from baton.engine.v1 import handoff_pb2, handoff_pb2_grpc
from typing_extensions import Self

from rpc.aio import TaskGroup
from rpc.calls import unary
from rpc.channels import Dial
from rpc.errors import HandoffLost, LayoutMismatch, StaleEpoch
from services.handoffs import LeasedBlocks
from services.kv import KvLayout
from services.transports.transport import PoolReader, Transport, TransportUnavailable

log = structlog.get_logger(__name__)

_SWEEP_SECONDS = 5.0
_IDLE_SECONDS = 300.0
_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Pool:
    """Another worker's pool, and the transport that reads it."""

    num_blocks: int
    block_bytes: int
    transport: str
    reader: PoolReader


class Peer:
    """One life of another worker's process."""

    def __init__(self, address: str, dial: Dial) -> None:
        self.users = 0
        self.used_at = time.monotonic()
        self._channel = dial(address)
        self.stub = handoff_pb2_grpc.HandoffServiceStub(self._channel)
        self._opening = asyncio.Lock()
        self._pools: dict[str, Pool] = {}

    async def pool(self, leased: LeasedBlocks, transports: Sequence[Transport], layout: KvLayout) -> Pool:
        """How to read the pool of this layout. Raises what GetPool answers, and HandoffLost where there is no way."""
        async with self._opening:
            if layout.digest not in self._pools:
                request = handoff_pb2.GetPoolRequest(epoch=leased.epoch, layout_digest=layout.digest)
                offer = await unary(self.stub.GetPool(request, timeout=_TIMEOUT_SECONDS))
                _check(offer, leased, layout)
                self._pools[layout.digest] = await _open(offer, transports, layout.block_bytes)
            return self._pools[layout.digest]

    async def close(self) -> None:
        """Lets go of the pools and the channel."""
        for pool in self._pools.values():
            pool.reader.close()
        await self._channel.close(None)


class Peers:
    """The peers of late, by address and epoch. An async context manager, which closes them.

    Whoever was not needed for a while is closed: a mapped pool is memory, also after its owner is gone.
    """

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._peers: dict[tuple[str, int], Peer] = {}
        self._forgotten: list[Peer] = []

    async def __aenter__(self) -> Self:
        self._group = await TaskGroup().__aenter__()
        self._sweeping = self._group.create_task(self._sweep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sweeping.cancel()
        await self._group.__aexit__(None, None, None)
        for peer in [*self._forgotten, *self._peers.values()]:
            await peer.close()

    @asynccontextmanager
    async def use(self, leased: LeasedBlocks) -> AsyncIterator[Peer]:
        """The peer that a lease is from; it is not closed while it is used."""
        key = (leased.address, leased.epoch)
        peer = self._peers.get(key)
        if peer is None:
            peer = self._peers[key] = Peer(leased.address, self._dial)
        peer.users += 1
        try:
            yield peer
        finally:
            peer.users -= 1
            peer.used_at = time.monotonic()

    def forget(self, leased: LeasedBlocks) -> None:
        """Begins anew next time: the peer is gone, or cannot be read any more as it was."""
        peer = self._peers.pop((leased.address, leased.epoch), None)
        if peer is not None:
            self._forgotten.append(peer)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            before = time.monotonic() - _IDLE_SECONDS
            idle = [key for key, peer in self._peers.items() if not peer.users and peer.used_at < before]
            self._forgotten += [self._peers.pop(key) for key in idle]
            closing = [peer for peer in self._forgotten if not peer.users]
            self._forgotten = [peer for peer in self._forgotten if peer.users]
            for peer in closing:
                await peer.close()


def _check(offer: handoff_pb2.GetPoolResponse, leased: LeasedBlocks, layout: KvLayout) -> None:
    """Refuses a pool that is not the one meant. It was not the caller who got this wrong."""
    if offer.epoch != leased.epoch:
        raise StaleEpoch(f"{leased.address} is in epoch {offer.epoch}; the lease is of {leased.epoch}")
    if offer.layout.digest != layout.digest:
        raise LayoutMismatch(
            f"the pool at {leased.address} has layout {offer.layout.digest}; here it is {layout.digest}"
        )
    if not offer.num_blocks or offer.layout.block_bytes != layout.block_bytes:
        raise HandoffLost(f"the pool at {leased.address} has {offer.num_blocks} x {offer.layout.block_bytes} bytes")


async def _open(offer: handoff_pb2.GetPoolResponse, transports: Sequence[Transport], block_bytes: int) -> Pool:
    """By the first of the owner's endpoints that works here."""
    known = {transport.name: transport for transport in transports}
    refusals = []
    for endpoint in offer.endpoints:
        name = endpoint.WhichOneof("endpoint") or ""
        if name not in known:
            refusals.append(f"{name}: not supported here")
            continue
        try:
            reader = await known[name].open(endpoint, offer.num_blocks, block_bytes)
        except TransportUnavailable as error:
            refusals.append(f"{name}: {error}")
            continue
        log.info("opened a pool", owner=offer.worker_id, transport=name, refused=refusals)
        return Pool(offer.num_blocks, block_bytes, name, reader)
    raise HandoffLost(f"no way to read the pool of {offer.worker_id}: {'; '.join(refusals)}")
