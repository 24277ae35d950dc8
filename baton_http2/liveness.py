"""The life of a connection: its handshake, keepalive in both directions, its age, slow readers, and its drain."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Final

from baton_http2.endpoint import Endpoint
from baton_http2.limits import EXCEEDED
from baton_http2.stream import Stream
from baton_http2.wire import frames as h2
from baton_http2.wire.frames import ConnectionFailure
from baton_http2.wire.messages import MessageFailure

_KEEPALIVE: Final = b"keepaliv"
_DRAIN: Final = b"draining"
# How long a peer may take to hear that the connection is drained, before its calls are refused.
_DRAIN_SECONDS: Final = 1.0
# A timer that is so late was held up by this process itself, which may not have read what its peers sent meanwhile.
_LATE_SECONDS: Final = 0.5
# As gRPC's own servers do it: so many pings may come too early in a row.
_MAX_PING_STRIKES: Final = 2
# Connections that began together shall not all end together.
_AGE_JITTER: Final = 0.1


class Liveness:
    """The clocks of one connection. `refuses_calls` says that it is drained and its peer knows."""

    def __init__(self, connection: Endpoint) -> None:
        self._connection = connection
        self._limits = connection.limits
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._asked_at: float | None = None
        self._last_ping_at = float("-inf")
        self._answers_at_ping = (0, 0)
        self._strikes = 0
        self._read_before = -1
        self._requests_looked_at = 0.0
        self.is_draining = False
        # The peer has sent its first frames.
        self.is_settled = False
        self.refuses_calls = False

    def start(self) -> None:
        """Begins to watch."""
        limits = self._limits
        self._later("handshake", limits.http2.handshake_seconds, self._check_handshake)
        self._later("keepalive", limits.keepalive_seconds, self._check_silence)
        self._later("readers", limits.http2.slow_reader_seconds / 2, self._check_readers)
        if limits.input is not None:
            self._later("requests", limits.input.stall_seconds / 3, self._check_requests)
            self._requests_looked_at = self._connection.loop.time()
        if limits.max_age_seconds:
            age = limits.max_age_seconds * random.uniform(1 - _AGE_JITTER, 1 + _AGE_JITTER)
            self._later("age", age, self.drain)

    def stop(self) -> None:
        """Ends to watch: the connection is closed."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def drain(self) -> None:
        """Tells the peer to connect elsewhere. What runs goes on, and then the connection is closed."""
        if self.is_draining or self._connection.is_closing:
            return
        self.is_draining = True
        # RFC 9113, 6.8: what is on its way meanwhile is still served.
        self._connection.output.send(h2.goaway(h2.MAX_STREAM_ID, h2.NO_ERROR) + h2.frame(h2.PING, 0, 0, _DRAIN))
        self._later("drain", _DRAIN_SECONDS, self._refuse)

    def record_idle(self) -> None:
        """No call runs on the connection."""
        if self.refuses_calls:
            self._connection.close()

    def record_ping(self) -> None:
        """The peer asks whether we live. Raises ConnectionFailure if it does so too often."""
        now = self._connection.loop.time()
        answers = (self._connection.output.header_blocks, self._connection.output.sent_bytes)
        is_early = now - self._last_ping_at < self._limits.min_ping_seconds
        # Pings beside answers measure the bandwidth, and are no nuisance.
        if answers != self._answers_at_ping or not is_early:
            self._strikes = 0
        else:
            self._strikes += 1
        self._last_ping_at, self._answers_at_ping = now, answers
        if self._strikes > _MAX_PING_STRIKES:
            # gRPC's clients know these words, and ask less often from then on.
            raise ConnectionFailure(h2.ENHANCE_YOUR_CALM, "too_many_pings", "pings")

    def record_pong(self, payload: bytes) -> None:
        """The peer has answered a PING of ours; that it lives is known from whatever it sends."""
        if self.is_draining and payload == _DRAIN:
            self._refuse()

    def _later(self, name: str, seconds: float, act: Callable[[], None]) -> None:
        connection = self._connection
        self._timers[name] = connection.loop.call_later(seconds, act, context=connection.context)

    def _check_handshake(self) -> None:
        if not self.is_settled:
            self._connection.budget_exceeded("handshake", "the first frames did not come in time")

    def _refuse(self) -> None:
        if self.refuses_calls or self._connection.is_closing:
            return
        self.refuses_calls = True
        self._connection.output.send(h2.goaway(self._connection.last_stream_id, h2.NO_ERROR))
        if not self._connection.streams:
            self._connection.close()

    def _check_silence(self) -> None:
        connection, limits = self._connection, self._limits
        now = connection.loop.time()
        if self._asked_at is not None and connection.heard_at < self._asked_at:
            if now < self._asked_at + limits.keepalive_timeout_seconds + _LATE_SECONDS:
                self._end_silent()
                return
            self._asked_at = now
            self._later("keepalive", limits.keepalive_timeout_seconds, self._check_silence)
            return
        self._asked_at = None
        silence = now - connection.heard_at
        if silence < limits.keepalive_seconds:
            self._later("keepalive", limits.keepalive_seconds - silence, self._check_silence)
            return
        self._asked_at = now
        connection.output.send(h2.frame(h2.PING, 0, 0, _KEEPALIVE))
        self._later("keepalive", limits.keepalive_timeout_seconds, self._check_silence)

    def _end_silent(self) -> None:
        self._connection.budget_exceeded("keepalive", "a PING was not answered")
        # The peer would not read a GOAWAY.
        self._connection.transport.abort()

    def _check_requests(self) -> None:
        """Ends the calls whose request does not come, or too slowly."""
        connection, limits = self._connection, self._limits.input
        assert limits is not None
        self._later("requests", limits.stall_seconds / 3, self._check_requests)
        now = connection.loop.time()
        is_late = now > self._requests_looked_at + limits.stall_seconds / 3 + _LATE_SECONDS
        self._requests_looked_at = now
        if is_late:
            for stream in connection.streams.values():
                stream.forget_pace()
            return
        for stream_id, stream in tuple(connection.streams.items()):
            call = connection.calls[stream_id]
            if stream.is_slow(now, limits, waits_for_first=call.waits_for_message):
                EXCEEDED.labels("slow_request").inc()
                call.fail(MessageFailure.too_slow())

    def _check_readers(self) -> None:
        # Found twice at the same place, a reader has taken nothing for at least half of its time.
        self._later("readers", self._limits.http2.slow_reader_seconds / 2, self._check_readers)
        connection = self._connection
        # Not by what is unread, which grows by an answer to each of the peer's PINGs.
        waits = connection.transport.get_write_buffer_size() > 0
        was, self._read_before = self._read_before, connection.output.read_bytes if waits else -1
        if waits and self._read_before == was:
            connection.budget_exceeded("slow_reader", "nothing was read for too long")
            return
        self._end_streams([stream for stream in connection.streams.values() if stream.is_stalled()], "slow_reader")

    def end_unread(self) -> None:
        """Ends the calls whose answers wait; where none is left that does, the connection."""
        unread = [stream for stream in self._connection.streams.values() if stream.is_unread]
        if unread:
            self._end_streams(unread, "unread_output")
        else:
            self._connection.budget_exceeded("unread_output", "too much of all answers is unread")

    def _end_streams(self, streams: Sequence[Stream], budget: str) -> None:
        for stream in streams:
            EXCEEDED.labels(budget).inc()
            call = self._connection.calls[stream.id]
            stream.reset(h2.ENHANCE_YOUR_CALM)
            call.leave()
