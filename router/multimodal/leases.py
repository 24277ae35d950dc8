"""A lease on an embedding in an encode worker's pool, as the router that asked for it holds it.

Keeps leases on embeddings: renews them, all of a worker's in one call, until they are released.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial

import structlog
from google.protobuf.duration_pb2 import Duration
from typing_extensions import Self

from baton.engine.v1 import encode_pb2
from baton.errors import BatonError, Unavailable
from engine_protocol import leases as remote
from engine_protocol.leases import SHORTEST_SECONDS
from router.workers.handle import WorkerHandle
from rpc.channels import best_effort
from runtime.aio import TaskGroup
from runtime.lasting import lasting

log = structlog.get_logger(__name__)


class EmbeddingLease:
    """A lease on an embedding of `worker`."""

    def __init__(self, message: encode_pb2.EmbeddingLease, worker: WorkerHandle) -> None:
        self.worker = worker
        self.remote = remote.RemoteLease(message.handoff_id, message.epoch, message.lease.ToNanoseconds() / 1e9)
        self._message = message

    @property
    def remaining_seconds(self) -> float:
        """The seconds that the lease is certain to hold."""
        return self.remote.remaining_seconds

    @property
    def holds(self) -> bool:
        """True if the embedding can still be read, as far as this router knows."""
        return self.remaining_seconds > 0 and not self.worker.problem and not self.worker.leaving.is_set()

    def message(self) -> encode_pb2.EmbeddingLease:
        """The lease for another to read, with what remains of it now."""
        message = encode_pb2.EmbeddingLease()
        message.CopyFrom(self._message)
        remaining = Duration()
        remaining.FromNanoseconds(int(self.remaining_seconds * 1e9))
        message.lease.CopyFrom(remaining)
        return message

    def end(self) -> None:
        """Notes that it is over."""
        self.remote.end()

    async def release(self) -> None:
        """Gives the blocks back if their owner answers within two seconds; otherwise they expire."""
        if not self.remaining_seconds:
            return
        request = self.remote.release_request("router")
        self.end()
        owner = self.worker
        answer = await best_effort(
            lambda seconds: owner.handoff.Release(request, timeout=seconds), healthy=not owner.problem
        )
        if answer is None:
            log.info("left an embedding to expire", worker_id=owner.record.worker_id)


async def renew(leases: Sequence[EmbeddingLease]) -> None:
    """Renews leases of one worker, in one call. One that its owner denies is over; if nothing answers, all stay."""
    if not leases:
        return
    seconds = max(remote.SHORTEST_SECONDS, min(lease.remaining_seconds for lease in leases))
    try:
        await remote.renew(leases[0].worker.handoff, [lease.remote for lease in leases], seconds)
    except BatonError:
        # An owner that is only away may be back while they last.
        return


class LeaseRenewer:
    """An async context manager; leaving it releases all that is kept.

    A worker's channel stays open for as long as one of its leases is kept, also after the worker has left.
    """

    def __init__(self) -> None:
        # In the order in which they were kept, which is that of their renewals.
        self._kept: dict[WorkerHandle, dict[EmbeddingLease, None]] = {}
        self._keeping: dict[WorkerHandle, asyncio.Task[None]] = {}
        self._releasing: set[asyncio.Task[None]] = set()
        self._resources = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._group = await self._resources.enter_async_context(TaskGroup())
        return self

    async def __aexit__(self, *exception: object) -> None:
        for leases in tuple(self._kept.values()):
            for lease in tuple(leases):
                self.release(lease)
        await self.wait_for_releases()
        for task in tuple(self._keeping.values()):
            task.cancel()
        await self._resources.aclose()

    def keep(self, lease: EmbeddingLease) -> None:
        """Renews it every third of its length from now on, for as long as its owner lets it."""
        self._kept.setdefault(lease.worker, {})[lease] = None
        if lease.worker not in self._keeping:
            self._keeping[lease.worker] = self._group.create_task(
                lasting("embedding_leases", partial(self._keep, lease.worker))
            )

    def release(self, lease: EmbeddingLease) -> None:
        """Begins to give it back, if it is kept."""
        if lease in self._kept.get(lease.worker, ()):
            del self._kept[lease.worker][lease]
            task = self._group.create_task(lease.release())
            self._releasing.add(task)
            task.add_done_callback(self._releasing.discard)

    async def wait_for_releases(self) -> None:
        """Waits for the releases that have begun, each at most two seconds."""
        await asyncio.gather(*self._releasing)

    async def _keep(self, worker: WorkerHandle) -> None:
        with ExitStack() as opened:
            try:
                opened.enter_context(worker.keep_open())
            except Unavailable:
                self._kept[worker].clear()  # it has left, and takes no calls: they expire
            while leases := [lease for lease in self._kept[worker] if lease.remaining_seconds]:
                shortest = min(lease.remaining_seconds for lease in leases)
                await asyncio.sleep(max(SHORTEST_SECONDS, shortest / 3))
                await renew([lease for lease in leases if lease in self._kept[worker] and lease.remaining_seconds])
                self._kept[worker] = dict.fromkeys(lease for lease in self._kept[worker] if lease.remaining_seconds)
            del self._kept[worker], self._keeping[worker]
            await self.wait_for_releases()
