"""Addresses of a configuration to listen at, and ports that the processes of one server share."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from baton.errors import ConfigError
from baton_http2.sockets.listening import open_sockets


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
