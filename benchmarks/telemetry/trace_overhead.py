"""The cost of tracing in a router: `python -m benchmarks.telemetry.trace_overhead`.

One set of simulated workers without tracing, and three routers: two without tracing, and one that samples a share of
its requests and sends their spans to a viewer in another process; compared by variants.py. Each stream has 512 prompt
tokens and 128 generated ones: at full speed, where tokens share messages, and at 30 tokens a second, where each token
has its own message.
"""

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection

from benchmarks.processes import child, received, run_process, run_router, until_told
from benchmarks.router_overhead import Client, run_workers
from benchmarks.telemetry.variants import CONTROL, OFF, ROUNDS, Comparison, Variant
from devtools.trace_viewer.api import open_viewer
from devtools.trace_viewer.store import Bounds
from discovery.record import WorkerRecord
from router.config import RouterConfig
from rpc.tracing.exporter import TracingConfig


def run_viewer(pipe: Connection) -> None:
    """Receives spans until the pipe ends."""

    async def serve() -> None:
        async with open_viewer("127.0.0.1:0", "127.0.0.1:0", Bounds()) as viewer:
            pipe.send(viewer.otlp_address)
            await until_told(pipe)

    run_process(serve)


async def start_router(stack: AsyncExitStack, records: Sequence[WorkerRecord], tracing: TracingConfig) -> Variant:
    config = RouterConfig(listen="127.0.0.1:0", drain_seconds=0, tracing=tracing)
    pipe, pid = await stack.enter_async_context(child(run_router, config))
    pipe.send(records)
    client = Client(await received(pipe))
    stack.push_async_callback(client.close)
    return Variant(client, pid)


async def run(rounds: int, ratio: float) -> None:
    async with AsyncExitStack() as stack:
        workers, _ = await stack.enter_async_context(child(run_workers))
        viewer, _ = await stack.enter_async_context(child(run_viewer))
        records = await received(workers)
        tracing = TracingConfig(endpoint=await received(viewer), sample_ratio=ratio)
        settings = {OFF: TracingConfig(), CONTROL: TracingConfig(), f"{ratio:.0%} sampled": tracing}
        comparison = Comparison(list(settings))
        for _ in range(rounds):
            async with AsyncExitStack() as routers:
                await comparison.measure(
                    {name: await start_router(routers, records, each) for name, each in settings.items()}
                )
        comparison.show()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--ratio", type=float, default=0.1, help="the share of requests that are sampled")
    arguments = parser.parse_args()
    asyncio.run(run(arguments.rounds, arguments.ratio))
