"""Addresses of a configuration to listen at, and ports that the processes of one server share.

Checks of addresses: is something listening there, could a server?
"""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from baton.errors import ConfigError
from baton_http2.sockets.accepting import open_sockets
from runtime.aio import timeout


def split_address(listen: str, key: str) -> tuple[str, int]:
    """The host and the port of a configuration's `host:port`. Raises ConfigError naming its key."""
    host, _, port = listen.rpartition(":")
    # Some libraries would read 99999 as port 34463, and a missing port as 443.
    if not (host and port.isdecimal() and int(port) < 2**16):
        raise ConfigError(f"{key}: {listen!r} is not host:port")
    return host.strip("[]"), int(port)


@contextmanager
def reserved_port(listen: str, key: str) -> Iterator[str]:
    """Holds the port of `host:port` while the context is open, without listening; yields it with the actual port.

    Processes of this user may then listen there by sharing the port. Raises ConfigError if another server has it.
    """
    host, port = split_address(listen, key)
    with ExitStack() as stack:
        try:
            sockets = open_sockets(host, port)
        except OSError as error:
            raise ConfigError(f"{key}: cannot listen on {listen!r}; is the port taken?") from error
        for each in sockets:
            stack.enter_context(each)
            # Only now: bound with it, the port could be one that another server shares.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        yield f"{listen.rpartition(':')[0]}:{sockets[0].getsockname()[1]}"


_CONNECT_SECONDS = 1.0


async def is_listening(address: str) -> bool:
    """True if a connection to `host:port` is accepted within a second."""
    host, _, port = address.rpartition(":")
    try:
        async with timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
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
