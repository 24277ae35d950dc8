"""Subscribes to the workers' KV events, and subscribes again where a message is missing."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from baton.calls import stream
from baton.engine.v1 import worker_pb2
from baton.errors import BatonError, Unsupported
from discovery.backoff import Backoff
from router.routing.prefix.kv_index import block_keys
from router.routing.prefix.prefix_caches import Cache, PrefixCaches
from router.telemetry import metrics
from router.workers.cluster import Cluster
from router.workers.handle import WorkerHandle
from router.workers.report_stream import ReportStream
from runtime.aio import TaskGroup, timeout

# Longer than a worker's heartbeat, which comes every two seconds.
_SILENCE_SECONDS = 10.0
# From this size on, about two hundred blocks, a message is large.
_LARGE_BYTES = 4096


class KvFeed:
    """One subscription: applies its messages in order, each once."""

    def __init__(self, process: str, epoch: int, caches: PrefixCaches) -> None:
        self._process = process
        self._epoch = epoch
        self._caches = caches
        self._next = 0

    def take(self, message: worker_pb2.SubscribeKvEventsResponse) -> bool:
        """Applies a message; ignores a repeated one. Returns false if one is missing or is from another process."""
        if message.epoch != self._epoch or message.sequence > self._next:
            return False
        if message.sequence == self._next:
            self._next += 1
            self._apply(message)
        return True

    def _apply(self, message: worker_pb2.SubscribeKvEventsResponse) -> None:
        cache = Cache(self._process, message.data_parallel_rank)
        match message.WhichOneof("event"):
            case "snapshot":
                self._caches.replace(cache, block_keys(message.snapshot.block_hashes))
            case "stored":
                self._caches.store(cache, block_keys(message.stored.block_hashes))
            case "removed":
                self._caches.remove(cache, block_keys(message.removed.block_hashes))
            case "changed":
                self._caches.remove(cache, block_keys(message.changed.removed))
                self._caches.store(cache, block_keys(message.changed.stored))


class KvSubscriber:
    """Keeps `caches` equal to what the workers of a cluster report. Calls `forget` for each process that has left."""

    def __init__(self, cluster: Cluster, caches: PrefixCaches, forget: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._caches = caches
        self._forget = forget
        self._following: dict[str, asyncio.Task[None]] = {}
        # A router that starts gets the snapshots of all workers at once.
        self._one_large = asyncio.Lock()

    async def follow(self) -> None:
        """Subscribes to every worker, until cancelled."""
        async with TaskGroup() as group:
            while True:
                present = {worker.record.process: worker for worker in self._cluster.workers}
                for process in self._following.keys() - present.keys():
                    self._following.pop(process).cancel()
                    self._forget(process)
                for process in present.keys() - self._following.keys():
                    self._following[process] = group.create_task(self._follow(present[process]))
                await self._cluster.change()

    async def _follow(self, worker: WorkerHandle) -> None:
        backoff = Backoff()
        with ReportStream("kv_events", worker.record.worker_id) as reports:
            while True:
                try:
                    await self._subscribe(worker, backoff, reports)
                except Unsupported:
                    # Its cache is estimated.
                    return
                except BatonError as error:
                    reports.lost(error.message)
                except TimeoutError:
                    reports.lost(f"nothing came for {_SILENCE_SECONDS:.0f} s")
                metrics.KV_RESUBSCRIPTIONS.inc()
                await asyncio.sleep(backoff.next_seconds())

    async def _subscribe(self, worker: WorkerHandle, backoff: Backoff, reports: ReportStream) -> None:
        """Follows one subscription until a message is missing, or the worker is silent for too long."""
        record = worker.record
        feed = KvFeed(record.process, record.epoch, self._caches)
        call = worker.control.SubscribeKvEvents(worker_pb2.SubscribeKvEventsRequest())
        async with timeout(_SILENCE_SECONDS) as patience, aclosing(stream(call)) as messages:
            async for message in messages:
                if not await self._take(feed, message):
                    return
                reports.arrived()
                backoff.reset()
                patience.reschedule(asyncio.get_running_loop().time() + _SILENCE_SECONDS)
        reports.lost("the worker ended it")

    async def _take(self, feed: KvFeed, message: worker_pb2.SubscribeKvEventsResponse) -> bool:
        """Applies a message. Of large ones, such as pieces of snapshots, one in each turn of the event loop."""
        if message.ByteSize() < _LARGE_BYTES:
            return feed.take(message)
        async with self._one_large:
            is_next = feed.take(message)
            await asyncio.sleep(0)
        return is_next
