"""The metrics of the adapter, those of TensorRT-LLM itself, and the latest statistics of its iterations."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog
from prometheus_client import REGISTRY as LIBRARY_REGISTRY
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from runtime.telemetry.metrics import REGISTRY, counter, gauge
from services.engines.trtllm.package import Package

OUTSTANDING = gauge("baton_trtllm_handoffs_outstanding", "Prompts whose KV TensorRT-LLM holds until it is fetched.")
OUTSTANDING_TOKENS = gauge("baton_trtllm_handoff_tokens_outstanding", "Tokens of these prompts.")
OLDEST_SECONDS = gauge("baton_trtllm_oldest_handoff_seconds", "For how long the oldest of them has been held.")
ABORTS = counter("baton_trtllm_aborts_total", "Requests that were aborted inside TensorRT-LLM.", ["when"])
UNANSWERED_ABORTS = counter(
    "baton_trtllm_unanswered_aborts_total", "Aborted requests that TensorRT-LLM did not end within abort_seconds."
)
STALLED_READERS = counter("baton_trtllm_stalled_readers_total", "Requests aborted because their answer was not read.")
KV_EVENT_GAPS = counter("baton_trtllm_kv_event_gaps_total", "Times that KV events were lost.")
POLLING = gauge("baton_trtllm_polling", "Whether statistics and KV events are read: 1, or 0 after that has failed.")


log = structlog.get_logger(__name__)

_PREFIX = "trtllm_"


class NativeMetrics(Collector):
    """TensorRT-LLM's `MetricsCollector`, whose families with the prefix `trtllm_` are shown at our endpoint.

    It registers with Prometheus' global registry, which is not served here, and in which a second collector is an
    error. So its metrics are moved into a registry of this object as soon as they exist.
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
        """Returns the families for a scrape."""
        for family in self._own.collect():
            if family.name.startswith(_PREFIX):
                yield family

    def describe(self) -> Iterable[Metric]:
        """Returns nothing: the families depend on the version."""
        return ()

    def record_request(self, result: Any) -> None:
        """Counts a request that has ended."""
        found = getattr(result, "metrics_dict", None)
        if self._collector is not None and self._log_request is not None and found:
            self._log_request(found)

    def record_iteration(self, stat: Any) -> None:
        """Counts an iteration."""
        if self._collector is not None:
            self._collector.log_iteration_stats(stat)

    def publish(self) -> None:
        """Shows the metrics at this process's endpoint until `withdraw`."""
        REGISTRY.register(self)

    def withdraw(self) -> None:
        """Removes the metrics from the endpoint."""
        REGISTRY.unregister(self)


def _registered(collector: Any) -> list[MetricWrapperBase]:
    """Yields the metrics among its attributes, also those in dictionaries and lists."""
    found: list[MetricWrapperBase] = []
    for value in vars(collector).values():
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        found += [one for one in inner if isinstance(one, MetricWrapperBase)]
    return found


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of one attention-DP rank."""

    rank: int
    number: int
    waiting: int
    waiting_tokens: int
    blocks_total: int
    read_at: float = field(default_factory=time.monotonic)


def read_iteration(stat: Mapping[str, Any]) -> Iteration:
    """Reads one row; a number that a version does not report is 0."""
    batching = stat.get("inflightBatchingStats") or {}
    cache = stat.get("kvCacheStats") or {}
    return Iteration(
        rank=int(stat.get("attentionDpRank") or 0),
        number=int(stat.get("iter") or 0),
        waiting=int(stat.get("numQueuedRequests") or 0),
        waiting_tokens=int(batching.get("numQueuedCtxTokens") or 0),
        blocks_total=int(cache.get("maxNumBlocks") or 0),
    )


class Statistics:
    """The latest iteration of each rank. The queue of one older than `fresh_seconds` does not count."""

    def __init__(self, fresh_seconds: float = 1.0) -> None:
        self._fresh_seconds = fresh_seconds
        self._latest: dict[int, Iteration] = {}

    def record(self, iteration: Iteration) -> bool:
        """Keeps an iteration. Returns whether it is another one than before."""
        before = self._latest.get(iteration.rank)
        self._latest[iteration.rank] = iteration
        return before is None or iteration.number != before.number

    @property
    def waiting(self) -> int:
        """Requests that are in no batch. All ranks share one queue: they report it once, or all of them do."""
        return max((one.waiting for one in self._fresh()), default=0)

    @property
    def waiting_tokens(self) -> int:
        """The tokens of their prompts."""
        return max((one.waiting_tokens for one in self._fresh()), default=0)

    @property
    def blocks_total(self) -> int:
        """Blocks of all ranks; 0 before the first iteration."""
        return sum(one.blocks_total for one in self._latest.values())

    def _fresh(self) -> list[Iteration]:
        now = time.monotonic()
        return [one for one in self._latest.values() if now - one.read_at < self._fresh_seconds]
