"""The registry of a world: late views, outages, and leases that a node loses when it is paused or cut off."""

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from baton.errors import Unavailable
from discovery.memory import MemoryRegistry
from discovery.record import WorkerRecord
from simulation.loop import Node

TTL_SECONDS = 3.0
_RENEWALS = 3
NAME = "registry"
Views = tuple[WorkerRecord, ...]


class _Memory(MemoryRegistry):
    """Tells of each change, and not only of the last one."""

    def __init__(self, namespace: str) -> None:
        super().__init__(namespace)
        self.listeners: dict[Callable[[Views], None], None] = {}

    @property
    def routers(self) -> "_Memory":
        self._routers = self._routers or _Memory(self._keys.namespace)
        assert isinstance(self._routers, _Memory)
        return self._routers

    def publish(self) -> None:
        workers = self.workers()
        for listener in self.listeners:
            listener(workers)


class SimulatedRegistry:
    """The server: who may reach it, and records that expire unless they are renewed.

    Watchers get views late: either the last one, or all that they have missed at once, in their order.
    """

    def __init__(self, network: Any, seed: int) -> None:
        self.network = network
        self.random = random.Random(f"registry-{seed}")
        self.memory = _Memory("simulation")
        self.is_away = False
        self.late_seconds = self.random.choice((1e-3, 5e-3, 0.1, 1.0))
        self.tells_all = self.random.random() < 0.7
        self._node = Node(network.loop, NAME, "10.0.1.1", 0)

    @asynccontextmanager
    async def of(self, node: Node) -> "AsyncGenerator[NodeRegistry, None]":
        """The registry as one node sees it."""
        yield NodeRegistry(self, self.memory, node)

    def reachable(self, node: Node) -> bool:
        """True if a call of this node would be answered."""
        return not (self.is_away or self.network.is_cut(node, self._node))

    def expire(self, name: str) -> None:
        """Forgets the record of a process that has kept its lease, as a member does that has lost what it knew."""
        for memory in (self.memory, self.memory.routers):
            for one in [each for each in memory._registrations if each.record.worker_id == name]:
                one._expire()  # type: ignore[attr-defined]  # of _Registration

    async def blink(self, seconds: float) -> None:
        """Shows no worker for a while, as during a restore. Their records come back as they were."""
        entries = self.memory._registrations
        lost = [*entries]
        entries.clear()
        self.memory.publish()
        await asyncio.sleep(seconds)
        entries += [one for one in lost if one.registered and one not in entries]
        self.memory.publish()

    def registered(self) -> dict[str, int]:
        """The epochs of the workers that are registered, by their ids."""
        return {record.worker_id: record.epoch for record in self.memory.workers()}


class NodeRegistry:
    """A `discovery.registry.Registry` as one node has it."""

    def __init__(self, server: SimulatedRegistry, memory: _Memory, node: Node) -> None:
        self._server, self._memory, self._node = server, memory, node

    @property
    def routers(self) -> "NodeRegistry":
        return NodeRegistry(self._server, self._memory.routers, self._node)

    async def next_epoch(self, worker_id: str) -> int:
        await self._call()
        return await self._memory.next_epoch(worker_id)

    @asynccontextmanager
    async def allocate_id(self, kind: str, limit: int) -> AsyncIterator[Any]:
        await self._call()
        async with self._memory.allocate_id(kind, limit) as allocated:
            yield allocated

    @asynccontextmanager
    async def register(self, record: WorkerRecord) -> AsyncIterator["_Registration"]:
        registration = _Registration(self._server, self._memory, self._node, record)
        await self._call()
        registration.write()
        renewing = asyncio.ensure_future(registration.renew())
        try:
            yield registration
        finally:
            renewing.cancel()
            registration.remove()

    async def watch(self) -> AsyncGenerator[Views, None]:
        views, news = deque((self._memory.workers(),)), asyncio.Event()

        def note(workers: Views) -> None:
            views.append(workers)
            news.set()

        self._memory.listeners[note] = None
        try:
            while True:
                while not views:
                    news.clear()
                    await news.wait()
                await asyncio.sleep(self._server.random.expovariate(1 / self._server.late_seconds))
                while not self._server.reachable(self._node):  # noqa: ASYNC110  # a call is made again
                    await asyncio.sleep(0.2)
                missed = list(views) if self._server.tells_all else [views[-1]]
                views.clear()
                for view in missed:
                    yield view
        finally:
            del self._memory.listeners[note]

    async def _call(self) -> None:
        """The way to the server. Raises Unavailable."""
        for _ in range(20):
            await asyncio.sleep(self._server.random.expovariate(1 / 2e-3))
            if self._server.reachable(self._node):
                return
            await asyncio.sleep(0.5)
        raise Unavailable("the registry cannot be reached")


class _Registration:
    """A record under a lease. Its owner writes it again after a loss."""

    def __init__(self, server: SimulatedRegistry, memory: _Memory, node: Node, record: WorkerRecord) -> None:
        self.record = record
        self.registered = False
        self._server, self._memory, self._node = server, memory, node
        self._expiry: asyncio.TimerHandle | None = None

    async def update(self, record: WorkerRecord) -> None:
        if record.worker_id != self.record.worker_id:
            raise ValueError(f"{record.worker_id} is not {self.record.worker_id}")
        self.record = record
        await asyncio.sleep(self._server.random.expovariate(1 / 2e-3))
        if self._server.reachable(self._node):
            self.write()

    def write(self) -> None:
        """Writes the record, and renews its lease: the server's work."""
        self._renew()
        entries = self._memory._registrations
        if self not in entries:
            entries.append(self)  # type: ignore[arg-type]  # it has a record, which is all that is read
            self.registered = True
            self._memory.publish()
        else:
            self._memory.publish()

    async def renew(self) -> None:
        """Keeps the lease while the registry is reached; registers again once it was lost."""
        while True:
            await asyncio.sleep(TTL_SECONDS / _RENEWALS * self._server.random.uniform(0.8, 1.0))
            if not self._server.reachable(self._node):
                continue
            if self in self._memory._registrations:
                self._renew()
            else:
                self.write()

    def remove(self) -> None:
        """The owner leaves; the server learns of it only if it is reached."""
        if self._server.reachable(self._node):
            self._expire()

    def _renew(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        loop = self._server.network.loop
        # Of the server: it expires also if its owner is paused or dead.
        self._expiry = self._server._node.context().run(loop.call_later, TTL_SECONDS, self._expire)

    def _expire(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self.registered = False
        entries = self._memory._registrations
        if self in entries:
            entries.remove(self)  # type: ignore[arg-type]
            self._memory.publish()
