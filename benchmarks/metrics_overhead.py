"""What metrics cost a router: `python -m benchmarks.metrics_overhead`.

One set of simulated workers and three routers: one that measures, and two that do not, as they serve no metrics. The
same small load goes to all three at the same time, again and again, so that whatever else the machine does is the same
for all; every round has new routers. Compared is the CPU time of their threads, turn by turn; the median and its
standard error are shown. What the second of the two equal ones seems to cost is noise. Loads are of streams of 512
prompt tokens and 128 generated ones each: flat out, where tokens share messages, and at 30 tokens a second, where each
has its own. A scrape is timed by itself.
"""

import argparse
import asyncio
import math
import statistics
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection

from benchmarks.processes import child, cpu_nanoseconds, received, routing, run_process, until_told
from benchmarks.router_overhead import FLAT, PACED, Client, cpu_seconds, run_workers
from discovery.record import WorkerRecord
from router.config import RouterConfig
from rpc.event_loop import watched_event_loop
from rpc.monitor import serve_monitor

OFF, CONTROL, ON = "off", "off again", "on"
STREAMS = 16
ROUNDS = 6
TURNS = {FLAT: 16, PACED: 4}  # of each round
SCRAPES = 100
SCRAPE_INTERVAL_SECONDS = 5  # of the Compose files

Costs = dict[str, dict[str, list[float]]]  # by load and router: microseconds of CPU a token, turn by turn


def run_router(pipe: Connection) -> None:
    """Routes to the workers, and measures or not, both of which come first through the pipe."""

    async def serve() -> None:
        records, measures = pipe.recv()
        metrics_listen = "127.0.0.1:0" if measures else ""
        config = RouterConfig(listen="127.0.0.1:0", metrics_listen=metrics_listen, drain_seconds=0)
        async with AsyncExitStack() as stack:
            port = stack.enter_context(serve_monitor(metrics_listen)).port
            if measures:
                await stack.enter_async_context(watched_event_loop())
            pipe.send((await stack.enter_async_context(routing(config, records)), port))
            await until_told(pipe)

    run_process(serve)


class Router:
    """A router's client, its process id, and the port of its metrics, 0 if it has none."""

    def __init__(self, client: Client, pid: int, metrics_port: int) -> None:
        self.client = client
        self.metrics_port = metrics_port
        self._pid = pid

    async def cost(self, model: str) -> float:
        """Microseconds of CPU for a token."""
        before = cpu_nanoseconds(self._pid)
        load = await self.client.streams("", model, STREAMS)
        return (cpu_nanoseconds(self._pid) - before) / load.tokens / 1000

    async def scrape_seconds(self) -> float:
        """Of CPU, for one scrape, whose thread ends with it: so that only the process as a whole can tell."""
        before = sum(cpu_seconds(self._pid))
        for _ in range(SCRAPES):
            await asyncio.to_thread(self._scrape)
        return (sum(cpu_seconds(self._pid)) - before) / SCRAPES

    def _scrape(self) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5) as answer:
            answer.read()


async def start_router(stack: AsyncExitStack, records: Sequence[WorkerRecord], name: str) -> Router:
    pipe, pid = await stack.enter_async_context(child(run_router))
    pipe.send((records, name == ON))
    address, metrics_port = await received(pipe)
    client = Client(address, pid, records[0].address)
    stack.push_async_callback(client.close)
    await client.streams("warm-up", FLAT, STREAMS)
    return Router(client, pid, metrics_port)


async def measure(routers: Mapping[str, Router], turns: Mapping[str, int], costs: Costs) -> None:
    """Adds what each turn has cost, the same load for all routers at once."""
    for model, count in turns.items():
        for _ in range(count):
            each = await asyncio.gather(*(router.cost(model) for router in routers.values()))
            for name, cost in zip(routers, each, strict=True):
                costs[model][name].append(cost)


def show(costs: Costs) -> None:
    for model, by_name in costs.items():
        for name in (CONTROL, ON):
            more = [cost / off - 1 for cost, off in zip(by_name[name], by_name[OFF], strict=True)]
            # Of the median of what is spread normally.
            error = 1.25 * statistics.stdev(more) / math.sqrt(len(more)) if len(more) > 1 else math.nan
            cost, median = statistics.median(by_name[name]), statistics.median(more)
            print(f"{model:<6} {name:<10} {cost:7.2f} us of CPU a token   {median:+6.2%} +- {error:.2%}")


async def run(rounds: int, turns: Mapping[str, int]) -> None:
    costs: Costs = {model: {name: [] for name in (OFF, CONTROL, ON)} for model in turns}
    scrapes = []
    async with AsyncExitStack() as stack:
        workers, _ = await stack.enter_async_context(child(run_workers))
        records = await received(workers)
        for _ in range(rounds):
            # New processes each time: two equal ones differ by some percent, for as long as they live.
            async with AsyncExitStack() as routers_stack:
                routers = {name: await start_router(routers_stack, records, name) for name in (OFF, CONTROL, ON)}
                await measure(routers, turns, costs)
                scrapes.append(await routers[ON].scrape_seconds())
    show(costs)
    scrape = statistics.median(scrapes)
    share = scrape / SCRAPE_INTERVAL_SECONDS
    print(f"a scrape {scrape * 1e3:.1f} ms of CPU, {share:.2%} of a core every {SCRAPE_INTERVAL_SECONDS} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asyncio.run(run(parser.parse_args().rounds, TURNS))
