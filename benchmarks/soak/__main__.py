"""Sends hours' worth of requests through a router on our own HTTP/2, and fails if the process grows: `make soak`.

    python -m benchmarks.soak [--hours 8] [--rate 4] [--rounds 24] [--lanes 64] [--seed N] [--output FILE]

The router, two workers and its client for their streams are one process; the clients are this one. `hours` x `rate`
(a second) things are done, as fast as it goes, in rounds: in each another worker comes and is lost while requests run,
then all clients leave, and what the process holds is counted. Of files, tasks, connections, streams, calls and KV
blocks there must never be more than in the first third of the rounds, which also fills caches; from the second third
to the last, memory must not grow; no outcome may be wrong. Exits with 1 otherwise.
"""

import argparse
import asyncio
import os
import platform
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.processes import child, received
from benchmarks.soak.cluster import Held, run_cluster, run_worker
from benchmarks.soak.traffic import KINDS, Tally, run

# What a round may leave for a while: a connection that a client has left, a call that is being cancelled.
_SETTLE_SECONDS = 30.0
# Between the medians of the second and of the last third of the rounds.
_GROWTH_BYTES = 8 * 2**20
_MEGABYTE = 2**20


@dataclass(frozen=True, slots=True)
class Round:
    """The work of one round until its end, its duration, and what was held then."""

    done: int
    seconds: float
    held: Held


@dataclass(frozen=True, slots=True)
class Soak:
    """A whole run."""

    rounds: Sequence[Round]
    tally: Tally
    hours: float
    rate: float
    seed: int

    @property
    def growth_bytes(self) -> int:
        """Of memory, from the second third of the rounds to the last."""
        third = len(self.rounds) // 3
        memory = [each.held.memory_bytes for each in self.rounds]
        return int(statistics.median(memory[-third:]) - statistics.median(memory[third:-third]))

    def faults(self) -> list[str]:
        """The problems; nothing, if all is well."""
        found = [f"{kind}: {outcome}, {count} times" for (kind, outcome), count in self.tally.wrong().items()]
        third = len(self.rounds) // 3
        most = _most([each.held for each in self.rounds[:third]])
        for number, each in enumerate(self.rounds[third:], third + 1):
            if not _is_within(each.held, most):
                found.append(f"round {number} leaves {each.held}, those before {most} at most")
        if self.growth_bytes > _GROWTH_BYTES:
            found.append(f"memory has grown by {self.growth_bytes / _MEGABYTE:.1f} MiB")
        return found


def _most(held: Sequence[Held]) -> tuple[int, ...]:
    """Of each count the highest."""
    return tuple(max(counts) for counts in zip(*(each.countable for each in held), strict=True))


def _is_within(held: Held, most: tuple[int, ...]) -> bool:
    return all(count <= limit for count, limit in zip(held.countable, most, strict=True))


async def soak(arguments: argparse.Namespace) -> Soak:
    """Runs all rounds."""
    total = int(arguments.hours * 3600 * arguments.rate)
    source, tally, rounds = random.Random(arguments.seed), Tally(), list[Round]()
    began = time.monotonic()
    async with child(run_cluster) as (pipe, _):
        address: str = await received(pipe)
        for number in range(arguments.rounds):
            todo = total * (number + 1) // arguments.rounds - tally.total
            async with child(run_worker) as (worker, _):
                pipe.send(await received(worker))
                assert await received(pipe)
                await run(address, todo * 9 // 10, arguments.lanes, source, tally)
                losing = asyncio.create_task(run(address, todo - todo * 9 // 10, arguments.lanes, source, tally))
                await asyncio.sleep(0.2)
            # The worker is gone, and requests still run.
            await losing
            held = await _rested(pipe, [each.held for each in rounds[: arguments.rounds // 3]])
            rounds.append(Round(tally.total, time.monotonic() - began, held))
            print(f"{number + 1}/{arguments.rounds}: {rounds[-1]}, load {os.getloadavg()[0]:.0f}", flush=True)
    return Soak(rounds, tally, arguments.hours, arguments.rate, arguments.seed)


async def _rested(pipe: Connection, before: Sequence[Held]) -> Held:
    """The holdings once they are no more than before, or after a while."""
    until = time.monotonic() + _SETTLE_SECONDS
    most = _most(before) if before else None
    while True:
        pipe.send("hold")
        held: Held = await received(pipe)
        if time.monotonic() > until or (most is not None and _is_within(held, most)):
            return held
        await asyncio.sleep(2)


def report(result: Soak) -> str:
    """The run as Markdown."""
    rounds = result.rounds
    shown = [rounds[0], *rounds[len(rounds) // 6 - 1 :: max(1, len(rounds) // 6)]]
    end = rounds[-1]
    per_second = result.tally.total / end.seconds
    lines = [
        "# A soak of our own HTTP/2",
        "",
        "```",
        f"make soak HOURS={result.hours:g} RATE={result.rate:g}",
        "```",
        "",
        f"{result.tally.total:,} requests, what {result.hours:g} hours of {result.rate:g} a second bring, in"
        f" {end.seconds / 60:.0f} minutes: {per_second:.0f} a second, {per_second / result.rate:.0f} times as fast."
        " Router, two simulated workers and the client for their streams in one process, clients and one more worker in"
        " others. In each round that worker comes and is lost while requests run; then the clients leave, and this is"
        " what the process holds.",
        "",
        f"Python {platform.python_version()}, {os.cpu_count()} cores, which other work loaded too (load average"
        f" {os.getloadavg()[0]:.0f} at the end), seed {result.seed}.",
        "",
        "| done | minutes | memory, MiB | files | tasks | connections | streams | calls | objects | KV blocks |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in dict.fromkeys(shown):
        held = each.held
        lines.append(
            f"| {each.done:,} | {each.seconds / 60:.1f} | {held.memory_bytes / _MEGABYTE:.1f} | {held.files}"
            f" | {held.tasks} | {held.connections} | {held.streams} | {held.calls} | {held.objects:,} | {held.blocks} |"
        )
    lines += [
        "",
        f"Memory, from the median of the second third of the {len(rounds)} rounds to that of the last:"
        f" {result.growth_bytes / _MEGABYTE:+.1f} MiB (at most {_GROWTH_BYTES // _MEGABYTE}).",
        "",
        "| what clients did | times | how it ended |",
        "|---|---|---|",
    ]
    for kind in KINDS:
        ends = Counter({end: count for (name, end), count in result.tally.outcomes.items() if name == kind.name})
        lines.append(f"| {kind.name} | {ends.total():,} | {', '.join(f'{end} {n:,}' for end, n in ends.items())} |")
    faults = result.faults()
    lines += ["", "Nothing is left, and no outcome is wrong." if not faults else "**Faults:**", ""]
    return "\n".join([*lines, *(f"* {fault}" for fault in faults)]).rstrip() + "\n"


def main() -> int:
    """Runs it, prints the report, and says by its exit code whether all is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    result = asyncio.run(soak(arguments))
    text = report(result)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)
    return 1 if result.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
