"""The adapter's metrics, and SGLang's own, `sglang:*`, at the same endpoint."""

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import REGISTRY as LIBRARY_REGISTRY
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from runtime.telemetry.metrics import REGISTRY, counter, gauge

ROOMS = gauge(
    "baton_sglang_rooms_open", "Prompts for which SGLang has allocated blocks, and whose KV has not come yet."
)
CLOSED_ROOMS = counter("baton_sglang_rooms_closed_total", "Rooms that were closed before their KV had come.")
ABORTS = counter("baton_sglang_aborts_total", "Requests that were aborted inside SGLang.")
UNANSWERED_ABORTS = counter(
    "baton_sglang_unanswered_aborts_total", "Aborts that SGLang did not handle within abort_seconds."
)
STALLED_READERS = counter("baton_sglang_stalled_readers_total", "Requests aborted because their answer was not read.")

_PREFIX = "sglang:"


class SglangFamilies(Collector):
    """The families of SGLang's processes, which write them into files of `folder`, and those of this one, which are in
    Prometheus' global registry. A context manager.
    """

    def __init__(self, folder: str) -> None:
        self._registry: Any = CollectorRegistry()
        MultiProcessCollector(self._registry, path=folder)  # type: ignore[no-untyped-call]

    def collect(self) -> Iterator[Metric]:
        """Returns the families for a scrape."""
        written = list(self._registry.collect())
        yield from written
        names = {family.name for family in written}
        for family in LIBRARY_REGISTRY.collect():
            if family.name.startswith(_PREFIX) and family.name not in names:
                yield family

    def describe(self) -> Iterable[Metric]:
        """Returns nothing: the families depend on the version."""
        return ()

    def __enter__(self) -> "SglangFamilies":
        REGISTRY.register(self)
        return self

    def __exit__(self, *_: object) -> None:
        REGISTRY.unregister(self)
