"""What the simulated engine makes of images: bytes that follow from the content, so that wrong ones are noticed."""

import hashlib
from collections.abc import Iterable

from rpc.errors import EngineFailed
from services.prompt import MediaSpan


def content_digest(content: bytes) -> bytes:
    """The digest of an image's embedding."""
    return hashlib.sha256(b"simulated image" + content).digest()


def embedding_data(digest: bytes, shape: tuple[int, int]) -> bytes:
    """What the embedding of this digest must contain, in float32."""
    size = shape[0] * shape[1] * 4
    return (digest * (size // len(digest) + 1))[:size]


def check_embeddings(media: Iterable[MediaSpan]) -> None:
    """Raises EngineFailed if an embedding is not what its digest says."""
    for span in media:
        embedding = span.embedding
        if embedding is not None and embedding.data != embedding_data(span.digest, embedding.shape):
            raise EngineFailed(f"the embedding at token {span.start} does not belong to its digest")


def media_bytes(media: Iterable[MediaSpan], start: int, end: int) -> bytes:
    """Which media stand at the tokens `start:end`, and which rows of them; empty where there are none."""
    inside = (span for span in media if span.start < end and start < span.end)
    return b"".join(b"%d:%d:%s" % (span.start - start, span.end - start, span.digest) for span in inside)
