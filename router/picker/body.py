"""The request within the HTTP request that passes a gateway: by OpenAI's API, or by gRPC."""

import asyncio
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2, inference_service_pb2
from router.openai.chat import ChatCompletionRequest
from router.openai.completions import CompletionRequest
from router.openai.fields import read
from router.openai.json_body import parse
from router.openai.responses import ResponsesRequest

_SERVICE = inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
_FRAME = struct.Struct(">BI")  # of a gRPC message: whether it is compressed, and its length

_Read = Callable[[bytes], generate_pb2.GenerateRequest]


async def read_request(path: str, body: Sequence[bytes]) -> generate_pb2.GenerateRequest | None:
    """The request that the pieces of a body are for a path, read in a thread; None if that path generates nothing.

    Raises a BatonError for a body that the router would refuse.
    """
    reader = _READERS.get(path.partition("?")[0].rstrip("/"))
    return None if reader is None else await asyncio.to_thread(_read, reader, body)


def _read(reader: _Read, body: Sequence[bytes]) -> generate_pb2.GenerateRequest:
    try:
        return reader(b"".join(body))
    except (ValueError, TypeError, OverflowError, RecursionError, DecodeError) as error:
        raise InvalidRequest.of("body", f"has a value that no request can hold: {error}") from None


def _json(kind: Any) -> _Read:
    """Reads a body of OpenAI's API as one of its classes."""

    def requested(body: bytes) -> generate_pb2.GenerateRequest:
        request: generate_pb2.GenerateRequest = read(kind, parse(body)).generate_request("")
        return request

    return requested


def _stream(body: bytes) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest.FromString(_message(body))


def _unary(body: bytes) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateUnaryRequest.FromString(_message(body)).request


def _message(body: bytes) -> bytes:
    """The only message of a gRPC call. Raises InvalidRequest."""
    if len(body) < _FRAME.size:
        raise InvalidRequest.of("body", "is not a gRPC message")
    is_compressed, length = _FRAME.unpack_from(body)
    if is_compressed:
        raise InvalidRequest.of("body", "is a compressed gRPC message")
    if len(body) != _FRAME.size + length:
        raise InvalidRequest.of("body", f"has {len(body) - _FRAME.size} bytes of a gRPC message of {length}")
    return body[_FRAME.size :]


_READERS: Mapping[str, _Read] = {
    "/v1/chat/completions": _json(ChatCompletionRequest),
    "/v1/completions": _json(CompletionRequest),
    "/v1/responses": _json(ResponsesRequest),
    f"/{_SERVICE}/Generate": _stream,
    f"/{_SERVICE}/GenerateUnary": _unary,
}
