"""Parses requests within limits of cost: large ones in a thread, and gzip only where it is allowed.

gRPC would decompress before it checks the size: 400 KB of gzip can be 400 MB. Its decompression is therefore off, and
compressed requests are refused here, or decompressed up to the limit of a message.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from grpc import aio

from baton.errors import BatonError, InvalidRequest, Unsupported
from baton_http2.input_budget import claim_hold
from baton_http2.server.methods import Behaviour, Context
from rpc.interceptors.calls import record_size
from rpc.interceptors.counting import TextLimits, count_fields
from rpc.interceptors.wire import find_fault
from runtime.garbage import forget_content

Deserializer = Callable[[bytes | bytearray], Any]
# The limits of the texts in a message; None if there are none. Called for each large message, in another thread.
TextLimitsOf = Callable[[Descriptor], TextLimits | None]

# Parsing this much takes at most 2 ms, and so does finding a fault in that much.
_PARSED_AT_ONCE = 64 * 1024
_SEARCHED_AT_ONCE = 1024

# No message starts with these bytes: a protobuf tag has no wire type 7.
_GZIP = b"\x1f\x8b"
_GZIP_WINDOW = 16 + zlib.MAX_WBITS

# gRPC passes compressed messages on as they are, and refuses all compressions but gzip.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.per_message_decompression", 0),
    ("grpc.compression_enabled_algorithms_bitset", 0b101),
)


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """The limits of parsing one request. `fields` counts as `count_fields` does."""

    message_bytes: int
    fields: int
    accepts_gzip: bool = False


class MalformedRequest:
    """Stands for a request that could not be parsed, until `refuse_malformed` raises its error."""

    __slots__ = ("error",)

    def __init__(self, error: BatonError) -> None:
        self.error = error


def _was_read() -> None:
    """The bytes of the request are gone."""
    raise RuntimeError("a request is read once")


class _Unread:
    """A request that takes long enough to parse that a thread does it; its bytes count until then."""

    __slots__ = ("hold", "read")

    def __init__(self, read: Callable[[], Any]) -> None:
        self.read = read
        self.hold = claim_hold()


class Reader:
    """Parses the requests of one server; the large ones in `threads`, which the caller owns."""

    def __init__(self, limits: ReadLimits, threads: ThreadPoolExecutor, texts: TextLimitsOf | None = None) -> None:
        self._limits = limits
        self._threads = threads
        self._texts = texts

    def deserializer(self, given: Deserializer | None) -> Deserializer | None:
        """Replaces a message's `FromString`; returns any other deserializer unchanged.

        It returns the message, or an object that `read` turns into a message or a MalformedRequest.
        """
        message = getattr(given, "__self__", None)
        if given is None or not (isinstance(message, type) and issubclass(message, Message)):
            return given
        descriptor: Any = message.DESCRIPTOR

        def deserialize(wire: bytes | bytearray) -> Any:
            record_size(len(wire))
            if wire.startswith(_GZIP) or len(wire) > _PARSED_AT_ONCE:
                return _Unread(lambda: self._read(given, descriptor, wire))
            try:
                return given(wire)
            except DecodeError:
                if len(wire) > _SEARCHED_AT_ONCE:
                    return _Unread(lambda: _fault(descriptor, wire))
                return _fault(descriptor, wire)

        return deserialize

    def read(self, _method: str, behaviour: Behaviour) -> Behaviour:
        """Parses in a thread what the deserializer left to it. Must wrap everything that uses the request."""

        async def reading(request: Any, context: Context) -> Any:
            if isinstance(request, Message):
                pass  # nearly all are
            elif isinstance(request, _Unread):
                request = await self._resolve(request)
            elif hasattr(request, "__aiter__"):
                request = self._each(request)
            try:
                return await behaviour(request, context)
            except aio.AbortError as error:
                # grpc.aio keeps it with the context, to which its frames refer, of which this is the last one.
                del request, context
                raise error.with_traceback(None) from error.__cause__

        return reading

    async def _each(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """The messages of a stream. Raises the error of the first that cannot be parsed."""
        async for each in requests:
            request = await self._resolve(each)
            if isinstance(request, MalformedRequest):
                raise request.error
            yield request

    async def _resolve(self, request: Any) -> Any:
        if not isinstance(request, _Unread):
            return request
        # Who has called still has the request, for as long as the call runs, and is not to keep its bytes.
        read, request.read = request.read, _was_read
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, read)
        finally:
            if request.hold is not None:
                request.hold.release()

    def _read(self, parse: Deserializer, descriptor: Descriptor, wire: bytes | bytearray) -> Any:
        try:
            plain = self._decompressed(wire) if wire.startswith(_GZIP) else wire
            texts = self._texts(descriptor) if self._texts else None
            if not count_fields(descriptor, plain, self._limits.fields, texts):
                return _fault(descriptor, plain)
            return parse(plain)
        except BatonError as error:
            return MalformedRequest(error)
        except DecodeError:
            return _fault(descriptor, plain)
        finally:
            if isinstance(wire, bytearray):
                forget_content(wire)

    def _decompressed(self, wire: bytes | bytearray) -> bytes:
        if not self._limits.accepts_gzip:
            raise Unsupported("compressed requests are not accepted here; send the request without compression")
        most = self._limits.message_bytes
        inflater = zlib.decompressobj(_GZIP_WINDOW)
        try:
            plain = inflater.decompress(wire, most + 1)
        except zlib.error:
            raise InvalidRequest.of("request", "is not valid gzip") from None
        if len(plain) > most:
            raise InvalidRequest.of("request", f"is larger than {most} bytes when it is decompressed")
        if not inflater.eof:
            raise InvalidRequest.of("request", "is truncated gzip")
        return plain


def _fault(descriptor: Descriptor, wire: bytes | bytearray) -> MalformedRequest:
    """INVALID_ARGUMENT, where gRPC itself would answer INTERNAL."""
    fault = find_fault(descriptor, wire)
    return MalformedRequest(InvalidRequest.of(fault.field, fault.description))


def refuse_malformed(_method: str, behaviour: Behaviour) -> Behaviour:
    """Raises the error of a MalformedRequest; every other request passes."""

    # No coroutine: it would only wait for the one within.
    def checked(request: Any, context: Context) -> Awaitable[Any]:
        if isinstance(request, MalformedRequest):
            raise request.error
        return behaviour(request, context)

    return checked
