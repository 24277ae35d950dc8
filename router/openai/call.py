"""One HTTP call: its headers as metadata, its body within limits, its response, and the connection that may go.

To the interceptors of rpc/ it looks like a gRPC call: HTTP headers are the metadata, and the status code is the one
that the same error has there.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import parse_qs

from grpc import StatusCode

from baton.errors import InvalidRequest, Overloaded
from baton_http2.input_budget import InputBudget, InputHold, InputLimits, Pace
from router.openai.errors import PLAIN_NAMES, HttpRefusal
from runtime.aio import timeout
from runtime.entropy import token_hex

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

# A larger body waits for its memory before it is read.
_LARGE_BYTES = 1024 * 1024
_TOO_SLOW = "the body came too slowly"
_NO_MEMORY = "the memory for unread requests is used up; try again"
_PLAIN = ("", "identity")
_ACCEPTED = (b"accept-encoding", b"identity")
_REQUEST_ID_HEADERS = (b"x-request-id", b"request-id")  # OpenAI's and Anthropic's
JSON = (b"content-type", b"application/json")


@dataclass(frozen=True, slots=True)
class Body:
    """A body in pieces, which counts as input until `hold` is released."""

    pieces: list[bytes]
    hold: InputHold


class HttpCall:
    """A call on an ASGI server. `request_id` is the client's `x-request-id`, or a new one."""

    def __init__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        headers = ((key.decode("latin-1").lower(), value.decode("latin-1")) for key, value in scope["headers"])
        self._metadata = _with_bearer(tuple(headers))
        self._query: bytes = scope.get("query_string", b"")
        self._host = str((scope.get("client") or ("",))[0])
        self._has_left = self._has_ended = False
        self.status = StatusCode.OK
        self.response_status = 0  # 0 before the response has begun
        self.names = PLAIN_NAMES  # of the body's fields, for errors
        self.places: Mapping[str, str] = {}  # fields of the request by their places in the body, for errors too
        self.request_id = next((value for key, value in self._metadata if key == "x-request-id"), "") or token_hex(16)

    # As a gRPC context.

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """The headers."""
        return self._metadata

    @property
    def query(self) -> Mapping[str, Sequence[str]]:
        """The parameters behind the path."""
        return parse_qs(self._query.decode("latin-1"))

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Empty: callers identify themselves by API keys."""
        return {}

    def time_remaining(self) -> float | None:
        """None: HTTP has no deadlines."""
        return None

    def code(self) -> StatusCode:
        """The status that the same call would have by gRPC."""
        return self.status

    def cancelled(self) -> bool:
        """True if the connection has gone."""
        return self._has_left

    # The request and the response.

    async def read_body(self, max_bytes: int, budget: InputBudget) -> "Body":
        """The whole body, which counts in `budget` until the caller releases it.

        Raises HttpRefusal for one that is compressed, too large or too slow, and Overloaded if there is no memory.
        """
        self._refuse_encoded()
        announced = self._announced_bytes()
        if announced > max_bytes:
            raise HttpRefusal(413, f"the body has more than {max_bytes} bytes")
        peer = budget.of_peer(self._host)
        if announced > _LARGE_BYTES and not await peer.reserved(announced):
            raise Overloaded(_NO_MEMORY, retry_after_seconds=1.0)
        counted = announced if announced > _LARGE_BYTES else 0
        body = Body([], peer.hold(counted, is_counted=True))
        try:
            await self._receive_all(body, counted, max_bytes, budget.limits)
        except BaseException:
            body.hold.release()
            raise
        return body

    async def _receive_all(self, body: "Body", counted: int, max_bytes: int, limits: InputLimits) -> None:
        loop = asyncio.get_running_loop()
        size, pace = 0, Pace(0, loop.time(), 0)
        while True:
            try:
                async with timeout(limits.stall_seconds):
                    message = await self._receive()
            except TimeoutError:
                raise HttpRefusal(408, _TOO_SLOW) from None
            if message["type"] == "http.disconnect":
                self._has_left = True
                raise InvalidRequest.of("body", "is incomplete")
            piece: bytes = message.get("body", b"")
            size += len(piece)
            if size > max_bytes:
                raise HttpRefusal(413, f"the body has more than {max_bytes} bytes")
            if size > counted:
                if not body.hold.grow(size - counted):
                    raise Overloaded(_NO_MEMORY, retry_after_seconds=1.0)
                counted = size
            body.pieces.append(piece)
            if not message.get("more_body", False):
                return
            if pace.is_slow(loop.time(), size, limits):
                raise HttpRefusal(408, _TOO_SLOW)

    def _refuse_encoded(self) -> None:
        """Raises HttpRefusal for a body that is not sent as it is."""
        for key, value in self._metadata:
            if key == "content-encoding" and any(one.strip().lower() not in _PLAIN for one in value.split(",")):
                raise HttpRefusal(415, f"the body is encoded as {value!r:.60}; only identity is accepted", _ACCEPTED)

    def _announced_bytes(self) -> int:
        """Its content-length; 0 for a body that comes in chunks."""
        value = next((value for key, value in self._metadata if key == "content-length"), "")
        return int(value) if value.isdecimal() and len(value) < 20 else 0

    @asynccontextmanager
    async def while_connected(self) -> AsyncGenerator[None, None]:
        """Cancels the body when the client leaves. The request must have been read."""
        task = asyncio.current_task()
        assert task is not None

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            # The server says the same after the last piece of a response, though the client is there.
            if not self._has_ended:
                self._has_left = True
                task.cancel()

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()

    async def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Sends the head of the response."""
        self.response_status = status
        named = self.request_id.encode("latin-1", "replace")
        own = [(name, named) for name in _REQUEST_ID_HEADERS]
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *own]})

    async def write(self, piece: bytes) -> None:
        """Sends a piece of the response. Waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self, piece: bytes = b"") -> None:
        """Sends the last piece of the response, once: an error or a cancel after that changes nothing of it."""
        if self._has_ended:
            return
        self._has_ended = True
        await self._send({"type": "http.response.body", "body": piece, "more_body": False})

    async def respond(self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Sends a whole response of JSON."""
        await self.begin(status, [JSON, (b"content-length", str(len(body)).encode()), *headers])
        await self.end(body)


def _with_bearer(headers: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """The headers, in which Anthropic's `x-api-key` is a bearer token, unless there is one."""
    key = next((value for name, value in headers if name == "x-api-key"), "")
    if not key or any(name == "authorization" for name, _ in headers):
        return headers
    return (*headers, ("authorization", f"Bearer {key}"))
