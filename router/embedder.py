"""Turns media into embeddings: out of the cache, or by workers that encode."""

import asyncio
import secrets
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton.engine.v1 import encode_pb2
from baton.inference.v1 import media_pb2
from opentelemetry.trace import SpanKind

from media.item import Media
from router import traces
from router.aborts import abort_unanswered
from router.deadline import Deadline
from router.embeddings import EmbeddingCache, EmbeddingKey, Encoded, Use
from router.encoders import Encoder, Encoders
from router.fault_plan import plan_metadata
from router.faults import located
from router.flight import Flight
from router.requests import RunningRequest
from router.retry import Retries
from router.worker import Worker
from rpc.calls import unary
from rpc.errors import (
    BatonError,
    DeadlineExceeded,
    EngineFailed,
    FieldViolation,
    InvalidRequest,
    NoWorker,
    Overloaded,
    Unavailable,
)
from rpc.tracing.span import stage_span

_STAGE = "encode"
_SENT_AS = "media[0]"  # the path of the only item in the requests to workers


@dataclass(frozen=True, slots=True)
class LoadedMedia:
    """A medium that has been checked, and its path in the client's request."""

    path: str
    media: Media


@dataclass(frozen=True, slots=True)
class Order:
    """For whom something is encoded, by what, and until when."""

    running: RunningRequest
    cache_salt: str
    encoder: Encoder
    deadline: Deadline


class Embedder:
    """Encodes each medium by a call of its own, so that those of one request spread over the encode workers."""

    def __init__(self, encoders: Encoders, retries: Retries, cache: EmbeddingCache) -> None:
        self._encoders = encoders
        self._retries = retries
        self._cache = cache

    def choose_encoder(self, model: str) -> Encoder:
        """The encoder for all media of a request; see Encoders.choose."""
        return self._encoders.choose(model)

    async def embed(self, loaded: LoadedMedia, order: Order) -> Use:
        """The embedding, for the caller to close. Raises NoWorker, and what the last worker tried has raised."""
        key = EmbeddingKey(loaded.media.digest, order.encoder, order.cache_salt)
        try:
            return await self._cache.acquire(key, partial(self._encode_somewhere, loaded.media, order), order.running)
        except InvalidRequest as error:
            raise _renamed(error, loaded.path) from error

    async def _encode_somewhere(self, media: Media, order: Order, flight: Flight[Any]) -> Encoded:
        """Encodes on the least busy worker, or on others where it fails."""
        tried: frozenset[str] = frozenset()
        failure: BatonError | None = None
        attempts = 0
        while True:
            worker = self._place(order.encoder, tried, failure)
            try:
                # An id of its own: others may come to wait, and the call must not end by the end of the one who began.
                flight.visit(worker, f"{order.running.request_id}/{secrets.token_hex(4)}")
                return await self._encode(worker, _request(flight.request_id, media, order), order, attempts + 1)
            except (Unavailable, Overloaded, EngineFailed) as error:
                attempts += 1
                self._retries.allow_encode(error, attempts)
                failure = error
            if not (isinstance(failure, Overloaded) and await self._cache.relieve(worker)):
                tried |= {worker.record.process}

    def _place(self, encoder: Encoder, tried: frozenset[str], failure: BatonError | None) -> Worker:
        try:
            return self._encoders.place(encoder, tried)
        except NoWorker:
            if failure is None:
                raise
            raise failure from None

    async def _encode(self, worker: Worker, request: encode_pb2.EncodeRequest, order: Order, attempt: int) -> Encoded:
        with (
            located(_STAGE, worker),
            stage_span(_STAGE, traces.worker(worker), kind=SpanKind.CLIENT),
            worker.carrying(0),
        ):
            seconds, metadata = order.deadline.remaining_seconds, plan_metadata(attempt)
            try:
                async with worker.answering():
                    response = await unary(worker.encode.Encode(request, timeout=seconds, metadata=metadata))
            except (asyncio.CancelledError, DeadlineExceeded):
                await abort_unanswered(worker, request.request_id)
                raise
            return _checked(response, worker)


def _request(request_id: str, media: Media, order: Order) -> encode_pb2.EncodeRequest:
    item = media_pb2.MediaItem(mime_type=media.mime_type, data=media.content, modality=media_pb2.MODALITY_IMAGE)
    return encode_pb2.EncodeRequest(request_id=request_id, model=order.encoder.model, media=[item])


def _checked(response: encode_pb2.EncodeResponse, worker: Worker) -> Encoded:
    if len(response.embeddings) != 1:
        raise EngineFailed(f"the encode worker answered {len(response.embeddings)} embeddings for 1 image")
    embedding = response.embeddings[0]
    expected = worker.model.images.tokens_per_image if worker.model and worker.model.images else 0
    if len(embedding.shape) != 2 or not embedding.shape[0] or expected not in (0, embedding.shape[0]):
        raise EngineFailed(f"the encode worker answered an embedding of shape {list(embedding.shape)}")
    return Encoded(embedding, worker)


def _renamed(error: InvalidRequest, path: str) -> InvalidRequest:
    """The worker's complaint, about the client's field."""
    violations = [
        FieldViolation(path + violation.field.removeprefix(_SENT_AS), violation.description)
        if violation.field.startswith(_SENT_AS)
        else FieldViolation(path, f"{violation.field}: {violation.description}")
        for violation in error.violations
    ]
    return InvalidRequest(violations, stage=error.stage, worker_id=error.worker_id)
