"""The steps of a sweep: a rate at which requests come, or a number of them that runs at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from devtools.bench.load import Load, Measured
from devtools.bench.workload import Planned, Workload


@dataclass(frozen=True, slots=True)
class AtRate:
    """So many requests a second, sent at random times."""

    rate: float
    requests: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.rate:g}/s"

    def plan(self, workload: Workload) -> list[Planned]:
        return workload.at_rate(self.rate, self.requests, self.seed)

    async def run(self, load: Load, planned: Sequence[Planned]) -> list[Measured]:
        return await load.open_loop(planned)


@dataclass(frozen=True, slots=True)
class AtOnce:
    """So many requests at once: the next one is sent when one has ended."""

    concurrency: int
    requests: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.concurrency} at once"

    def plan(self, workload: Workload) -> list[Planned]:
        return workload.all_at_once(self.requests, self.seed)

    async def run(self, load: Load, planned: Sequence[Planned]) -> list[Measured]:
        return await load.closed_loop(planned, self.concurrency)


Step: TypeAlias = AtRate | AtOnce


def sweep(rates: Sequence[float], concurrencies: Sequence[int], requests: int, seed: int) -> list[Step]:
    """A step for each, from the least. Their seeds differ: equal prompts would be in the prefix caches."""
    steps: list[Step] = [AtRate(rate, requests, seed + index) for index, rate in enumerate(sorted(rates))]
    begin = seed + len(steps)
    return [*steps, *(AtOnce(each, requests, begin + index) for index, each in enumerate(sorted(concurrencies)))]
