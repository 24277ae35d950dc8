"""The metrics of another package's engine, at this process's endpoint."""

from collections.abc import Iterable, Iterator

from prometheus_client import REGISTRY as LIBRARY_REGISTRY
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from typing_extensions import Self

from runtime.telemetry.metrics import REGISTRY


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
