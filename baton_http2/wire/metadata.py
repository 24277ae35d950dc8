"""gRPC's metadata as header fields, and back; and the text of a status."""

import base64
import binascii
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final
from urllib.parse import quote_from_bytes, unquote_to_bytes

from grpc import StatusCode

from baton_http2.wire.hpack import Field, literal
from baton_http2.wire.messages import ACCEPTED_ENCODINGS

Metadata = Sequence[tuple[str, str | bytes]]
# Metadata as servicers give them.
Pairs = Iterable[tuple[str, str | bytes]]

_KEY: Final = re.compile(r"[0-9a-z_.\-]+")
_VALUE: Final = re.compile(r"[\x20-\x7e]*")
_PLAIN: Final = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"

# gRPC's own fields, and those of HTTP; only these of them are an application's too.
_GRPC_PREFIX: Final = "grpc-"
_RICH_STATUS: Final = "grpc-status-details-bin"
_RESERVED: Final = frozenset({"te", "content-type", "content-length", "host", "connection", "transfer-encoding"})


# `:status: 200`, from the static table, and what every answer has.
RESPONSE: Final = (
    b"\x88"
    + literal(b"content-type", b"application/grpc")
    + literal(b"grpc-accept-encoding", ACCEPTED_ENCODINGS.encode())
)
OK_STATUS: Final = literal(b"grpc-status", b"0")
# By their numbers.
STATUS_CODES: Final = {code.value[0]: code for code in StatusCode}


class MalformedMetadata(ValueError):
    """A value under a key that ends in -bin is not base64."""


def encode(metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    """The fields of a header block. Raises ValueError for a key or a value that gRPC does not allow."""
    return b"".join([_encode(key, value) for key, value in metadata])


def decode(fields: Iterable[Field]) -> Metadata:
    """An application's metadata, without the fields that are gRPC's own. Raises MalformedMetadata."""
    metadata: list[tuple[str, str | bytes]] = []
    for name, value in fields:
        key = _key(name)
        if key is None:
            continue
        if key.endswith("-bin"):
            # A list of several is allowed in one field.
            metadata.extend((key, _unbase64(key, part)) for part in value.split(b","))
        else:
            metadata.append((key, _text(value)))
    return tuple(metadata)


def percent_encoded(details: str) -> bytes:
    """A status's details as `grpc-message` carries them."""
    return quote_from_bytes(details.encode("utf-8", "replace"), safe=_PLAIN).encode()


def percent_decoded(value: bytes) -> str:
    """The inverse of `percent_encoded`."""
    return unquote_to_bytes(value).decode("utf-8", "replace")


def status_fields(code: int, details: str, metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    """The fields of a header block that say how a call ended. Raises ValueError for illegal metadata."""
    block = OK_STATUS if code == 0 else literal(b"grpc-status", b"%d" % code)
    if details:
        block += literal(b"grpc-message", percent_encoded(details))
    return block + encode(metadata)


def _encode(key: str, value: str | bytes) -> bytes:
    name = _name(key)
    if name.endswith(b"-bin"):
        if isinstance(value, str):
            value = value.encode()
        return literal(name, base64.b64encode(value).rstrip(b"="))
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    if not _VALUE.fullmatch(text):
        raise ValueError(f"metadata: the value of {key!r} is not printable ASCII; use a key that ends in -bin")
    return literal(name, text.encode())


# Servers send few keys, each of them again and again.
@lru_cache(maxsize=1024)
def _name(key: str) -> bytes:
    if not _KEY.fullmatch(key) or key in _RESERVED or (key.startswith(_GRPC_PREFIX) and key != _RICH_STATUS):
        raise ValueError(f"metadata: {key!r} is not allowed as a key")
    return key.encode()


@lru_cache(maxsize=1024)
def _key(name: bytes) -> str | None:
    key = name.decode("latin-1")
    if key.startswith((":", _GRPC_PREFIX)) and key != _RICH_STATUS:
        return None
    return None if key in _RESERVED else key


def _text(value: bytes) -> str:
    value = value.strip(b" \t")
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _unbase64(key: str, value: bytes) -> bytes:
    stripped = value.strip().rstrip(b"=")
    try:
        return base64.b64decode(stripped + b"=" * (-len(stripped) % 4), validate=True)
    except binascii.Error:
        raise MalformedMetadata(f"metadata: the value of {key!r} is not base64") from None
