"""Keeps leases on embeddings: renews them, all of a worker's in one call, until they are released."""

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType

from typing_extensions import Self

from engine_protocol.leases import SHORTEST_SECONDS
from router.multimodal.leases import EmbeddingLease, renew
from router.workers.handle import WorkerHandle
from runtime.aio import TaskGroup
from runtime.lasting import lasting


class LeaseRenewer:
    """An async context manager; leaving it releases all that is kept.

    A worker's channel stays open for as long as one of its leases is kept, also after the worker has left.
    """

    def __init__(self) -> None:
        self._kept: dict[WorkerHandle, set[EmbeddingLease]] = {}
        self._keeping: dict[WorkerHandle, asyncio.Task[None]] = {}
        self._releasing: set[asyncio.Task[None]] = set()
        self._resources = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._group = await self._resources.enter_async_context(TaskGroup())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for leases in tuple(self._kept.values()):
            for lease in tuple(leases):
                self.release(lease)
        await self.wait_for_releases()
        for task in tuple(self._keeping.values()):
            task.cancel()
        await self._resources.aclose()

    def keep(self, lease: EmbeddingLease) -> None:
        """Renews it every third of its length from now on, for as long as its owner lets it."""
        self._kept.setdefault(lease.worker, set()).add(lease)
        if lease.worker not in self._keeping:
            self._keeping[lease.worker] = self._group.create_task(
                lasting("embedding_leases", partial(self._keep, lease.worker))
            )

    def release(self, lease: EmbeddingLease) -> None:
        """Begins to give it back, if it is kept."""
        if lease in self._kept.get(lease.worker, ()):
            self._kept[lease.worker].discard(lease)
            task = self._group.create_task(lease.release())
            self._releasing.add(task)
            task.add_done_callback(self._releasing.discard)

    async def wait_for_releases(self) -> None:
        """Waits for the releases that have begun, each at most two seconds."""
        await asyncio.gather(*self._releasing)

    async def _keep(self, worker: WorkerHandle) -> None:
        with worker.keep_open():
            while leases := [lease for lease in self._kept[worker] if lease.remaining_seconds]:
                shortest = min(lease.remaining_seconds for lease in leases)
                await asyncio.sleep(max(SHORTEST_SECONDS, shortest / 3))
                await renew([lease for lease in leases if lease in self._kept[worker] and lease.remaining_seconds])
                self._kept[worker] -= {lease for lease in self._kept[worker] if not lease.remaining_seconds}
            del self._kept[worker], self._keeping[worker]
            await self.wait_for_releases()
