"""A small HTTP/1.1 server for one page and some JSON: asyncio's streams, and h11 for the protocol."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

import h11

from baton.errors import ConfigError
from runtime.aio import timeout

_IDLE_SECONDS = 60.0
_CHUNK_BYTES = 64 * 1024
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True, slots=True)
class RequestTarget:
    """The target of a request: the path as sent, and the query parameters."""

    path: str
    query: Mapping[str, list[str]]


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A whole answer."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[RequestTarget], Awaitable[HttpAnswer]]


@asynccontextmanager
async def serve_http(listen: str, handler: Handler) -> AsyncGenerator[int, None]:
    """Serves GET and HEAD at `host:port` while the context is open, and yields the port. Port 0 is any free one.

    On loopback only loopback host names are answered, so that a foreign page cannot read by DNS rebinding. Raises
    ConfigError if it cannot listen there.
    """
    host, _, port = listen.rpartition(":")
    names = _LOOPBACK if host in _LOOPBACK else frozenset[str]()
    connections: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            await _HttpConnection(reader, writer, handler, names).run()
        finally:
            connections.discard(task)
            writer.close()

    try:
        server = await asyncio.start_server(connected, host.strip("[]"), int(port))
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(f"listen: cannot listen on {listen!r}: {error}") from error
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


class _HttpConnection:
    """One client's connection: one request after another, until either side closes it."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler, names: frozenset[str]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._handler = handler
        self._names = names
        self._protocol = h11.Connection(h11.SERVER)

    async def run(self) -> None:
        try:
            async with timeout(_IDLE_SECONDS) as idle:
                while await self._serve_one():
                    self._protocol.start_next_cycle()
                    idle.reschedule(asyncio.get_running_loop().time() + _IDLE_SECONDS)
        except (ConnectionError, h11.LocalProtocolError, TimeoutError):
            # The client has left, or is silent.
            return

    async def _serve_one(self) -> bool:
        """Answers the next request. Returns whether the connection stays open."""
        try:
            request = await self._next_request()
        except h11.RemoteProtocolError as error:
            await self._send(HttpAnswer(error.error_status_hint, b"not an HTTP request"), is_head=False)
            return False
        if request is None:
            return False
        await self._send(await self._answer(request), is_head=request.method == b"HEAD")
        return self._protocol.our_state is h11.DONE and self._protocol.their_state is h11.DONE

    async def _next_request(self) -> h11.Request | None:
        """The next request, its body skipped; None at the end of the connection."""
        request: h11.Request | None = None
        while True:
            event = self._protocol.next_event()
            if event is h11.NEED_DATA:
                self._protocol.receive_data(await self._reader.read(_CHUNK_BYTES))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.EndOfMessage):
                return request
            elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
                return None

    async def _answer(self, request: h11.Request) -> HttpAnswer:
        if request.method not in (b"GET", b"HEAD"):
            return HttpAnswer(405, b"only GET and HEAD", {"allow": "GET, HEAD"})
        host = dict(request.headers).get(b"host", b"").decode("latin-1")
        if self._names and _without_port(host) not in self._names:
            return HttpAnswer(421, b"this server answers only to names of loopback")
        parts = urlsplit(request.target.decode("latin-1"))
        return await self._handler(RequestTarget(parts.path, parse_qs(parts.query)))

    async def _send(self, answer: HttpAnswer, *, is_head: bool) -> None:
        if self._protocol.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        headers = {
            "content-type": "text/plain; charset=utf-8",
            "cache-control": "no-store",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            **answer.headers,
            "content-length": str(len(answer.body)),
        }
        self._write(h11.Response(status_code=answer.status, headers=list(headers.items())))
        if not is_head:
            self._write(h11.Data(data=answer.body))
        self._write(h11.EndOfMessage())
        await self._writer.drain()

    def _write(self, event: h11.Event) -> None:
        self._writer.write(self._protocol.send(event) or b"")


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower()
