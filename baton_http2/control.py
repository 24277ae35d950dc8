"""Frames that are about the connection and not about a call: windows, settings, pings, priorities, and goodbyes."""

from typing import Final

from baton_http2.endpoint import Endpoint
from baton_http2.limits import BYTES_PER_FRAME, Bucket
from baton_http2.liveness import Liveness
from baton_http2.wire import frames as h2
from baton_http2.wire.frames import ConnectionFailure, StreamFailure

# What a peer may make us frame at once.
_MAX_FRAME: Final = 1024 * 1024


class ControlFrames:
    """The control frames that one connection receives. `initial_window` is the peer's for new streams."""

    def __init__(self, connection: Endpoint, liveness: Liveness) -> None:
        limits, output = connection.limits.http2, connection.output
        self._connection = connection
        self._liveness = liveness
        self._output = output
        self._streams = connection.streams
        self.initial_window = h2.DEFAULT_WINDOW
        self._settings = Bucket("settings", limits.settings)
        self._priorities = Bucket("priorities", limits.priorities)
        self._goodbyes = Bucket("empty_frames", limits.empty_frames)
        self._pings = Bucket("pings", limits.pings, lambda: output.sent_bytes / BYTES_PER_FRAME)
        self._window_updates = Bucket(
            "window_updates", limits.window_updates, lambda: output.sent_bytes / BYTES_PER_FRAME
        )

    def on_window_update(self, _flags: int, stream_id: int, payload: bytes) -> None:
        """Opens a window."""
        if len(payload) != 4:
            require_size(payload, 4)
        self._window_updates.spend()
        increment = h2.U32.unpack(payload)[0] & h2.MAX_WINDOW
        stream = self._streams.get(stream_id)
        if stream is None and stream_id > self._connection.last_stream_id:
            raise ConnectionFailure(h2.PROTOCOL_ERROR, "WINDOW_UPDATE is on an idle stream")
        if not increment:
            failure = StreamFailure if stream_id else ConnectionFailure
            raise failure(h2.PROTOCOL_ERROR, "a window is opened by 0")
        if not stream_id:
            self._output.grant(increment)
        elif stream is not None:
            stream.widen(increment)

    def on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Takes the peer's settings."""
        if stream_id:
            raise ConnectionFailure(h2.PROTOCOL_ERROR, "SETTINGS is on a stream")
        if len(payload) % 6 or (flags & h2.ACK and payload):
            raise ConnectionFailure(h2.FRAME_SIZE_ERROR, "SETTINGS has a wrong size")
        self._settings.spend()
        if flags & h2.ACK:
            return
        values = list(h2.SETTING.iter_unpack(payload))
        for key, value in values:
            _check_setting(key, value)
        # The last of several values counts, and one frame may have thousands.
        last = dict(values)
        # Before what the new values allow: until its peer has acknowledged a wider window, gRPC's core resets streams
        # that use it.
        self._output.send(h2.frame(h2.SETTINGS, h2.ACK, 0))
        if h2.MAX_FRAME_SIZE in last:
            self._output.max_frame = min(last[h2.MAX_FRAME_SIZE], _MAX_FRAME)
        if h2.INITIAL_WINDOW_SIZE in last:
            self._resize_windows(last[h2.INITIAL_WINDOW_SIZE])

    def _resize_windows(self, value: int) -> None:
        change, self.initial_window = value - self.initial_window, value
        for stream in tuple(self._streams.values()) if change else ():
            try:
                stream.widen(change)
            except StreamFailure as failure:
                raise ConnectionFailure(failure.code, str(failure)) from None

    def on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Answers, or takes an answer."""
        if stream_id:
            raise ConnectionFailure(h2.PROTOCOL_ERROR, "PING is on a stream")
        require_size(payload, 8)
        self._pings.spend()
        if flags & h2.ACK:
            self._liveness.note_pong(payload)
            return
        self._liveness.note_ping()
        self._output.send(h2.frame(h2.PING, h2.ACK, 0, payload))

    def on_goaway(self, _flags: int, stream_id: int, payload: bytes) -> None:
        """The peer ends the connection, some time."""
        if stream_id:
            raise ConnectionFailure(h2.PROTOCOL_ERROR, "GOAWAY is on a stream")
        if len(payload) < 8:
            raise ConnectionFailure(h2.FRAME_SIZE_ERROR, "GOAWAY has at least 8 bytes")
        self._goodbyes.spend()
        self._connection.note_goaway(h2.U32.unpack_from(payload)[0] & h2.MAX_STREAM_ID)

    def on_priority(self, _flags: int, stream_id: int, payload: bytes) -> None:
        """Has no effect (RFC 9113, 5.3), but has to be right."""
        self._priorities.spend()
        if not stream_id:
            raise ConnectionFailure(h2.PROTOCOL_ERROR, "PRIORITY is on no stream")
        if len(payload) != 5:
            raise StreamFailure(h2.FRAME_SIZE_ERROR, "PRIORITY has 5 bytes")
        if h2.U32.unpack_from(payload)[0] & h2.MAX_STREAM_ID == stream_id:
            raise StreamFailure(h2.PROTOCOL_ERROR, "a stream depends on itself")

    def on_push_promise(self, _flags: int, _stream_id: int, _payload: bytes) -> None:
        """Is never right."""
        raise ConnectionFailure(h2.PROTOCOL_ERROR, "nothing may be pushed")


def require_size(payload: bytes, size: int) -> None:
    """Raises ConnectionFailure for a payload of another size."""
    if len(payload) != size:
        raise ConnectionFailure(h2.FRAME_SIZE_ERROR, f"a frame that has {size} bytes has {len(payload)}")


def _check_setting(key: int, value: int) -> None:
    if key == h2.ENABLE_PUSH and value > 1:
        raise ConnectionFailure(h2.PROTOCOL_ERROR, "SETTINGS_ENABLE_PUSH is 0 or 1")
    if key == h2.MAX_FRAME_SIZE and not h2.DEFAULT_MAX_FRAME <= value <= h2.LARGEST_MAX_FRAME:
        raise ConnectionFailure(h2.PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE is out of range")
    if key == h2.INITIAL_WINDOW_SIZE and value > h2.MAX_WINDOW:
        raise ConnectionFailure(h2.FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE is too large")
