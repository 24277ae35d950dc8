"""Turns media into embeddings: from the cache, or by Encode calls to workers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from baton.calls import unary
from baton.engine.v1 import encode_pb2, encode_pb2_grpc
from baton.errors import FieldViolation, InvalidRequest, NoWorker
from baton.inference.v1 import media_pb2
from media.content import CheckedMedia
from router.context import RequestContext
from router.multimodal.cache import EmbeddingCache, EmbeddingKey, EmbeddingRef, Encoded, InflightEncode
from router.placement.encoders import Encoders, EncoderVersion
from router.routing.retry import Retries
from router.workers.handle import WorkerHandle
from router.workers.replies import check_embedding
from router.workers.role_calls import Metadata, RoleCall, call_with_retries
from rpc.violations import renamed
from runtime.entropy import token_hex

_WORKER_PATH = "media[0]"  # of the only item in a request to a worker


@dataclass(frozen=True, slots=True)
class LoadedMedia:
    """A checked media item, and its path in the client's request."""

    path: str
    media: CheckedMedia


class Embedder:
    """Encodes each media item by a call of its own, so that a request's items spread over the encode workers."""

    def __init__(self, encoders: Encoders, retries: Retries, cache: EmbeddingCache) -> None:
        self.encoders = encoders
        self._retries = retries
        self.cache = cache

    def choose_encoder(self, model: str) -> EncoderVersion:
        """The encoder version for all media of a request; see Encoders.choose."""
        return self.encoders.choose(model)

    async def embed(
        self, ctx: RequestContext, loaded: LoadedMedia, encoder: EncoderVersion, avoided: frozenset[str]
    ) -> EmbeddingRef:
        """The embedding, for the caller to close, of none of the processes `avoided` if another one can make it.

        Raises NoWorker, or the error of the last attempt.
        """
        key = EmbeddingKey(loaded.media.digest, encoder, ctx.request.routing.cache_salt)
        encode = partial(self._encode, ctx, loaded.media, encoder, avoided)
        try:
            return await self.cache.acquire(key, encode, ctx.cancellation)
        except InvalidRequest as error:
            raise renamed(error, partial(_in_client_request, loaded.path)) from error

    async def _encode(
        self,
        ctx: RequestContext,
        media: CheckedMedia,
        encoder: EncoderVersion,
        avoided: frozenset[str],
        inflight: InflightEncode,
    ) -> Encoded:
        """Encodes on the least loaded worker, or on others if it fails."""
        place = partial(self._place, encoder, avoided)
        return await call_with_retries(ctx, self._retries, _EncodeCall(self, ctx, media, place, inflight))

    def _place(self, encoder: EncoderVersion, avoided: frozenset[str], tried: frozenset[str]) -> WorkerHandle:
        try:
            return self.encoders.place(encoder, tried | avoided)
        except NoWorker:
            return self.encoders.place(encoder, tried)


class _EncodeCall(RoleCall[Encoded]):
    """The call for one medium, which goes on for other waiters when the request that began it ends."""

    role = "encode"
    tokens = 0

    def __init__(
        self,
        embedder: Embedder,
        ctx: RequestContext,
        media: CheckedMedia,
        place: Callable[[frozenset[str]], WorkerHandle],
        inflight: InflightEncode,
    ) -> None:
        self._embedder = embedder
        self._ctx = ctx
        self._media = media
        self._place = place
        self._inflight = inflight

    def place(self, tried: frozenset[str]) -> WorkerHandle:
        return self._place(tried)

    def begin(self, worker: WorkerHandle) -> str:
        self._inflight.set_worker(worker, f"{self._ctx.call_id}/{token_hex(4)}")
        return self._inflight.call_id

    async def run(self, worker: WorkerHandle, seconds: float, metadata: Metadata) -> Encoded:
        request = _encode_request(self._inflight.call_id, worker.record.model, self._media)
        stub = worker.stub(encode_pb2_grpc.EncodeServiceStub)
        response = await unary(stub.Encode(request, timeout=seconds, metadata=metadata))
        return Encoded(check_embedding(response, worker), worker)

    async def relieve(self, worker: WorkerHandle) -> bool:
        return await self._embedder.cache.relieve(worker)


def _encode_request(call_id: str, model: str, media: CheckedMedia) -> encode_pb2.EncodeRequest:
    item = media_pb2.MediaItem(mime_type=media.mime_type, data=media.content, modality=media_pb2.MODALITY_IMAGE)
    return encode_pb2.EncodeRequest(request_id=call_id, model=model, media=[item])


def _in_client_request(path: str, violation: FieldViolation) -> FieldViolation:
    """The violation, with the field's path in the client's request."""
    if violation.field.startswith(_WORKER_PATH):
        return FieldViolation(path + violation.field.removeprefix(_WORKER_PATH), violation.description)
    return FieldViolation(path, f"{violation.field}: {violation.description}")
