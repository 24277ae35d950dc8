"""A small HTTP/1.1 server for one page and some JSON: asyncio's streams, and h11 for the protocol."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

import h11

from rpc.aio import timeout
from rpc.errors import ConfigError

_IDLE_SECONDS = 60.0
_CHUNK_BYTES = 64 * 1024
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked for: the path as it was sent, and the parameters behind it."""

    path: str
    query: Mapping[str, list[str]]


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[Target], Awaitable[Answer]]


@asynccontextmanager
async def serve_http(listen: str, handler: Handler) -> AsyncGenerator[int, None]:
    """Serves GET and HEAD at `host:port` while the context is open, and gives the port. Port 0 is any free one.

    On loopback only names of loopback are answered: a page of elsewhere whose name points here learns nothing. Raises
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
            await _Connection(reader, writer, handler, names).run()
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


class _Connection:
    """One client's connection: one request after another, until either side has had enough."""

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
        except (ConnectionError, h11.LocalProtocolError, asyncio.TimeoutError):
            # The client has left, or does not say anything any more.
            return

    async def _serve_one(self) -> bool:
        """Answers the next request; false if there is to be no other on this connection."""
        try:
            request = await self._next_request()
        except h11.RemoteProtocolError as error:
            await self._send(Answer(error.error_status_hint, b"this is no HTTP request"), is_head=False)
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

    async def _answer(self, request: h11.Request) -> Answer:
        if request.method not in (b"GET", b"HEAD"):
            return Answer(405, b"only GET and HEAD", {"allow": "GET, HEAD"})
        host = dict(request.headers).get(b"host", b"").decode("latin-1")
        if self._names and _without_port(host) not in self._names:
            return Answer(421, b"this server answers only to names of loopback")
        parts = urlsplit(request.target.decode("latin-1"))
        return await self._handler(Target(parts.path, parse_qs(parts.query)))

    async def _send(self, answer: Answer, *, is_head: bool) -> None:
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
