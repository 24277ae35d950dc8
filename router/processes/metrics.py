"""The metrics of a router that runs in several processes, described in docs/metrics.md."""

from prometheus_client import Counter, Gauge

from runtime.metrics import REGISTRY

PROCESSES = Gauge("baton_router_processes", "Processes of this router that listen.", registry=REGISTRY)
RESTARTS = Counter(
    "baton_router_process_restarts_total", "Processes of this router that ended and were replaced.", registry=REGISTRY
)
