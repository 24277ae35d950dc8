"""A connection that the calls of one channel share, as grpcio's do: the product's client connection, with many streams.

A connection on which a call has reached its deadline gets no further calls, so that one that is half-open does not keep
a channel from its peer until keepalive finds out.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from baton_http2.aio import timeout
from baton_http2.client.call import ClientCall, PushMessage, Status
from baton_http2.client.connection import ClientConnection, ResponseHeads
from baton_http2.client.dialing import DEFAULT_LIMITS, ConnectFailed
from baton_http2.stream import Stream
from baton_http2.wire.frames import REFUSED_STREAM, StreamFailure
from baton_http2.wire.header_blocks import HeaderBlock
from simulation.loop import NODE

_CONNECT_SECONDS = 10.0


class SharedCall(ClientCall):
    """One call of several. `has_sent_all` says that its request has ended."""

    has_sent_all = False

    def _end(self, status: Status, code: int) -> None:
        if self.has_sent_all and self._stream.half_closed:
            # Both sides have ended it: there is nothing to reset.
            self._stream.close()
        super()._end(status, code)


class _Calls:
    """All calls of a connection, in the place of its only one."""

    def __init__(self, connection: "SharedConnection") -> None:
        self._connection = connection

    def stop(self, reason: str) -> None:
        """The connection ends."""
        for call in tuple(self._connection.calls.values()):
            call.stop(reason)


class _Heads(ResponseHeads):
    def go_on(self, stream: Stream, block: HeaderBlock) -> None:
        connection = self._connection
        call = connection.calls[stream.id]
        assert isinstance(call, ClientCall)
        if stream.half_closed or block.fields is None:
            raise StreamFailure(REFUSED_STREAM, "HEADERS that no server of ours sends")
        call.receive_fields(block.fields, is_last=block.is_last)
        if block.is_last and not stream.closed:
            connection.receiver.feed(stream, b"", 0, is_last=True)


class SharedConnection(ClientConnection):
    """A connection to a server, for calls that begin at any time."""

    def __init__(self) -> None:
        super().__init__(b"", _drop, DEFAULT_LIMITS)
        self.heads = _Heads(self)
        self.call = _Calls(self)  # type: ignore[assignment]  # of which its parent uses `stop`
        self.last_stream_id = -1
        self.is_leaving = False  # it gets no further calls, and ends with those that it has

    def _begin_call(self) -> None:
        """None begins with the connection."""

    def begin(self, head: bytes, push: PushMessage) -> SharedCall:
        """A call; `head` is its header block."""
        self.last_stream_id += 2
        stream = Stream(self, self.last_stream_id, self.receiver.initial_window, self.limits)
        call = SharedCall(stream, push)
        self.streams[stream.id], self.calls[stream.id] = stream, call
        stream.start(head)
        return call

    def leave(self) -> None:
        """Takes no further calls."""
        self.is_leaving = True
        if not self.streams:
            self.close()

    def forget(self, stream: Stream, *, is_early: bool) -> None:
        super().forget(stream, is_early=is_early)
        if self.is_leaving and not self.streams:
            self.close()

    def record_goaway(self, last_stream_id: int) -> None:
        for number, call in tuple(self.calls.items()):
            if number > last_stream_id:
                call.stop("the server goes away, and has not answered the call")
        self.leave()

    def has_ended_early(self, stream_id: int) -> bool:
        return stream_id <= self.last_stream_id

    def forget_early(self, stream_id: int) -> bool:
        return stream_id <= self.last_stream_id

    def accepts_late_data(self, stream_id: int, size: int, *, is_last: bool) -> bool:
        del size, is_last
        return stream_id <= self.last_stream_id


class Connecting:
    """The connection of a channel to `address`, made for the first call and again after each loss."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection: SharedConnection | None = None
        self._dialing: asyncio.Task[SharedConnection] | None = None

    @asynccontextmanager
    async def open_call(self, head: bytes, push: PushMessage) -> AsyncGenerator[SharedCall, None]:
        """A call, which leaving the context cancels. Raises ConnectFailed if the peer cannot be reached."""
        connection = await self._connected()
        call = connection.begin(head, push)
        try:
            yield call
        finally:
            call.cancel()
            call.forget()

    def leave(self) -> None:
        """Uses another connection from now on."""
        if self._connection is not None:
            self._connection.leave()

    def close(self) -> None:
        """Ends the connection."""
        if self._dialing is not None:
            self._dialing.cancel()
        if self._connection is not None:
            self._connection.close()

    async def _connected(self) -> SharedConnection:
        connection = self._connection
        if connection is not None and not (connection.is_closing or connection.is_leaving):
            return connection
        if self._dialing is None:
            node = NODE.get()
            # Of no request: it outlives the one that it begins with.
            dialing = self._dialing = asyncio.get_running_loop().create_task(
                self._dial(), context=node.context() if node else None
            )
            dialing.add_done_callback(self._dialed)
        connection = await asyncio.shield(self._dialing)
        if connection.is_closing:
            raise ConnectFailed(f"cannot connect to {self._address}: the connection was lost")
        return connection

    def _dialed(self, dialing: "asyncio.Task[SharedConnection]") -> None:
        self._dialing = None
        if not dialing.cancelled() and dialing.exception() is None:
            self._connection = dialing.result()

    async def _dial(self) -> SharedConnection:
        host, _, port = self._address.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            async with timeout(_CONNECT_SECONDS):
                _, connection = await loop.create_connection(SharedConnection, host, int(port))
        except OSError as error:
            raise ConnectFailed(f"cannot connect to {self._address}: {error}") from error
        return connection


def _drop(message: bytes) -> None:
    """There is no call to push it to."""
