"""One GET over an open connection: HTTP/1.1 by h11, with a limit on the bytes read."""

from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import h11

from baton.errors import InvalidRequest, MediaUnavailable
from media.sources.addresses import HttpsTarget

_READ_BYTES = 64 * 1024
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PASSING = frozenset({408, 425, 429})
Event = h11.InformationalResponse | h11.Response | h11.Data


@dataclass(frozen=True, slots=True)
class Redirect:
    """A redirect; `location` is as the server sent it, and may be relative."""

    location: str


@dataclass(frozen=True, slots=True)
class Body:
    """The whole content."""

    content: bytes


@dataclass(frozen=True, slots=True)
class Exchange:
    """The parameters of one request. `field` is the field that errors name."""

    field: str
    accept: str
    max_bytes: int

    async def get(self, target: HttpsTarget, reader: StreamReader, writer: StreamWriter) -> Redirect | Body:
        """Requests the target's path and reads the response. The connection cannot be used again.

        Raises InvalidRequest for an answer that would be the same again, such as 404, a compressed body, or one over
        the limit, of which not more than the limit is read; MediaUnavailable for one that may be better next time.
        """
        connection = h11.Connection(h11.CLIENT)
        try:
            writer.write(self._request(connection, target))
            await writer.drain()
            async with aclosing(_events(connection, reader)) as events:
                return await self._answer(events)
        except (h11.RemoteProtocolError, OSError):
            raise MediaUnavailable(f"{self.field}: the server closed the connection or does not speak HTTP") from None

    def _request(self, connection: h11.Connection, target: HttpsTarget) -> bytes:
        headers = [
            ("Host", target.authority),
            ("User-Agent", "baton"),
            ("Accept", self.accept),
            ("Accept-Encoding", "identity"),
            ("Connection", "close"),
        ]
        request = connection.send(h11.Request(method="GET", target=target.path, headers=headers))
        connection.send(h11.EndOfMessage())
        return request or b""

    async def _answer(self, events: AsyncGenerator[Event, None]) -> Redirect | Body:
        content = bytearray()
        async for event in events:
            match event:
                case h11.Response():
                    location = _header(event, b"location") if event.status_code in _REDIRECTS else None
                    if location is not None:
                        return Redirect(location)
                    self._check(event)
                case h11.Data():
                    content += event.data
                    if len(content) > self.max_bytes:
                        raise self._too_large()
        return Body(bytes(content))

    def _check(self, response: h11.Response) -> None:
        status = response.status_code
        if status in _PASSING or status >= 500:
            raise MediaUnavailable(f"{self.field}: the server answered {status}")
        if status != 200:
            raise InvalidRequest.of(self.field, f"the server answered {status}")
        if (_header(response, b"content-encoding") or "identity").lower() != "identity":
            raise InvalidRequest.of(self.field, "the server sent it compressed, which was not requested")
        # h11 has verified that this is a number.
        if int(_header(response, b"content-length") or 0) > self.max_bytes:
            raise self._too_large()

    def _too_large(self) -> InvalidRequest:
        return InvalidRequest.of(self.field, f"is larger than the limit of {self.max_bytes} bytes")


async def _events(connection: h11.Connection, reader: StreamReader) -> AsyncGenerator[Event, None]:
    """The events of the server's response. Reads no faster than they are consumed."""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_READ_BYTES))
        elif isinstance(event, (h11.InformationalResponse, h11.Response, h11.Data)):
            yield event
        else:
            return


def _header(response: h11.Response, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in response.headers if key == name), None)
