"""The input of a connection: its frames, read and held to the protocol and to the connection's budgets."""

from collections.abc import Callable
from typing import Final

from baton_http2.control import ControlFrames, require_size
from baton_http2.endpoint import Endpoint
from baton_http2.limits import BYTES_PER_CANCEL, Bucket, Rate, exceeded
from baton_http2.liveness import Liveness
from baton_http2.stream import RECEIVE_WINDOW, Stream
from baton_http2.wire import frames as h2
from baton_http2.wire.frames import ConnectionFailure, StreamFailure
from baton_http2.wire.header_blocks import HeaderBlock, HeaderBlocks
from baton_http2.wire.messages import MessageFailure

# What a peer may send on all streams together before we open the window again, which we do at once.
CONNECTION_WINDOW: Final = 8 * RECEIVE_WINDOW
# What is read in one turn of the loop, in frames; the head of a call counts for many, a long one for more.
_TURN_FRAMES: Final = 1024
_FRAMES_A_CALL: Final = 16
_BYTES_A_FRAME: Final = 64
_WHOLE: Final = h2.DEFAULT_MAX_FRAME + 1
# After an answer, its reader may be busy with what comes of it.
_READER_SECONDS: Final = 5.0
# A request of more bytes is cut into frames that are longer, but for its last one.
_SMALL_BYTES: Final = 1024


class Receiver:
    """The receiving side of one connection, whose peer begins with `preface`.

    So many bytes of messages as `bytes_a_frame` take as long as a frame, where what comes of each costs more than to
    read it. `opened` are streams whose calls start once what has come is read.
    """

    def __init__(
        self, connection: Endpoint, liveness: Liveness, preface: bytes = b"", bytes_a_frame: int = _WHOLE
    ) -> None:
        limits, output = connection.limits.http2, connection.output
        self._connection = connection
        self._liveness = liveness
        self._output = output
        self._streams = connection.streams
        self._buffer = b""
        self._is_postponed = False
        self._preface = preface
        self._has_preface = not preface
        self._is_settled = False
        self._window = CONNECTION_WINDOW
        self._bytes_a_frame = bytes_a_frame
        self._blocks = HeaderBlocks(limits)
        self.opened: list[Stream] = []
        # Each answer earns one for its head and one for its trailers: whose calls are answered may cancel as many. And
        # who reads much of some calls may cancel others.
        self.cancels = Bucket(
            "resets", limits.resets, lambda: output.header_blocks + output.sent_bytes / BYTES_PER_CANCEL
        )
        # Of those, and of calls that are refused because of them, so many that the peer is no client.
        resets = limits.resets
        storm = Rate(burst=2 * resets.burst, per_second=resets.per_second * limits.resets_multiple)
        self._storm = Bucket("resets", storm, lambda: output.header_blocks)
        self._reads_until = 0.0
        self._sent_bytes = 0
        # A well-behaved peer makes us reset none, however many of its calls are answered.
        self._faults = Bucket("resets", limits.resets)
        self._premature_seconds = limits.premature_seconds
        self._empty_frames = Bucket("empty_frames", limits.empty_frames)
        self._header_lists = Bucket("header_lists", limits.header_lists)
        self._control = control = ControlFrames(connection, liveness)
        self._handlers: tuple[Callable[[int, int, bytes], None], ...] = (
            self._on_data,
            self._on_headers,
            control.on_priority,
            self._on_rst_stream,
            control.on_settings,
            control.on_push_promise,
            control.on_ping,
            control.on_goaway,
            control.on_window_update,
            self._on_continuation,
        )

    @property
    def initial_window(self) -> int:
        """The peer's for new streams."""
        return self._control.initial_window

    def refuses_calls(self) -> bool:
        """True if so many calls were cancelled early that this one is not begun. Raises ConnectionFailure."""
        if not self.cancels.is_overdrawn:
            return False
        if self._connection.heard_at >= self._reads_until:
            self._require_reader()
        self._storm.spend()
        return True

    def _require_reader(self) -> None:
        """Raises ConnectionFailure for a peer that only cancels: nothing is lost with its connection."""
        heard_at, sent_bytes = self._connection.heard_at, self._output.sent_bytes
        if sent_bytes > self._sent_bytes or any(stream.started for stream in self._streams.values()):
            self._reads_until, self._sent_bytes = heard_at + _READER_SECONDS, sent_bytes
        if heard_at >= self._reads_until:
            raise exceeded("resets", "too many resets")

    def receive(self, data: bytes) -> None:
        """Takes bytes of the connection."""
        self._buffer = self._buffer + data if self._buffer else data
        if not self._is_postponed:
            self._read()

    def close(self) -> None:
        """Reads nothing more: the connection is lost."""
        self._handlers = ()

    def _read(self) -> None:
        try:
            self._buffer = self._parse(self._buffer)
        except ConnectionFailure as failure:
            self._buffer = b""
            self._connection.fail(failure)
        # Only now: a call that was reset within the same bytes costs nothing more.
        if self.opened:
            self._start_calls()

    def _start_calls(self) -> None:
        opened, self.opened = self.opened, []
        for stream in opened:
            call = self._connection.calls.get(stream.id)
            if call is not None:
                call.start()

    def _parse(self, data: bytes) -> bytes:
        """Reads whole frames; what is left of the bytes, which is much if they were too much for one turn."""
        at, end, left = self._skip_preface(data), len(data), _TURN_FRAMES
        bytes_a_frame = self._bytes_a_frame
        while self._has_preface and end - at >= h2.FRAME_HEADER_BYTES and not self._connection.is_closing:
            word, flags, stream_id = h2.HEADER.unpack_from(data, at)
            length, kind = word >> 8, word & 0xFF
            if length > h2.DEFAULT_MAX_FRAME:
                raise ConnectionFailure(h2.FRAME_SIZE_ERROR, "a frame is too large")
            until = at + h2.FRAME_HEADER_BYTES + length
            if until > end:
                break
            if left <= 0:
                self._postpone()
                break
            if kind == h2.HEADERS:
                left -= _FRAMES_A_CALL + length // _BYTES_A_FRAME
            else:
                left -= 1 + length // bytes_a_frame
            self._handle_frame(kind, flags, stream_id & h2.MAX_STREAM_ID, data[at + h2.FRAME_HEADER_BYTES : until])
            at = until
        return data[at:]

    def _skip_preface(self, data: bytes) -> int:
        if self._has_preface:
            return 0
        preface = self._preface
        if data[: len(preface)] != preface[: len(data)]:
            raise ConnectionFailure(h2.PROTOCOL_ERROR, "this is not HTTP/2")
        if len(data) < len(preface):
            return 0
        self._has_preface = True
        return len(preface)

    def _postpone(self) -> None:
        """Lets others have their turn before the rest is read."""
        self._is_postponed = True
        self._connection.transport.pause_reading()
        self._connection.loop.call_soon(self._read_on, context=self._connection.context)

    def _read_on(self) -> None:
        self._is_postponed = False
        if not self._connection.is_closing:
            self._connection.transport.resume_reading()
            self._read()

    def _handle_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if not self._is_settled:
            if kind != h2.SETTINGS or flags & h2.ACK:
                raise ConnectionFailure(h2.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            self._is_settled = self._liveness.is_settled = True
        if self._blocks.has_begun:
            self._blocks.check(kind, stream_id)
        try:
            if kind <= h2.CONTINUATION:
                self._handlers[kind](flags, stream_id, payload)
            else:
                self._empty_frames.spend()
        except StreamFailure as failure:
            self._reset(stream_id, failure.code)

    def _reset(self, stream_id: int, code: int) -> None:
        # What a peer makes us reset costs as much as what it resets itself (CVE-2025-8671).
        # Refused streams have a budget of their own.
        if code != h2.REFUSED_STREAM:
            self._faults.spend()
        call = self._connection.calls.get(stream_id)
        stream = self._streams.get(stream_id)
        if stream is None:
            self._output.send(h2.rst_stream(stream_id, code))
            return
        stream.reset(code)
        if call is not None:
            call.leave()

    # Calls.

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        block = self._blocks.begin(flags, stream_id, payload)
        if block is not None:
            self._on_block(block)

    def _on_continuation(self, flags: int, _stream_id: int, payload: bytes) -> None:
        if not payload:
            self._empty_frames.spend()
        block = self._blocks.go_on(flags, payload)
        if block is not None:
            self._on_block(block)

    def _on_block(self, block: HeaderBlock) -> None:
        connection = self._connection
        if block.fields is None:
            for _ in range(block.times):
                self._header_lists.spend()
        stream = self._streams.get(block.stream_id)
        if stream is not None:
            connection.heads.go_on(stream, block)
        elif block.stream_id > connection.last_stream_id:
            connection.heads.begin(block)
        elif connection.has_ended_early(block.stream_id):
            self._empty_frames.spend()
        else:
            raise ConnectionFailure(h2.STREAM_CLOSED, "HEADERS is on a closed stream")

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id:
            raise ConnectionFailure(h2.PROTOCOL_ERROR, "DATA is on no stream")
        size, is_last = len(payload), bool(flags & h2.END_STREAM)
        self._use_window(size)
        if flags & h2.PADDED:
            payload = h2.unpadded(payload)
        if not payload and not is_last:
            self._empty_frames.spend()
        stream = self._streams.get(stream_id)
        if stream is not None and not stream.half_closed:
            self.feed(stream, payload, size, is_last=is_last)
        elif stream_id > self._connection.last_stream_id:
            raise ConnectionFailure(h2.PROTOCOL_ERROR, "DATA is on an idle stream")
        elif not self._connection.accepts_late_data(stream_id, size, is_last=is_last):
            raise StreamFailure(h2.STREAM_CLOSED, "DATA comes after the end of the stream")
        elif size < _SMALL_BYTES and not is_last:
            self._empty_frames.spend()

    def _use_window(self, size: int) -> None:
        self._window -= size
        if self._window < 0:
            raise ConnectionFailure(h2.FLOW_CONTROL_ERROR, "more was sent than the connection's window allows")
        if self._window * 2 < CONNECTION_WINDOW:
            self._output.send(h2.window_update(0, CONNECTION_WINDOW - self._window))
            self._window = CONNECTION_WINDOW

    def feed(self, stream: Stream, payload: bytes, size: int, *, is_last: bool) -> None:
        """Takes what has come on a stream; `size` counts its padding too."""
        call = self._connection.calls[stream.id]
        if not stream.received_bytes and call.waits_for_message:
            self.opened.append(stream)
        try:
            if size:
                stream.receive(payload, size, is_last=is_last)
            if is_last:
                stream.end()
                call.end()
        except MessageFailure as failure:
            call.fail(failure)

    def _on_rst_stream(self, _flags: int, stream_id: int, payload: bytes) -> None:
        require_size(payload, 4)
        if not stream_id or stream_id > self._connection.last_stream_id:
            raise ConnectionFailure(h2.PROTOCOL_ERROR, "RST_STREAM is on an idle stream")
        call = self._connection.calls.get(stream_id)
        stream = self._streams.get(stream_id)
        # What was ended early was paid for then.
        counts = self._is_premature(stream) if stream else not self._connection.forget_early(stream_id)
        if counts:
            self._storm.spend()
            self.cancels.owe()
            if self._connection.heard_at >= self._reads_until and self.cancels.is_overdrawn:
                self._require_reader()
        if stream is not None:
            stream.close()
        if call is not None:
            call.leave()

    def _is_premature(self, stream: Stream) -> bool:
        """True if a stream that is reset now had no time to be answered."""
        return not stream.started and self._connection.heard_at - stream.opened_at < self._premature_seconds
