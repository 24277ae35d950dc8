"""Fetching over `https:`, from allowed hosts and public addresses only.

The connection goes to an address that was checked and never to a name, so that a name that changes its addresses
between check and connection gains nothing. TLS still verifies the name. Proxies, cookies and credentials are not used.

One GET over an open connection: HTTP/1.1 by h11, with a limit on the bytes read.
"""

import asyncio
import ssl
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_network
from urllib.parse import urljoin

import h11

from baton.errors import ConfigError, DeadlineExceeded, InvalidRequest, MediaUnavailable, PermissionDenied
from media.config import FetchConfig
from media.sources import uri
from media.sources.addresses import Address, HostPattern, HttpsTarget, Resolver, is_public
from runtime.aio import timeout

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
                    location = self._redirect(event)
                    if location is not None:
                        return Redirect(location)
                    self._check(event)
                case h11.Data():
                    content += event.data
                    if len(content) > self.max_bytes:
                        raise self._too_large()
        return Body(bytes(content))

    def _redirect(self, response: h11.Response) -> str | None:
        return _header(response, b"location") if response.status_code in _REDIRECTS else None

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


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class HttpsFetcher:
    """Fetches `https:` URIs within the limits of a FetchConfig. Keeps no connection open.

    Raises ConfigError when it is made, if the certificates to trust cannot be read.
    """

    def __init__(self, config: FetchConfig, resolver: Resolver, *, accept: Sequence[str], max_bytes: int) -> None:
        self._config = config
        self._resolver = resolver
        self._accept = ", ".join(accept)
        self._max_bytes = max_bytes
        self._allowed = tuple(map(HostPattern.parse, config.allowed_hosts))
        self._private = tuple(map(ip_network, config.allowed_private_networks))
        self._tls = _tls(config.ca_file)

    async def fetch(self, address: str, field: str) -> bytes:
        """The content at a URI; `field` is what errors name.

        Raises InvalidRequest for a URI that does not lead to acceptable content, PermissionDenied for a host or an
        address that may not be asked, MediaUnavailable or DeadlineExceeded for a server that does not answer as
        servers do. Messages name no host and no address that is not in the URI.
        """
        try:
            async with timeout(self._config.timeout_seconds):
                return await self._follow(address, Exchange(field, self._accept, self._max_bytes))
        except TimeoutError:
            message = f"{field}: not fetched within {self._config.timeout_seconds:g} s"
            raise DeadlineExceeded(message) from None

    async def _follow(self, address: str, exchange: Exchange) -> bytes:
        subject = "the URI"
        for _ in range(self._config.max_redirects + 1):
            target = self._target(address, exchange.field, subject)
            async with self._connection(target, exchange.field, subject) as (reader, writer):
                answer = await exchange.get(target, reader, writer)
            match answer:
                case Body(content):
                    return content
                case Redirect(location):
                    address, subject = _joined(address, location, exchange.field), "a redirect"
        raise InvalidRequest.of(exchange.field, f"is redirected more than {self._config.max_redirects} times")

    def _target(self, address: str, field: str, subject: str) -> HttpsTarget:
        """The target of `address`, if it is allowed."""
        parts = uri.split(address, field)
        if parts.scheme != "https":
            raise PermissionDenied(f"{field}: {subject} leads away from https:")
        target = HttpsTarget.of(parts, field)
        if not any(pattern.matches(target) for pattern in self._allowed):
            raise PermissionDenied(f"{field}: {subject} leads to a host or port that is not allowed")
        return target

    @asynccontextmanager
    async def _connection(self, target: HttpsTarget, field: str, subject: str) -> AsyncIterator[Connection]:
        addresses = await self._addresses(target, field, subject)
        reader, writer = await self._connect(addresses, target, field)
        try:
            yield reader, writer
        finally:
            # Not close(), which would wait for the server.
            writer.transport.abort()

    async def _addresses(self, target: HttpsTarget, field: str, subject: str) -> tuple[Address, ...]:
        addresses = await self._resolver.resolve(target.host)
        if not addresses:
            raise MediaUnavailable(f"{field}: the host that {subject} leads to cannot be resolved")
        # One private address is enough to refuse: an honest name is not public and private at once.
        if not all(map(self._may_be_asked, addresses)):
            raise PermissionDenied(f"{field}: {subject} leads to an address that is not public")
        return addresses

    def _may_be_asked(self, address: Address) -> bool:
        return is_public(address) or any(address in network for network in self._private)

    async def _connect(self, addresses: Sequence[Address], target: HttpsTarget, field: str) -> Connection:
        """A connection to the first address that accepts it. Each address gets the same share of the time."""
        for address in addresses:
            try:
                async with timeout(self._config.timeout_seconds / len(addresses)):
                    return await asyncio.open_connection(
                        str(address), target.port, ssl=self._tls, server_hostname=target.host
                    )
            except ssl.SSLError:
                problem = "the server's TLS or certificate is invalid"
            except (OSError, TimeoutError):
                problem = "the server cannot be reached"
        raise MediaUnavailable(f"{field}: {problem}")


def _joined(address: str, location: str, field: str) -> str:
    try:
        uri.split(location, field)
        return urljoin(address, location)
    except (InvalidRequest, ValueError):
        raise InvalidRequest.of(field, "is redirected to something that is not a URI") from None


def _tls(ca_file: str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:
        raise ConfigError(f"fetch.ca_file: {ca_file}: cannot be read as certificates: {error.strerror}") from error
    context.set_alpn_protocols(["http/1.1"])
    return context
