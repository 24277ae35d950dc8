"""The process under test: a router and simulated workers on our own server and client, and what the process holds."""

import asyncio
import gc
import os
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from baton_http2.client.call import ClientCall
from baton_http2.client.connection import ClientConnection
from baton_http2.limits import Http2Limits
from baton_http2.server.call import ServerCall
from baton_http2.server.connection import Connection
from baton_http2.server.refusal import Refusal
from baton_http2.stream import Stream
from benchmarks.processes import run_process, until_told
from discovery.memory import MemoryRegistry
from discovery.record import WorkerRecord
from router.config import ClientConnections, ProbeConfig, RouterConfig, RoutingConfig
from router.server import host_router
from rpc.server import ConnectionLimits
from services.config import HandoffConfig, WorkerConfig
from services.engines.simulated.config import SimulatedConfig
from services.server import host_worker

MODEL = "soak"
_OTHER = "decode-1"
# A client's connection is renewed so often, and one that reads nothing is ended after so long.
_MAX_AGE_SECONDS = 10.0
_SLOW_READER_SECONDS = 4.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Several workers compute in this process beside the router: a late answer means busy, not lost.
_PROBE = ProbeConfig(timeout_seconds=20, hung_seconds=60)


@dataclass(frozen=True, slots=True)
class Held:
    """The holdings of the process. `objects` are all that the garbage collector knows; `blocks` are KV blocks."""

    memory_bytes: int
    files: int
    tasks: int
    connections: int
    streams: int
    calls: int
    objects: int
    blocks: int

    @property
    def countable(self) -> tuple[int, ...]:
        """The part that is the same after each round, to the last one."""
        return self.files, self.tasks, self.connections, self.streams, self.calls, self.blocks


def run_cluster(pipe: Pipe) -> None:
    """Sends the router's address, and then answers "hold" by `Held`, and the record of a worker once that is ready.

    That worker is a process of its own, and takes the place of the one before it.
    """

    async def serve() -> None:
        registry = MemoryRegistry("soak")
        async with AsyncExitStack() as stack, AsyncExitStack() as other:
            workers = [await stack.enter_async_context(host_worker(_worker(each), registry)) for each in _WORKERS]
            router = await stack.enter_async_context(host_router(_ROUTER, registry))
            await _ready(router.cluster, len(workers))
            pipe.send(router.address)
            while (command := await asyncio.to_thread(pipe.recv)) != "stop":
                if isinstance(command, WorkerRecord):
                    await other.aclose()
                    await _ready(router.cluster, len(workers))
                    await other.enter_async_context(registry.register(command))
                    await _ready(router.cluster, len(workers) + 1)
                    pipe.send(True)
                else:
                    pipe.send(_held(sum(worker.engines.load().blocks_used for worker in workers)))

    run_process(serve)


def run_worker(pipe: Pipe) -> None:
    """A worker that sends its record, and leaves without a word when it is told to."""

    async def serve() -> None:
        registry = MemoryRegistry("soak")
        async with host_worker(_worker(_OTHER), registry):
            pipe.send(registry.workers()[0])
            await until_told(pipe)
            os._exit(0)

    run_process(serve)


async def _ready(cluster: Any, count: int) -> None:
    while len(cluster.workers) != count or any(worker.problem for worker in cluster.workers):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def _held(blocks: int) -> Held:
    gc.collect()
    objects = gc.get_objects()
    kinds = Counter(map(type, objects))
    return Held(
        memory_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES,
        files=len(os.listdir("/proc/self/fd")),
        tasks=len(asyncio.all_tasks()),
        connections=kinds[Connection] + kinds[ClientConnection],
        streams=kinds[Stream],
        calls=kinds[ServerCall] + kinds[Refusal] + kinds[ClientCall],
        objects=len(objects),
        blocks=blocks,
    )


_HTTP2 = Http2Limits(slow_reader_seconds=_SLOW_READER_SECONDS)
_ROUTER = RouterConfig(
    listen="127.0.0.1:0",
    metrics_listen="127.0.0.1:0",
    server="http2",
    connections=ClientConnections(max_age_seconds=_MAX_AGE_SECONDS, http2=_HTTP2),
    probe=_PROBE,
    drain_seconds=0,
    # Each prompt is prefilled on one worker and decoded on another.
    routing=RoutingConfig(policy="least_loaded"),
)
_WORKERS = ("prefill-0", "decode-0")


def _worker(worker_id: str) -> WorkerConfig:
    return WorkerConfig(
        worker_id=worker_id,
        server="http2",
        roles=(worker_id.partition("-")[0],),  # type: ignore[arg-type]
        engine=SimulatedConfig(name=MODEL, num_blocks=4096, block_bytes=64, max_context_tokens=8192),
        handoff=HandoffConfig(lease_seconds=5.0),
        transports=("shm",),
        connections=ConnectionLimits(max_age_seconds=_MAX_AGE_SECONDS, http2=_HTTP2),
        drain_seconds=5,
    )
