"""The metrics registry of the process, and the metrics that every process has."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from baton.version import __version__

# Prometheus does not need the creation times, and they would be a third of each scrape.
disable_created_metrics()  # type: ignore[no-untyped-call]

# Not prometheus_client's default registry: libraries and engines register metrics of their own there.
REGISTRY = CollectorRegistry(auto_describe=True)

# prometheus_client's classes, in this registry.
counter, gauge = partial(Counter, registry=REGISTRY), partial(Gauge, registry=REGISTRY)
histogram, info = partial(Histogram, registry=REGISTRY), partial(Info, registry=REGISTRY)

ProcessCollector(registry=REGISTRY)
GCCollector(registry=REGISTRY)

# Of a line of /proc/net/dev: the device, the bytes that it has received, and, after seven other numbers, those sent.
_DEVICE = re.compile(r"^ *([^ :]+): *(\d+)(?: +\d+){7} +(\d+)", re.MULTILINE)
_PEAK = re.compile(r"^VmHWM:\s*(\d+) kB$", re.MULTILINE)


class NetworkCollector(Collector):
    """The bytes of each network device that the process sees: its container's, or the host's. Read with each scrape."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Returns the current values; none where the system does not tell them."""
        received = CounterMetricFamily("baton_network_receive_bytes", "Bytes received by a device.", labels=["device"])
        sent = CounterMetricFamily("baton_network_transmit_bytes", "Bytes sent by a device.", labels=["device"])
        with suppress(OSError):
            for device, bytes_received, bytes_sent in _DEVICE.findall(Path("/proc/self/net/dev").read_text()):
                received.add_metric([device], float(bytes_received))
                sent.add_metric([device], float(bytes_sent))
        yield received
        yield sent


class PeakMemoryCollector(Collector):
    """The most memory that the process has had. Read with each scrape."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Returns the current value; none where the system does not tell it."""
        peak = GaugeMetricFamily("baton_process_peak_memory_bytes", "The most resident memory since the start.")
        with suppress(OSError):
            for kilobytes in _PEAK.findall(Path("/proc/self/status").read_text()):
                peak.add_metric([], float(kilobytes) * 1024)
        yield peak


NETWORK = NetworkCollector()
REGISTRY.register(NETWORK)
REGISTRY.register(PeakMemoryCollector())

BUILD = info("baton_build", "The release that is running.")
BUILD.info({"version": __version__})

EVENT_LOOP_LAG = histogram(
    "baton_event_loop_lag_seconds",
    "How much later than asked the event loop wakes a task, looked at four times a second.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
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
