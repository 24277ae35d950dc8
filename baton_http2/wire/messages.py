"""gRPC's messages in a stream's bytes: cut out of them, and compressed or not."""

import asyncio
import ctypes
import zlib
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from grpc import StatusCode

from baton_http2.wire.frames import PREFIX

ACCEPTED_ENCODINGS: Final = "identity,deflate,gzip"
_WINDOW_BITS: Final = {"gzip": 31, "deflate": 15}
_PREFIX_BYTES: Final = 5
# What a message takes here besides its bytes.
_MESSAGE_OVERHEAD: Final = 128
# More is compressed, decompressed and joined in a thread: it would hold the event loop for milliseconds.
INLINE_BYTES: Final = 65_536
_LARGE_BYTES: Final = 1024 * 1024
# What is decompressed before it is counted.
_STEP_BYTES: Final = 4 * 1024 * 1024
# What one call of zlib reads: it copies what it has not read yet.
_INPUT_BYTES: Final = 65_536


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

    @classmethod
    def no_memory(cls) -> "MessageFailure":
        """Requests that are being received use all the memory for them, of this peer or of all."""
        return cls(StatusCode.RESOURCE_EXHAUSTED, "the memory for unread requests is used up; try again")

    @classmethod
    def too_slow(cls) -> "MessageFailure":
        """The peer does not send the message that it has begun."""
        return cls(StatusCode.DEADLINE_EXCEEDED, "the request's message came too slowly")


class Received(NamedTuple):
    """A message as it came."""

    is_compressed: bool
    payload: bytes | bytearray

    @property
    def size(self) -> int:
        """The bytes that it takes here."""
        return len(self.payload) + _MESSAGE_OVERHEAD


# Takes a message at once: whether it is compressed, and its bytes.
PushReceived = Callable[[bool, bytes], None]


class Inbox:
    """The messages of one call that have come and were not read yet; with `push`, at most a part of one."""

    __slots__ = (
        "_filled",
        "_large",
        "_max_bytes",
        "_messages",
        "_partial",
        "_push",
        "_reader",
        "_unread",
        "count",
        "is_ended",
    )

    def __init__(self, max_bytes: int, push: PushReceived | None = None) -> None:
        self._max_bytes = max_bytes
        self._push = push
        self._partial = bytearray()
        # Of a large message that has begun: its bytes, of which the first have come; then `_partial` is its prefix.
        self._large: bytearray | None = None
        self._filled = 0
        self._messages: deque[Received] = deque()
        self._unread = 0
        self._reader: asyncio.Future[None] | None = None
        self.count = 0  # of the messages that have come as a whole
        self.is_ended = False

    @property
    def size(self) -> int:
        """The bytes that are held here."""
        return self._unread + self.partial_size

    @property
    def is_partial(self) -> bool:
        """True if a message has begun and not ended."""
        return bool(self._partial)

    @property
    def partial_size(self) -> int:
        """The received bytes of a message that has begun, with its prefix."""
        return len(self._partial) + self._filled

    @property
    def partial_length(self) -> int:
        """The length of the whole message; 0 if it is not known yet."""
        return _PREFIX_BYTES + PREFIX.unpack_from(self._partial)[1] if len(self._partial) >= _PREFIX_BYTES else 0

    @property
    def wants_more(self) -> bool:
        """True if no whole message waits to be read: what is here of the next one must not keep its rest away."""
        return not self._messages

    def feed(self, chunk: bytes) -> int:
        """Adds bytes of the stream; how much more is held here now.

        Raises MessageFailure for a message over the limit.
        """
        if not self._partial and len(chunk) >= _PREFIX_BYTES:
            flag, length = PREFIX.unpack_from(chunk)
            if length + _PREFIX_BYTES == len(chunk) and length <= self._max_bytes:
                self._add(flag, chunk[_PREFIX_BYTES:])
                return 0 if self._push is not None else length + _MESSAGE_OVERHEAD
        before = self.size
        rest = chunk if self._large is None else self._fill(self._large, chunk)
        if rest:
            self._partial += rest
            self._cut()
        return self.size - before

    def make_room(self) -> None:
        """Has the rest of a large message that has begun written in its place as it comes."""
        if self._large is not None:
            return
        self._large = _empty_buffer(self.partial_length - _PREFIX_BYTES)
        came = bytes(self._partial[_PREFIX_BYTES:])
        del self._partial[_PREFIX_BYTES:]
        self._fill(self._large, came)

    def _fill(self, large: bytearray, chunk: bytes) -> bytes:
        """Adds bytes to a large message. Returns those that follow it."""
        start, size = self._filled, min(len(chunk), len(large) - self._filled)
        large[start : start + size] = chunk[:size]
        self._filled += size
        if self._filled == len(large):
            flag = self._partial[0]
            self._partial.clear()
            self._large, self._filled = None, 0
            self._add(flag, large)
        return chunk[size:]

    def end(self) -> None:
        """No more will come. Raises MessageFailure in the midst of a message."""
        if self._partial:
            raise MessageFailure(StatusCode.INTERNAL, "the stream ends within a message")
        self.is_ended = True
        self._wake()

    def clear(self) -> None:
        """Forgets everything: the call is over."""
        self._partial.clear()
        self._large, self._filled = None, 0
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
            with memoryview(partial) as view:
                payload = bytes(view[at + _PREFIX_BYTES : end])
            self._add(flag, payload)
            at = end
        del partial[:at]

    def _add(self, flag: int, payload: bytes | bytearray) -> None:
        if flag > 1:
            raise MessageFailure(StatusCode.INTERNAL, f"a message has the flags {flag}")
        self.count += 1
        if self._push is not None:
            self._push(flag == 1, bytes(payload))
            return
        self._messages.append(Received(flag == 1, payload))
        self._unread += len(payload) + _MESSAGE_OVERHEAD
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _empty_buffer(size: int) -> bytearray:
    """A buffer of so many bytes that have no value yet, for the caller to write each of them before it reads any.

    Its memory is the system's until it is written. A buffer that grows would be copied from the heap once it is larger
    than a gap there, and one of zeros written at once: 64 MiB hold the event loop for 10 to 40 ms.
    """
    buffer = bytearray()
    ctypes.pythonapi.PyByteArray_Resize(ctypes.py_object(buffer), ctypes.c_ssize_t(size))
    return buffer


async def whole(message: Received) -> bytes:
    """The bytes of a message that is not compressed."""
    if isinstance(message.payload, bytes):
        return message.payload
    return await asyncio.to_thread(_moved, message.payload)


def _moved(payload: bytearray) -> bytes:
    # Piece by piece: join() lets the event loop run meanwhile only if it joins nothing but bytes.
    with memoryview(payload) as view:
        pieces = [bytes(view[at : at + INLINE_BYTES]) for at in range(0, len(view), INLINE_BYTES)]
    payload.clear()
    return b"".join(pieces)


async def decompress(message: Received, encoding: str, max_bytes: int, count: Callable[[int], bool]) -> bytes:
    """The content of a compressed message, of which `count` says for each piece whether there is room for it.

    Raises MessageFailure for another encoding, for what is not in it, and for what is too large.
    """
    if encoding not in _WINDOW_BITS:
        if encoding == "identity":
            raise MessageFailure(StatusCode.INTERNAL, "a message is compressed, and grpc-encoding does not say how")
        raise MessageFailure(
            StatusCode.UNIMPLEMENTED,
            f"grpc-encoding: unknown encoding {encoding!r}; expected one of {ACCEPTED_ENCODINGS}",
        )
    inflating = _Inflating(message.payload, _WINDOW_BITS[encoding])
    pieces: list[bytes] = []
    size = 0
    try:
        while piece := inflating.next(INLINE_BYTES) if not pieces else await asyncio.to_thread(inflating.next):
            pieces.append(piece)
            size += len(piece)
            if size > max_bytes:
                raise MessageFailure(
                    StatusCode.RESOURCE_EXHAUSTED,
                    f"Received message larger than max (over {max_bytes} when decompressed)",
                )
            if not count(len(piece)):
                raise MessageFailure.no_memory()
    except zlib.error:
        raise MessageFailure(StatusCode.INTERNAL, f"a message is not in {encoding}") from None
    if not inflating.is_whole:
        raise MessageFailure(StatusCode.INTERNAL, f"a message is not in {encoding}")
    return b"".join(pieces) if size <= _LARGE_BYTES else await asyncio.to_thread(b"".join, pieces)


class _Inflating:
    """A compressed message that is decompressed piece by piece."""

    def __init__(self, payload: bytes | bytearray, window_bits: int) -> None:
        self._engine = zlib.decompressobj(window_bits)
        self._payload = memoryview(payload)
        self._at = 0

    @property
    def is_whole(self) -> bool:
        """True if its end has come."""
        return self._engine.eof

    def next(self, most: int = _STEP_BYTES) -> bytes:
        """So many bytes at most; none after the last."""
        out = bytearray()
        while len(out) < most and not self._engine.eof:
            source: bytes | memoryview = self._engine.unconsumed_tail
            if not source:
                source = self._payload[self._at : self._at + _INPUT_BYTES]
                self._at += len(source)
            got = self._engine.decompress(source, most - len(out))
            if not got and not source:
                break
            out += got
        return bytes(out)


async def compress(content: bytes, encoding: str) -> bytes:
    """The content in gzip or deflate."""
    if len(content) <= INLINE_BYTES:
        return _compress(content, encoding)
    return await asyncio.to_thread(_compress, content, encoding)


def _compress(content: bytes, encoding: str) -> bytes:
    engine = zlib.compressobj(wbits=_WINDOW_BITS[encoding])
    return engine.compress(content) + engine.flush()
