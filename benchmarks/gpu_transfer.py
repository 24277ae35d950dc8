"""Pulls between two processes by cuda_ipc and by nixl, beside one copy of the same bytes on the device.

Without a GPU they go over shared memory, which tries the program and measures nothing.
"""

import asyncio
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import torch

from baton.engine.v1 import handoff_pb2
from services.engines.kv import BlockMemory, KvLayout, packed_ids
from services.engines.pytorch.kv_cache.memory import DeviceMemory, HostMemory, open_memory
from services.transports.base import Exposure, PoolShape, Transfer
from services.transports.registry import offer_pool, open_transports


class _Everything:
    """A guard that lets every block be read; cuda_ipc asks none."""

    def may_read(self, handoff_id: str, certificate: str, block_ids: Collection[int]) -> bool:
        return True


LOOPBACK = Exposure("127.0.0.1", "127.0.0.1", _Everything())

# To try the programs on a machine without GPUs: small sizes and few rounds. In the environment, for all processes.
TINY = os.environ.get("BATON_BENCHMARK_TINY") == "1"

BLOCK_BYTES = {"32 KiB": 32 << 10, "128 KiB": 128 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20}
NIXL = any(find_spec(name) for name in ("nixl_cu13", "nixl_cu12"))
MOVED = {"16 MiB": 16 << 20, "500 MiB": (20 if TINY else 500) << 20}
POOL_BYTES = (64 << 20) if TINY else (2 << 30)
ROUNDS = 6 if TINY else 30


def device() -> torch.device:
    """The first GPU that this process sees. Not at import: processes choose their GPU before they use CUDA."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def transports() -> tuple[str, ...]:
    """The transport that reads another process's pool in place."""
    return ("cuda_ipc",) if torch.cuda.is_available() else ("shm",)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def layout(block_bytes: int) -> KvLayout:
    return KvLayout("benchmark", "bfloat16", 1, 2, 8, 16, block_bytes // (2 * 8 * 16 * 2), block_bytes)


def memory(block_bytes: int) -> HostMemory | DeviceMemory:
    return open_memory(layout(block_bytes), POOL_BYTES // block_bytes, device())


async def serve_pool(name: str, block_bytes: int, pipe: Connection) -> None:
    """Offers a pool of which each word says where it is, until something comes through the pipe."""
    pool = memory(block_bytes)
    words = pool.tensor.view(-1).view(torch.int64)
    torch.arange(len(words), out=words)
    synchronize()
    async with open_transports((name,), memory=pool) as opened:
        endpoints = await offer_pool(opened, pool, LOOPBACK)
        pipe.send([endpoint.SerializeToString() for endpoint in endpoints])
        await asyncio.to_thread(pipe.recv)


def own(pipe: Connection) -> None:
    """The owner's process: serves the pools it is told to, one after another."""
    while (told := pipe.recv()) is not None:
        asyncio.run(serve_pool(*told, pipe))


async def pull_from(name: str, block_bytes: int, sent: bytes, say: Callable[..., None]) -> None:
    pool = memory(block_bytes)
    count = POOL_BYTES // block_bytes
    words = block_bytes // 8
    async with open_transports((name,), memory=pool) as [transport]:
        began = time.perf_counter()
        endpoint = handoff_pb2.TransportEndpoint.FromString(sent)
        reader = await transport.open(endpoint, PoolShape(count, block_bytes))
        opened = time.perf_counter() - began
        for moved, size in MOVED.items():
            taken = []
            for _ in range(ROUNDS):
                # Packed, as the ids of a handoff and of a reservation are.
                source, target = (packed_ids(random.sample(range(count), size // block_bytes)) for _ in range(2))
                began = time.perf_counter()
                await reader.pull(Transfer(source, pool, target, time.monotonic() + 60))
                taken.append(time.perf_counter() - began)
            flat = pool.tensor.view(count, -1).view(torch.int64)
            origin, into = (torch.tensor(ids, dtype=torch.int64, device=flat.device) for ids in (source, target))
            first = flat[into, 0] == origin * words
            last = flat[into, -1] == origin * words + words - 1
            copy = copied(size)
            used = sorted(one * 1e3 for one in taken[ROUNDS // 6 :])
            ms = statistics.median(used)
            right = bool(first.all() and last.all())
            say(
                "transfer",
                by=name,
                moved=moved,
                block=block_bytes,
                pull_ms=ms,
                p90_ms=used[int(0.9 * len(used))],
                least_ms=used[0],
                copy_ms=copy,
                ratio=ms / copy,
                right=right,
            )
        say("transfer", by=name, opened_ms=opened * 1e3, block=block_bytes)
        reader.close()


def copied(size: int) -> float:
    """Milliseconds of one copy on the device, launch to done."""
    source, target = (torch.empty(size, dtype=torch.uint8, device=device()) for _ in range(2))
    taken = []
    for _ in range(20):
        synchronize()
        began = time.perf_counter()
        target.copy_(source)
        synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[5:]) * 1e3


def read_on(endpoint: bytes, num_blocks: int, kv: KvLayout, gpu: str | None, pipe: Connection) -> None:
    """The other process: pulls 500 MiB again and again, as long as it is told to, and says how often. It sees only the
    GPU `gpu`; None means those of its parent.
    """
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu

    async def serve() -> None:
        count = MOVED["500 MiB"] // kv.block_bytes
        pool, into = open_memory(kv, count, device()), packed_ids(range(count))
        async with open_transports(transports(), memory=pool) as [transport]:
            offered = handoff_pb2.TransportEndpoint.FromString(endpoint)
            reader = await transport.open(offered, PoolShape(num_blocks, kv.block_bytes))
            pipe.send(b"")
            while (told := await asyncio.to_thread(pipe.recv)) is not None:
                pause, seconds = told
                began, taken = time.perf_counter(), []
                while time.perf_counter() - began < seconds:
                    source, start = packed_ids(random.sample(range(1, num_blocks), count)), time.perf_counter()
                    await reader.pull(Transfer(source, pool, into, time.monotonic() + 60))
                    taken.append(time.perf_counter() - start)
                    await asyncio.sleep(pause)
                pipe.send((len(taken), time.perf_counter() - began, statistics.median(taken) * 1e3))
            reader.close()

    asyncio.run(serve())


class OtherReader:
    """A process that pulls when it is told to."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def pulls(self, pause: float, seconds: float) -> tuple[int, float, float]:
        """The number of pulls in about so many seconds, the time they took, and the median of a pull in ms."""
        self._pipe.send((pause, seconds))
        if not self._pipe.poll(60):
            raise TimeoutError("the reader does not answer")
        found: tuple[int, float, float] = self._pipe.recv()
        return found


@asynccontextmanager
async def other_reader(pool: BlockMemory, kv: KvLayout, gpu: str | None = None) -> AsyncIterator[OtherReader]:
    context = multiprocessing.get_context("spawn")
    async with open_transports(transports(), memory=pool) as opened:
        [endpoint] = await offer_pool(opened, pool, LOOPBACK)
        here, there = context.Pipe()
        process = context.Process(target=read_on, args=(endpoint.SerializeToString(), pool.num_blocks, kv, gpu, there))
        process.start()
        try:
            if not await asyncio.to_thread(here.poll, 60):
                raise TimeoutError("the reader did not start")
            here.recv()
            yield OtherReader(here)
        finally:
            process.kill()
            process.join()


def measure_transfers(say: Callable[..., Any]) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=own, args=(there,))
    process.start()
    try:
        cases = [("cuda_ipc", size) for size in BLOCK_BYTES.values()] + [("nixl", 4 << 20), ("nixl", 1 << 20)]
        for name, block_bytes in cases:
            if name == "nixl" and not NIXL:
                say("transfer", by=name, failed="NIXL is not installed")
                continue
            here.send((name, block_bytes))
            if not here.poll(60):
                say("transfer", by=name, failed="the owner did not start")
                return
            asyncio.run(pull_from(name, block_bytes, here.recv()[0], say))
            here.send(None)
            torch.cuda.empty_cache()
    finally:
        process.kill()
        process.join()
