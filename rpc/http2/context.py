"""What a servicer and the interceptors see of a call: grpc.aio's ServicerContext, on a stream of our own."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import grpc
from grpc import StatusCode, aio

from rpc.http2.room import wait_for_room
from rpc.http2.security import peer_identity_key
from rpc.http2.stream import Stream
from rpc.http2.wire.hpack import literal
from rpc.http2.wire.messages import ACCEPTED_ENCODINGS, compress
from rpc.http2.wire.metadata import Metadata, encode
from rpc.reply import Reply
from runtime.aio import timeout

if TYPE_CHECKING:
    from rpc.http2.call import Call, Method

Pairs: TypeAlias = Iterable[tuple[str, "str | bytes"]]

# `:status: 200`, from the static table, and what every answer has.
RESPONSE: Final = (
    b"\x88"
    + literal(b"content-type", b"application/grpc")
    + literal(b"grpc-accept-encoding", ACCEPTED_ENCODINGS.encode())
)
# What grpc.aio gives where a stream has ended.
EOF: Final[Any] = aio.EOF  # type: ignore[attr-defined]  # its stubs do not know it
# A servicer that never waits gives way to others after so many messages.
_MESSAGES_A_TURN: Final = 32
# Before a stream of requests is refused.
_FIRST_MESSAGE_SECONDS: Final = 0.2
_ENCODINGS: Final = {grpc.Compression.Gzip: "gzip", grpc.Compression.Deflate: "deflate"}
_CODES: Final = {code.value[0]: code for code in StatusCode}


class Context(aio.ServicerContext[Any, Any]):
    """The context of one call."""

    def __init__(self, call: "Call", method: "Method") -> None:
        self._call = call
        self._method = method
        self._stream = call.stream
        self._code: StatusCode | int | None = None
        self._details = ""
        self._trailing: Metadata = ()
        self._encoding = ""
        self._is_plain_next = False
        self._is_cancelled = False
        self._turn = -1
        self._written = 0

    # Messages.

    async def read(self) -> Any:
        """The next message of the request; aio.EOF after the last."""
        return await self._call.read(self._method)

    async def write(self, message: Any) -> None:
        """Sends a message; waits first while too much is unread. Raises aio.UsageError once the call is over."""
        wire = self._method.serialize(message)
        is_compressed = bool(self._encoding) and not self._is_plain_next
        self._is_plain_next = False
        if is_compressed:
            wire = await compress(wire, self._encoding)
        stream = self._stream
        if not stream.can_take(len(wire)):
            await wait_for_room(stream, len(wire))
        self._send(wire, is_compressed)
        if self._turn != stream.turns:
            self._turn, self._written = stream.turns, 0
        self._written += 1
        if self._written >= _MESSAGES_A_TURN:
            await asyncio.sleep(0)

    def reply(self) -> Reply:
        """The way back to the caller. Its wire does not compress."""
        return Reply(self.write, self.set_trailing_metadata, self._open_wire)

    def _open_wire(self) -> Stream:
        if self._call.is_over:
            raise aio.UsageError("the call is over")
        if not self._stream.started:
            self._start(())
        return self._stream

    def _send(self, wire: bytes, is_compressed: bool) -> None:
        self._open_wire().write(wire, int(is_compressed))

    # The answer's beginning and end.

    async def send_initial_metadata(self, initial_metadata: Pairs) -> None:
        """Sends the answer's headers; the first message does so otherwise."""
        if self._stream.started or self._call.is_over:
            raise aio.UsageError("the initial metadata were sent already")
        self._start(initial_metadata)

    async def abort(self, code: StatusCode, details: str = "", trailing_metadata: Pairs = ()) -> Any:
        """Ends the call with this status, and raises aio.AbortError."""
        if self._call.is_over:
            raise aio.UsageError("the call is over")
        if code is StatusCode.OK:
            raise ValueError("abort: a call is not aborted with OK")
        if self._method.takes_stream and not self._stream.received_bytes:
            await self._first_message()
        self._trailing = tuple(trailing_metadata) or self._trailing
        self._call.finish(code, details, self._trailing)
        raise aio.AbortError("Locally aborted.")

    async def _first_message(self) -> None:
        """Waits shortly for the request's first message.

        A write of grpcio's client that meets the end of its call fails with INTERNAL, and the status is lost.
        """
        with suppress(asyncio.TimeoutError):
            async with timeout(_FIRST_MESSAGE_SECONDS):
                await self._stream.inbox.first()

    def finish(self) -> None:
        """Ends the call with what the servicer has said of its end, or OK."""
        code = _CODES[self._code] if isinstance(self._code, int) else self._code
        self._call.finish(code or StatusCode.OK, self._details, self._trailing)

    @property
    def is_ok(self) -> bool:
        """Whether the servicer has said of no failure."""
        return not self._code or self._code is StatusCode.OK

    def note_end(self, code: StatusCode, details: str, *, is_cancelled: bool) -> None:
        """The call is over."""
        self._code, self._details, self._is_cancelled = code, details, is_cancelled

    def set_trailing_metadata(self, trailing_metadata: Pairs) -> None:
        """Goes out with the status."""
        self._trailing = tuple(trailing_metadata)

    def trailing_metadata(self) -> Metadata:  # type: ignore[override]
        """What was set."""
        return self._trailing

    def set_code(self, code: StatusCode | int) -> None:
        """The status's code, if the servicer ends well."""
        self._code = code

    def code(self) -> StatusCode | int | None:  # type: ignore[override]
        """What was set, or what the call has ended with; None before."""
        return self._code

    def set_details(self, details: str) -> None:
        """The status's text."""
        self._details = details

    def details(self) -> str:
        """What was set, or what the call has ended with."""
        return self._details

    def set_compression(self, compression: grpc.Compression) -> None:
        """Compresses the messages if the caller understands it; before the headers are sent."""
        if self._stream.started:
            raise aio.UsageError("compression is chosen before the first message")
        encoding = _ENCODINGS.get(compression, "")
        accepted = [name.strip() for name in self._call.head.accepted_encodings.split(",")]
        self._encoding = encoding if encoding in accepted else ""

    def disable_next_message_compression(self) -> None:
        """The next message is sent as it is."""
        self._is_plain_next = True

    # The call.

    def invocation_metadata(self) -> Metadata:  # type: ignore[override]
        """What the caller sent beside its request."""
        return self._call.head.metadata

    def time_remaining(self) -> float | None:  # type: ignore[override]
        """How long the caller will still wait; None if it set no deadline."""
        deadline = self._call.deadline_at
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Calls back with this context when the call has a status, or its caller has gone."""
        self._call.on_end(lambda: callback(self))

    def cancelled(self) -> bool:
        """Whether the caller has gone."""
        return self._is_cancelled

    def done(self) -> bool:
        """Whether the call is over."""
        return self._call.is_over

    def peer(self) -> str:
        """The caller's address, such as `ipv4:127.0.0.1:50000`."""
        return self._call.peer.peer

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """Who the caller has proven to be."""
        return self._call.peer.auth_context

    def peer_identity_key(self) -> str | None:
        """Under which key of `auth_context` the caller's identities are."""
        return peer_identity_key(self.auth_context())

    def peer_identities(self) -> Sequence[bytes] | None:
        """The caller's identities."""
        key = self.peer_identity_key()
        return None if key is None else self.auth_context()[key]

    def _start(self, metadata: Pairs) -> None:
        encoding = literal(b"grpc-encoding", self._encoding.encode()) if self._encoding else b""
        self._stream.start(RESPONSE + encoding + (encode(metadata) if metadata else b""))


class Requests(AsyncIterator[Any]):
    """The messages of a request that streams."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __anext__(self) -> Any:
        """The next one."""
        message = await self._context.read()
        if message is EOF:
            raise StopAsyncIteration
        return message
