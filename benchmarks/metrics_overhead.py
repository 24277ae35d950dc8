"""What metrics cost a router: `python -m benchmarks.metrics_overhead`.

One set of simulated workers and three routers, all running at once: one that measures, and two that do not, as they
serve no metrics. Small loads go to them in turn, in another order each time, so that whatever else the machine does is
the same for all. Compared is the CPU time of the routers' threads, turn by turn; the median is shown. What the second
of the two equal ones seems to cost is noise. Loads are of 64 streams, 512 prompt tokens and 128 generated ones each:
flat out, where tokens share messages, and at 30 tokens a second, where each has its own. A scrape is timed by itself.
"""

import argparse
import asyncio
import random
import statistics
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection

from benchmarks.router_overhead import FLAT, PACED, Client, cpu_seconds, run_process, run_workers, until_told
from benchmarks.trace_overhead import child, cpu_nanoseconds
from discovery.memory import MemoryRegistry
from discovery.record import WorkerRecord
from router.config import RouterConfig
from router.host import host_router
from rpc.event_loop import watched_event_loop
from rpc.telemetry import serve_metrics

OFF, CONTROL, ON = "off", "off again", "on"
STREAMS = 64
TURNS = {FLAT: 24, PACED: 8}
SCRAPES = 200
SCRAPE_INTERVAL_SECONDS = 5  # of the Compose files


def run_router(pipe: Connection) -> None:
    """Routes to the workers, and measures or not, both of which come first through the pipe."""

    async def serve() -> None:
        records, measures = pipe.recv()
        registry = MemoryRegistry("benchmark")
        metrics_listen = "127.0.0.1:0" if measures else ""
        async with AsyncExitStack() as stack:
            for record in records:
                await stack.enter_async_context(registry.register(record))
            port = stack.enter_context(serve_metrics(metrics_listen))
            await stack.enter_async_context(watched_event_loop())
            config = RouterConfig(listen="127.0.0.1:0", metrics_listen=metrics_listen, drain_seconds=0)
            router = await stack.enter_async_context(host_router(config, registry))
            while sum(not worker.problem for worker in router.cluster.workers) < len(records):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            pipe.send((router.address, port))
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
    address, metrics_port = await asyncio.to_thread(pipe.recv)
    client = Client(address, pid, records[0].address)
    stack.push_async_callback(client.close)
    await client.streams("warm-up", FLAT, STREAMS)
    return Router(client, pid, metrics_port)


async def measure(routers: Mapping[str, Router], model: str, turns: int) -> None:
    costs: dict[str, list[float]] = {name: [] for name in routers}
    for _ in range(turns):
        for name, router in random.sample(list(routers.items()), len(routers)):
            costs[name].append(await router.cost(model))
    for name, each in costs.items():
        more = statistics.median(cost / off - 1 for cost, off in zip(each, costs[OFF], strict=True))
        print(f"{model:<6} {name:<10} {statistics.median(each):7.2f} us of CPU a token   {more:+6.1%}")


async def run(turns: Mapping[str, int]) -> None:
    async with AsyncExitStack() as stack:
        workers, _ = await stack.enter_async_context(child(run_workers))
        records = await asyncio.to_thread(workers.recv)
        routers = {name: await start_router(stack, records, name) for name in (OFF, CONTROL, ON)}
        for model, count in turns.items():
            await measure(routers, model, count)
        scrape = await routers[ON].scrape_seconds()
        share = scrape / SCRAPE_INTERVAL_SECONDS
        print(f"a scrape {scrape * 1e3:.1f} ms of CPU, {share:.2%} of a core every {SCRAPE_INTERVAL_SECONDS} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=float, default=1.0, help="times as many turns")
    factor = parser.parse_args().turns
    asyncio.run(run({model: max(1, round(count * factor)) for model, count in TURNS.items()}))
