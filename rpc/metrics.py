"""The metrics of this process: the registry of them all, and those that every process has."""

from importlib.metadata import version

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)

# When each series began is known to whoever has looked since; it would be a third of what is served.
disable_created_metrics()  # type: ignore[no-untyped-call]

# Not the library's own: in that one, engines and libraries leave theirs.
REGISTRY = CollectorRegistry(auto_describe=True)

ProcessCollector(registry=REGISTRY)
GCCollector(registry=REGISTRY)

BUILD = Info("baton_build", "The release that is running.", registry=REGISTRY)
BUILD.info({"version": version("baton-serving")})

EVENT_LOOP_LAG = Histogram(
    "baton_event_loop_lag_seconds",
    "How much later than asked the event loop wakes a task, looked at four times a second.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    registry=REGISTRY,
)
