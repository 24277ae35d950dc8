"""Metrics for what happens at every token or request: the library's take several calls and locks for each value."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector


class Series:
    """The values of one set of labels. One thread observes; others may read."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Adds a value, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def cumulative(self) -> list[int]:
        """The number of values at or below each bound, and last their total."""
        return list(accumulate(tuple(self._counts)))

    @property
    def sum(self) -> float:
        """Of all values; it may be one value ahead of the counts that were read before it."""
        return self._sum


class FrequentHistogram(Collector):
    """A histogram to Prometheus. Make each series once, by `labels`, and keep it."""

    def __init__(
        self,
        name: str,
        help: str,
        labels: Sequence[str],
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._help = help
        self._labelnames = tuple(labels)
        self._bounds = tuple(buckets)
        self._shown = [*(str(float(bound)) for bound in buckets), "+Inf"]
        self._series: dict[tuple[str, ...], Series] = {}
        registry.register(self)

    def labels(self, *values: str) -> Series:
        """The series of these labels' values, which starts at zero."""
        assert len(values) == len(self._labelnames)
        return self._series.setdefault(values, Series(self._bounds))

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """The family without its values, for the registry."""
        yield HistogramMetricFamily(self._name, self._help, labels=self._labelnames)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The values, for a scrape, which may run in another thread."""
        family = HistogramMetricFamily(self._name, self._help, labels=self._labelnames)
        for values, series in tuple(self._series.items()):
            buckets = list(zip(self._shown, series.cumulative(), strict=True))
            family.add_metric(values, buckets, series.sum)
        yield family


class Count:
    """The number of one set of labels. One thread changes it; others may read."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Adds to it."""
        self.value += amount

    def dec(self) -> None:
        """Takes one from it; of a gauge."""
        self.value -= 1.0


class FrequentCounter(Collector):
    """A counter to Prometheus, or with `is_gauge` a gauge. Make each series once, by `labels`, and keep it."""

    def __init__(
        self, name: str, help: str, labels: Sequence[str], registry: CollectorRegistry, *, is_gauge: bool = False
    ) -> None:
        self._name = name
        self._help = help
        self._labelnames = tuple(labels)
        self._family: type[CounterMetricFamily] | type[GaugeMetricFamily]
        self._family = GaugeMetricFamily if is_gauge else CounterMetricFamily
        self._counts: dict[tuple[str, ...], Count] = {}
        registry.register(self)

    def labels(self, *values: str) -> Count:
        """The number for these labels' values, which starts at zero."""
        assert len(values) == len(self._labelnames)
        return self._counts.setdefault(values, Count())

    def describe(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """The family without its values, for the registry."""
        yield self._family(self._name, self._help, labels=self._labelnames)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """The values, for a scrape, which may run in another thread."""
        family = self._family(self._name, self._help, labels=self._labelnames)
        for values, count in tuple(self._counts.items()):
            family.add_metric(values, count.value)
        yield family
