"""A worker on each GPU and routers before them, each a process of its own, started as the real ones are.

All of them serve by the project's own HTTP/2.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

from transformers import LlamaConfig

from benchmarks.gpu_transfer import TINY
from benchmarks.processes import child, routing, run_like_real, until_told
from benchmarks.two_gpus.model import folder_of
from benchmarks.two_gpus.report import see
from discovery.memory import MemoryRegistry
from discovery.record import WorkerRecord
from router.config import ProbeConfig, RouterConfig, RoutingConfig
from services.config import WorkerConfig
from services.engines.pytorch.config import PyTorchConfig
from services.server import host_worker

START_SECONDS = 150.0
EARLY_TOKENS = RoutingConfig().early_handoff_tokens

# For each topology, the GPU of each worker and its roles.
TOPOLOGIES: dict[str, tuple[tuple[int, tuple[str, ...]], ...]] = {
    "1 prefill + 1 decode": ((0, ("prefill",)), (1, ("decode",))),
    "2 workers of both roles": ((0, ("prefill", "decode")), (1, ("prefill", "decode"))),
}


def run_worker(pipe: Connection, gpu: int, roles: tuple[str, ...], folder: str, transports: tuple[str, ...]) -> None:
    """Serves until the pipe ends, by the default transports if none are named. Sends its record."""
    see(gpu)
    sizes: dict[str, Any] = {"kv_cache_bytes": 64 << 20, "threads": 1, "execution": "fused"} if TINY else {}
    engine = PyTorchConfig.model_validate({"model": folder, "name": "benchmark", "gpu_memory_share": 0.9, **sizes})
    settings: dict[str, Any] = {"transports": transports} if transports else {}
    config = WorkerConfig(
        worker_id=f"{'-'.join(roles)}-{gpu}",
        roles=roles,  # type: ignore[arg-type]
        engine=engine,
        server="http2",
        drain_seconds=0,
        **settings,
    )

    async def serve() -> None:
        registry = MemoryRegistry("benchmark")
        async with host_worker(config, registry):
            pipe.send(registry.workers())
            await until_told(pipe)

    run_like_real(serve)


def run_router(pipe: Connection, early_tokens: int) -> None:
    """Routes to the workers whose records come first through the pipe, until it ends."""

    async def serve() -> None:
        config = RouterConfig(
            listen="127.0.0.1:0",
            metrics_listen="127.0.0.1:0",
            server="http2",
            drain_seconds=0,
            probe=ProbeConfig(timeout_seconds=10.0, hung_seconds=30.0),
            routing=RoutingConfig(early_handoff_tokens=early_tokens),
        )
        async with routing(config, pipe.recv()) as address:
            pipe.send(address)
            await until_told(pipe)

    run_like_real(serve)


@asynccontextmanager
async def cluster(
    topology: str,
    shape: LlamaConfig,
    *,
    transports: tuple[str, ...] = (),
    early_tokens: Sequence[int] = (EARLY_TOKENS,),
) -> AsyncIterator[list[str]]:
    """The addresses of routers before the same two workers, one for each length from which handoffs begin early."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(folder_of(shape))
        workers = [
            await stack.enter_async_context(child(run_worker, gpu, roles, str(folder), transports))
            for gpu, roles in TOPOLOGIES[topology]
        ]
        routers = [await stack.enter_async_context(child(run_router, tokens)) for tokens in early_tokens]
        records: list[WorkerRecord] = [record for pipe, _ in workers for record in await answer(pipe)]
        for record in records:
            print(f"{record.worker_id}: offers {', '.join(record.offers)}; reads {', '.join(record.reads)}", flush=True)
        print()
        for pipe, _ in routers:
            pipe.send(records)
        yield [await answer(pipe) for pipe, _ in routers]


async def answer(pipe: Connection) -> Any:
    """The next object from a process that may take long to start. Raises TimeoutError, and EOFError at its end."""
    if not await asyncio.to_thread(pipe.poll, START_SECONDS):
        raise TimeoutError("a process of the cluster does not start")
    return pipe.recv()
