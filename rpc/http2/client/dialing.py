"""How a call on a connection of its own is opened, and closed."""

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from baton.connection.channels import MAX_RECEIVE_BYTES
from baton.errors import ConfigError, Unavailable
from rpc.auth.tls import TlsConfig
from rpc.http2.client.call import Call, TakeMessage
from rpc.http2.client.connection import ClientConnection
from rpc.http2.limits import Http2Limits, ServerLimits
from rpc.http2.security import require_http2
from rpc.http2.wire.hpack import literal
from runtime.aio import timeout, wait_until_done
from runtime.network.listening import split_address

# A server measures its bandwidth by pings; how many come is no reason to leave it.
DEFAULT_LIMITS: Final = ServerLimits(
    Http2Limits(), MAX_RECEIVE_BYTES, accepts_compression=False, min_ping_seconds=0.0, input=None
)
_CONNECT_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A server at `host:port`; with a TLS context it has to prove that it is `server_name`, or the host."""

    address: str
    tls: ssl.SSLContext | None = None
    server_name: str = ""

    def head(self, path: str) -> bytes:
        """The header block of a call without metadata and without a deadline."""
        authority = self.server_name or self.address
        fields = (
            (b":method", b"POST"),
            (b":scheme", b"https" if self.tls else b"http"),
            (b":path", path.encode()),
            (b":authority", authority.encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"grpc-accept-encoding", b"identity"),
            (b"user-agent", b"baton"),
        )
        return b"".join([literal(name, value) for name, value in fields])


def client_context(tls: TlsConfig) -> ssl.SSLContext:
    """What to connect with. Raises ConfigError if a file is missing or cannot be read."""
    return require_http2(tls.client_context())


@asynccontextmanager
async def open_call(
    peer: Peer, path: str, take: TakeMessage, limits: ServerLimits = DEFAULT_LIMITS
) -> AsyncGenerator[Call, None]:
    """A call of a method with streams in both directions, whose messages `take` gets as they come.

    Raises Unavailable if the peer cannot be reached. Leaving the context cancels the call, and closes the connection.
    """
    connection = await _connect(peer, path, take, limits)
    call = connection.call
    try:
        yield call
    finally:
        call.cancel()
        connection.close()
        # What was written gets out; a peer that does not read it is cut off.
        await wait_until_done(connection.closed)
        call.forget()
        del connection.call


async def _connect(peer: Peer, path: str, take: TakeMessage, limits: ServerLimits) -> ClientConnection:
    loop = asyncio.get_running_loop()
    try:
        host, port = split_address(peer.address, "address")
        async with timeout(_CONNECT_SECONDS):
            _, connection = await loop.create_connection(
                lambda: ClientConnection(peer.head(path), take, limits),
                host,
                port,
                ssl=peer.tls,
                server_hostname=(peer.server_name or host) if peer.tls else None,
            )
    except (OSError, TimeoutError, UnicodeError, ConfigError) as error:  # UnicodeError: no name of DNS
        raise Unavailable(f"cannot connect to {peer.address}: {error}") from error
    secured_by = connection.transport.get_extra_info("ssl_object")
    if secured_by is not None and secured_by.selected_alpn_protocol() != "h2":
        connection.close()
        raise Unavailable(f"cannot connect to {peer.address}: it does not speak HTTP/2")
    return connection
