"""Checks of addresses: is something listening there, could a server?"""

import asyncio
import socket

from runtime.aio import timeout

_CONNECT_SECONDS = 1.0


async def is_listening(address: str) -> bool:
    """True if a connection to `host:port` is accepted within a second."""
    host, _, port = address.rpartition(":")
    try:
        async with timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, int(port))
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    return True


def is_free(port: int) -> bool:
    """True if a server could listen at this port of 127.0.0.1."""
    with socket.socket() as probe:
        # As servers do: connections that linger from an earlier server do not matter.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
