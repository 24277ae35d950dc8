"""The stand-in's MetricsCollector: like the real one it registers with the global registry, where it may be once."""

from typing import Any

from prometheus_client import Counter, Gauge

from fake_tensorrt_llm.tables import VersionTable


class MetricsCollector:
    """Some of the families that there are."""

    def __init__(self, labels: dict[str, str]) -> None:
        self.labels = labels
        names = list(labels)
        self.counter_request_success = Counter("trtllm_request_success", "Requests.", [*names, "finished_reason"])
        self.kv_cache_utilization = Gauge("trtllm_kv_cache_utilization", "Used blocks.", names)
        self.tiers = {"gpu": Gauge("trtllm_gpu_memory_usage_bytes", "Memory.", names)}
        self.other = Gauge("python_other", "Not of the family.")

    def log_iteration_stats(self, stat: dict[str, Any]) -> None:
        """Once an iteration."""
        cache = stat["kvCacheStats"]
        self.kv_cache_utilization.labels(**self.labels).set(cache["usedNumBlocks"] / cache["maxNumBlocks"])
        self.tiers["gpu"].labels(**self.labels).set(stat["gpuMemUsage"])

    def _log_request(self, metrics: dict[str, Any]) -> None:
        self.counter_request_success.labels(**self.labels, finished_reason=metrics["finished_reason"]).inc()


def collector_of(table: VersionTable) -> type[MetricsCollector]:
    """MetricsCollector of one version, by its name for the method."""

    def log_request(self: MetricsCollector, metrics: dict[str, Any]) -> None:
        MetricsCollector._log_request(self, metrics)

    return type("MetricsCollector", (MetricsCollector,), {table.log_request: log_request})
