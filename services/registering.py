"""What a worker says of itself in the registry."""

import dataclasses
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from discovery.registry import Registration, Registry, WorkerRecord


class Announcement:
    """A worker's record in the registry: absent until it is ready, then there, then draining."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._record: WorkerRecord | None = None
        self._registration: Registration | None = None
        self._open = AsyncExitStack()

    async def announce(self, record: WorkerRecord) -> None:
        """Registers. Raises Unavailable if the registry cannot be reached."""
        context: AbstractAsyncContextManager[Registration] = self._registry.register(record)
        self._registration = await self._open.enter_async_context(context)
        self._record = record

    async def drain(self) -> None:
        """Says that no work is to be sent any more."""
        if self._registration is None or self._record is None or self._record.draining:
            return
        self._record = dataclasses.replace(self._record, draining=True)
        await self._registration.update(self._record)

    async def withdraw(self) -> None:
        """Removes the record."""
        self._registration = None
        await self._open.aclose()
