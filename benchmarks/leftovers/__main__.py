"""Measures how many bytes a request leaves behind, by how it ended: in its two routers, and in their workers.

    PYTHONPATH=.:tests python -m benchmarks.leftovers [--requests 50000] [--lanes 64] [--server http2]
        [--only NAME ...] [--each] [--objects]

Of each outcome, or of each group of them that begin with the same word, so many requests are sent in five segments, and
the growth of the processes' memory is divided by them. A leak grows in each segment, and a table or an allocator that
fills up does not. Exits with 1 if it is more than 200 bytes, or if a request ended otherwise than it should have.

Not counted is what fills up once, and is full before the first segment: the last 4,096 handoffs that each prefill
worker has released (2 MiB), the router's cache of embeddings (0.5 MiB here, 256 MiB by default), and what a tenth of
the requests leaves of connections, metrics and free memory of the allocator.
"""

import argparse
import asyncio
import itertools
import os
import platform
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.leftovers.cluster import Cluster, running_cluster
from benchmarks.leftovers.heap import Heap
from benchmarks.leftovers.outcomes import OUTCOMES, Clients, Outcome

_MOST_BYTES = 200
_SEGMENTS = 5
# Each of the two prefill workers remembers its last 4,096 handoffs.
_REMEMBERED_HANDOFFS = 2 * 4096
_FILLING = "answered"


@dataclass(frozen=True, slots=True)
class Segment:
    """The bytes that a request has left behind, and in words what became more, in the router and in the workers."""

    bytes_each: tuple[float, float]
    growth: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Row:
    """The measurement of some outcomes: their `ends`, of which `wrong` are those that should not have been."""

    name: str
    requests: int
    segments: Sequence[Segment]
    ends: Counter[str]
    wrong: Counter[tuple[str, str]]

    @property
    def router(self) -> float:
        """Bytes a request that are left in the router."""
        return statistics.mean(each.bytes_each[0] for each in self.segments)

    @property
    def workers(self) -> float:
        """The same in the workers."""
        return statistics.mean(each.bytes_each[1] for each in self.segments)

    @property
    def is_right(self) -> bool:
        """Each request ended as it should, and left no more than it may."""
        return not self.wrong and max(self.router, self.workers) <= _MOST_BYTES


async def fill(cluster: Cluster, lanes: int) -> None:
    """Fills what workers remember of the requests before: see the top of this file."""
    answered = [each for each in OUTCOMES if each.name == _FILLING]
    await send(cluster, answered, _REMEMBERED_HANDOFFS * 11 // 10, lanes)


async def measure(cluster: Cluster, name: str, outcomes: Sequence[Outcome], requests: int, lanes: int) -> Row:
    """One row, with a tenth of the requests before it to warm up."""
    await send(cluster, outcomes, max(lanes * 8, requests // 10), lanes)
    ended: Counter[tuple[Outcome, str]] = Counter()
    segments = []
    before = await cluster.ask("heap")
    for _ in range(_SEGMENTS):
        ended += await send(cluster, outcomes, requests // _SEGMENTS, lanes)
        after = await cluster.ask("heap")
        segments.append(_segment(before, after, requests // _SEGMENTS))
        before = after
    ends: Counter[str] = Counter()
    wrong: Counter[tuple[str, str]] = Counter()
    for (outcome, end), count in ended.items():
        ends[end] += count
        if end not in outcome.right:
            wrong[outcome.name, end] += count
    return Row(name, ended.total(), segments, ends, wrong)


def _segment(before: tuple[Heap, Heap], after: tuple[Heap, Heap], requests: int) -> Segment:
    router, workers = ((last.resident - first.resident) / requests for first, last in zip(before, after, strict=True))
    router_growth, workers_growth = (last.growth(first, requests) for first, last in zip(before, after, strict=True))
    return Segment((router, workers), (router_growth, workers_growth))


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
    print("| ended | requests | router, bytes a request | by segment | workers | by segment | ends | wrong |")
    print("|---|---|---|---|---|---|---|---|")
    is_right = True
    for name, outcomes in _groups(arguments.only, is_each=arguments.each):
        async with running_cluster(arguments.server) as cluster:
            await fill(cluster, arguments.lanes)
            row = await measure(cluster, name, outcomes, arguments.requests, arguments.lanes)
        print(_line(row), flush=True)
        if arguments.objects:
            print(*_growth(row), sep="\n", flush=True)
        is_right = is_right and row.is_right
    return 0 if is_right else 1


def _line(row: Row) -> str:
    wrong = ", ".join(f"{outcome}: {end} {count}" for (outcome, end), count in row.wrong.items())
    ends = ", ".join(f"{end} {count:,}" for end, count in row.ends.items())
    router, workers = (", ".join(f"{each.bytes_each[side]:.0f}" for each in row.segments) for side in range(2))
    cells = (row.name, f"{row.requests:,}", f"{row.router:.0f}", router, f"{row.workers:.0f}", workers, ends, wrong)
    return f"| {' | '.join(cells)} |"


def _growth(row: Row) -> Iterator[str]:
    for number, segment in enumerate(row.segments):
        for process, growth in zip(("router", "workers"), segment.growth, strict=True):
            yield f"  {row.name}, segment {number}, {process}: {growth}"


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
    parser.add_argument("--objects", action="store_true", help="what became more in each segment, by type")
    sys.exit(asyncio.run(main(parser.parse_args())))
