"""The head of a request: what its header fields say of the call, checked as RFC 9113 and gRPC ask."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from baton_http2.wire import metadata
from baton_http2.wire.frames import PROTOCOL_ERROR, StreamFailure
from baton_http2.wire.hpack import Field
from baton_http2.wire.metadata import Metadata

_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
# Blanks at either end are malformed to RFC 9113; gRPC's page lets us strip them, and its clients send them.
_ILLEGAL_VALUE: Final = re.compile(rb"[\x00\r\n]")
_PSEUDO: Final = frozenset({b":method", b":path", b":scheme", b":authority"})
_OF_HTTP1: Final = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"})
_UNITS: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_TIMEOUT: Final = re.compile(rb"([0-9]{1,8})([HMSmun])")
_CONTENT_TYPE: Final = re.compile(rb"application/grpc(?:$|\+|;)")


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The headers of a call, decoded.

    `http_status` is the answer to what is not gRPC, 0 for what is. `fault` says what is wrong with a call that is
    gRPC and cannot be served; it is empty otherwise. `content_length` is -1 where it was not sent.
    """

    path: str
    metadata: Metadata
    timeout_seconds: float | None
    encoding: str
    accepted_encodings: str
    content_length: int
    http_status: int = 0
    fault: str = ""


def parse(fields: Sequence[Field]) -> RequestHead:
    """Reads the fields. Raises StreamFailure for what RFC 9113 calls malformed."""
    pseudo: dict[bytes, bytes] = {}
    own: dict[bytes, bytes] = {}
    for name, value in fields:
        if name[:1] == b":":
            # `own` has every other field, so that it is empty as long as only these have come.
            if own or name in pseudo or name not in _PSEUDO or _ILLEGAL_VALUE.search(value):
                raise StreamFailure(PROTOCOL_ERROR, "pseudo-headers are wrong")
            pseudo[name] = value
        else:
            check_field(name, value)
            if name == b"content-length" and name in own:
                raise StreamFailure(PROTOCOL_ERROR, "content-length is sent twice")
            own[name] = value
    path = pseudo.get(b":path")
    if not path or not pseudo.get(b":method") or not pseudo.get(b":scheme"):
        raise StreamFailure(PROTOCOL_ERROR, "pseudo-headers are missing")
    length = content_length([own[b"content-length"]] if b"content-length" in own else ())
    http_status = _http_status(pseudo[b":method"], own.get(b"content-type", b""))
    if http_status:
        return RequestHead("", (), None, "", "", length, http_status)
    return _call(path.decode("latin-1"), fields, own, length)


def check_field(name: bytes, value: bytes) -> None:
    """Raises StreamFailure for a field that HTTP/2 does not allow."""
    if not _is_legal_name(name):
        raise StreamFailure(PROTOCOL_ERROR, "a field's name is not allowed")
    if _ILLEGAL_VALUE.search(value) or (name == b"te" and value != b"trailers"):
        raise StreamFailure(PROTOCOL_ERROR, "a field's value is not allowed")


def check_trailers(fields: Sequence[Field]) -> None:
    """Raises StreamFailure for trailers that HTTP/2 does not allow."""
    for name, value in fields:
        check_field(name, value)


def content_length(values: Sequence[bytes]) -> int:
    """The number that a head has as `content-length`, or -1. Raises StreamFailure if it has another, or several."""
    if not values:
        return -1
    if len(values) > 1 or not values[0].isdigit() or len(values[0]) > 18:
        raise StreamFailure(PROTOCOL_ERROR, "content-length is not one number")
    return int(values[0])


def _call(path: str, fields: Sequence[Field], own: dict[bytes, bytes], length: int) -> RequestHead:
    fault = ""
    timeout = None
    sent: Metadata = ()
    try:
        timeout = _seconds(own.get(b"grpc-timeout"))
        sent = metadata.decode(fields)
    except ValueError as error:
        fault = str(error)
    encoding = own.get(b"grpc-encoding", b"identity").decode("latin-1")
    accepted = own.get(b"grpc-accept-encoding", b"").decode("latin-1")
    return RequestHead(path, sent, timeout, encoding, accepted, length, fault=fault)


def _http_status(method: bytes, content_type: bytes) -> int:
    if method != b"POST":
        return 405
    return 0 if _CONTENT_TYPE.match(content_type) else 415


def _seconds(timeout: bytes | None) -> float | None:
    if timeout is None:
        return None
    match = _TIMEOUT.fullmatch(timeout)
    if match is None:
        raise ValueError("grpc-timeout: expected at most 8 digits and one of H, M, S, m, u, n")
    return int(match[1]) * _UNITS[match[2]]


@lru_cache(maxsize=1024)
def _is_legal_name(name: bytes) -> bool:
    return _NAME.fullmatch(name) is not None and name not in _OF_HTTP1
