"""Between messages and values, of media and embeddings. What is wrong is named by its field."""

from collections.abc import Sequence

from baton.engine.v1 import encode_pb2, prompt_pb2
from baton.inference.v1 import media_pb2, timing_pb2

from media.item import MediaItem
from rpc.errors import InvalidRequest, Unsupported
from services.convert import as_seconds, duration, stage_timings
from services.encoding import Encoded, Leased
from services.handoffs import LeasedBlocks, Timing
from services.identity import Identity
from services.prompt import Embedding
from services.spans import GivenEmbedding, GivenSpan

_IMAGES = (media_pb2.MODALITY_UNSPECIFIED, media_pb2.MODALITY_IMAGE)


def media_items(messages: Sequence[media_pb2.MediaItem], max_items: int) -> list[MediaItem]:
    """What is to be encoded. Raises InvalidRequest for no media or too many, Unsupported for anything but images."""
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
            raise InvalidRequest.of(f"{path}.source", "is missing: neither data nor uri")


def encode_response(identity: Identity, encoded: Encoded) -> encode_pb2.EncodeResponse:
    """The embeddings, in the order of the request."""
    timings = [Timing(timing_pb2.STAGE_ENCODE, encoded.seconds)]
    return encode_pb2.EncodeResponse(
        embeddings=[_embedding(identity, one) for one in encoded.embeddings],
        timings=stage_timings(timings, identity.worker_id),
    )


def _embedding(identity: Identity, value: Embedding | Leased) -> encode_pb2.Embedding:
    match value:
        case Embedding(digest, shape, dtype, data):
            return encode_pb2.Embedding(digest=digest, shape=shape, dtype=dtype, inline=data)
        case Leased(embedding, lease, layout_digest):
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


def spans(message: prompt_pb2.Prompt) -> list[GivenSpan]:
    """The prompt's media; see `check_spans`."""
    return [
        GivenSpan(
            start=span.start,
            num_tokens=span.num_tokens,
            digest=span.digest,
            embedding=_given(span.embedding) if span.HasField("embedding") else None,
        )
        for span in message.media
    ]


def _given(message: encode_pb2.Embedding) -> GivenEmbedding:
    return GivenEmbedding(message.digest, tuple(message.shape), message.dtype, _source(message))


def _source(message: encode_pb2.Embedding) -> bytes | LeasedBlocks | None:
    match message.WhichOneof("source"):
        case "inline":
            return message.inline
        case "lease":
            return _leased(message.lease)
        case _:
            return None


def _leased(message: encode_pb2.EmbeddingLease) -> LeasedBlocks:
    return LeasedBlocks(
        handoff_id=message.handoff_id,
        worker_id=message.worker_id,
        epoch=message.epoch,
        address=message.address,
        lease_seconds=as_seconds(message.lease),
        layout_digest=message.layout_digest,
        num_bytes=message.num_bytes,
        block_ids=tuple(message.block_ids),
    )
