"""The embeddings that a router knows: what was encoded once is not encoded again while there is room for it."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType

from baton.engine.v1 import encode_pb2
from typing_extensions import Self

from router import metrics
from router.config import EmbeddingsConfig
from router.embedding_lease import EmbeddingLease
from router.encoders import Encoder
from router.flight import Flight
from router.lease_keeper import LeaseKeeper
from router.requests import RunningRequest
from router.worker import Worker
from rpc.errors import DeadlineExceeded

_SWEEP_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class EmbeddingKey:
    """What an embedding depends on: the medium's content, by its SHA-256, and what encodes it. Never an address.

    Requests with different cache salts share nothing: a hit would tell that somebody else has sent the same.
    """

    content: bytes
    encoder: Encoder
    cache_salt: str


@dataclass(frozen=True, slots=True)
class Encoded:
    """An embedding as an encode worker answered it."""

    embedding: encode_pb2.Embedding
    worker: Worker


@dataclass(slots=True, eq=False)
class _Entry:
    """An embedding in the cache, or out of it and still in use."""

    encoded: Encoded
    lease: EmbeddingLease | None
    is_cached: bool = False
    users: int = 0
    used_at: float = field(default_factory=time.monotonic)

    @property
    def num_bytes(self) -> int:
        embedding = self.encoded.embedding
        return embedding.lease.num_bytes if self.lease else len(embedding.inline)


# The flight itself is a user of what comes of it.
_Flight = Flight[_Entry]
Encode = Callable[[_Flight], Awaitable[Encoded]]


class Use:
    """An embedding in somebody's hands, from `EmbeddingCache.acquire` until `close`: so long it is kept readable."""

    def __init__(self, cache: "EmbeddingCache", key: EmbeddingKey, entry: _Entry, *, was_cached: bool) -> None:
        self.key = key
        self.was_cached = was_cached
        self.encoded = entry.encoded
        self._cache = cache
        self._entry = entry
        self._is_open = True

    @property
    def num_tokens(self) -> int:
        """How many tokens of the prompt it stands for."""
        return self.encoded.embedding.shape[0]

    @property
    def worker_id(self) -> str:
        """Who encoded it."""
        return self.encoded.worker.record.worker_id

    def message(self) -> encode_pb2.Embedding:
        """The embedding to send, with what remains of its lease."""
        embedding = self.encoded.embedding
        if self._entry.lease is None:
            return embedding
        leased = encode_pb2.Embedding(digest=embedding.digest, shape=embedding.shape, dtype=embedding.dtype)
        leased.lease.CopyFrom(self._entry.lease.message())
        return leased

    def lost(self) -> None:
        """A reader could not read it: a leased one leaves the cache. It is still to be closed."""
        if self._entry.lease is not None:
            self._cache.evict(self.key, self._entry, "lost")

    def close(self) -> None:
        """Needs it no more. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._cache.let_go(self._entry)


class EmbeddingCache:
    """Least recently used out, once the embeddings' bytes are over the limit. An async context manager.

    Requests that want one embedding at the same time share a call. What lies on an encode worker is kept there by
    renewing its lease while it is cached or in use, and given back after that.
    """

    def __init__(self, config: EmbeddingsConfig) -> None:
        self._config = config
        self._entries: OrderedDict[EmbeddingKey, _Entry] = OrderedDict()
        self._num_bytes = 0
        self._flights: dict[EmbeddingKey, _Flight] = {}
        self._flying: set[asyncio.Task[_Entry]] = set()
        self._keeper = LeaseKeeper()

    async def __aenter__(self) -> Self:
        await self._keeper.__aenter__()
        self._sweeping = asyncio.create_task(self._sweep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = (self._sweeping, *self._flying)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for key, entry in tuple(self._entries.items()):
            self.evict(key, entry, "closed")
        # What is still in use is released too.
        await self._keeper.__aexit__(None, None, None)

    async def acquire(self, key: EmbeddingKey, encode: Encode, running: RunningRequest) -> Use:
        """The embedding of that key, for a request: cached, or on its way already, or what `encode` returns.

        `encode` is cancelled when all who wait for it are. Its failure is everybody's, except that a deadline is only
        that of the one who set it.
        """
        entry = self._find(key)
        if entry is not None:
            metrics.EMBEDDING_CACHE_HITS.inc()
            entry.users += 1
            return Use(self, key, entry, was_cached=True)
        metrics.EMBEDDING_CACHE_MISSES.inc()
        while True:
            is_first = key not in self._flights
            flight = self._launch(key, encode) if is_first else self._flights[key]
            try:
                with running.waiting_for(flight):
                    return Use(self, key, await self._join(flight), was_cached=False)
            except DeadlineExceeded:
                if is_first:
                    raise

    def evict(self, key: EmbeddingKey, entry: _Entry, reason: str) -> None:
        """Forgets an embedding; whoever uses it still may."""
        if entry.is_cached:
            entry.is_cached = False
            del self._entries[key]
            self._count_bytes(-entry.num_bytes)
            metrics.EMBEDDING_CACHE_EVICTIONS.labels(reason).inc()
            self._free_if_unused(entry)

    def let_go(self, entry: _Entry) -> None:
        """One user less."""
        entry.users -= 1
        entry.used_at = time.monotonic()
        self._free_if_unused(entry)

    async def relieve(self, worker: Worker) -> bool:
        """Gives back all that lies on a worker and is not in use: it is full. Whether there was anything."""
        unused = [(key, entry) for key, entry in self._leased() if entry.encoded.worker is worker and not entry.users]
        for key, entry in unused:
            self.evict(key, entry, "relief")
        await self._keeper.settle()
        return bool(unused)

    def _find(self, key: EmbeddingKey) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.lease is not None and not entry.lease.holds:
            self.evict(key, entry, "lost")
            return None
        self._entries.move_to_end(key)
        entry.used_at = time.monotonic()
        return entry

    # One call for all who want the same.

    def _launch(self, key: EmbeddingKey, encode: Encode) -> _Flight:
        flight = self._flights[key] = _Flight(partial(self._forget, key))
        flight.task = task = asyncio.create_task(self._fly(key, encode, flight))
        self._flying.add(task)
        task.add_done_callback(self._flying.discard)
        return flight

    async def _fly(self, key: EmbeddingKey, encode: Encode, flight: _Flight) -> _Entry:
        entry = self._receive(await encode(flight))
        entry.users += 1
        self._cache(key, entry)
        return entry

    async def _join(self, flight: _Flight) -> _Entry:
        assert flight.task is not None
        flight.waiters += 1
        try:
            entry = await asyncio.shield(flight.task)
            entry.users += 1
            return entry
        finally:
            flight.waiters -= 1
            if not flight.waiters:
                self._land(flight.task)
            if flight.task.done() or not flight.waiters:
                flight.forget(flight)

    def _land(self, task: "asyncio.Task[_Entry]") -> None:
        """The last one who waited has what it wanted, or has left."""
        if not task.done():
            task.cancel()
        elif not task.cancelled() and task.exception() is None:
            self.let_go(task.result())

    def _forget(self, key: EmbeddingKey, flight: _Flight) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]

    # What is kept, and where.

    def _receive(self, encoded: Encoded) -> _Entry:
        embedding = encoded.embedding
        if not embedding.HasField("lease"):
            return _Entry(encoded, None)
        lease = EmbeddingLease(embedding.lease, encoded.worker)
        entry = _Entry(encoded, lease)
        self._keeper.keep(lease)
        return entry

    def _cache(self, key: EmbeddingKey, entry: _Entry) -> None:
        if key in self._entries or entry.num_bytes > self._config.max_bytes:
            return
        entry.is_cached = True
        self._entries[key] = entry
        self._count_bytes(entry.num_bytes)
        while self._num_bytes > self._config.max_bytes:
            self.evict(*next(iter(self._entries.items())), "full")

    def _count_bytes(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        metrics.EMBEDDING_CACHE_BYTES.inc(num_bytes)

    def _free_if_unused(self, entry: _Entry) -> None:
        if entry.lease is not None and not entry.users and not entry.is_cached:
            self._keeper.release(entry.lease)

    async def _sweep(self) -> None:
        """Lets leased embeddings go that are lost, idle, or on a worker that leaves, for ever."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            for key, entry in self._leased():
                if reason := self._reason_against(entry):
                    self.evict(key, entry, reason)

    def _reason_against(self, entry: _Entry) -> str:
        if entry.lease is not None and not entry.lease.holds:
            return "lost"
        if entry.encoded.worker.record.draining:
            return "draining"
        is_idle = not entry.users and time.monotonic() - entry.used_at > self._config.leased_idle_seconds
        return "idle" if is_idle else ""

    def _leased(self) -> list[tuple[EmbeddingKey, _Entry]]:
        return [(key, entry) for key, entry in self._entries.items() if entry.lease is not None]
