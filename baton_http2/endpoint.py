"""The endpoint that the parts of a connection know: a server's connection, or a client's, with its calls."""

import asyncio
from contextvars import Context
from typing import Protocol

from baton_http2.limits import ServerLimits
from baton_http2.output import Output
from baton_http2.stream import Stream
from baton_http2.wire.frames import ConnectionFailure
from baton_http2.wire.header_blocks import HeaderBlock
from baton_http2.wire.messages import MessageFailure


class StreamHandler(Protocol):
    """The call of a stream. `waits_for_message` says that there is no use to start it before the first message."""

    waits_for_message: bool

    def start(self) -> None:
        """Begins, now or soon. The head is known, and perhaps its message too."""

    def end(self) -> None:
        """The peer has sent its last."""

    def fail(self, failure: MessageFailure) -> None:
        """Ends the call with a status: the peer sent no message of gRPC's."""

    def leave(self) -> None:
        """The stream is over without us: its peer has gone, or has reset it."""

    def stop(self, reason: str) -> None:
        """Ends the call with UNAVAILABLE, because this side ends."""


class Heads(Protocol):
    """The receiver of header blocks: to a server they begin calls, to a client they answer them."""

    def begin(self, block: HeaderBlock) -> None:
        """The first block of a stream. Raises StreamFailure and ConnectionFailure."""

    def go_on(self, stream: Stream, block: HeaderBlock) -> None:
        """Another block of a stream that is open. Raises StreamFailure."""


class Endpoint(Protocol):
    """A connection. `heard_at` is when its peer last sent something, in the loop's time.

    `last_stream_id` is the last one that the client has opened.
    """

    limits: ServerLimits
    context: Context
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    output: Output
    heads: Heads
    streams: dict[int, Stream]
    calls: dict[int, StreamHandler]
    last_stream_id: int
    is_closing: bool
    heard_at: float

    def has_ended_early(self, stream_id: int) -> bool:
        """True if we have ended that stream, and its peer may not have known when it sent what comes now."""

    def forget_early(self, stream_id: int) -> bool:
        """The peer has reset a stream: whether we had ended it early, which is not remembered any more."""

    def takes_late_data(self, stream_id: int, size: int, *, is_last: bool) -> bool:
        """True if such DATA may have been sent by a peer that did not know yet that we have ended the stream."""

    def note_goaway(self, last_stream_id: int) -> None:
        """The peer answers no streams after that one."""

    def fail(self, failure: ConnectionFailure) -> None:
        """Ends the connection with GOAWAY, and what runs on it."""

    def close(self, reason: str = "") -> None:
        """Ends the connection in order; what still runs ends with UNAVAILABLE."""

    def budget_exceeded(self, budget: str, reason: str) -> None:
        """Ends the connection, whose peer went over a limit."""
