"""The output of a connection: the frames of all its streams, in one write each turn of the event loop."""

import asyncio
from collections.abc import Callable
from contextvars import Context
from itertools import islice
from typing import Final, TypeAlias

from baton_http2.wire.frames import (
    DEFAULT_MAX_FRAME,
    DEFAULT_WINDOW,
    FLOW_CONTROL_ERROR,
    MAX_WINDOW,
    ConnectionFailure,
    header_block,
)
from baton_http2.wire.hpack import EMPTY_TABLE

# What the transport holds before it asks to pause, and what is framed of waiting bytes in one turn.
_TRANSPORT_BYTES: Final = 256 * 1024
_TURN_BYTES: Final = 1024 * 1024
# How many writers that wait for the connection go on in one turn.
_WOKEN_A_TURN: Final = 32
# What one stream sends of waiting bytes before it is another's turn.
_QUANTUM_BYTES: Final = 4 * DEFAULT_MAX_FRAME


# Frames up to so many bytes of one stream that wait, as the windows allow; how many they were.
Pump: TypeAlias = Callable[[int], int]
# Tells the writers of one stream that something has changed that they may have waited for.
WakeWriters: TypeAlias = Callable[[], None]


class Output:
    """The sending side of one connection: its flow control, and the frames of this turn.

    `window` is the peer's for the connection, `paused` says that the transport has enough for now.
    """

    __slots__ = (
        "_context",
        "_crowd",
        "_granted",
        "_loop",
        "_max_waiting",
        "_transport",
        "_waiting",
        "_was_flushed",
        "_written_bytes",
        "frames",
        "header_blocks",
        "held_bytes",
        "is_scheduled",
        "max_frame",
        "paused",
        "turns",
        "waiting_bytes",
        "window",
    )

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, context: Context, max_waiting_bytes: int
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._context = context
        self._max_waiting = max_waiting_bytes
        self.frames: list[bytes] = []
        self.is_scheduled = False
        self._was_flushed = False  # in this turn of the loop, early
        self._written_bytes = 0
        self._waiting: dict[Pump, None] = {}
        self._crowd: dict[WakeWriters, None] = {}
        self._granted = DEFAULT_WINDOW
        self.window = DEFAULT_WINDOW
        self.max_frame = DEFAULT_MAX_FRAME
        self.paused = False
        self.turns = 0
        self.header_blocks = 0
        # Of all streams, what was written and could not be framed yet.
        self.waiting_bytes = 0
        # Of messages that their writers could not write yet.
        self.held_bytes = 0
        transport.set_write_buffer_limits(high=_TRANSPORT_BYTES)

    @property
    def sent_bytes(self) -> int:
        """The DATA that was sent so far."""
        return self._granted - self.window

    @property
    def read_bytes(self) -> int:
        """The bytes of all frames that the transport has written so far."""
        return self._written_bytes - self._transport.get_write_buffer_size()

    @property
    def unread_bytes(self) -> int:
        """The bytes of answers that wait here, in the transport, and with their writers."""
        return self.waiting_bytes + self.held_bytes + self._transport.get_write_buffer_size()

    @property
    def is_crowded(self) -> bool:
        """True if so much waits that a stream may only write little, and only if its own window allows it."""
        return self.waiting_bytes >= self._max_waiting

    @property
    def is_full(self) -> bool:
        """True if a stream may have to wait for others of the connection."""
        return self.paused or self.waiting_bytes >= self._max_waiting

    def send(self, frames: bytes) -> None:
        """Sends frames at the end of this turn of the loop."""
        self.frames.append(frames)
        if not self.is_scheduled:
            self.schedule()

    def send_headers(self, stream_id: int, block: bytes, *, end_stream: bool) -> None:
        """Sends a header block."""
        if not self.header_blocks:
            block = EMPTY_TABLE + block
        self.header_blocks += 1
        self.send(header_block(stream_id, block, self.max_frame, end_stream=end_stream))

    def flush(self) -> None:
        """Hands what was framed to the transport, in one write."""
        self.is_scheduled = self._was_flushed = False
        self.turns += 1
        if self.frames:
            self._write()
        if self._waiting:
            self.pump()
        if self._crowd and not self.is_full:
            self._wake_writers()

    def flush_early(self) -> None:
        """Hands what was framed to the transport, for what comes later in this turn takes long; once a turn."""
        if self.frames and self.is_scheduled and not self._was_flushed:
            self._was_flushed = True
            self._write()

    def wait(self, pump: Pump) -> None:
        """A stream has bytes that its own window allows, and the connection did not."""
        self._waiting[pump] = None

    def join_crowd(self, wake_writers: WakeWriters) -> None:
        """A stream's writer waits for the connection; it is told when there is room again."""
        self._crowd[wake_writers] = None

    def forget(self, pump: Pump, wake_writers: WakeWriters) -> None:
        """The stream is closed."""
        if self._waiting:
            self._waiting.pop(pump, None)
        if self._crowd:
            self._crowd.pop(wake_writers, None)

    def pump(self) -> None:
        """Frames waiting bytes of all streams in turn, until a limit of the connection is reached."""
        left = _TURN_BYTES
        while self._waiting and self.window > 0 and not self.paused and left > 0:
            pump = next(iter(self._waiting))
            del self._waiting[pump]
            left -= pump(_QUANTUM_BYTES)
        if self._crowd and not self.is_full:
            self._wake_writers()

    def relieve(self, size: int) -> None:
        """So many of the bytes that waited are not sent any more."""
        self.waiting_bytes -= size
        if self._crowd and not self.is_scheduled:
            self.schedule()

    def grant(self, increment: int) -> None:
        """The peer has opened the connection's window. Raises ConnectionFailure if it is too large."""
        self.window += increment
        self._granted += increment
        if self.window > MAX_WINDOW:
            raise ConnectionFailure(FLOW_CONTROL_ERROR, "the connection's window is too large")
        if self._waiting:
            self.pump()

    def pause(self) -> None:
        """The transport holds enough."""
        self.paused = True

    def resume(self) -> None:
        """The transport can take more."""
        self.paused = False
        if self._waiting:
            self.pump()
        # Also those that have waited for this alone: the transport has sent a good deal since it paused.
        crowd, self._crowd = self._crowd, {}
        for wake_writers in crowd:
            wake_writers()

    def close(self, last: bytes, seconds: float, abort: Callable[[], None]) -> None:
        """Sends the last frames, and closes the connection once they are written, or after so many seconds."""
        self.frames.append(last)
        self._waiting.clear()
        self.flush()
        self._transport.close()
        # A peer that does not read would keep it open.
        self._loop.call_later(seconds, abort, context=self._context)

    def _write(self) -> None:
        frames = self.frames
        content = frames[0] if len(frames) == 1 else b"".join(frames)
        frames.clear()
        # uvloop's raises where its peer has just gone, which is not known here yet.
        if not self._transport.is_closing():
            self._written_bytes += len(content)
            self._transport.write(content)

    def schedule(self) -> None:
        """Has `flush` called at the end of this turn of the loop; once, while `is_scheduled`."""
        self.is_scheduled = True
        self._loop.call_soon(self.flush, context=self._context)

    def _wake_writers(self) -> None:
        # Not all at once: the first ones may use up the room, and a peer could have the others woken for each byte.
        for wake_writers in tuple(islice(self._crowd, _WOKEN_A_TURN)):
            del self._crowd[wake_writers]
            wake_writers()
        if self._crowd and not self.is_scheduled:
            self.schedule()
