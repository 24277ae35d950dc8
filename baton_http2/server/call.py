"""One call: its task, its deadline, its end, which always has a status, and the context that its servicer sees."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import grpc
import structlog
from grpc import StatusCode, aio

from baton_http2.aio import ended_with, timeout
from baton_http2.clock import monotonic, perf_counter
from baton_http2.input_budget import InputHold, offer_hold
from baton_http2.limits import EXCEEDED
from baton_http2.server.calls import Calls, note_read
from baton_http2.server.methods import CallDetails, Caller, Method, method_of
from baton_http2.server.peer import ClientPeer
from baton_http2.server.reply import Reply
from baton_http2.server.servicer_context import CallContext
from baton_http2.stream import Stream
from baton_http2.turns import wait_until_writable
from baton_http2.wire.hpack import literal
from baton_http2.wire.messages import INLINE_BYTES, MessageFailure, Received, compress, decompress, whole
from baton_http2.wire.metadata import OK_STATUS, RESPONSE, Metadata, Pairs, encode, status_fields
from baton_http2.wire.request import RequestHead

log = structlog.get_logger(__name__)

# What grpc.aio gives where a stream has ended.
EOF: Final[Any] = aio.EOF  # type: ignore[attr-defined]  # its stubs do not know it
# A servicer that never waits gives way to others after so many messages.
_MESSAGES_A_TURN: Final = 32
# Before a stream of requests is refused.
_FIRST_MESSAGE_SECONDS: Final = 0.2
_ENCODINGS: Final = {grpc.Compression.Gzip: "gzip", grpc.Compression.Deflate: "deflate"}
_NOT_COMPRESSED = "compressed requests are not accepted here; send the request without compression"


class ServerCall:
    """A call that is answered by a servicer."""

    __slots__ = (
        "_callbacks",
        "_calls",
        "_context",
        "_hold",
        "_read_at",
        "_refusal",
        "_task",
        "_timer",
        "deadline_at",
        "head",
        "is_over",
        "peer",
        "stream",
        "waits_for_message",
    )

    def __init__(self, calls: Calls, peer: ClientPeer, stream: Stream, head: RequestHead) -> None:
        self._calls = calls
        # What streams may be answered before anything was asked.
        self.waits_for_message = calls.expects_one_message(head.path)
        # Before anything is received: a stranger's request uses no memory.
        self._refusal: object | None = None
        if calls.refuse is not None and self.waits_for_message:
            self._refusal = calls.refuse(head.path, Caller(head.metadata, peer))
            self.waits_for_message = self._refusal is None
            stream.ignores_input = self._refusal is not None
        self._hold: InputHold | None = None
        self._read_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._callbacks: tuple[Callable[[], None], ...] = ()
        self._context: Context | None = None
        self.peer = peer
        self.stream = stream
        self.head = head
        self.is_over = False
        self.deadline_at: float | None = None
        if head.timeout_seconds is not None:
            self.deadline_at = monotonic() + head.timeout_seconds
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(head.timeout_seconds, calls.turns.run, self._expire)

    # What the connection says.

    def start(self) -> None:
        """Begins the task, or in a later turn of the loop; not if the call is wrong or over by then."""
        self._read_at = perf_counter()
        self._calls.turns.run(self._begin)

    def _begin(self) -> None:
        if self.is_over or self._task is not None:
            return
        if self.head.fault:
            self.finish(StatusCode.INVALID_ARGUMENT, self.head.fault)
            return
        if self.deadline_at is not None and self.deadline_at <= monotonic():
            # Its timer has not had its turn yet.
            self._expire()
            return
        self._task = self._calls.spawn(self._run())
        self._task.add_done_callback(self._on_task_end)

    def end(self) -> None:
        """The peer has sent its last; who reads is told by the stream."""

    def fail(self, failure: MessageFailure) -> None:
        """Ends the call: the peer sent no message of gRPC's."""
        self.finish(failure.code, failure.details)
        self._cancel()

    def leave(self) -> None:
        """The stream is over without us. What runs ends now, or in a later turn of the loop."""
        if self._task is None:
            self._leave()
        else:
            self._calls.turns.run(self._leave)

    def _leave(self) -> None:
        if not self.is_over:
            self._record_end(StatusCode.CANCELLED, "", is_cancelled=True)
        self._cancel()

    def stop(self, reason: str) -> None:
        """The server ends."""
        self.finish(StatusCode.UNAVAILABLE, reason)
        self._cancel()

    # What the context says.

    def finish(self, code: StatusCode, details: str = "", metadata: Metadata = ()) -> None:
        """Ends the call with a status, after what was written. Raises ValueError for illegal metadata."""
        if self.is_over:
            return
        if code is StatusCode.OK and not details:
            block = OK_STATUS + encode(metadata) if metadata else OK_STATUS
        else:
            block = status_fields(code.value[0], details, metadata)
        self.stream.finish(block if self.stream.started else RESPONSE + block)
        self._record_end(code, details, is_cancelled=False)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Calls back when the call has a status, or its peer has gone; at once, if that is so already."""
        if self.is_over:
            callback()
        else:
            self._callbacks = (*self._callbacks, callback)

    async def read(self, method: Method) -> Any:
        """The next message; aio.EOF after the last. Raises MessageFailure."""
        received = await self.stream.inbox.next()
        if received is None:
            return EOF
        if received.is_compressed or len(received.payload) > INLINE_BYTES:
            return await self._read_large(received, method)
        self.stream.was_read(received)
        return method.deserialize(received.payload)

    async def _read_large(self, received: Received, method: Method) -> Any:
        """A message that counts until it is parsed, with what it becomes."""
        self._release_hold()
        self.stream.was_read(received)
        hold = self._hold = self.peer.input.hold(received.size)
        limits = self.stream.limits
        if not received.is_compressed:
            # A parser reads them as they are: a copy would cost tens of milliseconds, also of what is refused.
            wire = await whole(received) if method.deserialize is bytes else received.payload
        elif not limits.accepts_compression:
            raise MessageFailure(StatusCode.UNIMPLEMENTED, _NOT_COMPRESSED)
        else:
            await self._wait_to_inflate(hold)
            wire = await decompress(received, self.head.encoding, limits.max_message_bytes, hold.grow)
        offer_hold(hold)
        request = method.deserialize(wire)
        offer_hold(None)
        if not hold.is_claimed:
            hold.release()
        return request

    async def _wait_to_inflate(self, hold: InputHold) -> None:
        inflating, limits = self._calls.inflating, self.stream.limits.input
        try:
            async with timeout(limits.wait_seconds if limits else None):
                await inflating.acquire()
        except TimeoutError:
            EXCEEDED.labels("unread_input").inc()
            raise MessageFailure.no_memory() from None
        hold.on_release(inflating.release)

    def _release_hold(self) -> None:
        if self._hold is not None:
            self._hold.release()
            self._hold = None

    # Its life.

    async def _run(self) -> None:
        note_read(self._read_at)
        try:
            handler = await self._calls.find(CallDetails(self.head.path, self.head.metadata))
            if handler is None:
                self.finish(StatusCode.UNIMPLEMENTED, "Method not found!")
                return
            method = method_of(handler)
            context = self._context = Context(self, method)
            response = await method.behaviour(await self._request(method, context), context)
            if not method.gives_stream and context.is_ok:
                await context.write(response)
            context.finish()
        except MessageFailure as failure:
            self.finish(failure.code, failure.details)
        except aio.AbortError:
            if not self.is_over:
                raise
        finally:
            self._release_hold()

    async def _request(self, method: Method, context: "Context") -> Any:
        """The servicer's first argument."""
        if self._refusal is not None:
            return self._refusal
        if method.takes_stream:
            return Requests(context)
        request = await self.read(method)
        if request is EOF:
            raise MessageFailure(StatusCode.UNIMPLEMENTED, "the request has no message")
        return request

    def _on_task_end(self, task: "asyncio.Task[None]") -> None:
        self._task = None
        self._calls.ended(task)
        if not self.is_over and not task.cancelled() and (error := task.exception()) is not None:
            log.error("call failed", method=self.head.path, exc_info=error)
            self.finish(StatusCode.INTERNAL, "internal error")
        if isinstance(ended_with(task), asyncio.CancelledError):
            # By whom is not known: the peer and the deadline leave the call with a status.
            self.finish(StatusCode.CANCELLED, "the call was cancelled")

    def _expire(self) -> None:
        if not self.is_over:
            self.stream.drop_unsent()
            self.finish(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self._cancel()

    def _cancel(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()

    def _record_end(self, code: StatusCode, details: str, *, is_cancelled: bool) -> None:
        self.is_over = True
        # Without this reference no cycle is left, and the call is freed without the garbage collector.
        context, self._context = self._context, None
        if context is not None:
            context.record_end(code, details, is_cancelled=is_cancelled)
        if self._timer is not None:
            self._timer.cancel()
        callbacks, self._callbacks = self._callbacks, ()
        for callback in callbacks:
            callback()


class Context(CallContext):
    """The context of one call, as its servicer and the interceptors see it."""

    def __init__(self, call: ServerCall, method: Method) -> None:
        super().__init__(call.head.metadata, call.deadline_at)
        self._call = call
        self._method = method
        self._stream = call.stream
        self._encoding = ""
        self._is_plain_next = False
        self._turn = -1
        self._written = 0

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
        if not stream.is_writable(len(wire)):
            await wait_until_writable(stream, len(wire))
        self._open_wire().write(wire, int(is_compressed))
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
        with suppress(TimeoutError):
            async with timeout(_FIRST_MESSAGE_SECONDS):
                await self._stream.inbox.first()

    def finish(self) -> None:
        """Ends the call with what the servicer has said of its end, or OK."""
        self._call.finish(self.final_code, self._details, self._trailing)

    def record_end(self, code: StatusCode, details: str, *, is_cancelled: bool) -> None:
        """The call is over."""
        self._code, self._details, self._is_cancelled = code, details, is_cancelled

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

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Calls back with this context when the call has a status, or its caller has gone."""
        self._call.on_end(lambda: callback(self))

    def done(self) -> bool:
        """True if the call is over."""
        return self._call.is_over

    def peer(self) -> str:
        """The caller's address, such as `ipv4:127.0.0.1:50000`."""
        return self._call.peer.address

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """The identities that the caller has proven, by property."""
        return self._call.peer.auth_context

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
