"""A reader on GPU 1 of an owner on GPU 0 that is killed or stopped amid a pull, or frees its pool.

Every word of a pool says where it is, so a wrong one is noticed. After each fault the reader computes, and pulls from
a new owner: its CUDA context must be whole.
"""

import asyncio
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from baton.engine.v1 import handoff_pb2
from benchmarks.gpu_transfer import LOOPBACK, MOVED, POOL_BYTES, TINY, device, memory, synchronize, transports
from benchmarks.two_gpus.report import see, table
from benchmarks.two_gpus.transfer import received
from services.engines.kv import BlockMemory
from services.transports.base import PoolReader, PoolShape, Transfer, TransferFailed, TransportUnavailable
from services.transports.registry import offer_pool, open_transports

BLOCK = 128 << 10
COUNT = POOL_BYTES // BLOCK
WORDS = BLOCK // 8
PULLS = 6 if TINY else 40
FAULTS = (
    "killed amid a gather",
    "stopped amid a gather",
    "asked by requests that are cancelled amid their gathers",
    "frees its pool and reuses the memory",
)


def serve_pool(gpu: int, pipe: Connection) -> None:
    """An owner. Told "free", it frees its pool and fills as much memory with other numbers."""
    see(gpu)

    async def serve() -> None:
        pool = memory(BLOCK)
        words = pool.tensor.view(-1).view(torch.int64)
        torch.arange(len(words), out=words)
        synchronize()
        async with open_transports(transports(), memory=pool) as opened:
            endpoints = await offer_pool(opened, pool, LOOPBACK)
            pipe.send([endpoint.SerializeToString() for endpoint in endpoints])
            await asyncio.to_thread(pipe.recv)
            if TINY:
                words.fill_(-1)
            else:
                del words
                pool.tensor, pool._bytes = torch.empty(0), torch.empty(0)  # type: ignore[union-attr]
                torch.cuda.empty_cache()
                other = torch.full((POOL_BYTES // 8,), -1, dtype=torch.int64, device=device())
                synchronize()
                assert other[0] == -1
            pipe.send("freed")
            await asyncio.to_thread(pipe.recv)

    asyncio.run(serve())


class Owner:
    """An owner's process, and its pool as this process has opened it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=serve_pool, args=(0, theirs))
        self.process.start()
        theirs.close()
        [sent] = received(self.pipe)
        self.endpoint = handoff_pb2.TransportEndpoint.FromString(sent)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


class Reader:
    """Pulls 16 or 500 MiB into its own pool, and counts wrong words."""

    def __init__(self, pool: BlockMemory, tensor: torch.Tensor) -> None:
        self._pool = pool
        self._words = tensor.view(COUNT, -1).view(torch.int64)

    async def pull(self, reader: PoolReader, moved: str = "500 MiB") -> str:
        """Returns "right", "wrong: N words" or "failed: REASON" of one pull."""
        count = MOVED[moved] // BLOCK
        source, target = random.sample(range(COUNT), count), random.sample(range(COUNT), count)
        try:
            await reader.pull(Transfer(source, self._pool, target, time.monotonic() + 20))
        except TransferFailed as error:
            return f"failed: {str(error)[:80]}"
        return await asyncio.to_thread(self._compare, source, target)

    async def is_still(self) -> bool:
        """True if the pool stays as it is for some milliseconds, longer than a pull lasts."""
        synchronize()
        before = self._words.clone()
        await asyncio.sleep(0.01)
        synchronize()
        return bool(torch.equal(before, self._words))

    def _compare(self, source: list[int], target: list[int]) -> str:
        where = self._words.device
        first = torch.tensor(source, device=where).unsqueeze(1) * WORDS
        wrong = 0
        for start in range(0, len(source), 512):
            part = slice(start, start + 512)
            expected = first[part] + torch.arange(WORDS, device=where)
            wrong += int((self._words[torch.tensor(target[part], device=where)] != expected).sum())
        return f"wrong: {wrong} words" if wrong else "right"


async def amid_pulls(reader: Reader, opened: PoolReader, fault: Callable[[], object]) -> dict[str, int]:
    """Pulls again and again, with the fault at a random moment of the fourth; counts the outcomes."""
    outcomes: dict[str, int] = {}
    for index in range(PULLS):
        pulling = asyncio.ensure_future(reader.pull(opened))
        if index == 3:
            await asyncio.sleep(random.random() * 0.002)
            fault()
        found = await pulling
        outcomes[found] = outcomes.get(found, 0) + 1
    return outcomes


async def context_works(reader: Reader, opened: PoolReader) -> str:
    """Computes a matrix product, and pulls from another owner."""
    a = torch.ones(512, 512, device=device())
    product = (a @ a)[0, 0].item()
    return "yes" if product == 512 and await reader.pull(opened) == "right" else "NO"


async def main() -> None:
    see(1)
    pool = memory(BLOCK)
    reader = Reader(pool, pool.tensor)
    rows: list[tuple[str, str, str]] = []
    healthy = await asyncio.to_thread(Owner)
    async with open_transports(transports(), memory=pool) as [transport]:
        shape = PoolShape(COUNT, BLOCK)
        good = await transport.open(healthy.endpoint, shape)
        for name in FAULTS:
            owner = await asyncio.to_thread(Owner)
            opened = await transport.open(owner.endpoint, shape)
            if name.startswith("killed"):
                found = await amid_pulls(reader, opened, lambda owner=owner: owner.signal(signal.SIGKILL))  # type: ignore[misc]
            elif name.startswith("stopped"):
                found = await amid_pulls(reader, opened, lambda owner=owner: owner.signal(signal.SIGSTOP))  # type: ignore[misc]
            elif name.startswith("asked by"):
                found = await amid_cancelled_pulls(reader, opened)
            else:
                found = await after_free(reader, opened, owner)
            rows.append((name, in_words(found), await context_works(reader, good)))
            opened.close()
            owner.end()
            if name.startswith("killed"):
                rows.append(
                    (
                        "opened after its owner's end",
                        await reopened(transport, owner, shape),
                        await context_works(reader, good),
                    )
                )
        good.close()
    healthy.end()
    table(
        (
            "the owner on GPU 0 is or",
            f"pulls of {MOVED['500 MiB'] >> 20} MiB by GPU 1",
            "afterwards it computes and pulls",
        ),
        rows,
    )
    print(
        "A pull of freed memory that returns other words is refused by its confirmation, an RPC to the owner's lease."
    )


async def amid_cancelled_pulls(reader: Reader, opened: PoolReader) -> dict[str, int]:
    """Cancels every second pull at a random moment. When it has ended nothing may be written any more: the blocks that
    it wrote to are given to the next pull at once.
    """
    outcomes: dict[str, int] = {}
    for index in range(PULLS):
        pulling = asyncio.ensure_future(reader.pull(opened))
        if index % 2:
            await asyncio.sleep(random.random() * 0.002)
            pulling.cancel()
        [found] = await asyncio.gather(pulling, return_exceptions=True)
        outcome = "cancelled" if isinstance(found, asyncio.CancelledError) else str(found)
        if outcome == "cancelled":
            outcome += " and still afterwards" if await reader.is_still() else ", BUT STILL WRITTEN TO"
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return outcomes


async def after_free(reader: Reader, opened: PoolReader, owner: Owner) -> dict[str, int]:
    outcomes = {await reader.pull(opened) + " before": 1}
    owner.pipe.send("free")
    await asyncio.to_thread(received, owner.pipe)
    for _ in range(3):
        found = await reader.pull(opened)
        outcomes[found + " after"] = outcomes.get(found + " after", 0) + 1
    return outcomes


async def reopened(transport: object, owner: Owner, shape: PoolShape) -> str:
    try:
        opened = await transport.open(owner.endpoint, shape)  # type: ignore[attr-defined]
    except TransportUnavailable as error:
        return f"refused: {str(error)[:80]}"
    opened.close()
    return "was opened"


def in_words(outcomes: dict[str, int]) -> str:
    return "; ".join(f"{count} {outcome}" for outcome, count in outcomes.items())


if __name__ == "__main__":
    asyncio.run(main())
