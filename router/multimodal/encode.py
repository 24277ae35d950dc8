"""Turns media into embeddings: from the cache, or by Encode calls to workers."""

import asyncio
import secrets
from dataclasses import dataclass
from functools import partial

from opentelemetry.trace import SpanKind

from baton.calls import unary
from baton.engine.v1 import encode_pb2
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    EngineFailed,
    FieldViolation,
    InvalidRequest,
    NoWorker,
    Overloaded,
    Unavailable,
)
from baton.inference.v1 import media_pb2
from media.item import CheckedMedia
from router.context import RequestContext
from router.multimodal.cache import EmbeddingCache, EmbeddingKey, EmbeddingRef, Encoded, InflightEncode
from router.placement.encoders import Encoders, EncoderVersion
from router.routing.retry import Attempts, Retries
from router.workers.aborts import abort_unanswered
from router.workers.calls import annotate_worker_errors
from router.workers.handle import Waiting, WorkerHandle
from router.workers.replies import Suspects, check_embedding
from router.workers.spans import worker_attributes
from rpc.tracing.span import stage_span

_STAGE = "encode"
_WORKER_PATH = "media[0]"  # of the only item in a request to a worker


@dataclass(frozen=True, slots=True)
class LoadedMedia:
    """A checked media item, and its path in the client's request."""

    path: str
    media: CheckedMedia


class Embedder:
    """Encodes each media item by a call of its own, so that a request's items spread over the encode workers."""

    def __init__(self, encoders: Encoders, retries: Retries, cache: EmbeddingCache) -> None:
        self._encoders = encoders
        self._retries = retries
        self._cache = cache

    def choose_encoder(self, model: str) -> EncoderVersion:
        """The encoder version for all media of a request; see Encoders.choose."""
        return self._encoders.choose(model)

    async def embed(self, ctx: RequestContext, loaded: LoadedMedia, encoder: EncoderVersion) -> EmbeddingRef:
        """The embedding, for the caller to close. Raises NoWorker, or the error of the last attempt."""
        key = EmbeddingKey(loaded.media.digest, encoder, ctx.request.routing.cache_salt)
        encode = partial(self._encode_with_retries, ctx, loaded.media, encoder)
        try:
            return await self._cache.acquire(key, encode, ctx.cancellation)
        except InvalidRequest as error:
            raise _renamed(error, loaded.path) from error

    async def _encode_with_retries(
        self, ctx: RequestContext, media: CheckedMedia, encoder: EncoderVersion, inflight: InflightEncode
    ) -> Encoded:
        """Encodes on the least loaded worker, or on others if it fails."""
        failure: BatonError | None = None
        attempts, suspects = self._retries.attempts("encode"), Suspects()
        while True:
            worker = self._place(encoder, attempts.tried, failure)
            # An id of its own: the call goes on for other waiters when the request that began it ends.
            inflight.set_worker(worker, f"{ctx.call_id}/{secrets.token_hex(4)}")
            request = _encode_request(inflight.call_id, encoder.model, media)
            try:
                waiting = _Encoding(self._encoders, encoder, self._retries, ctx, attempts)
                found = await self._encode(ctx, worker, request, waiting, attempts.number)
                suspects.answered(worker)
                return found
            except (Unavailable, Overloaded, EngineFailed) as error:
                suspects.add(worker, _STAGE, error)
                attempts.allow(error)
                failure = error
            if isinstance(failure, Overloaded) and await self._cache.relieve(worker):
                continue
            attempts.exclude(worker.record.process)
            self._place(encoder, attempts.tried, failure)
            await attempts.pause(failure, ctx.deadline.remaining_seconds)

    def _place(self, encoder: EncoderVersion, tried: frozenset[str], failure: BatonError | None) -> WorkerHandle:
        try:
            return self._encoders.place(encoder, tried)
        except NoWorker:
            if failure is None:
                raise
            raise failure from None

    async def _encode(
        self,
        ctx: RequestContext,
        worker: WorkerHandle,
        request: encode_pb2.EncodeRequest,
        waiting: Waiting,
        attempt: int,
    ) -> Encoded:
        with (
            annotate_worker_errors(_STAGE, worker, ctx),
            stage_span(_STAGE, worker_attributes(worker), kind=SpanKind.CLIENT),
            worker.track_load(0),
        ):
            seconds, metadata = ctx.deadline.remaining_seconds, ctx.worker_metadata(attempt)
            try:
                with worker.fail_if_hung(waiting):
                    response = await unary(worker.encode.Encode(request, timeout=seconds, metadata=metadata))
            except (asyncio.CancelledError, DeadlineExceeded):
                await abort_unanswered(worker, request.request_id)
                raise
            return Encoded(check_embedding(response, worker), worker)


class _Encoding(Waiting):
    """An Encode call, while it waits for a worker."""

    def __init__(
        self, encoders: Encoders, encoder: EncoderVersion, retries: Retries, ctx: RequestContext, attempts: Attempts
    ) -> None:
        self._encoders = encoders
        self._encoder = encoder
        self._retries = retries
        self._ctx = ctx
        self._attempts = attempts
        self.awaits_answer = True

    def answer_seconds(self) -> float:
        return self._retries.answer_seconds(self._ctx.deadline.remaining_seconds)

    def another_can(self, worker: WorkerHandle) -> bool:
        try:
            self._encoders.place(self._encoder, self._attempts.tried | {worker.record.process})
        except NoWorker:
            return False
        return self._attempts.has_another


def _encode_request(call_id: str, model: str, media: CheckedMedia) -> encode_pb2.EncodeRequest:
    item = media_pb2.MediaItem(mime_type=media.mime_type, data=media.content, modality=media_pb2.MODALITY_IMAGE)
    return encode_pb2.EncodeRequest(request_id=call_id, model=model, media=[item])


def _renamed(error: InvalidRequest, path: str) -> InvalidRequest:
    """The worker's error, with the field's path in the client's request."""
    violations = [
        FieldViolation(path + violation.field.removeprefix(_WORKER_PATH), violation.description)
        if violation.field.startswith(_WORKER_PATH)
        else FieldViolation(path, f"{violation.field}: {violation.description}")
        for violation in error.violations
    ]
    return InvalidRequest(violations, stage=error.stage, worker_id=error.worker_id)
