"""The surroundings of an engine of another package: free ports, variables of the environment, and its metrics."""

import os
import random
import socket
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import REGISTRY as LIBRARY_REGISTRY
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from typing_extensions import Self

from baton.errors import ConfigError
from runtime.telemetry.metrics import REGISTRY

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


class PackageFamilies(Collector):
    """The families whose names begin with `prefix`, of `written` and of Prometheus' global registry, which is not
    served here. Those of its own processes a package writes into files, which `written` reads. A context manager.
    """

    def __init__(self, prefix: str, written: CollectorRegistry | None = None) -> None:
        self._prefix = prefix
        self._written = written or CollectorRegistry()

    def collect(self) -> Iterator[Metric]:
        """Returns the families for a scrape."""
        written = list(self._written.collect())
        yield from written
        names = {family.name for family in written}
        for family in LIBRARY_REGISTRY.collect():
            if family.name.startswith(self._prefix) and family.name not in names:
                yield family

    def describe(self) -> Iterable[Metric]:
        """Returns nothing: the families depend on the version."""
        return ()

    def __enter__(self) -> Self:
        REGISTRY.register(self)
        return self

    def __exit__(self, *_: object) -> None:
        REGISTRY.unregister(self)
