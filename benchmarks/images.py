"""Requests with images: encoded by a worker of its own or by the one that answers, with the embedding cache or without.

    python -m benchmarks.images [--model models/demo] [--device cpu] [--sizes 32 336] [--numbers 1 4]
        [--repeats 0 0.9] [--requests 40] [--concurrency 4] [--rounds 3] [--output FILE]

Each cluster is a router and one worker of every role, or one worker with all of them, in processes of their own; the
load and its clocks are those of `baton bench sweep --images`. All clusters run meanwhile; each load goes from one to
the next, and on a GPU all workers share it.
"""

import argparse
import asyncio
import os
import statistics
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path

from baton import AsyncClient
from baton.inference.v1 import generate_pb2
from benchmarks.processes import child, received, run_process, run_router, until_told
from devtools.bench.load import Load, Measured
from devtools.bench.report import Summary, Targets, summarize
from devtools.bench.servers import GrpcServer
from devtools.bench.workload import Images, Lengths, Workload
from discovery.memory import MemoryRegistry
from engine_protocol.roles import Role
from router.config import EmbeddingsConfig, ProbeConfig, RouterConfig
from services.config import WorkerConfig
from services.engines.pytorch.config import PyTorchConfig
from services.server import host_worker

_APART: Sequence[tuple[Role, ...]] = (("encode",), ("prefill",), ("decode",))
_TOGETHER: Sequence[tuple[Role, ...]] = (("encode", "prefill", "decode"),)
_REQUEST_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Deployment:
    """A cluster by the worker that encodes images, with or without kept embeddings."""

    workers: Sequence[tuple[Role, ...]]
    is_cached: bool

    def __str__(self) -> str:
        where = "encode on its own worker" if self.workers is _APART else "one worker"
        return f"{where}, {'cache' if self.is_cached else 'no cache'}"

    @property
    def router(self) -> RouterConfig:
        """Its router, which is patient with workers that share cores with everything else."""
        embeddings = EmbeddingsConfig() if self.is_cached else EmbeddingsConfig(max_bytes=0)
        probe = ProbeConfig(timeout_seconds=20, hung_seconds=60)
        return RouterConfig(
            listen="127.0.0.1:0", metrics_listen="127.0.0.1:0", drain_seconds=0, embeddings=embeddings, probe=probe
        )


def run_worker(pipe: Connection, roles: tuple[Role, ...], model: Path, device: str) -> None:
    """A worker of the embedded engine, until the pipe ends. Sends its record."""
    engine = PyTorchConfig(
        model=model, name="bench", device=device, threads=1, kv_cache_bytes=256 << 20, canary_seconds=None
    )
    config = WorkerConfig(worker_id="-".join(roles), roles=roles, engine=engine, drain_seconds=0)

    async def serve() -> None:
        registry = MemoryRegistry("benchmark")
        async with host_worker(config, registry):
            pipe.send(registry.workers())
            await until_told(pipe)

    run_process(serve)


@asynccontextmanager
async def cluster(deployment: Deployment, options: argparse.Namespace) -> AsyncIterator[Load]:
    """The client of a cluster that runs."""
    async with AsyncExitStack() as stack:
        starting = [child(run_worker, roles, options.model, options.device) for roles in deployment.workers]
        pipes = [(await stack.enter_async_context(each))[0] for each in starting]
        records = [record for pipe in pipes for record in await received(pipe)]
        pipe, _ = await stack.enter_async_context(child(run_router, deployment.router))
        pipe.send(records)
        address = await received(pipe)
        clients = [await stack.enter_async_context(AsyncClient(address)) for _ in range(options.concurrency)]
        yield Load(GrpcServer(clients, generate_pb2.TOPOLOGY_UNSPECIFIED, _REQUEST_SECONDS), "bench", _ignore)


def _ignore(_: Measured) -> None:
    pass


async def measure(options: argparse.Namespace) -> str:
    """All rounds, as Markdown."""
    deployments = [Deployment(workers, cached) for workers in (_APART, _TOGETHER) for cached in (True, False)]
    images = [
        Images(number, (size, size), repeated)
        for size, number, repeated in product(options.sizes, options.numbers, options.repeats)
    ]
    found: dict[tuple[Images, Deployment], list[Summary]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        opening = (stack.enter_async_context(cluster(each, options)) for each in deployments)
        loads = await asyncio.gather(*opening)
        for turn in range(options.rounds):
            for (number, each), (load, deployment) in product(enumerate(images), zip(loads, deployments, strict=True)):
                workload = Workload(Lengths(prompt=(24, 24), answer=(options.answer, options.answer)), each)
                if not turn:
                    warming = workload.all_at_once(options.concurrency, -1 - number)
                    await load.closed_loop(warming, options.concurrency)
                planned = workload.all_at_once(options.requests, turn * len(images) + number)
                answers = await load.closed_loop(planned, options.concurrency)
                found[each, deployment].append(summarize(str(deployment), answers, Targets()))
    lines = [
        f"`python -m benchmarks.images`, {options.model.name} on {options.device}, {options.rounds} rounds of "
        f"{options.requests} requests, {options.concurrency} at once, answers of {options.answer} tokens; "
        f"load average {os.getloadavg()[0]:.1f} at the end. Medians of the rounds, times in ms.",
        "",
        "| images | repeated | deployment | requests/s | images/s | TTFT p50 | p99 | failed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(each, deployment, found[each, deployment]) for each in images for deployment in deployments]
    return "\n".join(lines) + "\n"


def _row(images: Images, deployment: Deployment, rounds: Sequence[Summary]) -> str:
    rate = statistics.median(each.requests_per_second for each in rounds)
    first, late = (statistics.median(getattr(each.first_token, name) for each in rounds) for name in ("p50", "p99"))
    cells = [f"{images.number} of {images.pixels[0]} x {images.pixels[0]}", f"{images.repeated:.0%}", str(deployment)]
    cells += [f"{rate:.2f}", f"{rate * images.number:.2f}", f"{first * 1e3:.1f}", f"{late * 1e3:.1f}"]
    return f"| {' | '.join([*cells, str(sum(each.failed for each in rounds))])} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/demo"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 336], help="pixels")
    parser.add_argument("--numbers", type=int, nargs="+", default=[1, 4], help="images of a request")
    parser.add_argument("--repeats", type=float, nargs="+", default=[0.0, 0.9], help="shares of images sent before")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--answer", type=int, default=4, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    printed = asyncio.run(measure(options))
    print(printed)
    if options.output:
        options.output.write_text(f"# images\n\n{printed}", encoding="utf-8")


if __name__ == "__main__":
    main()
