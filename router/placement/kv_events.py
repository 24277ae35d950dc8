"""Subscribes to the workers' KV events, and subscribes again where a message is missing."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton.calls import stream
from baton.engine.v1 import worker_pb2
from baton.errors import BatonError, InvalidReply, Unsupported
from baton.inference.v1.cluster_service_pb2 import WorkerLoad
from discovery.backoff import Backoff
from router.routing.prefix.kv_index import block_keys
from router.routing.prefix.prefix_caches import Cache, PrefixCaches
from router.telemetry import metrics
from router.workers.cluster import Cluster
from router.workers.handle import WorkerHandle
from router.workers.watching.report_stream import ReportStream
from runtime.aio import TaskGroup, timeout
from runtime.lasting import lasting

# Longer than a worker's heartbeat, which comes every two seconds.
_SILENCE_SECONDS = 10.0
# From this size on, about two hundred blocks, a message is large.
_LARGE_BYTES = 4096
# Workers send at most 1024 hashes of 16 bytes in a message; so many take the event loop 2 ms.
_MOST_HASHES = 4096
_MOST_BYTES = 512 * 1024  # a larger one is not parsed
# What one worker may send: about an eighth of the event loop's time. Beyond that it waits, and merges its changes.
_BYTES_PER_SECOND = 4 * 2**20
_BURST_SECONDS = 1.0
_HASH_BYTES = range(8, 65)
_MOST_TIERS = 8
_ON_DEVICE = (worker_pb2.KV_TIER_UNSPECIFIED, worker_pb2.KV_TIER_DEVICE)
# A worker's caches may hold more blocks than its engine's pools: those of the tiers whose sizes it tells, and of slower
# memory that it does not tell of, but not so many times as many.
_MOST_POOLS = 64
# Of a worker that does not say how many blocks it has.
_MOST_UNTOLD_BLOCKS = 2**20
# Of any worker, of all its ranks: about 700 MB of this process, if all of them are on a disk.
_MOST_BLOCKS = 2**22
# Between two subscriptions to a worker that has sent what it may not.
_FIRST_PENALTY_SECONDS, _LONGEST_PENALTY_SECONDS = 1.0, 60.0
# A subscription that lasted so long was a good one.
_LASTING_SECONDS = 60.0
_METHOD = "/baton.engine.v1.WorkerService/SubscribeKvEvents"


@dataclass(frozen=True, slots=True)
class KvMessage:
    """A message and its bytes; without `events` if they are too many to be parsed."""

    size: int
    events: worker_pb2.SubscribeKvEventsResponse | None

    @classmethod
    def read(cls, wire: bytes) -> "KvMessage":
        """Parses a message within the limit."""
        fits = len(wire) <= _MOST_BYTES
        return cls(len(wire), worker_pb2.SubscribeKvEventsResponse.FromString(wire) if fits else None)


class KvEventsStub:
    """The subscription to a worker's KV events, as a stub."""

    def __init__(self, channel: Any) -> None:
        serialize = worker_pb2.SubscribeKvEventsRequest.SerializeToString
        self.subscribe = channel.unary_stream(_METHOD, serialize, KvMessage.read)


class EventPace:
    """The pace of one worker's messages."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def seconds_after(self, size: int, now: float) -> float:
        """The seconds to wait after a message of so many bytes."""
        cost = (size + _LARGE_BYTES) / _BYTES_PER_SECOND
        self._free_at = max(self._free_at, now - _BURST_SECONDS) + cost
        return max(0.0, self._free_at - now)


class KvFeed:
    """One subscription to a worker with so many ranks: applies its messages in order, each once.

    `load` is the worker's last report of its load, which tells how many blocks it has, of all ranks.
    """

    def __init__(
        self,
        process: str,
        epoch: int,
        caches: PrefixCaches,
        ranks: int = 1,
        load: Callable[[], WorkerLoad] = WorkerLoad,
    ) -> None:
        self._process = process
        self._epoch = epoch
        self._caches = caches
        self._ranks = max(1, ranks)
        self._load = load
        self._most_blocks = 0  # of the reports so far: a tier that fails is reported before its blocks are
        # By rank. Until its snapshot has come a rank has what an earlier subscription has told.
        self._blocks = [caches.num_blocks(Cache(process, rank)) for rank in range(self._ranks)]
        self._total = sum(self._blocks)
        self._next = 0

    def apply(self, message: worker_pb2.SubscribeKvEventsResponse) -> bool:
        """Applies a message; ignores a repeated one. Returns false for one of another process.

        Raises InvalidReply if one is missing, and for one that the worker may not send, of which nothing is applied.
        """
        if message.epoch != self._epoch:
            return False
        if message.sequence > self._next:
            raise InvalidReply(f"KV events: message {self._next} is missing")
        if message.sequence == self._next:
            self._next += 1
            self._apply(message)
        return True

    def _apply(self, message: worker_pb2.SubscribeKvEventsResponse) -> None:
        if message.data_parallel_rank >= self._ranks:
            raise InvalidReply(f"KV events of rank {message.data_parallel_rank}: the worker has {self._ranks}")
        cache = Cache(self._process, message.data_parallel_rank)
        match message.WhichOneof("event"):
            case "snapshot":
                self._caches.replace(cache, _keys(message.snapshot.block_hashes))
            case "stored":
                self._store(cache, message.stored)
            case "removed":
                self._caches.remove(cache, _keys(message.removed.block_hashes))
            case "changed":
                changed = message.changed
                if len(changed.moved) > _MOST_TIERS:
                    raise InvalidReply(f"KV events of {len(changed.moved)} tiers; at most {_MOST_TIERS} are allowed")
                _check_hashes(changed.removed, changed.stored, *(each.block_hashes for each in changed.moved))
                removed, stored = _keys(changed.removed), _keys(changed.stored)
                moved = [_keys(each.block_hashes) for each in changed.moved]
                self._caches.remove(cache, removed)
                self._caches.store(cache, stored)
                for keys, each in zip(moved, changed.moved, strict=True):
                    self._move(cache, keys, each.tier)
        self._check_number(cache)

    def _check_number(self, changed: Cache) -> None:
        """Raises InvalidReply if all caches have more blocks than the worker has room for, as far as it has told."""
        blocks = self._caches.num_blocks(changed)
        self._total += blocks - self._blocks[changed.rank]
        self._blocks[changed.rank] = blocks
        if self._total <= self._most_blocks:
            return
        self._most_blocks = max(self._most_blocks, _most_blocks(self._load()))
        if self._total > self._most_blocks:
            total = self._load().blocks_total
            raise InvalidReply(f"KV events of more than {self._most_blocks} blocks: the worker's pool has {total}")

    def _store(self, cache: Cache, stored: worker_pb2.KvBlocksStored) -> None:
        keys = _keys(stored.block_hashes)
        if stored.tier in _ON_DEVICE:
            self._caches.store(cache, keys)
        else:
            self._move(cache, keys, stored.tier)

    def _move(self, cache: Cache, keys: Sequence[int], tier: worker_pb2.KvTier.ValueType) -> None:
        # A tier that this router does not know is taken for the slowest.
        self._caches.move(cache, keys, on_disk=tier != worker_pb2.KV_TIER_HOST)


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
                    following = lasting("kv_events", partial(self._follow, present[process]))
                    self._following[process] = group.create_task(following)
                await self._cluster.change()

    async def _follow(self, worker: WorkerHandle) -> None:
        backoff, penalty = Backoff(), Backoff(_FIRST_PENALTY_SECONDS, _LONGEST_PENALTY_SECONDS)
        now = asyncio.get_running_loop().time
        with ReportStream("kv_events", worker.record.worker_id) as reports:
            while True:
                waits, began = backoff, now()
                try:
                    await self._subscribe(worker, reports)
                except Unsupported:
                    # Its cache is estimated.
                    return
                except InvalidReply as error:
                    # What it said before is not believed, either: until its next snapshot its cache is estimated.
                    self._caches.drop(worker.record.process)
                    metrics.WORKER_FAULTS.labels("kv_events").inc()
                    reports.lost(error.message)
                    waits = penalty
                except BatonError as error:
                    reports.lost(error.message)
                except TimeoutError:
                    reports.lost(f"nothing came for {_SILENCE_SECONDS:.0f} s")
                metrics.KV_RESUBSCRIPTIONS.inc()
                if now() - began > _LASTING_SECONDS:
                    backoff.reset()
                    penalty.reset()
                await asyncio.sleep(waits.next_seconds())

    async def _subscribe(self, worker: WorkerHandle, reports: ReportStream) -> None:
        """Follows one subscription until it ends. Raises InvalidReply, and TimeoutError if nothing comes for long."""
        record, now, pace = worker.record, asyncio.get_running_loop().time, EventPace()
        ranks = record.data_parallel_ranks
        feed = KvFeed(record.process, record.epoch, self._caches, ranks, lambda: worker.load)
        call = worker.stub(KvEventsStub).subscribe(worker_pb2.SubscribeKvEventsRequest())
        async with timeout(_SILENCE_SECONDS) as patience, aclosing(stream(call)) as messages:
            async for message in messages:
                if not await self._apply(feed, message):
                    reports.lost("they are of another process")
                    return
                reports.arrived()
                if (seconds := pace.seconds_after(message.size, now())) > 0:
                    await asyncio.sleep(seconds)
                patience.reschedule(now() + _SILENCE_SECONDS)
        reports.lost("the worker ended it")

    async def _apply(self, feed: KvFeed, message: KvMessage) -> bool:
        """Applies events as KvFeed does; of large ones, such as pieces of snapshots, one in each turn of the loop."""
        if message.events is None:
            raise InvalidReply(f"KV events: a message has {message.size} bytes; at most {_MOST_BYTES} are allowed")
        if message.size < _LARGE_BYTES:
            return feed.apply(message.events)
        async with self._one_large:
            is_next = feed.apply(message.events)
            await asyncio.sleep(0)
        return is_next


def _most_blocks(load: WorkerLoad) -> int:
    """The most blocks of all caches of a worker that reports this load."""
    if not load.blocks_total:
        return _MOST_UNTOLD_BLOCKS
    in_tiers = load.memory.host_blocks_total + load.memory.disk_blocks_total
    return min(_MOST_BLOCKS, _MOST_POOLS * load.blocks_total + in_tiers)


def _check_hashes(*hashes: Sequence[bytes]) -> None:
    """Raises InvalidReply if a message has too many."""
    count = sum(map(len, hashes))
    if count > _MOST_HASHES:
        raise InvalidReply(f"KV events: a message has {count} blocks; at most {_MOST_HASHES} are allowed")


def _keys(hashes: Sequence[bytes]) -> list[int]:
    """The keys of a message's hashes. Raises InvalidReply."""
    _check_hashes(hashes)
    for each in hashes:
        if len(each) not in _HASH_BYTES:
            raise InvalidReply(f"KV events with a block hash of {len(each)} bytes")
    return block_keys(hashes)
