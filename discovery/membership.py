"""The registered workers, as one watcher sees them through outages of the registry.

A value for one reader, who gets the newest and may skip earlier ones.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from discovery.record import WorkerRecord


class Membership:
    """The workers by key. While removals are held, removed workers stay; new and changed ones are applied at once.

    During an outage of the registry leases may expire, or data be lost, while the workers live; they need a moment to
    register again.
    """

    def __init__(self) -> None:
        self._records: dict[bytes, WorkerRecord] = {}
        self._removed: set[bytes] = set()
        self._holds_removals = False

    @property
    def workers(self) -> tuple[WorkerRecord, ...]:
        """All workers, in the order of their keys."""
        return tuple(self._records[key] for key in sorted(self._records))

    def hold_removals(self) -> None:
        """Keeps removed workers until `apply_removals`."""
        self._holds_removals = True

    def apply_removals(self) -> None:
        """Removes the workers that were removed meanwhile and have not come back."""
        self._holds_removals = False
        for key in self._removed:
            self._records.pop(key, None)
        self._removed.clear()

    def replace(self, records: Mapping[bytes, WorkerRecord]) -> None:
        """Replaces all workers by a listing."""
        for key in self._records.keys() - records.keys():
            self.remove(key)
        for key, record in records.items():
            self.put(key, record)

    def put(self, key: bytes, record: WorkerRecord) -> None:
        """Adds or changes a worker."""
        self._removed.discard(key)
        self._records[key] = record

    def remove(self, key: bytes) -> None:
        """Removes a worker, if it is there."""
        if self._holds_removals:
            self._removed.add(key)
        else:
            self._records.pop(key, None)


T = TypeVar("T")


class Latest(Generic[T]):
    """The newest value, for one reader. Values that it was too slow to read, and repeated values, are dropped."""

    def __init__(self) -> None:
        self._values: list[T] = []
        self._changed = asyncio.Event()
        self._closed = False

    def set(self, value: T) -> None:
        """Replaces the value and wakes the reader."""
        self._values = [value]
        self._changed.set()

    def close(self) -> None:
        """Ends `values` after the newest value."""
        self._closed = True
        self._changed.set()

    async def values(self) -> AsyncGenerator[T, None]:
        """Yields the newest value, at once if there is one, then each time it differs from the last one."""
        seen: list[T] = []
        while not self._closed or self._values != seen:
            if self._values != seen:
                seen = self._values
                yield seen[0]
                continue
            await self._changed.wait()
            self._changed.clear()


async def values_of(latest: Latest[T], producer: Coroutine[Any, Any, None]) -> AsyncGenerator[T, None]:
    """Yields the values that `producer` sets, until it ends; then raises its error. Closing it cancels `producer`."""
    producing = asyncio.create_task(producer)
    producing.add_done_callback(lambda _: latest.close())
    try:
        async with aclosing(latest.values()) as values:
            async for value in values:
                yield value
        await producing
    finally:
        producing.cancel()
        await asyncio.wait({producing})
