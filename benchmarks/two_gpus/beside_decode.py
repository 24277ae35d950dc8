"""Gaps between the tokens of 16 requests on GPU 0, alone, while a process on GPU 1 pulls from its pool, and while the
engine's own process pulls from GPU 1 into it, as a decode worker does.
"""

import asyncio
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

from baton.engine.v1 import handoff_pb2
from benchmarks.gpu import arrivals
from benchmarks.gpu_transfer import MOVED, POOL_BYTES, TINY, other_reader, transports
from benchmarks.two_gpus.model import CONTEXT, VOCABULARY, big_shape, engine_of
from benchmarks.two_gpus.report import quantile, see, table
from benchmarks.two_gpus.transfer import owner, received
from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.engine import PyTorchEngine
from services.transports.base import PoolReader, PoolShape, Transfer
from services.transports.registry import open_transports

SECONDS = 0.5 if TINY else 1.5
PAUSES = (0.1, 0.02)
REQUESTS = 4 if TINY else 16
TOKENS = 60 if TINY else 700


def other_gpu() -> str:
    """The environment of a process on GPU 1, as `see` sets it."""
    return "1,0" if os.environ.get("BATON_BENCHMARK_SEE_BOTH") == "1" else "1"


def prompt(length: int, seed: int) -> Prompt:
    return Prompt(tuple(random.Random(seed).choices(range(3, VOCABULARY), k=length)))


async def gaps(engine: PyTorchEngine, beside: Callable[[], Awaitable[object]]) -> list[float]:
    """Milliseconds from token to token during `beside`."""
    greedy = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    length = max(8, CONTEXT - TOKENS // 2)
    asked = [prompt(length, 7000 + index) for index in range(REQUESTS)]
    streams = [asyncio.create_task(arrivals(engine, each, greedy)) for each in asked]
    await asyncio.sleep(0.05 if TINY else 0.9)
    began = time.perf_counter()
    await beside()
    ended = time.perf_counter()
    found = [[t for t in times if began <= t <= ended] for times in await asyncio.gather(*streams)]
    return [(b - a) * 1e3 for times in found for a, b in pairwise(times)]


@asynccontextmanager
async def pool_on_gpu_1(engine: PyTorchEngine) -> AsyncIterator[PoolReader]:
    """A pool with the engine's blocks in a process on GPU 1, opened by the engine's own process."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    size = engine.facts.layout.block_bytes
    process = context.Process(target=owner, args=(1, size, there))
    process.start()
    try:
        [sent] = await asyncio.to_thread(received, here)
        async with open_transports(transports(), memory=engine.memory) as [transport]:
            endpoint = handoff_pb2.TransportEndpoint.FromString(sent)
            reader = await transport.open(endpoint, PoolShape(POOL_BYTES // size, size))
            yield reader
            reader.close()
    finally:
        process.kill()
        process.join()


async def pull_here(
    engine: PyTorchEngine, reader: PoolReader, pause: float, seconds: float
) -> tuple[int, float, float]:
    """Pulls into the pool's last blocks, which the few requests do not use."""
    memory = engine.memory
    assert memory is not None
    size = memory.block_bytes
    count = min(MOVED["500 MiB"] // size, POOL_BYTES // size, memory.num_blocks // 4)
    into = range(memory.num_blocks - count, memory.num_blocks)
    began, taken = time.perf_counter(), []
    while time.perf_counter() - began < seconds:
        source, start = random.sample(range(POOL_BYTES // size), count), time.perf_counter()
        await reader.pull(Transfer(source, memory, into, time.monotonic() + 60))
        taken.append(time.perf_counter() - start)
        await asyncio.sleep(pause)
    return len(taken), time.perf_counter() - began, statistics.median(taken) * 1e3


async def main() -> None:
    see(0)
    async with engine_of(big_shape()) as engine:
        await gaps(engine, lambda: asyncio.sleep(SECONDS))
        alone = await gaps(engine, lambda: asyncio.sleep(SECONDS))
        rows: list[tuple[object, ...]] = [("alone", "", "", *described(alone, alone))]
        assert engine.memory is not None
        async with other_reader(engine.memory, engine.facts.layout, None if TINY else other_gpu()) as other:
            await asyncio.to_thread(other.pulls, 0.02, 0.1)
            for pause in PAUSES:
                counts: list[tuple[int, float, float]] = []

                async def theirs(pause: float = pause, counts: list[tuple[int, float, float]] = counts) -> None:
                    counts.append(await asyncio.to_thread(other.pulls, pause, SECONDS))

                found = await gaps(engine, theirs)
                [(count, seconds, ms)] = counts
                rows.append(("GPU 1 pulls 500 MiB from it", count / seconds, ms, *described(found, alone)))
        async with pool_on_gpu_1(engine) as reader:
            await pull_here(engine, reader, 0.02, 0.1)
            for pause in PAUSES:
                counts = []

                async def ours(pause: float = pause, counts: list[tuple[int, float, float]] = counts) -> None:
                    counts.append(await pull_here(engine, reader, pause, SECONDS))

                found = await gaps(engine, ours)
                [(count, seconds, ms)] = counts
                rows.append(("it pulls 500 MiB from GPU 1", count / seconds, ms, *described(found, alone)))
        again = await gaps(engine, lambda: asyncio.sleep(SECONDS))
        rows.append(("alone again", "", "", *described(again, alone)))
    header = ("16 requests decode", "pulls/s", "a pull, ms", "gap, mean ms", "p50", "p99", "mean, against alone")
    table(header, rows)


def described(found: list[float], alone: list[float]) -> tuple[object, ...]:
    if not found:
        return ("no tokens", "", "", "")
    grown = statistics.mean(found) / statistics.mean(alone) - 1
    return (statistics.mean(found), quantile(found, 0.5), quantile(found, 0.99), f"{grown:+.1%}")


if __name__ == "__main__":
    asyncio.run(main())
