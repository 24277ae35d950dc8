"""One call: its task, its deadline, and its end, which always has a status; and answers to what is not a call."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import grpc
import structlog
from grpc import StatusCode, aio

from rpc.http2.context import EOF, RESPONSE, Context, Requests
from rpc.http2.limits import EXCEEDED
from rpc.http2.security import AuthContext
from rpc.http2.stream import Stream
from rpc.http2.wire.hpack import literal
from rpc.http2.wire.messages import INLINE_BYTES, MessageFailure, Received, decompress, whole
from rpc.http2.wire.metadata import OK_STATUS, Metadata, status_fields
from rpc.http2.wire.request import RequestHead
from rpc.input_budget import InputHold, offer_hold
from rpc.interceptors.behaviour import Behaviour, as_coroutine
from rpc.turns import CallTurns
from runtime.aio import ended_with, timeout

log = structlog.get_logger(__name__)

_NOT_COMPRESSED = "compressed requests are not accepted here; send the request without compression"


class CallDetails(grpc.HandlerCallDetails):
    """What an interceptor sees of a call before it has a handler."""

    def __init__(self, method: str, invocation_metadata: Metadata) -> None:
        self.method = method
        self.invocation_metadata = invocation_metadata  # type: ignore[assignment]  # in its stubs without bytes


class Caller:
    """Who begins a call, as far as its headers and its connection say."""

    __slots__ = ("_metadata", "_peer")

    def __init__(self, metadata: Metadata, peer: "CallConnection") -> None:
        self._metadata = metadata
        self._peer = peer

    def invocation_metadata(self) -> Metadata:
        """What the caller sent beside its request."""
        return self._metadata

    def auth_context(self) -> AuthContext:
        """Who the caller has proven to be."""
        return self._peer.auth_context


# Of a method and its caller: what is served instead of the request; None if the call is allowed.
Refuse = Callable[[str, Caller], object | None]


class CallHost(Protocol):
    """The server, as its calls know it."""

    turns: CallTurns
    # Held by the call whose request is decompressed, until that is parsed: one at a time is in memory.
    inflating: asyncio.Lock

    def takes_one_message(self, path: str) -> bool:
        """Whether the method's request is known to be a single message."""

    @property
    def refuse(self) -> "Refuse | None":
        """Decides whether a caller may call a method; None if all may."""

    async def find(self, details: CallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """The handler of a call, wrapped by the interceptors."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Runs a call in a task of its own, with fresh context variables, until the call says `ended`."""

    def ended(self, task: "asyncio.Task[None]") -> None:
        """The task of a call is done."""


class CallConnection(Protocol):
    """The connection, as its calls know it."""

    @property
    def peer(self) -> str:
        """The client's address."""

    @property
    def auth_context(self) -> AuthContext:
        """Who the client has proven to be."""

    def hold_input(self, size: int) -> InputHold:
        """Counts a message that has been read, until it is parsed."""


@dataclass(frozen=True, slots=True)
class Method:
    """A handler, as it is called."""

    behaviour: Behaviour
    deserialize: Callable[[bytes | bytearray], Any]
    serialize: Callable[[Any], bytes]
    takes_stream: bool
    gives_stream: bool


class Call:
    """A call that is answered by a servicer."""

    __slots__ = (
        "_callbacks",
        "_context",
        "_hold",
        "_host",
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

    def __init__(self, host: CallHost, peer: CallConnection, stream: Stream, head: RequestHead) -> None:
        self._host = host
        # What streams may be answered before anything was asked.
        self.waits_for_message = host.takes_one_message(head.path)
        # Before anything is received: a stranger's request uses no memory.
        self._refusal: object | None = None
        if host.refuse is not None and self.waits_for_message:
            self._refusal = host.refuse(head.path, Caller(head.metadata, peer))
            self.waits_for_message = self._refusal is None
            stream.ignores_input = self._refusal is not None
        self._hold: InputHold | None = None
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
            self.deadline_at = time.monotonic() + head.timeout_seconds
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(head.timeout_seconds, self._expire)

    # What the connection says.

    def start(self) -> None:
        """Begins the task, or in a later turn of the loop; not if the call is wrong or over by then."""
        self._host.turns.run(self._begin)

    def _begin(self) -> None:
        if self.is_over or self._task is not None:
            return
        if self.head.fault:
            self.finish(StatusCode.INVALID_ARGUMENT, self.head.fault)
            return
        if self.deadline_at is not None and self.deadline_at <= time.monotonic():
            # Its timer has not had its turn yet.
            self._expire()
            return
        self._task = self._host.spawn(self._run())
        self._task.add_done_callback(self._on_task_end)

    def end(self) -> None:
        """The peer has sent its last; who reads is told by the stream."""

    def fail(self, failure: MessageFailure) -> None:
        """What has come is no message of gRPC's."""
        self.finish(failure.code, failure.details)
        self._cancel()

    def leave(self) -> None:
        """The stream is over without us."""
        if not self.is_over:
            self._note_end(StatusCode.CANCELLED, "", is_cancelled=True)
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
        if code is StatusCode.OK and not details and not metadata:
            block = OK_STATUS
        else:
            block = status_fields(code.value[0], details, metadata)
        self.stream.finish(block if self.stream.started else RESPONSE + block)
        self._note_end(code, details, is_cancelled=False)

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
        hold = self._hold = self.peer.hold_input(received.size)
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
        inflating, limits = self._host.inflating, self.stream.limits.input
        try:
            async with timeout(limits.wait_seconds if limits else None):
                await inflating.acquire()
        except asyncio.TimeoutError:
            EXCEEDED.labels("unread_input").inc()
            raise MessageFailure.no_memory() from None
        hold.on_release(inflating.release)

    def _release_hold(self) -> None:
        if self._hold is not None:
            self._hold.release()
            self._hold = None

    # Its life.

    async def _run(self) -> None:
        try:
            handler = await self._host.find(CallDetails(self.head.path, self.head.metadata))
            if handler is None:
                self.finish(StatusCode.UNIMPLEMENTED, "Method not found!")
                return
            await self._serve(method_of(handler))
        except MessageFailure as failure:
            self.finish(failure.code, failure.details)
        except aio.AbortError:
            if not self.is_over:
                raise
        finally:
            self._release_hold()

    async def _serve(self, method: Method) -> None:
        context = self._context = Context(self, method)
        request: Any = Requests(context)
        if self._refusal is not None:
            request = self._refusal
        elif not method.takes_stream:
            request = await self.read(method)
            if request is EOF:
                raise MessageFailure(StatusCode.UNIMPLEMENTED, "the request has no message")
        response = await method.behaviour(request, context)
        if not method.gives_stream and context.is_ok:
            await context.write(response)
        context.finish()

    def _on_task_end(self, task: "asyncio.Task[None]") -> None:
        self._task = None
        self._host.ended(task)
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

    def _note_end(self, code: StatusCode, details: str, *, is_cancelled: bool) -> None:
        self.is_over = True
        # Without this reference no cycle is left, and the call is freed without the garbage collector.
        context, self._context = self._context, None
        if context is not None:
            context.note_end(code, details, is_cancelled=is_cancelled)
        if self._timer is not None:
            self._timer.cancel()
        callbacks, self._callbacks = self._callbacks, ()
        for callback in callbacks:
            callback()


class Refusal:
    """The answer to what is not a call: another protocol's request, or one whose headers were too large.

    It needs no task.
    """

    waits_for_message = False

    def __init__(self, stream: Stream, head: RequestHead | None) -> None:
        self._stream = stream
        self._head = head
        # Whatever it is, it is not kept.
        stream.ignores_input = True

    def start(self) -> None:
        """Answers at once where nothing more is needed."""
        if self._head is None:
            EXCEEDED.labels("header_lists").inc()
            trailers = status_fields(StatusCode.RESOURCE_EXHAUSTED.value[0], "metadata is too large", ())
            self._stream.finish(RESPONSE + trailers)

    def end(self) -> None:
        """The request is complete."""
        if self._head is not None:
            self._answer(self._head.http_status)

    def fail(self, _failure: MessageFailure) -> None:
        """It is no message, as was to be expected."""
        self.end()

    def leave(self) -> None:
        """Nothing runs."""

    def stop(self, _reason: str) -> None:
        """Nothing runs."""

    def _answer(self, http_status: int) -> None:
        if self._stream.started:
            return
        self._stream.start(literal(b":status", b"%d" % http_status) + literal(b"content-type", b"text/plain"))
        self._stream.write_raw(b"this is a gRPC server\n")
        self._stream.finish(status_fields(StatusCode.UNIMPLEMENTED.value[0], "", ()))


@lru_cache(maxsize=1024)
def method_of(handler: "grpc.RpcMethodHandler[Any, Any]") -> Method:
    """What is called for a handler, made once."""
    plain = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    assert plain is not None
    return Method(
        as_coroutine(plain),
        handler.request_deserializer or bytes,
        handler.response_serializer or bytes,
        handler.request_streaming,
        handler.response_streaming,
    )
