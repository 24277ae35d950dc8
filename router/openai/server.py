"""Serves OpenAI's API: uvicorn, on the router's event loop."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import structlog

from baton.connection.credentials import is_loopback
from baton.errors import ConfigError
from router.config import OpenAIConfig
from router.openai.app import OpenAIApp
from rpc.timeouts import CLEANUP_SECONDS
from runtime.network.listening import open_sockets, split_address

try:
    import uvicorn
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError as error:
    raise ConfigError("openai.listen: needs the extra `openai`: pip install 'baton-serving[openai]'") from error

log = structlog.get_logger(__name__)

_BACKLOG = 2048
_IDLE_SECONDS = 75
_POLL_SECONDS = 0.01
_MAX_HEAD_BYTES = 64 * 1024


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

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request's headers are too large.")

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)


class _Server(uvicorn.Server):
    """uvicorn without its own handling of signals: the process has one."""

    def begin_exit(self) -> None:
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@asynccontextmanager
async def serve_openai(
    config: OpenAIConfig, app: OpenAIApp, drain_seconds: float, *, shares_port: bool = False
) -> AsyncGenerator[OpenAIServer, None]:
    """Serves until the context is left; then running calls have `drain_seconds` more. Raises ConfigError.

    With `shares_port` other processes may listen at the same port.
    """
    listening = _bind(config.listen, shares_port=shares_port)
    host, port = listening[0].getsockname()[:2]
    settings = uvicorn.Config(
        app,
        loop="none",
        http=_BoundedHttp,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=max(1, round(drain_seconds)),
        limit_concurrency=config.max_connections,
    )
    settings.load()
    if config.tls is not None:
        settings.ssl = config.tls.server_context("openai.tls")
    elif not is_loopback(host):
        log.warning("listening beyond this host without TLS", listen=config.listen)
    server = _Server(settings)
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


def _bind(listen: str, *, shares_port: bool) -> list[socket.socket]:
    host, port = split_address(listen, "openai.listen")
    try:
        return open_sockets(host, port, shares_port=shares_port)
    except OSError as error:
        raise ConfigError(f"openai.listen: cannot listen on {listen!r}; is the port taken?") from error
