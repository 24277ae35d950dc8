"""Opening and closing of a call on a connection of its own."""

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from baton_http2.aio import timeout, wait_until_done
from baton_http2.client.call import ClientCall, PushMessage
from baton_http2.client.connection import ClientConnection
from baton_http2.limits import Http2Limits, ServerLimits
from baton_http2.security import require_http2
from baton_http2.wire.hpack import literal

# A server measures its bandwidth by pings; how many come is no reason to leave it.
DEFAULT_LIMITS: Final = ServerLimits(Http2Limits(), accepts_compression=False, min_ping_seconds=0.0, input=None)
_CONNECT_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class ServerAddress:
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


class ConnectFailed(ConnectionError):
    """A server cannot be reached, or does not speak HTTP/2."""


@asynccontextmanager
async def open_call(
    peer: ServerAddress, path: str, push: PushMessage, limits: ServerLimits = DEFAULT_LIMITS
) -> AsyncGenerator[ClientCall, None]:
    """A call of a method with streams in both directions, whose messages `push` gets as they come.

    Raises ConnectFailed if the peer cannot be reached. Leaving the context cancels the call, and closes the connection.
    """
    connection = await _connect(peer, path, push, limits)
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


async def _connect(peer: ServerAddress, path: str, push: PushMessage, limits: ServerLimits) -> ClientConnection:
    loop = asyncio.get_running_loop()
    try:
        host, _, port = peer.address.rpartition(":")
        host = host.strip("[]")
        if peer.tls is not None:
            require_http2(peer.tls)
        async with timeout(_CONNECT_SECONDS):
            _, connection = await loop.create_connection(
                lambda: ClientConnection(peer.head(path), push, limits),
                host,
                int(port),
                ssl=peer.tls,
                server_hostname=(peer.server_name or host) if peer.tls else None,
            )
    except (OSError, ValueError, OverflowError) as error:
        raise ConnectFailed(f"cannot connect to {peer.address}: {error}") from error
    secured_by = connection.transport.get_extra_info("ssl_object")
    if secured_by is not None and secured_by.selected_alpn_protocol() != "h2":
        connection.close()
        raise ConnectFailed(f"cannot connect to {peer.address}: it does not speak HTTP/2")
    return connection
