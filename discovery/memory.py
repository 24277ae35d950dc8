"""A registry within one process, for tests and for systems that run in one."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from discovery.keys import WorkerKeys
from discovery.latest import Latest
from discovery.record import WorkerRecord
from rpc.errors import Unavailable


class MemoryRegistry:
    """A Registry whose workers are those registered on this very object. Nothing is ever lost, so nothing heals."""

    def __init__(self, namespace: str) -> None:
        self._keys = WorkerKeys(namespace)
        self._registrations: list[MemoryRegistration] = []
        self._numbers: dict[bytes, set[int]] = {}
        self._watchers: list[Latest[tuple[WorkerRecord, ...]]] = []

    @asynccontextmanager
    async def register(self, record: WorkerRecord) -> "AsyncIterator[MemoryRegistration]":
        """See `Registry.register`."""
        self._keys.of(record.worker_id)
        registration = MemoryRegistration(self, record)
        self._registrations.append(registration)
        self.publish()
        try:
            yield registration
        finally:
            self._registrations.remove(registration)
            self.publish()

    @asynccontextmanager
    async def number(self, kind: str, limit: int) -> "AsyncIterator[MemoryNumber]":
        """See `Registry.number`."""
        taken = self._numbers.setdefault(self._keys.numbers(kind), set())
        free = next((number for number in range(limit) if number not in taken), None)
        if free is None:
            raise Unavailable(f"all {limit} numbers of {kind} are taken")
        taken.add(free)
        try:
            yield MemoryNumber(free)
        finally:
            taken.discard(free)

    async def watch(self) -> AsyncGenerator[tuple[WorkerRecord, ...], None]:
        """See `Registry.watch`."""
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
        """Who is registered, by worker id; of several under one id the highest epoch."""
        records = sorted((registration.record for registration in self._registrations), key=lambda one: one.epoch)
        by_id = {record.worker_id: record for record in records}
        return tuple(by_id[worker_id] for worker_id in sorted(by_id))

    def publish(self) -> None:
        """Tells every watcher who is registered now."""
        workers = self.workers()
        for latest in self._watchers:
            latest.set(workers)


@dataclass(frozen=True, slots=True)
class MemoryNumber:
    """A Number that never changes."""

    value: int


class MemoryRegistration:
    """A Registration in a MemoryRegistry."""

    def __init__(self, registry: MemoryRegistry, record: WorkerRecord) -> None:
        self.record = record
        self._registry = registry

    @property
    def registered(self) -> bool:
        """See `Registration.registered`."""
        return self.record in self._registry.workers()

    async def update(self, record: WorkerRecord) -> None:
        """See `Registration.update`."""
        if record.worker_id != self.record.worker_id:
            raise ValueError(f"{record.worker_id} is not {self.record.worker_id}")
        self.record = record
        self._registry.publish()
