"""The time in which a restarted router learns what all workers have cached, and for which its event loop waits.

    python benchmarks/routing/rebuild.py [--workers N] [--blocks N]

Two processes: one serves the KV events of all workers, each with its share of the blocks, through gRPC; this one
subscribes to all of them at once, as a router does, into the router's own index. Meanwhile a task wakes up every
millisecond: what it is late by, streams would be late by. Its CPU time between two turns depends less on other load.
"""

import argparse
import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import uvloop
from grpc import aio

from baton.engine.v1 import worker_pb2, worker_pb2_grpc
from benchmarks.processes import child, received, run_process, until_told
from discovery.record import WorkerRecord
from router.placement.kv_events import KvSubscriber
from router.routing.prefix.prefix_caches import Cache, PrefixCaches
from rpc.channels import open_channel
from runtime.garbage import exempt_living_objects
from services.control import kv_event
from services.engines.kv_events import KvPublisher, in_pieces

EPOCH = 1


class _Events(worker_pb2_grpc.WorkerServiceServicer):
    """Every subscription gets the events of another worker."""

    def __init__(self, workers: int, blocks: int) -> None:
        source = random.Random(1)
        self._publishers = [KvPublisher() for _ in range(workers)]
        for number in range(blocks):
            self._publishers[number % workers].stored(source.randbytes(16))
        self._next = 0

    async def SubscribeKvEvents(  # type: ignore[override]
        self, request: worker_pb2.SubscribeKvEventsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.SubscribeKvEventsResponse]:
        publisher = self._publishers[self._next % len(self._publishers)]
        self._next += 1
        sequence = 0
        async with aclosing(publisher.changes()) as changes:
            async for change in changes:
                for piece in in_pieces(change):
                    yield kv_event(EPOCH, sequence, piece)
                    sequence += 1


def run_workers(pipe: Connection, workers: int, blocks: int) -> None:
    """Serves until the pipe ends."""

    async def serve() -> None:
        server = aio.server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(_Events(workers, blocks), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        pipe.send(f"127.0.0.1:{port}")
        await until_told(pipe)
        await server.stop(None)

    run_process(serve)


@dataclass(frozen=True)
class _Known:
    """A worker as the subscriber sees it."""

    record: WorkerRecord
    control: worker_pb2_grpc.WorkerServiceStub


class _Cluster:
    """Workers that neither come nor go."""

    def __init__(self, workers: list[_Known]) -> None:
        self.workers = workers

    async def change(self) -> None:
        await asyncio.Event().wait()


@dataclass
class _Turns:
    """The longest that the event loop did not return to a task, on the clock and of this thread's CPU time."""

    late: float = 0.0
    busy: float = 0.0

    async def watch(self) -> None:
        while True:
            clock, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.001)
            self.late = max(self.late, time.perf_counter() - clock - 0.001)
            self.busy = max(self.busy, time.thread_time() - cpu)


async def measure(workers: int, blocks: int) -> str:
    async with child(run_workers, workers, blocks) as (pipe, _):
        address = await received(pipe)
        channels = [open_channel(address) for _ in range(workers)]
        known = [
            _Known(
                WorkerRecord(f"w{number}", EPOCH, address, ("prefill",), "m", "simulated", "0" * 64, 1000),
                worker_pb2_grpc.WorkerServiceStub(channel),
            )
            for number, channel in enumerate(channels)
        ]
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        caches, turns = PrefixCaches(), _Turns()
        subscriber = KvSubscriber(_Cluster(known), caches, caches.drop)  # type: ignore[arg-type]
        started, cpu = time.perf_counter(), time.process_time()
        tasks = [asyncio.create_task(turns.watch()), asyncio.create_task(subscriber.follow())]
        async with asyncio.timeout(120):
            while sum(caches.num_blocks(Cache(each.record.process)) for each in known) < blocks:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in channels:
            await channel.close()
    return f"| {blocks} | {workers} | {seconds:.2f} | {cpu:.2f} | {turns.late * 1e3:.1f} | {turns.busy * 1e3:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    options = parser.parse_args()
    exempt_living_objects()  # as in each of the project's processes
    print("| blocks | workers | seconds | of CPU, s | longest delay, ms | longest turn, ms of CPU |")
    print("|---|---|---|---|---|---|")
    print(uvloop.run(measure(options.workers, options.blocks)))


if __name__ == "__main__":
    main()
