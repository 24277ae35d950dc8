"""Fetching over `https:`, from allowed hosts and public addresses only.

The connection goes to an address that was checked and never to a name, so that a name that changes its addresses
between check and connection gains nothing. TLS still verifies the name. Proxies, cookies and credentials are not used.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_network
from urllib.parse import urljoin

from baton.errors import ConfigError, DeadlineExceeded, InvalidRequest, MediaUnavailable, PermissionDenied
from media.config import FetchConfig
from media.sources import uri
from media.sources.addresses import Address, HostPattern, HttpsTarget, Resolver, is_public
from media.sources.exchange import Body, Exchange, Redirect
from runtime.aio import timeout

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
