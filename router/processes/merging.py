"""The metrics of a router's processes as those of one: counters and histograms added up, gauges of each process.

A gauge gets the label `process`: of some the sum means something, of others the largest, and a query can say which.
"""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.samples import Sample

from router.processes.messages import Family

_PROCESS = "process"
# What only grows, so that it can be added up, and lives on when its process does not.
_ADDED = ("counter", "histogram", "summary")

# By the sample's name and labels. Those of one histogram stay together, as Prometheus' text format wants them.
_Totals = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def collect(registry: CollectorRegistry) -> list[Family]:
    """The metrics of this process, to be merged."""
    return [
        Family(
            name=metric.name,
            documentation=metric.documentation,
            type=metric.type,
            samples=[(sample.name, sample.labels, sample.value) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


class MergedMetrics:
    """The last known metrics of each process, and what those had counted that are gone."""

    def __init__(self) -> None:
        self._known: dict[str, Sequence[Family]] = {}
        self._gone: dict[str, _Totals] = {}
        self._families: dict[str, Family] = {}

    def update(self, process: str, families: Sequence[Family]) -> None:
        """These are the metrics of a process now."""
        self._known[process] = families
        self._families.update({family.name: family for family in families})

    def leave(self, process: str) -> None:
        """The process has ended: its gauges go, and what it counted stays, so that no counter ever falls."""
        for family in self._known.pop(process, ()):
            if family.type in _ADDED:
                _add(self._gone.setdefault(family.name, {}), family)

    def merged(self) -> list[Metric]:
        """The metrics of all."""
        return [self._merge(family) for family in self._families.values()]

    def _merge(self, family: Family) -> Metric:
        metric = Metric(family.name, family.documentation, family.type)
        found = [(process, each) for process in sorted(self._known) for each in self._named(process, family.name)]
        if family.type in _ADDED:
            totals = dict(self._gone.get(family.name, {}))
            for _, each in found:
                _add(totals, each)
            metric.samples = [Sample(name, dict(labels), value) for (name, labels), value in totals.items()]
        elif family.type == "gauge":
            metric.samples = [
                Sample(name, {**labels, _PROCESS: process}, value)
                for process, each in found
                for name, labels, value in each.samples
            ]
        else:
            # Facts about the release, which are the same everywhere.
            metric.samples = [Sample(*sample) for _, each in found[:1] for sample in each.samples]
        return metric

    def _named(self, process: str, name: str) -> Iterable[Family]:
        return (family for family in self._known[process] if family.name == name)


def _add(totals: _Totals, family: Family) -> None:
    for name, labels, value in family.samples:
        key = (name, tuple(labels.items()))
        totals[key] = totals.get(key, 0.0) + value
