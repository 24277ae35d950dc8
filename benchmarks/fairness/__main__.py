"""Fairness between tenants, and quotas of several routers, measured on processes beside the bars.

    light          p99 of the time to the first token of a tenant that sends 7 % of the capacity, alone and beside one
                   that sends twenty times as much, on two fleets at the same time
    shapes         the larger by the smaller work in every 10 s of two backlogged tenants, long prompts and long answers
    late           what a tenant that comes later gets, of the early one's work (`--seconds`: how much later)
    throughput     the work of `admission.fairness` weighted by that of none, in turns
    quota          quotas of eight routers, under demands of 3 and 0.9 times as much that move between them
    killed         the same while a router is killed every 20 s
    decision       the CPU time of a decision with 1,000 tenants, in this process

    python -m benchmarks.fairness light shapes late throughput quota killed decision [--seconds 60]

Routers, workers (the simulated engine) and clients are processes. Work is that of the queue: prompt tokens and four
times the answer's, counted as the client gets them. The exit code is 1 if a bar is missed.
"""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from benchmarks.fairness.decision import measure_decision
from benchmarks.fairness.fleet import Engines, fleet
from benchmarks.fairness.killed import measure_quota
from benchmarks.fairness.loads import Bars, Got, Load, check_late, check_light, check_shapes, check_throughput, total
from router.config import Fairness

# A place gets free every 0.02 s: 55 requests a second of 2,000 and 10 tokens (medians).
_QUICK = Engines(places=19, step_seconds=0.02)
_LIGHT_RATE = 3.8  # requests a second: 7 % of what the places serve
_SLOW = Engines(places=8, step_seconds=0.048)  # for a run of minutes beside other work: 3.5 requests a second
_TURNS, _TURN_SECONDS, _BEGIN_SECONDS = 3, 16.0, 4.0


async def measure_light(bars: Bars, seconds: float, fairness: Fairness) -> None:
    light, flood = Load(_LIGHT_RATE, 2000, 10), Load(20 * _LIGHT_RATE, 2000, 10)

    async def got(**loads: Load) -> dict[str, Got]:
        async with fleet(fairness, _QUICK) as clients:
            return await clients.run(loads, seconds)

    alone, beside = await asyncio.gather(got(light=light), got(light=light, flood=flood))
    print(f"{fairness}: {len(beside['flood'].first_tokens) / seconds:.1f} requests/s of the flood were served")
    check_light(bars, alone["light"], beside["light"], fairness)


async def measure_shapes(bars: Bars, seconds: float, fairness: Fairness) -> None:
    tenants = {"long": Load(4.0, 3000, 8), "chat": Load(24.0, 200, 40)}
    async with fleet(fairness) as clients:
        got = await clients.run(tenants, seconds + 15)
    has_bar = fairness == "weighted"
    check_shapes(bars, got["long"], got["chat"], 15, 15 + int(seconds), fairness, has_bar=has_bar)


async def measure_late(bars: Bars, seconds: float, fairness: Fairness) -> None:
    tenants = {"early": Load(4.2), "late": Load(4.2, begins=seconds)}
    async with fleet(fairness, _SLOW) as clients:
        got = await clients.run(tenants, seconds + 41)
    check_late(bars, got["early"], got["late"], seconds, fairness, has_bar=fairness == "weighted")


async def measure_throughput(bars: Bars) -> None:
    tenants = {"one": Load(12.0), "other": Load(6.0)}
    works = []
    async with AsyncExitStack() as stack:
        fleets = [(one, await stack.enter_async_context(fleet(one))) for one in ("none", "weighted")]  # type: ignore[arg-type]
        for turn in range(_TURNS):
            for name, clients in fleets if turn % 2 else reversed(fleets):
                got = await clients.run(tenants, _BEGIN_SECONDS + _TURN_SECONDS)
                end = _BEGIN_SECONDS + _TURN_SECONDS
                works.append((name, total(got.values(), _BEGIN_SECONDS, end)))
    check_throughput(bars, works)


async def run(options: argparse.Namespace) -> list[str]:
    """The names of the bars that were missed."""
    bars, seconds, fairness = Bars(), options.seconds, options.fairness
    measurements: dict[str, Callable[[], Awaitable[None]]] = {
        "light": lambda: measure_light(bars, seconds, fairness),
        "shapes": lambda: measure_shapes(bars, seconds, fairness),
        "late": lambda: measure_late(bars, seconds, fairness),
        "throughput": lambda: measure_throughput(bars),
        "quota": lambda: measure_quota(bars, seconds, kills=False),
        "killed": lambda: measure_quota(bars, seconds, kills=True),
    }
    for name in options.what or (*measurements, "decision"):
        await measurements[name]() if name != "decision" else measure_decision(bars)
    return bars.missed


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="fairness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", metavar="NAME", help="of those above; all if none is given")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    parser.add_argument("--fairness", choices=("weighted", "strict", "none"), default="weighted")
    missed = asyncio.run(run(parser.parse_args()))
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
