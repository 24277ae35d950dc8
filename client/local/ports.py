"""Loopback ports for the processes of a local cluster."""

import random
import socket

PREFERRED_ROUTER_PORT = 7070
ATTEMPTS = 200

# What a plan has given to one process is still free when it looks for the next.
_given: set[int] = set()


def free_port() -> int:
    """A port that nothing listens on now, and that this process has not been given before.

    Below the range from which systems give out ports of their own accord, so that no connection takes it meanwhile.
    """
    for _ in range(ATTEMPTS):
        port = random.randrange(20_000, 32_000)
        if port not in _given and is_free(port):
            _given.add(port)
            return port
    raise OSError(f"no free port between 20000 and 32000 in {ATTEMPTS} attempts")


def router_port() -> int:
    """The port that clients try by default, or another one if it is taken."""
    return port_or_another(PREFERRED_ROUTER_PORT)


def port_or_another(port: int) -> int:
    """That port, or a free one if it is taken."""
    return port if is_free(port) else free_port()


def is_free(port: int) -> bool:
    """Whether a server could listen there."""
    with socket.socket() as probe:
        # As servers do it: a connection that lingers from an earlier server is in nobody's way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
