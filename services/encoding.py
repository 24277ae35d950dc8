"""A request's media: loaded, checked, encoded, and, where the embedding is large, put under a lease."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from media.item import MediaItem
from media.loader import MediaLoader
from rpc.arrival import arrived_at
from rpc.settle import settle
from services import metrics
from services.embedding_pool import EmbeddingPool
from services.engine import Encoder
from services.leases import Lease, LeaseTable
from services.prompt import Embedding, Media


@dataclass(frozen=True, slots=True)
class Leased:
    """An embedding that lies in this worker's pool."""

    embedding: Embedding
    lease: Lease
    layout_digest: str


@dataclass(frozen=True, slots=True)
class Encoded:
    """The embeddings of a request's media, in order, and what they took from the call's arrival on."""

    embeddings: tuple[Embedding | Leased, ...]
    seconds: float

    @property
    def handoff_ids(self) -> list[str]:
        """Of those that are held."""
        return [one.lease.handoff_id for one in self.embeddings if isinstance(one, Leased)]


class EmbeddingStore:
    """Gives embeddings over `inline_bytes` to the pool and the lease table."""

    def __init__(self, pool: EmbeddingPool, leases: LeaseTable, inline_bytes: int) -> None:
        self._pool = pool
        self._leases = leases
        self._inline_bytes = inline_bytes

    def offer(self, request_id: str, embeddings: Sequence[Embedding]) -> tuple[Embedding | Leased, ...]:
        """Holds what is large. Raises Overloaded, and holds nothing, if the pool has no room for all of it."""
        with ExitStack() as undo:
            offered: list[Embedding | Leased] = []
            for embedding in embeddings:
                if len(embedding.data) <= self._inline_bytes:
                    offered.append(embedding)
                    continue
                lease = self._leases.hold(request_id, self._pool.store(embedding))
                undo.callback(self._leases.discard, lease.handoff_id)
                offered.append(Leased(embedding, lease, self._pool.layout.digest))
            undo.pop_all()
        for one in offered:
            metrics.MEDIA_ENCODED.labels("leased" if isinstance(one, Leased) else "inline").inc()
        return tuple(offered)


class MediaEncoder:
    """Runs media through an encoder."""

    def __init__(self, encoder: Encoder, loader: MediaLoader, store: EmbeddingStore) -> None:
        self._encoder = encoder
        self._loader = loader
        self._store = store

    async def encode(self, request_id: str, items: Sequence[MediaItem]) -> Encoded:
        """Loads, encodes and holds. Raises what MediaLoader.load, the encoder and the store raise."""
        started = arrived_at()
        embeddings = await self._encoder.encode(await self._load(items))
        # From the encoder's hands to the table's without an await in between: nothing can be lost here.
        encoded = Encoded(self._store.offer(request_id, embeddings), time.perf_counter() - started)
        metrics.COMPUTE_SECONDS.labels("encode").observe(encoded.seconds)
        return encoded

    async def _load(self, items: Sequence[MediaItem]) -> list[Media]:
        """All at once; the error is that of the first item that has one."""
        loading = [asyncio.ensure_future(self._loader.load(item)) for item in items]
        try:
            loaded = [await one for one in loading]
        finally:
            for one in loading:
                one.cancel()
            await settle(*loading)
        return [Media(one.content, one.mime_type) for one in loaded]
