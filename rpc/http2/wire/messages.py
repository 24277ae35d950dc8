"""gRPC's messages in a stream's bytes: cut out of them, and compressed or not."""

import asyncio
import zlib
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from grpc import StatusCode

from rpc.http2.wire.frames import PREFIX

ACCEPTED_ENCODINGS: Final = "identity,deflate,gzip"
_WINDOW_BITS: Final = {"gzip": 31, "deflate": 15}
_PREFIX_BYTES: Final = 5
# What a message takes here besides its bytes.
_MESSAGE_OVERHEAD: Final = 128
# More is compressed and decompressed in a thread: it would hold the event loop for milliseconds.
_INLINE_BYTES: Final = 65_536


class MessageFailure(Exception):
    """A request's bytes are not the messages that gRPC asks for: the status with which the call ends."""

    def __init__(self, code: StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details

    @classmethod
    def too_much_unread(cls) -> "MessageFailure":
        """The peer's requests together wait for more than its connection may keep here."""
        return cls(StatusCode.RESOURCE_EXHAUSTED, "too much of this connection's requests waits to be read")


class Received(NamedTuple):
    """A message as it came."""

    is_compressed: bool
    payload: bytes | bytearray

    @property
    def size(self) -> int:
        """What it takes here."""
        return len(self.payload) + _MESSAGE_OVERHEAD


# Takes a message at once: whether it is compressed, and its bytes.
TakeReceived = Callable[[bool, bytes], None]


class Inbox:
    """The messages of one call that have come and were not read yet; with `take`, at most a part of one."""

    __slots__ = ("_max_bytes", "_messages", "_partial", "_reader", "_take", "_unread", "is_ended")

    def __init__(self, max_bytes: int, take: TakeReceived | None = None) -> None:
        self._max_bytes = max_bytes
        self._take = take
        self._partial = bytearray()
        self._messages: deque[Received] = deque()
        self._unread = 0
        self._reader: asyncio.Future[None] | None = None
        self.is_ended = False

    @property
    def size(self) -> int:
        """The bytes that are held here."""
        return self._unread + len(self._partial)

    @property
    def wants_more(self) -> bool:
        """Whether no whole message waits to be read: what is here of the next one must not keep its rest away."""
        return not self._messages

    def feed(self, chunk: bytes) -> int:
        """Adds bytes of the stream; how much more is held here now.

        Raises MessageFailure for a message over the limit.
        """
        if not self._partial and len(chunk) >= _PREFIX_BYTES:
            flag, length = PREFIX.unpack_from(chunk)
            if length + _PREFIX_BYTES == len(chunk) and length <= self._max_bytes:
                self._add(flag, chunk[_PREFIX_BYTES:])
                return 0 if self._take is not None else length + _MESSAGE_OVERHEAD
        before = self.size
        self._partial += chunk
        self._cut()
        return self.size - before

    def end(self) -> None:
        """No more will come. Raises MessageFailure in the midst of a message."""
        if self._partial:
            raise MessageFailure(StatusCode.INTERNAL, "the request ends within a message")
        self.is_ended = True
        self._wake()

    def clear(self) -> None:
        """Forgets everything: the call is over."""
        self._partial.clear()
        self._messages.clear()
        self._unread = 0
        self.is_ended = True
        self._wake()

    async def next(self) -> Received | None:
        """The next message; None after the last one. Raises RuntimeError if another one is waited for."""
        while not self._messages:
            if self.is_ended:
                return None
            if self._reader is not None and not self._reader.done():
                raise RuntimeError("a request's messages are read one after the other")
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        message = self._messages.popleft()
        self._unread -= message.size
        return message

    async def first(self) -> None:
        """Returns when something of the request has come, or its end; at once if another one waits for that."""
        if not self._messages and not self.is_ended and self._reader is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def _cut(self) -> None:
        partial = self._partial
        at = 0
        while len(partial) - at >= _PREFIX_BYTES:
            flag, length = PREFIX.unpack_from(partial, at)
            if length > self._max_bytes:
                raise MessageFailure(
                    StatusCode.RESOURCE_EXHAUSTED, f"Received message larger than max ({length} vs. {self._max_bytes})"
                )
            end = at + _PREFIX_BYTES + length
            if end > len(partial):
                break
            if length > _INLINE_BYTES and end == len(partial) and self._take is None:
                # As it is: a copy of many megabytes would hold the event loop.
                del partial[: at + _PREFIX_BYTES]
                self._partial = bytearray()
                self._keep(flag, partial)
                return
            with memoryview(partial) as whole:
                payload = bytes(whole[at + _PREFIX_BYTES : end])
            self._add(flag, payload)
            at = end
        del partial[:at]

    def _add(self, flag: int, payload: bytes) -> None:
        if self._take is None or flag > 1:
            self._keep(flag, payload)
        else:
            self._take(flag == 1, payload)

    def _keep(self, flag: int, payload: bytes | bytearray) -> None:
        if flag > 1:
            raise MessageFailure(StatusCode.INTERNAL, f"a message has the flags {flag}")
        self._messages.append(Received(flag == 1, payload))
        self._unread += len(payload) + _MESSAGE_OVERHEAD
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


async def decompress(message: Received, encoding: str, max_bytes: int) -> bytes | bytearray:
    """The message's content. Raises MessageFailure for another encoding, and for what is not in it or too large."""
    if not message.is_compressed:
        return message.payload
    if encoding not in _WINDOW_BITS:
        if encoding == "identity":
            raise MessageFailure(StatusCode.INTERNAL, "a message is compressed, and grpc-encoding does not say how")
        raise MessageFailure(StatusCode.UNIMPLEMENTED, f"grpc-encoding: {encoding!r} is none of {ACCEPTED_ENCODINGS}")
    engine = zlib.decompressobj(_WINDOW_BITS[encoding])
    limit = max_bytes + 1
    try:
        content = engine.decompress(message.payload, min(_INLINE_BYTES, limit))
        if not engine.eof and len(content) < limit:
            content += await asyncio.to_thread(engine.decompress, engine.unconsumed_tail, limit - len(content))
    except zlib.error:
        raise MessageFailure(StatusCode.INTERNAL, f"a message is not in {encoding}") from None
    if len(content) > max_bytes:
        raise MessageFailure(
            StatusCode.RESOURCE_EXHAUSTED, f"Received message larger than max (over {max_bytes} when decompressed)"
        )
    if not engine.eof:
        raise MessageFailure(StatusCode.INTERNAL, f"a message is not in {encoding}")
    return content


async def compress(content: bytes, encoding: str) -> bytes:
    """The content in gzip or deflate."""
    if len(content) <= _INLINE_BYTES:
        return _compress(content, encoding)
    return await asyncio.to_thread(_compress, content, encoding)


def _compress(content: bytes, encoding: str) -> bytes:
    engine = zlib.compressobj(wbits=_WINDOW_BITS[encoding])
    return engine.compress(content) + engine.flush()
