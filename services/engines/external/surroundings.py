"""The surroundings in which an engine of another package starts: free ports, and variables of the environment."""

import os
import random
import socket
from collections.abc import Mapping

from baton.errors import ConfigError

_PORTS = range(20_000, 32_000)


def free_ports(host: str, count: int) -> int:
    """Returns the first of `count` neighbouring ports that nothing listens at.

    They are below the ephemeral range: engines bind them half a minute later, and vLLM without its port starts all
    the same, but no other worker can read from it.
    """
    for _ in range(50):
        port = _PORTS[random.randrange(len(_PORTS) - count)]
        if all(_is_free(host, port + offset) for offset in range(count)):
            return port
    raise ConfigError(f"no {count} neighbouring ports are free at {host}")


def _is_free(host: str, port: int) -> bool:
    try:
        with socket.create_server((host, port)):
            return True
    except OSError:
        return False


class EnvironmentVariables:
    """Sets variables while an engine's processes start, which read them later too: only our copy is put back."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self._before = {name: os.environ.get(name) for name in variables}

    def __enter__(self) -> None:
        os.environ.update(self._variables)

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
