"""The connections of clients: their life, their streams, and the calls that answer them."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar, Final, cast

import structlog

from baton_http2.endpoint import Heads, StreamHandler
from baton_http2.input_budget import InputBudget, Reservation
from baton_http2.limits import CONNECTIONS, EXCEEDED, Bucket, ServerLimits, exceeded
from baton_http2.liveness import Liveness
from baton_http2.output import Output
from baton_http2.output_budget import OutputBudget
from baton_http2.receiver import CONNECTION_WINDOW, Receiver
from baton_http2.server.call import ServerCall
from baton_http2.server.calls import Calls
from baton_http2.server.peer import ClientPeer
from baton_http2.server.refusal import Refusal
from baton_http2.sockets.descriptors import OpenConnections
from baton_http2.stream import RECEIVE_WINDOW, Stream
from baton_http2.wire import frames as h2
from baton_http2.wire.frames import ConnectionFailure, StreamFailure
from baton_http2.wire.header_blocks import HeaderBlock
from baton_http2.wire.hpack import Field
from baton_http2.wire.messages import MessageFailure
from baton_http2.wire.request import RequestHead, check_trailers, parse

log = structlog.get_logger(__name__)

# Of streams that we have ended early, for what their peer had sent before it knew.
_REMEMBERED_STREAMS: Final = 1024
# How long a closed connection may take to be written out.
_CLOSE_SECONDS: Final = 30.0
_CUT_SECONDS: Final = 1.0


class Connections:
    """The connections of one server, and what they share."""

    def __init__(
        self,
        limits: ServerLimits,
        calls: Calls,
        input: InputBudget,
        output: OutputBudget,
        open_connections: OpenConnections,
    ) -> None:
        self.limits = limits
        self.calls = calls
        self.input = input
        self._output = output
        self.open: dict[Connection, None] = {}
        self._of_process = open_connections
        self._by_peer: Counter[str] = Counter()

    def add(self, connection: "Connection") -> None:
        """Counts a connection that is made. Raises ConnectionFailure if it may not stay."""
        self.open[connection] = None
        self._of_process.add(connection)
        self._output.add(connection)
        self._by_peer[connection.peer.host] += 1
        if self._by_peer[connection.peer.host] > self.limits.http2.max_connections_per_peer:
            raise exceeded("connections", "too many connections of one peer")
        secured = connection.transport.get_extra_info("ssl_object")
        if secured is not None and secured.selected_alpn_protocol() != "h2":
            raise ConnectionFailure(h2.PROTOCOL_ERROR, "ALPN did not choose h2")

    def discard(self, connection: "Connection") -> None:
        """Forgets a connection that is lost."""
        self.open.pop(connection, None)
        self._of_process.discard(connection)
        self._output.discard(connection)
        self._by_peer[connection.peer.host] -= 1
        if not self._by_peer[connection.peer.host]:
            del self._by_peer[connection.peer.host]
        self.calls.changed.set()


class Connection(asyncio.Protocol):
    """A connection of a client. `heard_at` is when it last sent something, in the loop's time."""

    # For mypyc.
    __deletable__: ClassVar = ("heads", "liveness", "receiver")

    transport: asyncio.Transport
    output: Output
    liveness: Liveness
    receiver: Receiver
    peer: ClientPeer

    def __init__(self, host: Connections) -> None:
        self.limits = host.limits
        self.context = host.calls.context
        self.streams: dict[int, Stream] = {}
        self.calls: dict[int, StreamHandler] = {}
        self.heads: Heads = RequestHeads(self)
        self.last_stream_id = 0
        self.unread_input = 0
        self.is_closing = False
        self.heard_at = 0.0
        self._host = host
        self._server_calls = host.calls
        # With what their peers may still have sent on them.
        self._ended_early: dict[int, int] = {}
        # Since when no call runs, in the loop's time.
        self._idle_since = 0.0
        self._refused_streams = Bucket("refused_streams", host.limits.http2.refused_streams)

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Introduces ourselves."""
        CONNECTIONS.inc()
        self.loop = asyncio.get_running_loop()
        # uvloop's are not asyncio's own.
        self.transport = cast("asyncio.Transport", transport)
        self.heard_at = self._idle_since = self.loop.time()
        self.peer = ClientPeer(self.transport, self._host.input)
        self.output = Output(self.loop, self.transport, self.context, self.limits.http2.max_unread_output_bytes)
        self.liveness = Liveness(self)
        self.receiver = Receiver(self, self.liveness, h2.PREFACE)
        try:
            self._host.add(self)
        except ConnectionFailure as failure:
            self.fail(failure)
            return
        own = {
            h2.MAX_CONCURRENT_STREAMS: self.limits.max_streams,
            h2.INITIAL_WINDOW_SIZE: RECEIVE_WINDOW,
            h2.MAX_HEADER_LIST_SIZE: self.limits.http2.max_header_list_bytes,
        }
        self.output.send(h2.settings(own) + h2.window_update(0, CONNECTION_WINDOW - h2.DEFAULT_WINDOW))
        self.liveness.start()

    def connection_lost(self, _error: Exception | None) -> None:
        """Ends what runs."""
        CONNECTIONS.dec()
        self.is_closing = True
        self.liveness.stop()
        self._host.discard(self)
        self._leave_calls()
        # They refer to this connection: only a garbage collection would free what refers to one another.
        self.receiver.close()
        del self.heads, self.liveness, self.receiver

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

    # Streams.

    def require_free_stream(self) -> None:
        """Raises StreamFailure if no more streams are taken, and ConnectionFailure if too many were refused."""
        if self.liveness.refuses_calls:
            self._refused_streams.spend()
            raise StreamFailure(h2.REFUSED_STREAM, "this connection accepts no more calls")
        if len(self.streams) >= self.limits.max_streams:
            self._refused_streams.spend()
            raise StreamFailure(h2.REFUSED_STREAM, "too many streams")
        if self.receiver.cancels.left < 0 and self.receiver.refuses_calls():
            self._remember_early(self.last_stream_id, RECEIVE_WINDOW)
            raise StreamFailure(h2.REFUSED_STREAM, "too many calls are cancelled early")

    def open(self, stream_id: int, window: int, head: RequestHead | None) -> Stream:
        """A new stream, and the call that answers it."""
        stream = Stream(self, stream_id, window, self.limits)
        stream.content_length = head.content_length if head else -1
        stream.opened_at = self.heard_at
        self.streams[stream_id] = stream
        if head is None or head.http_status:
            self.calls[stream_id] = Refusal(stream, head)
        else:
            self.calls[stream_id] = ServerCall(self._server_calls, self.peer, stream, head)
        return stream

    def forget(self, stream: Stream, *, is_early: bool) -> None:
        """The stream is closed; `is_early` if its peer does not know yet."""
        self.streams.pop(stream.id, None)
        self.calls.pop(stream.id, None)
        if is_early:
            self._remember_early(stream.id, stream.receive_window)
        if not self.streams and not self.is_closing:
            self._idle_since = self.heard_at
            self.liveness.record_idle()
            self._server_calls.changed.set()

    def has_ended_early(self, stream_id: int) -> bool:
        """True if we have ended that stream, and its peer may not have known when it sent what comes now."""
        return self._ended_early.get(stream_id, -1) >= 0

    def forget_early(self, stream_id: int) -> bool:
        """The peer has reset a stream: whether we had ended it early, which is not remembered any more."""
        return self._ended_early.pop(stream_id, None) is not None

    def _remember_early(self, stream_id: int, window: int) -> None:
        self._ended_early[stream_id] = window
        if len(self._ended_early) > _REMEMBERED_STREAMS:
            del self._ended_early[next(iter(self._ended_early))]

    def accepts_late_data(self, stream_id: int, size: int, *, is_last: bool) -> bool:
        """True if such DATA may have been sent by a peer that did not know yet that we have ended the stream."""
        window = self._ended_early.get(stream_id, -1)
        if size > window:
            return False
        # Without a window only its reset is remembered.
        self._ended_early[stream_id] = -1 if is_last else window - size
        return True

    def record_goaway(self, last_stream_id: int) -> None:
        """The client opens no more streams and closes the connection itself; it has nothing that we could act on."""

    def account_input(self, change: int) -> None:
        """Adds to the bytes that wait to be read, or subtracts. Raises MessageFailure if they are too many."""
        self.unread_input += change
        fits = self.peer.input.add(change)
        if change > 0 and self.unread_input > self.limits.http2.max_unread_input_bytes:
            EXCEEDED.labels("unread_input").inc()
            raise MessageFailure.too_much_unread()
        if not fits:
            EXCEEDED.labels("unread_input").inc()
            raise MessageFailure.no_memory()

    def reserve(self, stream: Stream, size: int) -> Reservation | None:
        """Counts what is still to come of a large message; None if that is done, and else the stream hears of it."""
        waiting = self.peer.input.reserve(size, lambda is_granted: self._decide(stream, size, is_granted=is_granted))
        if waiting is None:
            self.unread_input += size
        return waiting

    def _decide(self, stream: Stream, size: int, *, is_granted: bool) -> None:
        if is_granted:
            self.unread_input += size
            stream.add_reserved(size)
            return
        EXCEEDED.labels("unread_input").inc()
        call = self.calls.get(stream.id)
        if call is not None:
            call.fail(MessageFailure.no_memory())

    # Its end.

    def fail(self, failure: ConnectionFailure) -> None:
        """Ends the connection with GOAWAY, and what runs on it."""
        if self.is_closing:
            return
        self.is_closing = True
        if failure.budget:
            EXCEEDED.labels(failure.budget).inc()
            log.warning("connection ended", peer=self.peer.address, budget=failure.budget, reason=str(failure))
        self.liveness.stop()
        self._leave_calls()
        last = h2.goaway(self.last_stream_id, failure.code, str(failure))
        # Who has done nothing wrong may need its time to read what was written.
        seconds = _CLOSE_SECONDS if failure.code == h2.NO_ERROR else _CUT_SECONDS
        self.output.close(last, seconds, self.transport.abort)

    def close(self, reason: str = "") -> None:
        """Ends the connection in order; what still runs ends with UNAVAILABLE."""
        for call in tuple(self.calls.values()):
            call.stop(reason)
        self.fail(ConnectionFailure(h2.NO_ERROR, reason))

    def budget_exceeded(self, budget: str, reason: str) -> None:
        """Ends the connection, whose peer went over a limit."""
        self.fail(exceeded(budget, reason))

    def idle_since(self) -> float | None:
        """The loop's time since which no call has run on it; None if one does."""
        return None if self.streams or self.is_closing else self._idle_since

    def close_idle(self) -> None:
        """Ends the connection, whose place others need."""
        EXCEEDED.labels("connections").inc()
        self.close("too many connections, and none has been idle for longer")
        self.loop.call_later(_CUT_SECONDS, self.transport.abort, context=self.context)

    @property
    def unread_bytes(self) -> int:
        """Of answers, what its client has not taken."""
        return self.output.unread_bytes

    @property
    def read_bytes(self) -> int:
        """Taken by its client so far."""
        return self.output.read_bytes

    def end_unread(self) -> None:
        """Ends the calls whose answers wait, or the connection."""
        if not self.is_closing:
            self.liveness.end_unread()

    def _leave_calls(self) -> None:
        calls, streams = tuple(self.calls.values()), tuple(self.streams.values())
        self.calls.clear()
        self.streams.clear()
        for stream in streams:
            stream.abandon()
        for call in calls:
            call.leave()
        self._server_calls.changed.set()


class RequestHeads:
    """The header blocks of one client: the heads of its calls, and trailers, which mean nothing but their end."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._parsed_fields: Sequence[Field] | None = None
        self._parsed_head: RequestHead | None = None

    def begin(self, block: HeaderBlock) -> None:
        """Opens a stream, and makes its call."""
        connection, receiver = self._connection, self._connection.receiver
        connection.last_stream_id = block.stream_id
        connection.require_free_stream()
        if block.fields is None:
            head = None
        elif block.fields is self._parsed_fields:
            # The decoder gives the same list for the same block.
            head = self._parsed_head
        else:
            head = self._parsed_head = parse(block.fields)
            self._parsed_fields = block.fields
        stream = connection.open(block.stream_id, receiver.initial_window, head)
        if not connection.calls[stream.id].waits_for_message:
            receiver.opened.append(stream)
        if block.is_last:
            receiver.feed(stream, b"", 0, is_last=True)

    def go_on(self, stream: Stream, block: HeaderBlock) -> None:
        """Ends the request."""
        if stream.half_closed:
            raise StreamFailure(h2.STREAM_CLOSED, "HEADERS comes after the end of the stream")
        if not block.is_last:
            raise StreamFailure(h2.PROTOCOL_ERROR, "trailers do not end the stream")
        check_trailers(block.fields or ())
        self._connection.receiver.feed(stream, b"", 0, is_last=True)
