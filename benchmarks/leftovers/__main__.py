"""Measures how many bytes a request leaves behind, by how it ended: in the router, and in its workers.

    python -m benchmarks.leftovers [--requests 50000] [--lanes 64] [--server http2] [--only NAME ...] [--each]

Of each outcome, or of each group of them that begin with the same word, so many requests are sent after some to warm
up, and the growth of the processes' memory is divided by them. Exits with 1 if it is more than 200 bytes, or if a
request ended otherwise than it should have.
"""

import argparse
import asyncio
import itertools
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.leftovers.cluster import Cluster, running_cluster
from benchmarks.leftovers.outcomes import OUTCOMES, Clients, Outcome

_MOST_BYTES = 200


@dataclass(frozen=True, slots=True)
class Row:
    """The measurement of some outcomes: their `ends`, of which `wrong` are those that should not have been."""

    name: str
    requests: int
    router: float
    workers: float
    ends: Counter[str]
    wrong: Counter[tuple[str, str]]

    @property
    def is_right(self) -> bool:
        """Each request ended as it should, and left no more than it may."""
        return not self.wrong and max(self.router, self.workers) <= _MOST_BYTES


async def measure(cluster: Cluster, name: str, outcomes: Sequence[Outcome], requests: int, lanes: int) -> Row:
    """One row, with a tenth of the requests before it to warm up."""
    await send(cluster, outcomes, max(lanes * 8, requests // 10), lanes)
    before = await cluster.ask("memory")
    ended = await send(cluster, outcomes, requests, lanes)
    after = await cluster.ask("memory")
    router, workers = ((last - first) / requests for first, last in zip(before, after, strict=True))
    ends: Counter[str] = Counter()
    wrong: Counter[tuple[str, str]] = Counter()
    for (outcome, end), count in ended.items():
        ends[end] += count
        if end not in outcome.right:
            wrong[outcome.name, end] += count
    return Row(name, requests, router, workers, ends, wrong)


async def send(
    cluster: Cluster, outcomes: Sequence[Outcome], requests: int, lanes: int
) -> Counter[tuple[Outcome, str]]:
    """Sends so many requests, one after another in each lane, with each of the outcomes in turn. Counts their ends."""
    ended: Counter[tuple[Outcome, str]] = Counter()
    todo = itertools.islice(itertools.cycle(outcomes), requests)
    async with Clients(cluster) as clients:

        async def lane() -> None:
            for outcome in todo:
                ended[outcome, await outcome.act(clients)] += 1

        await asyncio.gather(*(lane() for _ in range(lanes)))
    await cluster.settled()
    return ended


async def main(arguments: argparse.Namespace) -> int:
    """Prints the table row by row."""
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {arguments.server}.\n")
    print("| ended | requests | router, bytes a request | workers, bytes a request | ends | wrong |")
    print("|---|---|---|---|---|---|")
    is_right = True
    for name, outcomes in _groups(arguments.only, is_each=arguments.each):
        async with running_cluster(arguments.server) as cluster:
            row = await measure(cluster, name, outcomes, arguments.requests, arguments.lanes)
        wrong = ", ".join(f"{outcome}: {end} {count}" for (outcome, end), count in row.wrong.items())
        ends = ", ".join(f"{end} {count:,}" for end, count in row.ends.items())
        print(f"| {name} | {row.requests:,} | {row.router:.0f} | {row.workers:.0f} | {ends} | {wrong} |", flush=True)
        is_right = is_right and row.is_right
    return 0 if is_right else 1


def _groups(only: Sequence[str], *, is_each: bool) -> Iterable[tuple[str, Sequence[Outcome]]]:
    chosen = [each for each in OUTCOMES if not only or any(each.name.startswith(name) for name in only)]
    groups: dict[str, list[Outcome]] = {}
    for each in chosen:
        groups.setdefault(
            each.name if is_each else each.name.replace(":", " ").replace(",", " ").split()[0], []
        ).append(each)
    return groups.items()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--server", choices=("grpcio", "http2"), default="http2")
    parser.add_argument("--only", nargs="*", default=[], help="outcomes whose names begin so")
    parser.add_argument("--each", action="store_true", help="a row for each outcome, and not for each group")
    sys.exit(asyncio.run(main(parser.parse_args())))
