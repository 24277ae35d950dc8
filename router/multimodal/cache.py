"""A cache of embeddings, with one Encode call for all requests that want the same one at the same time."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial

from typing_extensions import Self

from baton.engine.v1 import encode_pb2
from baton.errors import DeadlineExceeded
from baton.inference.v1 import generate_pb2
from router.config import EmbeddingsConfig
from router.multimodal.leases import EmbeddingLease, LeaseRenewer
from router.placement.encoders import EncoderVersion
from router.telemetry import metrics
from router.workers.cancellation import Cancellation, abort
from router.workers.handle import WorkerHandle
from runtime.aio import forget_cancellation
from runtime.clock import monotonic
from runtime.lasting import lasting

_SWEEP_SECONDS = 0.5
# An entry takes this beside its embedding, of which a small one is the lesser part: a router grows by 2.2 KB.
ENTRY_BYTES = 2560


@dataclass(frozen=True, slots=True)
class EmbeddingKey:
    """The key of an embedding: the SHA-256 of the media's content, and the encoder version. Never an address.

    Requests with different cache salts share nothing, since a hit would reveal that someone else has sent the same.
    """

    content: bytes
    encoder: EncoderVersion
    cache_salt: str


@dataclass(frozen=True, slots=True)
class Encoded:
    """An embedding as an encode worker returned it."""

    embedding: encode_pb2.Embedding
    worker: WorkerHandle


@dataclass(slots=True, eq=False)
class _Entry:
    """An embedding that is cached or in use."""

    encoded: Encoded
    lease: EmbeddingLease | None
    is_cached: bool = False
    users: int = 0
    used_at: float = field(default_factory=monotonic)

    @property
    def num_bytes(self) -> int:
        embedding = self.encoded.embedding
        return embedding.lease.num_bytes if self.lease else len(embedding.inline)


@dataclass(slots=True, eq=False)
class InflightEncode:
    """An Encode call that requests wait for, with the worker that runs it. Itself a user of the entry it makes.

    `forget` keeps other requests from joining.
    """

    forget: Callable[["InflightEncode"], None]
    task: "asyncio.Task[_Entry] | None" = None
    waiters: int = 0
    worker: WorkerHandle | None = None
    call_id: str = ""

    def set_worker(self, worker: WorkerHandle, call_id: str) -> None:
        """Notes the worker that the call is about to be sent to."""
        self.worker, self.call_id = worker, call_id

    async def stop(self, leaving: int) -> generate_pb2.CancelReceipt | None:
        """Stops the call on its worker if it has no more than `leaving` waiters. Returns what the worker confirms."""
        if self.worker is None or self.waiters > leaving:
            return None
        self.forget(self)
        return await abort(self.worker, self.call_id)


Encode = Callable[[InflightEncode], Awaitable[Encoded]]


class EmbeddingRef:
    """A counted reference to an embedding, which stays readable until `close`."""

    def __init__(self, cache: "EmbeddingCache", key: EmbeddingKey, entry: _Entry, *, was_cached: bool) -> None:
        self.key = key
        self.was_cached = was_cached
        self.encoded = entry.encoded
        self._cache = cache
        self._entry = entry
        self._is_open = True

    @property
    def num_tokens(self) -> int:
        """The number of tokens that it takes in the prompt."""
        return self.encoded.embedding.shape[0]

    @property
    def worker_id(self) -> str:
        """The worker that encoded it."""
        return self.encoded.worker.record.worker_id

    def message(self) -> encode_pb2.Embedding:
        """The embedding as a message, with the remaining time of its lease."""
        embedding = self.encoded.embedding
        if self._entry.lease is None:
            return embedding
        leased = encode_pb2.Embedding(digest=embedding.digest, shape=embedding.shape, dtype=embedding.dtype)
        leased.lease.CopyFrom(self._entry.lease.message())
        return leased

    def invalidate(self) -> None:
        """Removes the embedding from the cache, because a worker could not read it. Does not close."""
        self._cache.evict(self.key, self._entry, "lost")

    def close(self) -> None:
        """Gives up the reference. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._cache.unref(self._entry)


class EmbeddingCache:
    """Evicts the least recently used once all entries exceed the limit in bytes. An async context manager.

    Requests that want the same embedding at the same time share one call. An embedding on an encode worker is kept
    there by renewing its lease while it is cached or in use, and released after that.
    """

    def __init__(self, config: EmbeddingsConfig) -> None:
        self._config = config
        self._entries: OrderedDict[EmbeddingKey, _Entry] = OrderedDict()
        self._has_leased = asyncio.Event()  # or had when it was last swept
        self._num_bytes = 0
        self._inflight: dict[EmbeddingKey, InflightEncode] = {}
        self._tasks: dict[asyncio.Task[_Entry], None] = {}  # in their order, which is that of their ends
        self._resources = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._renewer = await self._resources.enter_async_context(LeaseRenewer())
        self._sweeping = asyncio.create_task(lasting("embedding_cache", self._sweep))
        return self

    async def __aexit__(self, *exception: object) -> None:
        tasks = (self._sweeping, *self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for key, entry in tuple(self._entries.items()):
            self.evict(key, entry, "closed")
        # Releases embeddings that are still in use, too.
        await self._resources.aclose()

    async def acquire(self, key: EmbeddingKey, encode: Encode, cancellation: Cancellation) -> EmbeddingRef:
        """The embedding for a key: from the cache, from a call in flight, or from `encode`.

        `encode` is cancelled with its last waiter. All waiters get its error, except that DeadlineExceeded is raised
        only to the request that started it.
        """
        entry = self._find(key)
        if entry is not None:
            metrics.EMBEDDING_CACHE_HITS.inc()
            entry.users += 1
            return EmbeddingRef(self, key, entry, was_cached=True)
        metrics.EMBEDDING_CACHE_MISSES.inc()
        while True:
            is_first = key not in self._inflight
            inflight = self._start(key, encode) if is_first else self._inflight[key]
            try:
                with cancellation.waiting_for(inflight):
                    return EmbeddingRef(self, key, await self._join(inflight), was_cached=False)
            except DeadlineExceeded:
                if is_first:
                    raise

    def evict(self, key: EmbeddingKey, entry: _Entry, reason: str) -> None:
        """Removes an embedding from the cache. References to it stay valid."""
        if entry.is_cached:
            entry.is_cached = False
            del self._entries[key]
            self._count_bytes(-entry.num_bytes)
            metrics.EMBEDDING_CACHE_EVICTIONS.labels(reason).inc()
            self._free_if_unused(entry)

    def unref(self, entry: _Entry) -> None:
        """Notes that a reference was closed."""
        entry.users -= 1
        entry.used_at = monotonic()
        self._free_if_unused(entry)

    async def relieve(self, worker: WorkerHandle) -> bool:
        """Releases the unused embeddings on an overloaded worker. Returns whether there were any."""
        unused = [(key, entry) for key, entry in self._leased() if entry.encoded.worker is worker and not entry.users]
        for key, entry in unused:
            self.evict(key, entry, "relief")
        await self._renewer.wait_for_releases()
        return bool(unused)

    def _find(self, key: EmbeddingKey) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.lease is not None and not entry.lease.holds:
            self.evict(key, entry, "lost")
            return None
        self._entries.move_to_end(key)
        entry.used_at = monotonic()
        return entry

    # One call for all requests that want the same embedding.

    def _start(self, key: EmbeddingKey, encode: Encode) -> InflightEncode:
        inflight = self._inflight[key] = InflightEncode(partial(self._forget, key))
        inflight.task = task = asyncio.create_task(self._run(key, encode, inflight))
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        task.add_done_callback(forget_cancellation)
        return inflight

    async def _run(self, key: EmbeddingKey, encode: Encode, inflight: InflightEncode) -> _Entry:
        entry = self._receive(await encode(inflight))
        entry.users += 1
        self._cache(key, entry)
        return entry

    async def _join(self, inflight: InflightEncode) -> _Entry:
        task = inflight.task
        assert task is not None
        inflight.waiters += 1
        try:
            entry = await asyncio.shield(task)
            entry.users += 1
            return entry
        finally:
            inflight.waiters -= 1
            if task.done() or not inflight.waiters:
                inflight.forget(inflight)
            if not inflight.waiters:
                self._finish(task)
                # Its frames refer to `inflight`.
                inflight.task = None

    def _finish(self, task: "asyncio.Task[_Entry]") -> None:
        """Ends the call, because its last waiter has its result or has left."""
        if not task.done():
            task.cancel()
        elif not task.cancelled() and task.exception() is None:
            self.unref(task.result())

    def _forget(self, key: EmbeddingKey, inflight: InflightEncode) -> None:
        if self._inflight.get(key) is inflight:
            del self._inflight[key]

    # Entries and their leases.

    def _receive(self, encoded: Encoded) -> _Entry:
        embedding = encoded.embedding
        if not embedding.HasField("lease"):
            return _Entry(encoded, None)
        lease = EmbeddingLease(embedding.lease, encoded.worker)
        entry = _Entry(encoded, lease)
        self._renewer.keep(lease)
        return entry

    def _cache(self, key: EmbeddingKey, entry: _Entry) -> None:
        limit = self._config.max_bytes
        if key in self._entries or entry.num_bytes + ENTRY_BYTES > limit:
            return
        entry.is_cached = True
        self._entries[key] = entry
        if entry.lease is not None:
            self._has_leased.set()
        self._count_bytes(entry.num_bytes)
        while self._num_bytes + len(self._entries) * ENTRY_BYTES > limit:
            self.evict(*next(iter(self._entries.items())), "full")

    def _count_bytes(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        metrics.EMBEDDING_CACHE_BYTES.inc(num_bytes)

    def _free_if_unused(self, entry: _Entry) -> None:
        if entry.lease is not None and not entry.users and not entry.is_cached:
            self._renewer.release(entry.lease)

    async def _sweep(self) -> None:
        """Evicts leased embeddings that are lost, idle, or on a draining worker, until cancelled."""
        while True:
            await self._has_leased.wait()
            await asyncio.sleep(_SWEEP_SECONDS)
            if not (leased := self._leased()):
                self._has_leased.clear()
            for key, entry in leased:
                if reason := self._eviction_reason(entry):
                    self.evict(key, entry, reason)

    def _eviction_reason(self, entry: _Entry) -> str:
        if entry.lease is not None and not entry.lease.holds:
            return "lost"
        if entry.encoded.worker.record.draining:
            return "draining"
        is_idle = not entry.users and monotonic() - entry.used_at > self._config.leased_idle_seconds
        return "idle" if is_idle else ""

    def _leased(self) -> list[tuple[EmbeddingKey, _Entry]]:
        return [(key, entry) for key, entry in self._entries.items() if entry.lease is not None]
