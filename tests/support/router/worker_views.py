"""Records to register, and a reader of a registry's views that tests can wait on."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import replace

from support.eventually import PATIENCE_SECONDS
from typing_extensions import Self

from discovery.record import WorkerRecord
from discovery.registry import Registry
from runtime.aio import timeout

_RECORD = WorkerRecord(
    worker_id="w0",
    epoch=1,
    address="127.0.0.1:5000",
    roles=("prefill", "decode"),
    model="demo",
    engine="simulated",
    layout_digest="digest",
    max_context_tokens=2048,
)


def worker(worker_id: str, epoch: int = 1) -> WorkerRecord:
    """A record with that id; its other fields are fixed."""
    return replace(_RECORD, worker_id=worker_id, epoch=epoch)


class Views:
    """Reads a registry's watch and keeps every view: `async with Views(registry) as views: ...`."""

    def __init__(self, registry: Registry) -> None:
        self.all: list[tuple[WorkerRecord, ...]] = []
        self._registry = registry
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reading.cancel()
        with suppress(asyncio.CancelledError):
            await self._reading

    async def until(self, holds: Callable[[tuple[WorkerRecord, ...]], bool], seconds: float = PATIENCE_SECONDS) -> None:
        """Waits until `holds` is true of the newest view."""
        async with timeout(seconds):
            while not self.all or not holds(self.all[-1]):
                if self._reading.done():
                    self._reading.result()
                await self._changed.wait()
                self._changed.clear()

    async def until_ids(self, *worker_ids: str, seconds: float = PATIENCE_SECONDS) -> None:
        """Waits until exactly these workers are in the newest view."""
        await self.until(lambda workers: tuple(one.worker_id for one in workers) == worker_ids, seconds)

    async def _read(self) -> None:
        try:
            async with aclosing(self._registry.watch()) as views:
                async for view in views:
                    self.all.append(view)
                    self._changed.set()
        finally:
            self._changed.set()
