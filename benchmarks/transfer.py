"""The speed of each transport between two processes, as a multiple of a memcpy of the same bytes in the same run.

    python benchmarks/transfer.py [--mebibytes 64] [--rounds 15]

The owner is a separate process; blocks are read from permuted and contiguous places into permuted and contiguous
places. All methods take turns, round by round, so that other load affects all of them. Prints medians and minimums.
"""

import argparse
import asyncio
import multiprocessing
import random
import statistics
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection

import numpy as np

from baton.engine.v1 import handoff_pb2
from services.engines.memory.shared_pool import SharedPool
from services.transports.base import Exposure, PoolReader, PoolShape, Transfer
from services.transports.registry import offer_pool, open_transports

# 48 KiB are the demonstration model's blocks: 6 layers, keys and values, 2 heads, 16 tokens, 32 numbers, float32.
_BLOCK_BYTES = {"128 KiB": 128 * 1024, "48 KiB": 48 * 1024, "8 KiB": 8 * 1024}


@dataclass(frozen=True)
class Case:
    """Which blocks go where."""

    name: str
    source: Sequence[int]
    destination: Sequence[int]


def names() -> tuple[str, ...]:
    """The transports to compare: NIXL too where it is installed."""
    installed = any(find_spec(name) for name in ("nixl_cu13", "nixl_cu12", "nixl"))
    return ("shm", "nixl", "tcp") if installed else ("shm", "tcp")


class _Everything:
    """Lets every reader read."""

    def may_read(self, handoff_id: str, certificate: str, block_ids: Collection[int]) -> bool:
        return True


def own(num_blocks: int, block_bytes: int, pipe: Connection) -> None:
    """The owner's process: fills a pool, offers it, and waits."""

    async def serve() -> None:
        with SharedPool(num_blocks, block_bytes) as pool:
            for block in range(num_blocks):
                pool.block(block)[:] = block.to_bytes(8, "little") * (block_bytes // 8)
            async with open_transports(names()) as transports:
                endpoints = await offer_pool(transports, pool, Exposure("127.0.0.1", "127.0.0.1", _Everything()))
                pipe.send([endpoint.SerializeToString() for endpoint in endpoints])
                await asyncio.to_thread(pipe.recv)

    asyncio.run(serve())


def cases(num_blocks: int, count: int) -> list[Case]:
    """Twice as many blocks as are moved, so that permuted ones have no accidental neighbours everywhere."""
    chance = random.Random(1)
    contiguous = range(count)
    permuted = chance.sample(range(num_blocks), count)
    return [
        Case("contiguous", contiguous, contiguous),
        Case("permuted to contiguous", permuted, contiguous),
        Case("permuted to permuted", permuted, chance.sample(range(num_blocks), count)),
    ]


async def measure(label: str, block_bytes: int, total_bytes: int, rounds: int) -> None:
    """One block size: starts the owner, times every case, and prints a line each."""
    count = total_bytes // block_bytes
    num_blocks = 2 * count
    ours, theirs = multiprocessing.Pipe()
    owner = multiprocessing.get_context("spawn").Process(target=own, args=(num_blocks, block_bytes, theirs))
    owner.start()
    endpoints = [handoff_pb2.TransportEndpoint.FromString(text) for text in await asyncio.to_thread(ours.recv)]
    async with open_transports(names()) as transports:
        with SharedPool(num_blocks, block_bytes) as pool:
            readers = {
                transport.name: await transport.open(endpoint, PoolShape(num_blocks, block_bytes))
                for transport, endpoint in zip(transports, endpoints, strict=True)
            }
            for case in cases(num_blocks, count):
                await compare(label, case, pool, readers, rounds)
    ours.send("enough")
    owner.join()


async def compare(label: str, case: Case, pool: SharedPool, readers: dict[str, PoolReader], rounds: int) -> None:
    """Memcpy and every transport in turns. Checks each block's origin."""
    total = len(case.source) * pool.block_bytes
    plain, copy = np.ones(total, np.uint8), np.zeros(total, np.uint8)
    seconds: dict[str, list[float]] = {"memcpy": [], **{name: [] for name in readers}}
    for _ in range(rounds + 1):
        started = time.perf_counter()
        np.copyto(copy, plain)
        seconds["memcpy"].append(time.perf_counter() - started)
        for name, reader in readers.items():
            pool.block(case.destination[-1])[:8] = b"\xff" * 8
            started = time.perf_counter()
            await reader.pull(Transfer(case.source, pool, case.destination, time.monotonic() + 60))
            seconds[name].append(time.perf_counter() - started)
            check(case, pool)
    report(label, case, total, {name: times[1:] for name, times in seconds.items()})


def check(case: Case, pool: SharedPool) -> None:
    """Raises unless every block is the requested one."""
    for source, destination in zip(case.source, case.destination, strict=True):
        assert pool.block(destination)[-8:] == source.to_bytes(8, "little"), (source, destination)


def report(label: str, case: Case, total: int, seconds: dict[str, list[float]]) -> None:
    """Multiples of memcpy, by medians and by minimums."""
    base, least = statistics.median(seconds["memcpy"]), min(seconds["memcpy"])
    line = f"{total >> 20} MiB in {label:>8}, {case.name:<22}  memcpy {total / base / 1e9:5.1f} GB/s"
    for name, times in seconds.items():
        if name != "memcpy":
            line += f"  {name} x{statistics.median(times) / base:5.2f} (least x{min(times) / least:5.2f})"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    for label, block_bytes in _BLOCK_BYTES.items():
        asyncio.run(measure(label, block_bytes, arguments.mebibytes << 20, arguments.rounds))


if __name__ == "__main__":
    main()
