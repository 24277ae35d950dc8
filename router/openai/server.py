"""Serves OpenAI's API: uvicorn, on the router's event loop."""

import asyncio
import re
import select
import socket
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from typing import Any

import structlog

from baton.connection.credentials import is_loopback
from baton.errors import ConfigError
from baton_http2.limits import EXCEEDED
from baton_http2.sockets.accepting import Acceptor, open_sockets
from baton_http2.sockets.descriptors import longest_idle
from baton_http2.turns import CallTurns
from router.config import OpenAIConfig
from router.openai.app import OpenAIApp
from rpc.server import SharedLimits
from rpc.timeouts import CLEANUP_SECONDS
from runtime.clock import wall_time
from runtime.network import split_address

try:
    import uvicorn
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
except ImportError as error:
    raise ConfigError("openai.listen: needs the extra `openai`: pip install 'baton-serving[openai]'") from error

log = structlog.get_logger(__name__)

_IDLE_SECONDS = 75
_CUT_SECONDS = 1.0
# Of `max_connections`, from where idle ones are closed for new ones.
_CROWDED = 0.9
_POLL_SECONDS = 0.01
_MAX_HEAD_BYTES = 64 * 1024
# Requests that wait for an answer to the one before, and chunks of bodies that come in one read of 256 KiB: the work
# of each takes as long as that of thousands of bytes.
_MOST_PIPELINED = 16
_MOST_CHUNKS = 2048
# What a client has taken at least when writing goes on: it pauses at 64 KiB, and resumes at 16.
_RESUMED_BYTES = 48 * 1024
# Tells a client that has closed the connection from one that waits for its answer, which skips it (RFC 9110, 15.2).
_STILL_THERE = b"HTTP/1.1 100 Continue\r\n\r\n"
# Then a client that had closed the connection has answered this with a reset.
_RESET_SECONDS = 0.2
# Without the characters that end it in a URL.
_HOST = re.compile(rb"[!$-.0-;=A-\[\]-~]*")


class _Malformed(Exception):
    """Ends the parsing of what has come, and the connection: it is no request, or in too many pieces."""


@dataclass(frozen=True, slots=True)
class OpenAIServer:
    """A server that is listening at `address`, a `host:port`."""

    address: str
    _server: "_Server"

    def stop_after(self, seconds: float) -> None:
        """Begins the drain, in so many seconds: no new calls, and running ones may end."""
        asyncio.get_running_loop().call_later(seconds, self._server.begin_exit)


class _BoundedHttp(HttpToolsProtocol):
    """HTTP/1.1 by llhttp, which bounds neither headers nor trailers: a peer that sends more of them is refused.

    A bound on what comes without any body, since only body is held back when it is not read.
    """

    _head_bytes = 0
    _chunks = 0
    # Since when a request is received whose end has not come, and since when none runs; in the loop's time.
    _receiving_since: float | None = None
    _idle_since = 0.0
    # What the client has not taken, and since when it is as much; in the loop's time.
    _unread = 0
    _unread_since = 0.0
    _resumed = 0
    # Its client has sent its last.
    _is_half_closed = False
    # The request that is being answered; `cycle` is the last that came.
    _answering: RequestResponseCycle | None = None
    _timer: asyncio.TimerHandle | None = None
    shared: SharedLimits
    turns: CallTurns  # in which calls end whose clients have gone
    date: Callable[[], None]  # renews the server's date

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._idle_since = self.loop.time()
        self.shared.connections.add(self)
        self.shared.output.add(self)
        self._timer = self.loop.call_later(self._stall_seconds / 3, self._check)
        most = self.limit_concurrency or 0
        if len(self.connections) >= most * _CROWDED:
            for each in longest_idle(self.connections):  # type: ignore[arg-type]  # all of them are of this class
                each.close_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self.shared.connections.discard(self)
        self.shared.output.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        # At once: uvloop raises where a closed connection is written to.
        for cycle in (self._answering, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
        self.turns.run(partial(self._end_calls, exc))

    def _end_calls(self, exc: Exception | None) -> None:
        if self._answering is not None:
            # It may not be the last that came.
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.date()
        self._head_bytes += len(data)
        self._chunks = 0
        if self._receiving_since is None:
            self._receiving_since = self.loop.time()
        super().data_received(data)
        if self._head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request's headers are too large.")

    def eof_received(self) -> bool:  # type: ignore[override]  # of which the transport takes True
        """Answers requests that are complete, if their client only sends no more: True keeps the connection for that.

        One that has closed it sends the same, and is told apart by what it does with more bytes: it resets the
        connection. Once the last answer has begun, and to HTTP/1.0, there is nothing to send in between: such a client
        is taken to have gone, as is one with TLS, which cannot close one direction alone.
        """
        cycle = self._answering
        is_secured = self.transport.get_extra_info("ssl_object") is not None
        if cycle is None or not self._owes_answer or is_secured or cycle.scope["http_version"] == "1.0":
            return False
        if not cycle.response_started:
            self.transport.write(_STILL_THERE)
        elif not self.pipeline:
            return False
        self._is_half_closed = True
        self.loop.call_later(_RESET_SECONDS, self._close_if_reset)
        return True

    @property
    def _owes_answer(self) -> bool:
        """True if a request is not answered yet that has come as a whole."""
        cycle = self._answering
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    def _close_if_reset(self) -> None:
        """Aborts a half-closed connection that was reset, which the event loop is not told: it reads it no more."""
        if self.transport.is_closing():
            return
        poller = select.poll()
        poller.register(self.transport.get_extra_info("socket").fileno(), 0)
        if poller.poll(0):
            self.transport.abort()

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        hosts = [value for name, value in self.headers if name == b"host"]
        # RFC 9112, 3.2: a proxy before this router may have taken another one than it does.
        if len(hosts) > 1 or (not hosts and self.parser.get_http_version() != "1.0"):
            raise _Malformed
        if hosts and not _HOST.fullmatch(hosts[0]):
            raise _Malformed
        if len(self.pipeline) >= _MOST_PIPELINED:
            raise _Malformed
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        self._chunks += 1
        if self._chunks > _MOST_CHUNKS:
            raise _Malformed
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._receiving_since = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()
        if self._is_half_closed and not self._owes_answer:
            self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def idle_since(self) -> float | None:
        """The loop's time since which no call has run on it; None if one does."""
        is_idle = self.cycle is None or self.cycle.response_complete
        return self._idle_since if is_idle and not self.transport.is_closing() else None

    def close_idle(self) -> None:
        """Closes the connection, whose place others need."""
        self.transport.close()
        self.loop.call_later(_CUT_SECONDS, self.transport.abort)

    @property
    def _stall_seconds(self) -> float:
        return self.shared.input.limits.stall_seconds

    def _check(self) -> None:
        """Closes a connection whose client takes nothing of its answer, or sends no request, or too slowly a head, or
        the rest of what is answered already.
        """
        self._timer = self.loop.call_later(self._stall_seconds / 3, self._check)
        idle, now = self.idle_since(), self.loop.time()
        self._end_slow_reader(now)
        if self._is_half_closed:
            self._close_if_reset()
        if idle is None:
            return
        if self._receiving_since is not None:
            seconds = now - max(idle, self._receiving_since)
            if seconds > self._stall_seconds:
                self.close_idle()
        elif self.cycle is None and now - idle > _IDLE_SECONDS:
            self.close_idle()

    def resume_writing(self) -> None:
        self._resumed += 1
        super().resume_writing()

    @property
    def unread_bytes(self) -> int:
        """Of the answer, what its client has not taken."""
        return self.transport.get_write_buffer_size()

    @property
    def read_bytes(self) -> int:
        """About what its client has taken."""
        return self._resumed * _RESUMED_BYTES - self.unread_bytes

    def end_unread(self) -> None:
        """Ends the connection at once: an error would wait behind what is not read."""
        EXCEEDED.labels("unread_output").inc()
        self.transport.abort()

    def _end_slow_reader(self, now: float) -> None:
        """Closes it if nothing is read. Writers wait while much is unread, so that only reads change it."""
        unread = self.transport.get_write_buffer_size()
        if unread != self._unread:
            self._unread, self._unread_since = unread, now
        elif unread and now - self._unread_since > self.shared.slow_reader_seconds:
            EXCEEDED.labels("slow_reader").inc()
            self.transport.abort()


class _Server(uvicorn.Server):
    """uvicorn without its own handling of signals, which the process has, and without its accepting and its timer.

    Its timer looks ten times a second whether to exit, and renews the date of answers: an event and `date` do so here.
    """

    def __init__(self, config: uvicorn.Config, shared: SharedLimits) -> None:
        super().__init__(config)
        self._shared = shared
        self._turns = CallTurns()
        self._exiting = asyncio.Event()
        self._dated_at = 0

    async def main_loop(self) -> None:
        await self._exiting.wait()

    def date(self) -> None:
        """Gives answers the date of now, to the second."""
        now = int(wall_time())
        if now != self._dated_at:
            self._dated_at = now
            self.server_state.default_headers = [(b"date", formatdate(now, usegmt=True).encode())]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        acceptor = Acceptor(
            sockets or (), self._make_protocol, self._shared.connections, _refuse_connection, tls=self.config.ssl
        )
        self.servers = [acceptor]  # type: ignore[list-item]  # of which it uses no more than an acceptor has
        self.started = True

    def _make_protocol(self) -> _BoundedHttp:
        protocol = _BoundedHttp(self.config, self.server_state, self.lifespan.state)
        protocol.shared, protocol.turns, protocol.date = self._shared, self._turns, self.date
        return protocol

    def begin_exit(self) -> None:
        self.should_exit = True
        self._exiting.set()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _refuse_connection(accepted: socket.socket) -> None:
    """Says why a connection may not stay."""
    with suppress(OSError):
        accepted.send(b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")


@asynccontextmanager
async def serve_openai(
    config: OpenAIConfig,
    app: OpenAIApp,
    shared: SharedLimits,
    drain_seconds: float,
    *,
    shares_port: bool = False,
) -> AsyncGenerator[OpenAIServer, None]:
    """Serves until the context is left; then running calls have `drain_seconds` more. Raises ConfigError.

    With `shares_port` other processes may listen at the same port.
    """
    listening = _bind(config.listen, shares_port=shares_port)
    host, port = listening[0].getsockname()[:2]
    settings = _settings(config, app, drain_seconds)
    if config.tls is not None:
        settings.ssl = config.tls.server_context("openai.tls")
    elif not is_loopback(host):
        log.warning("listening beyond this host without TLS", listen=config.listen)
    server = _Server(settings, shared)
    serving = asyncio.create_task(server.serve(sockets=listening))
    try:
        while not (server.started or serving.done()):  # noqa: ASYNC110  # uvicorn has no event for it
            await asyncio.sleep(_POLL_SECONDS)
        yield OpenAIServer(f"{config.listen.rpartition(':')[0]}:{port}", server)
    finally:
        server.begin_exit()
        await asyncio.shield(serving)
        try:
            await app.running.ended(CLEANUP_SECONDS)
        except TimeoutError:
            log.warning("calls did not end when cancelled", calls=app.running.count)


def _settings(config: OpenAIConfig, app: OpenAIApp, drain_seconds: float) -> uvicorn.Config:
    settings = uvicorn.Config(
        app,
        loop="none",
        http=_BoundedHttp,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=max(1, round(drain_seconds)),
        limit_concurrency=config.max_connections,
    )
    settings.load()
    return settings


def _bind(listen: str, *, shares_port: bool) -> list[socket.socket]:
    host, port = split_address(listen, "openai.listen")
    try:
        return open_sockets(host, port, shares_port=shares_port)
    except OSError as error:
        raise ConfigError(f"openai.listen: cannot listen on {listen!r}; is the port taken?") from error
