"""Metrics of the GPUs that this process may use, read from NVML at each scrape; none without GPUs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pynvml
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from runtime.machine import visible_gpus
from runtime.telemetry.metrics import REGISTRY


@dataclass(frozen=True, slots=True)
class _Gauge:
    name: str
    help: str
    read: Callable[[Any], float]


_GAUGES = (
    _Gauge(
        "baton_gpu_utilization_ratio",
        "The part of the last second or less in which any kernel ran.",
        lambda gpu: float(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu) / 100,
    ),
    _Gauge(
        "baton_gpu_memory_used_bytes",
        "Memory that is taken, by whatever process.",
        lambda gpu: float(pynvml.nvmlDeviceGetMemoryInfo(gpu).used),
    ),
    _Gauge(
        "baton_gpu_memory_total_bytes",
        "Memory that there is.",
        lambda gpu: float(pynvml.nvmlDeviceGetMemoryInfo(gpu).total),
    ),
    _Gauge(
        "baton_gpu_temperature_celsius",
        "How hot it is.",
        lambda gpu: float(pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)),
    ),
)


class GpuCollector(Collector):
    """The gauges of some GPUs, named by index or UUID."""

    def __init__(self, gpus: dict[str, Any]) -> None:
        self._gpus = gpus

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Returns the current values. A value that a GPU does not report is left out."""
        for gauge in _GAUGES:
            family = GaugeMetricFamily(gauge.name, gauge.help, labels=["gpu"])
            for name, gpu in self._gpus.items():
                try:
                    family.add_metric([name], gauge.read(gpu))
                except pynvml.NVMLError:
                    continue
            yield family


@contextmanager
def watched_gpus() -> Iterator[None]:
    """Serves the metrics of this process's GPUs, if there are any, while the context is open."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield
        return
    collector = GpuCollector(_visible_gpus())
    REGISTRY.register(collector)
    try:
        yield
    finally:
        REGISTRY.unregister(collector)
        pynvml.nvmlShutdown()


def _visible_gpus() -> dict[str, Any]:
    """Returns the GPUs that CUDA shows to this process, by index or UUID; NVML itself shows all of the host."""
    gpus = {}
    for name in visible_gpus():
        try:
            gpus[name] = _find(name)
        except pynvml.NVMLError:
            # As CUDA does: an unknown name hides all that follow it.
            break
    return gpus


def _find(name: str) -> Any:
    if name.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name)
