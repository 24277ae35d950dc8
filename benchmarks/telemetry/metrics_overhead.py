"""The cost of metrics in a router: `python -m benchmarks.telemetry.metrics_overhead`.

One set of simulated workers and three routers, one with metrics and two without, compared by variants.py. Each stream
has 512 prompt tokens and 128 generated ones: at full speed, where tokens share messages, and at 30 tokens a second,
where each token has its own message. A scrape is measured separately.
"""

import argparse
import asyncio
import os
import statistics
import urllib.request
from collections.abc import Sequence
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.processes import child, received, routing, run_process, until_told
from benchmarks.router_overhead import Client, run_workers
from benchmarks.telemetry.variants import CONTROL, OFF, ROUNDS, Comparison, Variant
from discovery.record import WorkerRecord
from router.config import RouterConfig
from runtime.telemetry.metrics import watched_event_loop
from runtime.telemetry.monitor import serve_monitor

ON = "on"
NAMES = (OFF, CONTROL, ON)
SCRAPES = 100
SCRAPE_INTERVAL_SECONDS = 5  # of the Compose files


def run_router(pipe: Connection) -> None:
    """A router with or without metrics; the workers and that choice arrive first through the pipe."""

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


class Router(Variant):
    """A router that serves its metrics at `port`; 0 is none."""

    def __init__(self, client: Client, pid: int, metrics_port: int) -> None:
        super().__init__(client, pid)
        self.metrics_port = metrics_port

    async def scrape_seconds(self) -> float:
        """CPU seconds of one scrape, from the process's total, because the scrape's thread ends with it."""
        before = cpu_seconds(self.pid)
        for _ in range(SCRAPES):
            await asyncio.to_thread(self._scrape)
        return (cpu_seconds(self.pid) - before) / SCRAPES

    def _scrape(self) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5) as answer:
            answer.read()


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, in ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def start_router(stack: AsyncExitStack, records: Sequence[WorkerRecord], name: str) -> Router:
    pipe, pid = await stack.enter_async_context(child(run_router))
    pipe.send((records, name == ON))
    address, metrics_port = await received(pipe)
    client = Client(address)
    stack.push_async_callback(client.close)
    return Router(client, pid, metrics_port)


async def run(rounds: int) -> None:
    comparison, scrapes = Comparison(NAMES), []
    async with AsyncExitStack() as stack:
        workers, _ = await stack.enter_async_context(child(run_workers))
        records = await received(workers)
        for _ in range(rounds):
            async with AsyncExitStack() as routers_stack:
                routers = {name: await start_router(routers_stack, records, name) for name in NAMES}
                await comparison.measure(routers)
                scrapes.append(await routers[ON].scrape_seconds())
    comparison.show()
    scrape = statistics.median(scrapes)
    share = scrape / SCRAPE_INTERVAL_SECONDS
    print(f"a scrape {scrape * 1e3:.1f} ms of CPU, {share:.2%} of a core every {SCRAPE_INTERVAL_SECONDS} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asyncio.run(run(parser.parse_args().rounds))
