"""Windows of flow control after any order of data, cancellations, ends and updates: both ends count the same.

Everything is in memory, so that bytes are in flight for as long as an example says.
"""

import asyncio
from collections.abc import Callable

import hypothesis
import pytest
from hpack import Encoder
from hyperframe.frame import (
    DataFrame,
    Frame,
    HeadersFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from hypothesis import strategies as st
from support.http2.peer import PREFACE, head, message
from support.http2.pipe import Pipe, failures_of
from support.http2.server import echoing
from support.interpreted import interpreted

import baton_http2.receiver
import baton_http2.server.connection
import baton_http2.stream
from baton_http2.server.connection import Connection
from baton_http2.wire.frames import DEFAULT_WINDOW

# Small enough that they are used up and opened again; a connection's is never smaller than it begins.
STREAM_BYTES, CONNECTION_BYTES = 16_384, 70_000
_CANCEL = 8
# Turns of the loop without a byte, after which nothing is on its way.
_QUIET_TURNS = 20

Act = tuple[str, int, int]
ACTS = st.tuples(
    st.sampled_from(("open", "open", "send", "send", "cancel", "end", "deliver", "deliver", "read", "resize", "turn")),
    st.integers(0, 7),
    st.sampled_from((0, 1, 6, 300, 5_000, 17_000, 40_000)),
)
METHODS = ("bidi", "bidi", "gather", "count", "endless", "hang", "abort_late", "large")


class Client:
    """The other end of a connection of ours: counts by itself what either end may send, 0 being the connection."""

    def __init__(self, connection: Connection) -> None:
        self.ours = connection
        self.pipe = Pipe()
        self.may_send = {0: DEFAULT_WINDOW}
        self.granted = {0: DEFAULT_WINDOW}
        self._encoder = Encoder()
        self._unread: dict[int, int] = {}
        self._open: list[int] = []
        self._next = 1
        self._own, self._peers = DEFAULT_WINDOW, STREAM_BYTES  # initial windows of streams
        self._to_us = PREFACE + SettingsFrame().serialize()
        self._received = b""
        connection.connection_made(self.pipe)
        self._acts: dict[str, Callable[[int, int], object]] = {
            "open": self._begin, "send": self._send, "cancel": self._cancel, "end": self._end,
            "deliver": self.deliver, "read": self._read, "resize": self._resize, "turn": lambda *_: None,
        }  # fmt: skip

    async def act(self, name: str, which: int, size: int) -> None:
        """One thing that a client or its network does."""
        self._acts[name](which, size)
        await asyncio.sleep(0)

    async def settle(self) -> None:
        """Delivers all that is on its way, until nothing is."""
        quiet = 0
        while quiet < _QUIET_TURNS:
            quiet = 0 if self.deliver(0, 2**30) else quiet + 1
            await asyncio.sleep(0)

    def deliver(self, _which: int, size: int) -> bool:
        """So many bytes arrive, in each direction. True if there were any."""
        to_us, self._to_us = self._to_us[:size], self._to_us[size:]
        to_them, self.pipe.written = self.pipe.written[:size], self.pipe.written[size:]
        if to_us:
            self.ours.data_received(to_us)
        self._received += to_them
        while len(self._received) >= 9:
            frame, length = Frame.parse_frame_header(memoryview(self._received[:9]))
            if len(self._received) < 9 + length:
                break
            frame.parse_body(memoryview(self._received[9 : 9 + length]))
            self._received = self._received[9 + length :]
            self._take(frame)
        return bool(to_us or to_them)

    def _take(self, frame: Frame) -> None:
        if isinstance(frame, WindowUpdateFrame) and frame.stream_id in self.may_send:
            self.may_send[frame.stream_id] += frame.window_increment
        elif isinstance(frame, DataFrame):
            for window in {0, frame.stream_id}:
                self.granted[window] -= frame.flow_controlled_length
            self._unread[frame.stream_id] = self._unread.get(frame.stream_id, 0) + frame.flow_controlled_length
        if isinstance(frame, RstStreamFrame) or "END_STREAM" in frame.flags:
            self._forget(frame.stream_id)

    def _put(self, frame: Frame) -> None:
        self._to_us += frame.serialize()

    def _begin(self, which: int, size: int) -> None:
        stream, self._next = self._next, self._next + 2
        method = METHODS[which]
        self.may_send[stream], self.granted[stream] = self._peers, self._own
        self._put(HeadersFrame(stream, self._encoder.encode(head(method)), flags=["END_HEADERS"]))
        self._open.append(stream)
        if method not in ("bidi", "gather"):
            content = str(min(size, 300)).encode() if method in ("count", "large") else bytes(min(size, 5_000))
            self._data(stream, message(content))

    def _send(self, which: int, size: int) -> None:
        if self._open:
            self._data(self._open[which % len(self._open)], message(bytes(size)))

    def _data(self, stream: int, content: bytes) -> None:
        """The bytes that the windows allow: what is cut off is in no message."""
        piece = content[: max(0, min(self.may_send[0], self.may_send[stream], 16_384))]
        if piece:
            self.may_send[0] -= len(piece)
            self.may_send[stream] -= len(piece)
            self._put(DataFrame(stream, piece))

    def _cancel(self, which: int, _size: int) -> None:
        if self._open:
            stream = self._open[which % len(self._open)]
            self._put(RstStreamFrame(stream, _CANCEL))
            self._forget(stream)

    def _end(self, which: int, _size: int) -> None:
        if self._open:
            stream = self._open.pop(which % len(self._open))
            self._put(DataFrame(stream, flags=["END_STREAM"]))

    def _forget(self, stream: int) -> None:
        if stream in self._open:
            self._open.remove(stream)

    def _resize(self, _which: int, size: int) -> None:
        self._put(SettingsFrame(settings={SettingsFrame.INITIAL_WINDOW_SIZE: size}))
        change, self._own = size - self._own, size
        for stream in [one for one in self.granted if one]:
            self.granted[stream] += change

    def _read(self, _which: int, size: int) -> None:
        """The client reads a part of what has come."""
        for stream, unread in self._unread.items():
            part = min(unread, size)
            self._unread[stream] -= part
            for window in (0, stream) if part else ():
                self.granted[window] += part
                self._put(WindowUpdateFrame(window, window_increment=part))

    def check(self) -> None:
        """Both ends have the same windows, and the connection's is no smaller than was promised."""
        assert not self.pipe.is_closed
        assert self.ours.output.window == self.granted[0]
        assert self.ours.receiver._window == self.may_send[0]
        assert CONNECTION_BYTES / 2 <= self.may_send[0] <= CONNECTION_BYTES
        for number, stream in self.ours.streams.items():
            assert stream.window == self.granted[number], number
            assert stream.half_closed or stream.receive_window == self.may_send[number], number


async def converse(acts: list[Act]) -> None:
    failures = failures_of(asyncio.get_running_loop())
    async with echoing() as server:
        client = Client(Connection(server.server.connections))
        await client.settle()
        try:
            for act in acts:
                await client.act(*act)
            await client.settle()
            client.check()
        finally:
            client.ours.connection_lost(None)
    assert failures == []


@interpreted(baton_http2.stream, baton_http2.server.connection, baton_http2.receiver)
@hypothesis.given(acts=st.lists(ACTS, max_size=60))
@hypothesis.settings(max_examples=150, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
def test_both_ends_have_the_same_windows_whatever_was_cancelled_in_flight(acts: list[Act]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (baton_http2.stream, baton_http2.server.connection, baton_http2.receiver):
            patch.setattr(module, "RECEIVE_WINDOW", STREAM_BYTES)
        for module in (baton_http2.server.connection, baton_http2.receiver):
            patch.setattr(module, "CONNECTION_WINDOW", CONNECTION_BYTES)
        asyncio.run(converse(acts))
