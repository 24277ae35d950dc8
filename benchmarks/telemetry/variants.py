"""Compares the cost of routers that differ in one thing.

The same small load goes to all at the same time, repeatedly, so that other load on the machine affects all of them;
and each round has new processes. Two equal processes differ by some percent for as long as they live, so a single pair
shows nothing. The measured difference between two equal routers is the remaining error.
"""

import asyncio
import math
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.processes import cpu_nanoseconds
from benchmarks.router_overhead import FLAT, PACED, Client

OFF, CONTROL = "off", "off again"
STREAMS = 16
ROUNDS = 6
TURNS = {FLAT: 16, PACED: 4}  # of each round


class Variant:
    """A router in a process of its own, and the client that loads it."""

    def __init__(self, client: Client, pid: int) -> None:
        self.client = client
        self.pid = pid

    async def cost(self, model: str) -> float:
        """Microseconds of CPU for each token, of all the router's threads."""
        before = cpu_nanoseconds(self.pid)
        tokens = await self.client.streams(model, STREAMS)
        return (cpu_nanoseconds(self.pid) - before) / tokens / 1000


class Comparison:
    """The cost of each turn for the named variants; the first is `off`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._costs: dict[str, dict[str, list[float]]] = {model: {name: [] for name in names} for model in TURNS}

    async def measure(self, variants: Mapping[str, Variant]) -> None:
        """Runs a round with new routers."""
        await asyncio.gather(*(variant.client.streams(FLAT, STREAMS) for variant in variants.values()))
        for model, count in TURNS.items():
            for _ in range(count):
                each = await asyncio.gather(*(variant.cost(model) for variant in variants.values()))
                for name, cost in zip(variants, each, strict=True):
                    self._costs[model][name].append(cost)

    def show(self) -> None:
        """Prints the extra cost of the others over `off`: the median of all turns and its standard error."""
        for model, by_name in self._costs.items():
            for name, costs in by_name.items():
                if name == OFF:
                    continue
                more = [cost / off - 1 for cost, off in zip(costs, by_name[OFF], strict=True)]
                # The standard error of the median of a normal distribution.
                error = 1.25 * statistics.stdev(more) / math.sqrt(len(more))
                cost, median = statistics.median(costs), statistics.median(more)
                print(f"{model:<6} {name:<12} {cost:7.2f} us of CPU a token   {median:+6.2%} +- {error:.2%}")
