"""The metrics registry of the process, and the metrics that every process has."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry, GCCollector, Histogram, Info, ProcessCollector, disable_created_metrics

from baton.version import __version__

# Prometheus does not need the creation times, and they would be a third of each scrape.
disable_created_metrics()  # type: ignore[no-untyped-call]

# Not prometheus_client's default registry: libraries and engines register metrics of their own there.
REGISTRY = CollectorRegistry(auto_describe=True)

ProcessCollector(registry=REGISTRY)
GCCollector(registry=REGISTRY)

BUILD = Info("baton_build", "The release that is running.", registry=REGISTRY)
BUILD.info({"version": __version__})

EVENT_LOOP_LAG = Histogram(
    "baton_event_loop_lag_seconds",
    "How much later than asked the event loop wakes a task, looked at four times a second.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    registry=REGISTRY,
)

_LAG_INTERVAL_SECONDS = 0.25


@asynccontextmanager
async def watched_event_loop() -> AsyncIterator[None]:
    """Measures the lag of the running event loop while the context is open."""
    task = asyncio.create_task(_observe_lag())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _observe_lag() -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _LAG_INTERVAL_SECONDS
        await asyncio.sleep(_LAG_INTERVAL_SECONDS)
        EVENT_LOOP_LAG.observe(max(0.0, loop.time() - due))
