"""The adapter's metrics, and vLLM's own, `vllm:*`, at the same endpoint."""

from collections.abc import Iterable, Iterator

from prometheus_client import REGISTRY as LIBRARY_REGISTRY
from prometheus_client import Counter, Gauge, Metric
from prometheus_client.registry import Collector

from runtime.metrics import REGISTRY

HANDOFFS = Gauge("baton_vllm_handoffs_held", "Prompts whose KV vLLM holds for readers.", registry=REGISTRY)
EXPIRED = Counter(
    "baton_vllm_handoffs_expired_total", "Handoffs whose KV vLLM freed before they were confirmed.", registry=REGISTRY
)
EARLY_RELEASES = Counter(
    "baton_vllm_early_releases_total", "Handoffs whose KV was freed before vLLM's own deadline.", registry=REGISTRY
)
ABORTS = Counter("baton_vllm_aborts_total", "Requests that were aborted inside vLLM.", registry=REGISTRY)
UNANSWERED_ABORTS = Counter(
    "baton_vllm_unanswered_aborts_total", "Aborts that vLLM did not handle within abort_seconds.", registry=REGISTRY
)
STALLED_READERS = Counter(
    "baton_vllm_stalled_readers_total", "Requests aborted because their answer was not read.", registry=REGISTRY
)
DIVERGED = Counter(
    "baton_vllm_answers_diverged_total",
    "Sampled answers that were continued, and whose first tokens did not come again.",
    registry=REGISTRY,
)
KV_EVENT_GAPS = Counter("baton_vllm_kv_event_gaps_total", "Times that KV events were lost.", registry=REGISTRY)

_PREFIX = "vllm:"


class VllmFamilies(Collector):
    """The families that vLLM keeps in Prometheus' global registry, which is not served here."""

    def collect(self) -> Iterator[Metric]:
        """Returns the families for a scrape."""
        for family in LIBRARY_REGISTRY.collect():
            if family.name.startswith(_PREFIX):
                yield family

    def describe(self) -> Iterable[Metric]:
        """Returns nothing: the families depend on the version."""
        return ()

    def __enter__(self) -> "VllmFamilies":
        REGISTRY.register(self)
        return self

    def __exit__(self, *_: object) -> None:
        REGISTRY.unregister(self)
