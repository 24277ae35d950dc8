"""Loopback ports for the processes of a local cluster."""

import random

from runtime.network import is_free

PREFERRED_ROUTER_PORT = 7070
ATTEMPTS = 200

# A port that a plan has assigned to one process is still free when it looks for the next one.
_given: set[int] = set()


def free_port() -> int:
    """A free port that this function has not returned before.

    It is below the ephemeral range, so that no outgoing connection can take it.
    """
    for _ in range(ATTEMPTS):
        port = random.randrange(20_000, 32_000)
        if port not in _given and is_free(port):
            _given.add(port)
            return port
    raise OSError(f"no free port between 20000 and 32000 in {ATTEMPTS} attempts")


def router_port() -> int:
    """The clients' default port, or another one if it is taken."""
    return port_or_another(PREFERRED_ROUTER_PORT)


def port_or_another(port: int) -> int:
    """`port`, or a free one if it is taken."""
    return port if is_free(port) else free_port()
