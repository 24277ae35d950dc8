"""The connection of one call, from the client's side."""

import asyncio
from contextvars import copy_context
from typing import ClassVar, Final, cast

import structlog

from baton_http2.client.call import ClientCall, PushMessage
from baton_http2.endpoint import Heads, StreamHandler
from baton_http2.limits import EXCEEDED, ServerLimits, exceeded
from baton_http2.liveness import Liveness
from baton_http2.output import Output
from baton_http2.receiver import CONNECTION_WINDOW, Receiver
from baton_http2.stream import RECEIVE_WINDOW, Stream
from baton_http2.wire import frames as h2
from baton_http2.wire.frames import ConnectionFailure, StreamFailure
from baton_http2.wire.header_blocks import HeaderBlock
from baton_http2.wire.request import check_trailers

log = structlog.get_logger(__name__)

_STREAM_ID: Final = 1
# A worker's message has a token in each few bytes, and what comes of one takes a router 10 us: 1 KiB in a turn.
_BYTES_A_FRAME: Final = 1
# How long a closed connection may take to be written out.
_CLOSE_SECONDS: Final = 1.0


class ClientConnection(asyncio.Protocol):
    """A connection to a server, for one call that begins at once: `head` is its header block.

    `call` is there once the transport is, and ends with the connection; `closed` has a result when that is gone.
    """

    loop: asyncio.AbstractEventLoop
    # For mypyc.
    __deletable__: ClassVar = ("call", "heads", "liveness", "receiver")

    transport: asyncio.Transport
    output: Output
    liveness: Liveness
    receiver: Receiver
    call: ClientCall

    def __init__(self, head: bytes, push: PushMessage, limits: ServerLimits) -> None:
        self.limits = limits
        self.context = copy_context()
        self.heads: Heads = ResponseHeads(self)
        self.streams: dict[int, Stream] = {}
        self.calls: dict[int, StreamHandler] = {}
        self.last_stream_id = _STREAM_ID
        self.is_closing = False
        self.heard_at = 0.0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._head = head
        self._push = push

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Introduces ourselves, and begins the call."""
        self.loop = asyncio.get_running_loop()
        # uvloop's are not asyncio's own.
        self.transport = cast("asyncio.Transport", transport)
        self.heard_at = self.loop.time()
        self.output = Output(self.loop, self.transport, self.context, self.limits.http2.max_unread_output_bytes)
        self.liveness = Liveness(self)
        self.receiver = Receiver(self, self.liveness, bytes_a_frame=_BYTES_A_FRAME)
        own = {
            h2.ENABLE_PUSH: 0,
            h2.INITIAL_WINDOW_SIZE: RECEIVE_WINDOW,
            h2.MAX_HEADER_LIST_SIZE: self.limits.http2.max_header_list_bytes,
        }
        window = h2.window_update(0, CONNECTION_WINDOW - h2.DEFAULT_WINDOW)
        self.output.send(h2.PREFACE + h2.settings(own) + window)
        self._begin_call()
        self.liveness.start()

    def _begin_call(self) -> None:
        stream = Stream(self, _STREAM_ID, h2.DEFAULT_WINDOW, self.limits)
        self.streams[_STREAM_ID] = stream
        self.calls[_STREAM_ID] = self.call = ClientCall(stream, self._push)
        stream.start(self._head)

    def connection_lost(self, error: Exception | None) -> None:
        """Ends the call."""
        self.is_closing = True
        self.liveness.stop()
        # Nothing can be sent any more.
        for stream in self.streams.values():
            stream.abandon()
        self.call.stop(f"the connection was lost: {error}" if error else "the connection was lost")
        # They refer to this connection: only a garbage collection would free what refers to one another.
        self.receiver.close()
        self.streams.clear()
        self.calls.clear()
        del self.heads, self.liveness, self.receiver
        if not self.closed.done():
            self.closed.set_result(None)

    def pause_writing(self) -> None:
        """The transport holds enough for now."""
        self.output.pause()

    def resume_writing(self) -> None:
        """The transport can take more."""
        self.output.resume()

    def data_received(self, data: bytes) -> None:
        """Reads what came."""
        if not self.is_closing:
            self.heard_at = self.loop.time()
            self.receiver.receive(data)

    # What its parts say.

    def forget(self, stream: Stream, *, is_early: bool) -> None:
        """The stream is closed."""
        del is_early
        self.streams.pop(stream.id, None)
        self.calls.pop(stream.id, None)

    def has_ended_early(self, stream_id: int) -> bool:
        """The only stream may end at any time, and its peer may not have known when it sent what comes now."""
        return stream_id == _STREAM_ID

    def forget_early(self, stream_id: int) -> bool:
        """It is remembered: a server has no reason to reset the one stream twice."""
        del stream_id
        return False

    def accepts_late_data(self, stream_id: int, size: int, *, is_last: bool) -> bool:
        """The same; the connection ends with its only stream, and so does what is counted of it."""
        del size, is_last
        return stream_id == _STREAM_ID

    def account_input(self, change: int) -> None:
        """Messages are taken as they come: what waits is at most one that has not come as a whole."""

    def reserve(self, stream: Stream, size: int) -> None:
        """The same: servers are workers, and there is one message at a time."""

    def record_goaway(self, last_stream_id: int) -> None:
        """The server ends the connection; the call goes on, if the server has seen it."""
        if last_stream_id < _STREAM_ID:
            self.close("the server goes away, and has not answered the call")

    # Its end.

    @property
    def _peer(self) -> str:
        name = self.transport.get_extra_info("peername")
        return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "unknown"

    def fail(self, failure: ConnectionFailure) -> None:
        """Ends the connection with GOAWAY, and the call."""
        if self.is_closing:
            return
        if failure.budget:
            EXCEEDED.labels(failure.budget).inc()
            log.warning("connection ended", peer=self._peer, budget=failure.budget, reason=str(failure))
        self.call.stop(str(failure))
        self.is_closing = True
        self.liveness.stop()
        self.output.close(h2.goaway(0, failure.code, str(failure)), _CLOSE_SECONDS, self.transport.abort)

    def close(self, reason: str = "") -> None:
        """Ends the connection in order; the call ends with UNAVAILABLE, if it runs."""
        self.fail(ConnectionFailure(h2.NO_ERROR, reason))

    def budget_exceeded(self, budget: str, reason: str) -> None:
        """Ends the connection, whose peer went over a limit."""
        self.fail(exceeded(budget, reason))


class ResponseHeads:
    """The header blocks of a server: they all answer the one call."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    def begin(self, block: HeaderBlock) -> None:
        """Is never right: no other stream was opened."""
        raise ConnectionFailure(h2.PROTOCOL_ERROR, f"HEADERS is on stream {block.stream_id}, which was not opened")

    def go_on(self, stream: Stream, block: HeaderBlock) -> None:
        """The answer's head, or its trailers."""
        if stream.half_closed:
            raise StreamFailure(h2.STREAM_CLOSED, "HEADERS comes after the end of the stream")
        if block.fields is None:
            raise StreamFailure(h2.ENHANCE_YOUR_CALM, "the answer's metadata are too large")
        check_trailers([field for field in block.fields if field[0] != b":status"])
        self._connection.call.receive_fields(block.fields, is_last=block.is_last)
        if block.is_last and not stream.closed:
            self._connection.receiver.feed(stream, b"", 0, is_last=True)
