"""KV transports of a world: `remote` asks the owner for each block, as tcp does; `mapped` reads memory, as shm does.

A mapped pool can be read after its owner has ended, and shows whatever its blocks hold by then: what was freed too
early, or is read too late, is another prompt's. A remote one is guarded by the owner, who has to be alive.
"""

import asyncio
from typing import Any, ClassVar

from baton.engine.v1 import handoff_pb2
from runtime.clock import monotonic
from services.transports import registry
from services.transports.base import (
    Endpoint,
    Exposure,
    PoolShape,
    Transfer,
    TransferFailed,
    Transport,
    TransportContext,
    TransportUnavailable,
)
from simulation.loop import NODE, Node

_LOOK_SECONDS = 0.05


class _Pools:
    """The pools that are offered in this world."""

    found: ClassVar[dict[str, tuple[Any, Any, Node]]] = {}
    record: Any = staticmethod(lambda *_: None)  # told of each transfer that has ended well
    record_block: Any = staticmethod(lambda _: None)  # told of the reader of each block


class _SimulatedTransport(Transport):
    supports_tls = True
    reads_early = True
    is_mapped = False

    def __init__(self, context: TransportContext) -> None:
        del context

    async def offer(self, memory: Any, exposure: Exposure) -> Endpoint:
        node = NODE.get()
        assert node is not None
        key = f"{self.name}/{node.ip}/{node.generation}/{len(_Pools.found)}"
        _Pools.found[key] = (memory, exposure.guard, node)
        endpoint = handoff_pb2.TransportEndpoint()
        endpoint.custom.transport = self.name
        endpoint.custom.description = key.encode()
        return endpoint

    async def open(self, endpoint: Endpoint, shape: PoolShape) -> "_Pool":
        node = NODE.get()
        assert node is not None
        found = _Pools.found.get(endpoint.custom.description.decode())
        if found is None or found[2].dead:
            raise TransportUnavailable("the pool is gone")
        return _Pool(found, node, is_mapped=self.is_mapped)


class RemoteTransport(_SimulatedTransport):
    """A transport like tcp: the owner answers, applies its guard, and may be cut off."""

    name = "remote"


class MappedTransport(_SimulatedTransport):
    """A transport like shm: the owner takes no part."""

    name = "mapped"
    is_mapped = True


class _Pool:
    def __init__(self, found: "tuple[Any, Any, Node]", reader: Node, *, is_mapped: bool) -> None:
        self._memory, self._guard, self._owner = found
        self._reader, self._is_mapped = reader, is_mapped

    async def pull(self, transfer: Transfer) -> None:
        network = self._reader.loop.network
        writer = transfer.memory.write(transfer.destination)
        size = transfer.memory.block_bytes
        places = [view[at : at + size] for view in writer.views for at in range(0, len(view), size)]
        for into, block in zip(places, transfer.source, strict=True):
            await asyncio.sleep(network.delay())
            if not self._is_mapped:
                await self._ask(network, transfer, block)
            if monotonic() > transfer.deadline:
                raise TransferFailed("deadline exceeded")
            into[:] = self._memory.block(block)
            _Pools.record_block(self._reader)
        writer.commit()
        _Pools.record(self._reader, transfer)

    async def _ask(self, network: Any, transfer: Transfer, block: int) -> None:
        while self._owner.paused or network.is_cut(self._reader, self._owner) or self._owner.ip in network.gone:
            await asyncio.sleep(_LOOK_SECONDS)
            if monotonic() > transfer.deadline:
                raise TransferFailed("deadline exceeded")
        if self._owner.dead:
            raise TransferFailed("the owner is gone")
        if not self._guard.may_read(transfer.handoff_id, "", [block]):
            raise TransferFailed("the owner does not hold that handoff")

    def close(self) -> None:
        """Nothing is kept."""


def install() -> None:
    """Lets workers of this process use them by name."""
    for kind in (RemoteTransport, MappedTransport):
        registry.TRANSPORTS[kind.name] = kind


def record_pulls(record: Any) -> None:
    """Tells `record` of each reader and transfer that has ended well."""
    _Pools.record = record


def record_blocks(record: Any) -> None:
    """Tells `record` of the reader of each block."""
    _Pools.record_block = record
