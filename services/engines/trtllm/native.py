"""TensorRT-LLM's own Prometheus metrics at our endpoint: moved out of the global registry, and let through by name."""

from collections.abc import Iterable, Iterator
from typing import Any

import structlog
from prometheus_client import REGISTRY as LIBRARY_REGISTRY
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from rpc.metrics import REGISTRY
from services.engines.trtllm.package import Package

log = structlog.get_logger(__name__)

_PREFIX = "trtllm_"


class NativeMetrics(Collector):
    """`MetricsCollector`, fed by us. A Collector of those of its families that have its prefix.

    It registers with Prometheus' global registry, which we do not serve, and where a second one of a process is an
    error. So what it has registered is moved into a registry of this object's own as soon as it is made.
    """

    def __init__(self, package: Package, model: str) -> None:
        self._own = CollectorRegistry()
        made = package.metrics_collector
        self._collector = made({"model_name": model, "engine_type": "trtllm"}) if made is not None else None
        if self._collector is None:
            log.warning("trtllm has no metrics of its own", version=str(package.version))
            return
        for metric in _registered(self._collector):
            LIBRARY_REGISTRY.unregister(metric)
            self._own.register(metric)
        # Renamed in 1.3.0rc5.
        named = ("log_request_metrics_dict", "log_metrics_dict")
        self._log_request = next((found for name in named if (found := getattr(self._collector, name, None))), None)

    def collect(self) -> Iterator[Metric]:
        """For a scrape."""
        for family in self._own.collect():
            if family.name.startswith(_PREFIX):
                yield family

    def describe(self) -> Iterable[Metric]:
        """None ahead of time: what an engine counts depends on its version."""
        return ()

    def note_request(self, result: Any) -> None:
        """A request has ended."""
        found = getattr(result, "metrics_dict", None)
        if self._collector is not None and self._log_request is not None and found:
            self._log_request(found)

    def note_iteration(self, stat: Any) -> None:
        """An iteration is over."""
        if self._collector is not None:
            self._collector.log_iteration_stats(stat)

    def publish(self) -> None:
        """Shows them at this process's endpoint, until `withdraw`."""
        REGISTRY.register(self)

    def withdraw(self) -> None:
        """Shows them no more."""
        REGISTRY.unregister(self)


def _registered(collector: Any) -> list[MetricWrapperBase]:
    """The metrics among its attributes, also those in dictionaries and lists."""
    found: list[MetricWrapperBase] = []
    for value in vars(collector).values():
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        found += [one for one in inner if isinstance(one, MetricWrapperBase)]
    return found
