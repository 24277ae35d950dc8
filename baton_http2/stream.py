"""One stream of a connection: the bytes of one call in both directions, within the windows of flow control."""

import asyncio
from functools import partial
from typing import Final, Protocol

from baton_http2.input_budget import InputLimits, LargeMessage, Pace, Reservation
from baton_http2.limits import ServerLimits
from baton_http2.output import Output
from baton_http2.wire.frames import (
    DATA,
    FLOW_CONTROL_ERROR,
    HEADER,
    MAX_WINDOW,
    MESSAGE,
    NO_ERROR,
    PREFIX,
    PROTOCOL_ERROR,
    StreamFailure,
    rst_stream,
    window_update,
)
from baton_http2.wire.messages import Inbox, PushReceived, Received

# What a peer may send of one request before it is read.
RECEIVE_WINDOW: Final = 1024 * 1024
# What may wait of one answer before its writer does.
_HIGH_WATER: Final = 64 * 1024
# A message that may be written though others of the connection are not read: a token's, and not a file's.
_SMALL_BYTES: Final = 16 * 1024
# What waits of all streams that have never waited: never changed.
_NOTHING: Final = bytearray()


class StreamOwner(Protocol):
    """The connection, as its streams know it."""

    output: Output

    def forget(self, stream: "Stream", *, is_early: bool) -> None:
        """The stream is closed; `is_early` if its peer does not know yet."""

    def account_input(self, change: int) -> None:
        """Adds to the bytes that wait to be read, or subtracts. Raises MessageFailure if they are too many."""

    def reserve(self, stream: "Stream", size: int) -> Reservation | None:
        """Counts what is still to come of a large message; None if that is done, and else the stream hears of it."""


class Stream:
    """One stream. `window` is the peer's for it; `half_closed` says that the peer has sent its last.

    `opened_at` is in the loop's time. With `ignores_input` what comes is dropped.
    """

    __slots__ = (
        "_has_waited",
        "_inbox",
        "_large",
        "_output",
        "_owner",
        "_pace",
        "_pending",
        "_receive_window",
        "_trailers",
        "_writers",
        "closed",
        "content_length",
        "half_closed",
        "id",
        "ignores_input",
        "limits",
        "opened_at",
        "received_bytes",
        "started",
        "window",
    )

    def __init__(self, owner: StreamOwner, stream_id: int, window: int, limits: ServerLimits) -> None:
        self._owner = owner
        self._output = owner.output
        self._pending = _NOTHING
        self._has_waited = False  # bytes, all of them since `is_stalled` was last asked
        self._trailers: bytes | None = None
        self._writers: list[asyncio.Future[None]] = []
        self._receive_window = RECEIVE_WINDOW
        # Made for the first bytes, or for who waits for them: heads without a message are cheap to send.
        self._inbox: Inbox | None = None
        self._large: LargeMessage | None = None  # made for the first one
        self._pace: Pace | None = None
        self.id = stream_id
        self.window = window
        self.limits = limits
        self.content_length = -1
        self.opened_at = 0.0
        self.received_bytes = 0
        self.half_closed = False
        self.ignores_input = False
        self.started = False
        self.closed = False

    # What is received.

    @property
    def inbox(self) -> Inbox:
        """The messages that have come and were not read yet."""
        if self._inbox is None:
            self._inbox = Inbox(self.limits.max_message_bytes)
            if self.closed:
                self._inbox.clear()
        return self._inbox

    def push_messages_to(self, push: PushReceived) -> None:
        """Gives messages to `push` as they come, instead of keeping them for `read`."""
        self._inbox = Inbox(self.limits.max_message_bytes, push)

    def receive(self, payload: bytes, size: int, *, is_last: bool = False) -> None:
        """Takes a DATA frame's payload; `size` counts its padding too. Raises StreamFailure and MessageFailure."""
        self._receive_window -= size
        if self._receive_window < 0:
            raise StreamFailure(FLOW_CONTROL_ERROR, "more was sent than the stream's window allows")
        self.received_bytes += len(payload)
        # Before its messages are looked at: they may end the call, and the error would be missed.
        if self.content_length >= 0:
            self._check_length(is_last=is_last)
        if not self.ignores_input:
            inbox = self._inbox or self.inbox
            more = inbox.feed(payload)
            if more:
                self._owner.account_input(more if self._large is None else self._large.beyond_counted(more))
        if self._receive_window * 2 < RECEIVE_WINDOW:
            self._grant()

    def end(self) -> None:
        """The peer has sent its last. Raises StreamFailure and MessageFailure."""
        self.half_closed = True
        if self.content_length >= 0:
            self._check_length(is_last=True)
        if not self.ignores_input:
            (self._inbox or self.inbox).end()

    def _check_length(self, *, is_last: bool) -> None:
        if self.received_bytes > self.content_length or (is_last and self.received_bytes != self.content_length):
            raise StreamFailure(PROTOCOL_ERROR, "content-length differs from the number of bytes sent")

    @property
    def receive_window(self) -> int:
        """The bytes that the peer may still send."""
        return self._receive_window

    def was_read(self, message: Received) -> None:
        """A message of the inbox has been read: its peer may send more."""
        if not self.closed:
            self._owner.account_input(-message.size)
            self._grant()

    def is_slow(self, now: float, limits: InputLimits, *, waits_for_first: bool) -> bool:
        """True if a message comes too slowly; asked again and again, it measures from one time to the next.

        `waits_for_first` says that the call needs a message.
        """
        is_partial = self._inbox is not None and self._inbox.is_partial
        waits = is_partial or self.ignores_input or (waits_for_first and not self.received_bytes)
        if not waits or self.half_closed or self._trailers is not None or (self._large and self._large.waits):
            self._pace = None
            return False
        messages = 0 if self._inbox is None else self._inbox.count
        if self._pace is None or self._pace.messages != messages:
            self._pace = Pace(messages, now, self.received_bytes)
        return self._pace.is_slow(now, self.received_bytes, limits)

    def forget_pace(self) -> None:
        """Measures anew: this process may not have read what came meanwhile."""
        self._pace = None

    def add_reserved(self, size: int) -> None:
        """The bytes that a large message waited for are counted."""
        if self._large is None or self.closed or self.ignores_input:
            self._owner.account_input(-size)
            return
        self._large.add(size)
        self._grant()

    def _grant(self) -> None:
        used = RECEIVE_WINDOW - self._receive_window
        if used * 2 <= RECEIVE_WINDOW or self.half_closed or self.closed or self._trailers is not None:
            return
        if not self.ignores_input:
            inbox = self.inbox
            if not inbox.wants_more and inbox.size * 2 > RECEIVE_WINDOW:
                return
            if inbox.partial_length > RECEIVE_WINDOW:
                if self._large is None:
                    self._large = LargeMessage(partial(self._owner.reserve, self))
                if not self._large.is_counted(inbox.partial_length - inbox.partial_size):
                    return
                inbox.make_room()
        self._receive_window = RECEIVE_WINDOW
        self._output.send(window_update(self.id, used))

    def _drop_input(self) -> None:
        """Drops the input that has not been read."""
        self.ignores_input = True
        large, self._large = self._large, None
        held = 0 if large is None else large.drop()
        if self._inbox is not None:
            held += self._inbox.size
            self._inbox.clear()
        if held:
            self._owner.account_input(-held)

    # What is sent.

    @property
    def connection(self) -> Output:
        """The same for all streams that are flushed together."""
        return self._output

    @property
    def turns(self) -> int:
        """The number of times that the connection has sent; messages of one turn go out together."""
        return self._output.turns

    def is_writable(self, size: int) -> bool:
        """True if a message of so many bytes may be written now."""
        output = self._output
        if self._pending:
            return len(self._pending) < _HIGH_WATER and not output.is_crowded
        if output.paused:
            return False
        return not output.is_crowded or size + 5 <= min(self.window, _SMALL_BYTES)

    @property
    def is_unread(self) -> bool:
        """True if bytes wait, or a writer does."""
        return bool(self._pending) or bool(self._writers)

    def is_stalled(self) -> bool:
        """True if bytes wait, and none of them has been sent since this was last asked."""
        # Not by the window, which a peer may open as it likes while that of its connection is closed.
        had_waited, self._has_waited = self._has_waited, bool(self._pending)
        return had_waited and self._has_waited

    @property
    def can_pump(self) -> bool:
        """True if bytes wait that this stream's own window allows."""
        return bool(self._pending) and self.window > 0 and not self.closed

    def start(self, headers: bytes) -> None:
        """Sends the answer's headers."""
        if not self.closed:
            self.started = True
            self._output.send_headers(self.id, headers, end_stream=False)

    def write(self, message: bytes, flag: int = 0) -> bool:
        """Sends a message, or keeps what the windows do not allow yet. `flag` is 1 for a compressed one.

        False if there is no room for another one. Once the answer has ended, it does nothing.
        """
        size = len(message) + 5
        output = self._output
        if (
            size <= self.window
            and size <= output.window
            and size <= output.max_frame
            and not self._pending
            and not output.paused
        ):
            self.window -= size
            output.window -= size
            # What `Output.send` does, without a call: for each token.
            output.frames.append(MESSAGE.pack(size << 8, 0, self.id, flag, size - 5) + message)
            if not output.is_scheduled:
                output.schedule()
            return output.waiting_bytes == 0 or self.is_writable(0)
        if not self.closed and self._trailers is None:
            self.write_raw(PREFIX.pack(flag, size - 5) + message)
        return self.is_writable(0)

    def flush(self) -> None:
        """Hands what was written to the transport, though this turn of the event loop goes on."""
        self._output.flush_early()

    def write_raw(self, content: bytes) -> None:
        """Sends bytes as they are, or keeps what the windows do not allow yet."""
        if self._pending is _NOTHING:
            self._pending = bytearray()
        self._pending += content
        self._output.waiting_bytes += len(content)
        self._pump_or_wait()

    def finish(self, trailers: bytes) -> None:
        """Ends the answer, after what waits."""
        if self.closed or self._trailers is not None:
            return
        self._trailers = trailers
        if not self._pending:
            self._send_trailers()
        elif not self.ignores_input:
            self._drop_input()

    def drop_unsent(self) -> None:
        """Drops the output that has not been sent."""
        self._output.relieve(len(self._pending))
        self._pending.clear()

    def reset(self, code: int) -> None:
        """Ends the stream without trailers."""
        if not self.closed:
            self._output.send(rst_stream(self.id, code))
            self.close(is_early=not self.half_closed)

    def close(self, *, is_early: bool = False) -> None:
        """The stream is over, for whatever reason."""
        if self.closed:
            return
        self.closed = True
        self.window = 0
        if self._pending:
            self.drop_unsent()
        if self._inbox is not None:
            self._drop_input()
        self._output.forget(self.pump, self.wake_writers)
        self._owner.forget(self, is_early=is_early)
        if self._writers:
            self.wake_writers()

    def abandon(self) -> None:
        """The connection is over, and everything on it."""
        self.closed = True
        self.window = 0
        self._pending.clear()
        if self._inbox is not None:
            self._drop_input()
        self.wake_writers()

    def widen(self, increment: int) -> None:
        """The peer has opened, or by its settings narrowed, the window. Raises StreamFailure if it is too large."""
        self.window += increment
        if self.window > MAX_WINDOW:
            raise StreamFailure(FLOW_CONTROL_ERROR, "the stream's window is too large")
        if self._pending:
            self._pump_or_wait()
        if self._writers:
            self.wake_writers()

    def change(self) -> "asyncio.Future[None]":
        """A future that is done when what a writer waits for has changed; the writer asks `is_writable` again."""
        change = asyncio.get_running_loop().create_future()
        self._writers.append(change)
        if self._output.is_full:
            self._output.join_crowd(self.wake_writers)
        return change

    def wake_writers(self) -> None:
        """Something has changed that writers may have waited for."""
        if not self._writers:
            return
        writers, self._writers = self._writers, []
        for each in writers:
            if not each.done():
                each.set_result(None)

    def pump(self, most: int) -> int:
        """Frames up to `most` of the bytes that wait, as the windows allow; how many they were."""
        output, pending = self._output, self._pending
        sendable = min(most, len(pending), self.window, output.window)
        sent = 0
        while sent < sendable:
            size = min(sendable - sent, output.max_frame)
            output.send(HEADER.pack(size << 8 | DATA, 0, self.id) + pending[sent : sent + size])
            sent += size
        if sent > 0:
            self.window -= sent
            output.window -= sent
            output.waiting_bytes -= sent
            self._has_waited = False
            del pending[:sent]
            self.wake_writers()
            if not pending and self._trailers is not None:
                self._send_trailers()
        if self.can_pump:
            output.wait(self.pump)
        return max(sent, 0)

    def _pump_or_wait(self) -> None:
        if self.can_pump:
            self._output.wait(self.pump)
            self._output.pump()

    def _send_trailers(self) -> None:
        assert self._trailers is not None
        self._output.send_headers(self.id, self._trailers, end_stream=True)
        if not self.half_closed:
            # The rest of the request is not needed (RFC 9113, 8.1).
            self._output.send(rst_stream(self.id, NO_ERROR))
        self.close(is_early=not self.half_closed)
