"""The encode role: loads a request's media, encodes them, and holds large embeddings under a lease."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from baton.engine.v1 import encode_pb2, encode_pb2_grpc
from baton.errors import InvalidRequest, Unsupported
from baton.inference.v1 import media_pb2, timing_pb2
from media.content import MediaItem
from media.loader import MediaLoader
from rpc.interceptors.calls import arrived_at
from rpc.server import Service
from runtime.aio import wait_until_done
from runtime.clock import perf_counter
from services.config import WorkerConfig
from services.engines.base import Encoder
from services.engines.prompt import Embedding, Media
from services.handoff.leases import Lease, LeaseTable
from services.handoff.service import release_if_undelivered
from services.identity import Identity
from services.multimodal.embedding_pull import EmbeddingPool
from services.parts import WorkerParts
from services.requests.calls import Calls
from services.telemetry import metrics
from services.telemetry.timings import Timing, duration, stage_timings
from services.worker_engines import Encoding

SERVICE_NAME = encode_pb2.DESCRIPTOR.services_by_name["EncodeService"].full_name
_IMAGES = (media_pb2.MODALITY_UNSPECIFIED, media_pb2.MODALITY_IMAGE)


class EncodeServicer(encode_pb2_grpc.EncodeServiceServicer):
    """EncodeService. Only a worker without the role has no `encoder`."""

    def __init__(self, identity: Identity, calls: Calls, encoder: "MediaEncoder | None", leases: LeaseTable) -> None:
        self._identity = identity
        self._calls = calls
        self._encoder = encoder
        self._leases = leases

    async def Encode(self, request: encode_pb2.EncodeRequest, context: Any) -> encode_pb2.EncodeResponse:
        with self._calls.run("encode", request.request_id, request.model, context.invocation_metadata()) as call:
            assert self._encoder is not None
            await call.faults.inject("queue")
            await call.faults.inject("encode")
            items = _media_items(request.media, self._encoder.max_items)
            encoded = await self._encoder.encode(request.request_id, items)
        release_if_undelivered(context, encoded.handoff_ids, self._leases)
        return _response(self._identity, encoded)


@dataclass(frozen=True, slots=True)
class LeasedEmbedding:
    """An embedding in this worker's pool, held under a lease."""

    embedding: Embedding
    lease: Lease
    layout_digest: str


@dataclass(frozen=True, slots=True)
class EncodedMedia:
    """The embeddings of a request's media, in order, and the seconds since the call's arrival."""

    embeddings: tuple[Embedding | LeasedEmbedding, ...]
    seconds: float

    @property
    def handoff_ids(self) -> list[str]:
        """The ids of the leases."""
        return [one.lease.handoff_id for one in self.embeddings if isinstance(one, LeasedEmbedding)]


class EmbeddingStore:
    """Puts embeddings over `inline_bytes` into the pool, and holds them in the lease table."""

    def __init__(self, pool: EmbeddingPool, leases: LeaseTable, inline_bytes: int) -> None:
        self._pool = pool
        self._leases = leases
        self._inline_bytes = inline_bytes
        self._layout_digest = pool.layout.digest

    def hold(self, request_id: str, embeddings: Sequence[Embedding]) -> tuple[Embedding | LeasedEmbedding, ...]:
        """Holds the large ones. Raises Overloaded, and holds none, if the pool has no room for all of them."""
        with ExitStack() as undo:
            held: list[Embedding | LeasedEmbedding] = []
            for embedding in embeddings:
                if len(embedding.data) <= self._inline_bytes:
                    held.append(embedding)
                    continue
                lease = self._leases.hold(request_id, self._pool.store(embedding), self._layout_digest)
                undo.callback(self._leases.discard, lease.handoff_id)
                held.append(LeasedEmbedding(embedding, lease, self._layout_digest))
            undo.pop_all()
        for one in held:
            metrics.MEDIA_ENCODED.labels("leased" if isinstance(one, LeasedEmbedding) else "inline").inc()
        return tuple(held)


class MediaEncoder:
    """Loads and encodes the media of requests, at most `max_items` of each."""

    def __init__(self, encoder: Encoder, loader: MediaLoader, store: EmbeddingStore, max_items: int) -> None:
        self.max_items = max_items
        self._encoder = encoder
        self._loader = loader
        self._store = store

    async def encode(self, request_id: str, items: Sequence[MediaItem]) -> EncodedMedia:
        """Loads, encodes and holds. Raises what MediaLoader.load, the encoder and the store raise."""
        started = arrived_at()
        embeddings = await self._encoder.encode(await self._load(items))
        # From the encoder to the lease table without an await in between, so that a cancellation loses no blocks.
        encoded = EncodedMedia(self._store.hold(request_id, embeddings), perf_counter() - started)
        metrics.COMPUTE_SECONDS.labels("encode").observe(encoded.seconds)
        return encoded

    async def _load(self, items: Sequence[MediaItem]) -> list[Media]:
        """Loads all items at once; raises the error of the first item that has one."""
        loading = [asyncio.ensure_future(self._loader.load(item)) for item in items]
        try:
            loaded = [await one for one in loading]
        finally:
            for one in loading:
                one.cancel()
            await wait_until_done(*loading)
        return [Media(one.content, one.mime_type) for one in loaded]


@asynccontextmanager
async def open_service(parts: WorkerParts) -> AsyncIterator[Service]:
    """Opens the role on a worker; one without it answers RoleMismatch."""
    worker = parts.worker
    async with open_media_encoder(parts.config, worker.engines.encoding, worker.leases) as encoder:
        servicer = EncodeServicer(worker.identity, parts.calls, encoder, worker.leases)
        yield Service(SERVICE_NAME, encode_pb2_grpc.add_EncodeServiceServicer_to_server, servicer)


@asynccontextmanager
async def open_media_encoder(
    config: WorkerConfig, encoding: Encoding | None, leases: LeaseTable
) -> AsyncIterator[MediaEncoder | None]:
    """Yields the media encoder; None on a worker without the role."""
    if encoding is None:
        yield None
        return
    async with MediaLoader(config.media) as loader:
        store = EmbeddingStore(encoding.pool, leases, config.encode.inline_bytes)
        yield MediaEncoder(encoding.encoder, loader, store, config.encode.max_items)


def _media_items(messages: Sequence[media_pb2.MediaItem], max_items: int) -> list[MediaItem]:
    """Raises InvalidRequest for no media or too many, and Unsupported for media that are not images."""
    if not messages:
        raise InvalidRequest.of("media", "is empty")
    if len(messages) > max_items:
        raise InvalidRequest.of("media", f"has {len(messages)} items; the limit is {max_items}")
    return [_media_item(f"media[{index}]", message) for index, message in enumerate(messages)]


def _media_item(path: str, message: media_pb2.MediaItem) -> MediaItem:
    if message.modality not in _IMAGES:
        raise Unsupported(f"{path}.modality: only images are encoded")
    match message.WhichOneof("source"):
        case "data":
            return MediaItem(path, message.data, message.mime_type)
        case "uri":
            return MediaItem(path, message.uri, message.mime_type)
        case _:
            raise InvalidRequest.of(f"{path}.source", "is missing; give one of data, uri")


def _response(identity: Identity, encoded: EncodedMedia) -> encode_pb2.EncodeResponse:
    timings = [Timing(timing_pb2.STAGE_ENCODE, encoded.seconds)]
    return encode_pb2.EncodeResponse(
        embeddings=[_embedding_message(identity, one) for one in encoded.embeddings],
        timings=stage_timings(timings, identity.worker_id),
    )


def _embedding_message(identity: Identity, value: Embedding | LeasedEmbedding) -> encode_pb2.Embedding:
    match value:
        case Embedding(digest, shape, dtype, data):
            return encode_pb2.Embedding(digest=digest, shape=shape, dtype=dtype, inline=data)
        case LeasedEmbedding(embedding, lease, layout_digest):
            lease_message = encode_pb2.EmbeddingLease(
                handoff_id=lease.handoff_id,
                worker_id=identity.worker_id,
                epoch=identity.epoch,
                lease=duration(lease.remaining_seconds),
                layout_digest=layout_digest,
                num_bytes=len(embedding.data),
                block_ids=lease.held.block_ids,
                address=identity.address,
            )
            return encode_pb2.Embedding(
                digest=embedding.digest, shape=embedding.shape, dtype=embedding.dtype, lease=lease_message
            )
