"""`data:` URIs (RFC 2397): content that travels inside its own address."""

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from rpc.errors import InvalidRequest

_CHUNK = 64 * 1024


@dataclass(frozen=True, slots=True)
class DataUri:
    """What a `data:` URI holds. `mime_type` is as written, empty where the URI gives none."""

    content: bytes
    mime_type: str


def decode(uri: str, field: str, max_bytes: int) -> DataUri:
    """Decodes the base64 and the percent form. Blocking: takes up to seconds for the largest.

    Raises InvalidRequest, before anything is decoded if it is too large.
    """
    head, comma, payload = uri.partition(",")
    if not comma:
        raise InvalidRequest.of(field, "is a data: URI without a comma")
    media_type = head[len("data:") :]
    is_base64 = media_type.lower().endswith(";base64")
    length = len(payload) - 2 * payload.count("%")
    # Without its padding, which may be there or not, so that content of exactly the limit passes.
    if (length * 3 // 4 - 2 if is_base64 else length) > max_bytes:
        raise InvalidRequest.of(field, f"is larger than the limit of {max_bytes} bytes")
    content = _unescape(payload)
    return DataUri(_decode_base64(content, field) if is_base64 else content, media_type.partition(";")[0])


def _unescape(payload: str) -> bytes:
    if "%" not in payload:
        return payload.encode("utf-8", "replace")
    # In parts: unquote_to_bytes makes an object of every escape, which is a hundred times their size.
    return b"".join(unquote_to_bytes(part.encode("utf-8", "replace")) for part in _parts(payload))


def _parts(payload: str) -> Iterator[str]:
    """Pieces of `payload`, none of which ends within an escape."""
    start = 0
    while start < len(payload):
        end = start + _CHUNK
        if end < len(payload) and "%" in payload[end - 2 : end]:
            end = payload.rindex("%", end - 2, end)
        yield payload[start:end]
        start = end


def _decode_base64(text: bytes, field: str) -> bytes:
    try:
        # Padding is often left out in URIs, where it would have to be escaped.
        return base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except binascii.Error:
        raise InvalidRequest.of(field, "is not valid base64") from None
