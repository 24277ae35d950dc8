"""A client of completions over HTTP/1.1 with streams: reads what comes, and counts events, without parsing JSON."""

import asyncio
import json
import time
from typing import Final, cast

from benchmarks.peers.clients.load import PROMPTS, STEP_SECONDS, Answer

_EVENT: Final = b"data: "
_DONE: Final = b"data: [DONE]"
_END: Final = b"0\r\n\r\n"
# An event's beginning may be cut in two by the end of a read.
_KEPT: Final = len(_DONE) - 1


class Connection(asyncio.Protocol):
    """One connection, one request after the other."""

    @classmethod
    async def open(cls, port: int) -> "Connection":
        """A connection to a port of this host."""
        _, connection = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection was lost: {exc}")

    def close(self) -> None:
        """Closes it."""
        self._transport.close()

    async def answer(self, body: bytes, tokens: int) -> Answer:
        """Sends a request, and waits for the end of its stream. Raises ConnectionError."""
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self._kept = b""
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answer = Answer(tokens)
        self._transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        try:
            await self._done
        except asyncio.CancelledError:
            self._transport.close()
            raise
        return self._answer

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        events = self._count(data, _EVENT) - self._count(data, _DONE)
        if events > 0:
            self._answer.note(now, events)
        if not self._answer.arrivals and b" 200 " not in data[:32] and data.startswith(b"HTTP/1.1 "):
            self._fail(data[:300].decode("latin-1"))
        elif (self._kept + data).endswith(_END) and not self._done.done():
            self._done.set_result(None)
        self._kept = (self._kept + data)[-_KEPT:]

    def _count(self, data: bytes, what: bytes) -> int:
        return (self._kept[1 - len(what) :] + data).count(what)

    def _fail(self, reason: str) -> None:
        done = getattr(self, "_done", None)
        if done is not None and not done.done():
            done.set_exception(ConnectionError(reason))


class HttpClient:
    """Sends a router its load, on connections that are kept and used again. See LoadClient.

    `served` is the name that the router knows the engine's models by, if it knows but one.
    """

    def __init__(self, port: int, served: str = "") -> None:
        self._port = port
        self._served = served
        self._idle: list[Connection] = []
        self._opened: list[Connection] = []

    async def answer(self, model: str, tokens: int) -> Answer:
        connection = self._idle.pop() if self._idle else await self._open()
        asked = {"model": self._served or model, "user": model, "prompt": next(PROMPTS), "max_tokens": tokens}
        speed = list(STEP_SECONDS).index(model)  # By gRPC smg passes on a seed, but no user.
        body = json.dumps({**asked, "seed": speed, "stream": True, "ignore_eos": True}).encode()
        answer = await connection.answer(body, tokens)
        self._idle.append(connection)
        return answer

    def close(self) -> None:
        for connection in self._opened:
            connection.close()

    async def _open(self) -> Connection:
        connection = await Connection.open(self._port)
        self._opened.append(connection)
        return connection
