"""URI syntax, read strictly: ambiguous URIs are refused. `data:` URIs (RFC 2397) are decoded here."""

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

from baton.errors import InvalidRequest

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,31}):")
_AMBIGUOUS = re.compile(r"[^\x21-\x7e]|\\")
_MAX_LENGTH = 8192
_CHUNK = 64 * 1024


def scheme(uri: str, field: str, enabled: Sequence[str]) -> str:
    """The scheme in lower case. Raises InvalidRequest, which names the enabled schemes, if there is none."""
    match = _SCHEME.match(uri)
    if match is None:
        raise InvalidRequest.of(field, f"is not a URI; enabled are {listed(enabled)}")
    return match[1].lower()


def split(uri: str, field: str) -> SplitResult:
    """The parts of a URI other than `data:`. Raises InvalidRequest."""
    if len(uri) > _MAX_LENGTH:
        raise InvalidRequest.of(field, f"is longer than {_MAX_LENGTH} characters")
    if _AMBIGUOUS.search(uri):
        raise InvalidRequest.of(field, "has a space, a backslash, a control or a non-ASCII character: escape them")
    try:
        return urlsplit(uri)
    except ValueError:
        raise InvalidRequest.of(field, "is not a valid URI") from None


def listed(schemes: Sequence[str]) -> str:
    """Schemes, formatted for a message."""
    return ", ".join(f"{name}:" for name in schemes)


@dataclass(frozen=True, slots=True)
class DataUri:
    """The content of a `data:` URI. `mime_type` is as written, and empty if the URI has none."""

    content: bytes
    mime_type: str


def decode_data(uri: str, field: str, max_bytes: int) -> DataUri:
    """Decodes the base64 and the percent form. Blocking: takes up to seconds for the largest.

    Raises InvalidRequest, before anything is decoded if it is too large.
    """
    head, comma, payload = uri.partition(",")
    if not comma:
        raise InvalidRequest.of(field, "is a data: URI without a comma")
    media_type = head[len("data:") :]
    is_base64 = media_type.lower().endswith(";base64")
    length = len(payload) - 2 * payload.count("%")
    # Without padding, which is optional, so that content of exactly the limit passes.
    if (length * 3 // 4 - 2 if is_base64 else length) > max_bytes:
        raise InvalidRequest.of(field, f"is larger than the limit of {max_bytes} bytes")
    content = _unescape(payload)
    return DataUri(_decode_base64(content, field) if is_base64 else content, media_type.partition(";")[0])


def _unescape(payload: str) -> bytes:
    if "%" not in payload:
        return payload.encode("utf-8", "replace")
    # In parts: unquote_to_bytes makes an object for every escape, a hundred times its size.
    return b"".join(unquote_to_bytes(part.encode("utf-8", "replace")) for part in _parts(payload))


def _parts(payload: str) -> Iterator[str]:
    """Pieces of `payload`, which do not end within an escape."""
    start = 0
    while start < len(payload):
        end = start + _CHUNK
        if end < len(payload) and "%" in payload[end - 2 : end]:
            end = payload.rindex("%", end - 2, end)
        yield payload[start:end]
        start = end


def _decode_base64(text: bytes, field: str) -> bytes:
    # Padding is often left out in URIs, where it would have to be escaped.
    text += b"=" * (-len(text) % 4)
    if 0 <= text.find(b"=") < len(text) - 2:
        raise InvalidRequest.of(field, "is not valid base64")
    try:
        # In parts, between which other threads run. Each is a whole number of groups of four.
        parts = (text[start : start + _CHUNK] for start in range(0, len(text), _CHUNK))
        return b"".join([base64.b64decode(part, validate=True) for part in parts])
    except binascii.Error:
        raise InvalidRequest.of(field, "is not valid base64") from None
