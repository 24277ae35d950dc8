"""What tracing costs a router: `python -m benchmarks.trace_overhead`.

One set of simulated workers, which trace nothing, and a router for each sampling ratio, all running at once, and one
more that traces nothing. Loads of 64 requests (512 prompt tokens, 128 generated ones) go to the routers in turn, in
another order each time, so that whatever else the machine does is the same for all. Compared is the CPU time of all
threads of a router per token, turn by turn, with that of the router that traces nothing: the median of these ratios is
shown, and their quartiles. What the second router that traces nothing seems to cost is the error of the rest.

Paced are 30 tokens a second and request, as a model generates them; flat out is as fast as the router can, where
several tokens share a message and a token costs the least.
"""

import argparse
import asyncio
import random
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection

from benchmarks.processes import child, cpu_nanoseconds, received, routing, run_process, until_told
from benchmarks.router_overhead import FLAT, PACED, Client, run_workers
from client.traces.store import Bounds
from client.traces.viewer import open_viewer
from discovery.record import WorkerRecord
from router.config import RouterConfig
from rpc.tracing.config import TracingConfig

OFF, OFF_TOO = "off", "off, once more"
ROUTERS: dict[str, float | None] = {
    OFF: None,
    OFF_TOO: None,
    "0% sampled": 0.0,
    "10% sampled": 0.1,
    "100% sampled": 1.0,
}
STREAMS = 64
TURNS = 6
FLAT_TURNS = 4  # for each paced one, which takes so much longer


def run_viewer(pipe: Connection) -> None:
    """Receives spans until the pipe ends."""

    async def serve() -> None:
        async with open_viewer("127.0.0.1:0", "127.0.0.1:0", Bounds()) as viewer:
            pipe.send(viewer.otlp_address)
            await until_told(pipe)

    run_process(serve)


def run_router(pipe: Connection) -> None:
    """Routes to the workers, and traces as told, both of which come first through the pipe."""

    async def serve() -> None:
        records, tracing = pipe.recv()
        config = RouterConfig(listen="127.0.0.1:0", drain_seconds=0, tracing=tracing)
        async with routing(config, records) as address:
            pipe.send(address)
            await until_told(pipe)

    run_process(serve)


async def start_router(
    stack: AsyncExitStack, records: Sequence[WorkerRecord], tracing: TracingConfig
) -> tuple[Client, int]:
    pipe, pid = await stack.enter_async_context(child(run_router))
    pipe.send((records, tracing))
    address = await received(pipe)
    client = Client(address, pid, records[0].address)
    stack.push_async_callback(client.close)
    await client.streams("warm-up", FLAT, STREAMS)
    return client, pid


async def run(turns: int) -> None:
    async with AsyncExitStack() as stack:
        workers, _ = await stack.enter_async_context(child(run_workers))
        viewer, _ = await stack.enter_async_context(child(run_viewer))
        records = await received(workers)
        endpoint = await received(viewer)
        clients = {}
        for name, ratio in ROUTERS.items():
            tracing = TracingConfig() if ratio is None else TracingConfig(endpoint=endpoint, sample_ratio=ratio)
            clients[name] = await start_router(stack, records, tracing)
        for model, count in ((PACED, turns), (FLAT, FLAT_TURNS * turns)):
            print_table(model, await compare(clients, model, count))


async def compare(clients: Mapping[str, tuple[Client, int]], model: str, turns: int) -> dict[str, list[float]]:
    """Microseconds of CPU a token, of each router in each turn."""
    costs: dict[str, list[float]] = {name: [] for name in ROUTERS}
    for _ in range(turns):
        # In another order each time: whoever comes after a pause pays for it.
        for name, (client, pid) in random.sample(list(clients.items()), len(clients)):
            before = cpu_nanoseconds(pid)
            load = await client.streams("", model, STREAMS)
            costs[name].append((cpu_nanoseconds(pid) - before) / load.tokens / 1000)
    return costs


def print_table(model: str, costs: Mapping[str, Sequence[float]]) -> None:
    print(f"| {model}, {len(costs[OFF])} turns | us of CPU a token | more than off: median | quartiles |")
    print("|---|---|---|---|")
    for name, each in costs.items():
        print(row(name, each, costs[OFF]))


def row(name: str, costs: Sequence[float], off: Sequence[float]) -> str:
    more = [cost / without - 1 for cost, without in zip(costs, off, strict=True)]
    low, median, high = statistics.quantiles(more, n=4)
    return f"| {name} | {statistics.median(costs):.2f} | {median:+.1%} | {low:+.1%} to {high:+.1%} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=TURNS)
    asyncio.run(run(parser.parse_args().turns))
