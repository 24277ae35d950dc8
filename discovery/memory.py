"""A registry in memory, for tests and for systems in one process."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from baton.errors import Unavailable
from discovery.membership import Latest
from discovery.record import WorkerRecord, epoch_after
from discovery.registry import WorkerKeys


class MemoryRegistry:
    """A Registry of the workers that are registered on this object."""

    def __init__(self, namespace: str) -> None:
        self._keys = WorkerKeys(namespace)
        self._registrations: list[MemoryRegistration] = []
        self._ids: dict[bytes, set[int]] = {}
        self._watchers: list[Latest[tuple[WorkerRecord, ...]]] = []
        self._routers: MemoryRegistry | None = None

    @property
    def routers(self) -> "MemoryRegistry":
        """The registry of routers (`Registry.routers`)."""
        self._routers = self._routers or MemoryRegistry(self._keys.namespace)
        return self._routers

    @asynccontextmanager
    async def register(self, record: WorkerRecord) -> "AsyncIterator[MemoryRegistration]":
        self._keys.of(record.worker_id)
        registration = MemoryRegistration(self, record)
        self._registrations.append(registration)
        self.publish()
        try:
            yield registration
        finally:
            self._registrations.remove(registration)
            self.publish()

    async def next_epoch(self, worker_id: str) -> int:
        self._keys.of(worker_id)
        return epoch_after(max((one.epoch for one in self.workers() if one.worker_id == worker_id), default=-1))

    @asynccontextmanager
    async def allocate_id(self, kind: str, limit: int) -> "AsyncIterator[MemoryAllocatedId]":
        taken = self._ids.setdefault(self._keys.ids(kind), set())
        free = next((one for one in range(limit) if one not in taken), None)
        if free is None:
            raise Unavailable(f"all {limit} ids of kind {kind} are in use")
        taken.add(free)
        try:
            yield MemoryAllocatedId(free)
        finally:
            taken.discard(free)

    async def watch(self) -> AsyncGenerator[tuple[WorkerRecord, ...], None]:
        latest: Latest[tuple[WorkerRecord, ...]] = Latest()
        self._watchers.append(latest)
        latest.set(self.workers())
        try:
            async with aclosing(latest.values()) as views:
                async for workers in views:
                    yield workers
        finally:
            self._watchers.remove(latest)

    def workers(self) -> tuple[WorkerRecord, ...]:
        """The registered workers, in the order of their ids; of several with one id the one of the highest epoch."""
        records = sorted((registration.record for registration in self._registrations), key=lambda one: one.epoch)
        by_id = {record.worker_id: record for record in records}
        return tuple(by_id[worker_id] for worker_id in sorted(by_id))

    def publish(self) -> None:
        """Sends the registered workers to every watcher."""
        workers = self.workers()
        for latest in self._watchers:
            latest.set(workers)


@dataclass(frozen=True, slots=True)
class MemoryAllocatedId:
    """An AllocatedId that never changes."""

    value: int


class MemoryRegistration:
    """A Registration in a MemoryRegistry."""

    def __init__(self, registry: MemoryRegistry, record: WorkerRecord) -> None:
        self.record = record
        self._registry = registry

    @property
    def registered(self) -> bool:
        return self.record in self._registry.workers()

    async def update(self, record: WorkerRecord) -> None:
        if record.worker_id != self.record.worker_id:
            raise ValueError(f"{record.worker_id} is not {self.record.worker_id}")
        self.record = record
        self._registry.publish()
