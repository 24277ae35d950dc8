"""For tests of cuda_ipc: a pool that stands for GPU memory, and a pool in a real GPU's memory in another process."""

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch
from support.engines.device import seeing_gpu
from support.transports.grants import EveryBlock

from baton.engine.v1 import handoff_pb2
from services.engines.kv import KvLayout
from services.engines.memory.device_memory import DeviceExport, DeviceUnavailable
from services.engines.memory.shared_pool import SharedPool
from services.engines.pytorch.kv_cache.memory import DeviceMemory, pool_file
from services.transports.base import Exposure, PoolShape, Transfer, TransportUnavailable
from services.transports.registry import offer_pool, open_transports

BLOCKS = 64
BLOCK_BYTES = 256 * 1024


class HostAsDevice(SharedPool):
    """A pool in host memory that can be exported and attached like a GPU's, within this process.

    A gather waits for `may_copy`. It fails if `lost` gives a reason.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        super().__init__(num_blocks, block_bytes)
        self.may_copy = threading.Event()
        self.may_copy.set()
        self.copying = threading.Event()
        self.lost = ""

    def export(self) -> DeviceExport:
        if self.lost:
            raise DeviceUnavailable(self.lost)
        return DeviceExport("GPU-0", os.getpid(), id(self), b"h" * 64, 0, self.num_blocks * self.block_bytes)

    def attach(self, export: DeviceExport) -> "HostReader":
        if self.lost:
            raise DeviceUnavailable(self.lost)
        return HostReader(_POOLS[export.address], self)


class KeptHostAsDevice(HostAsDevice):
    """Such a pool, exported by its descriptor, like a GPU's that is kept."""

    def export(self) -> DeviceExport:
        return replace(super().export(), handle=self.file_descriptor)

    def attach(self, export: DeviceExport) -> "HostReader":
        assert isinstance(export.handle, int)
        same = os.path.sameopenfile(export.handle, _POOLS[export.address].file_descriptor)
        assert same
        assert export.handle != _POOLS[export.address].file_descriptor
        return super().attach(export)


class HostReader:
    """A DeviceReader between two of them."""

    def __init__(self, theirs: HostAsDevice, ours: HostAsDevice) -> None:
        self._theirs, self._ours = theirs, ours

    def begin(self, source: Sequence[int], destination: Sequence[int]) -> "HostCopy":
        self._theirs.copying.set()
        return HostCopy(self._theirs, self._ours, list(zip(source, destination, strict=True)))

    def close(self) -> None:
        pass


class HostCopy:
    """A DeviceCopy that takes place as soon as it may."""

    def __init__(self, theirs: HostAsDevice, ours: HostAsDevice, blocks: Sequence[tuple[int, int]]) -> None:
        self._theirs, self._ours, self._blocks = theirs, ours, blocks

    def is_done(self) -> bool:
        if not self._theirs.may_copy.is_set():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        assert self._theirs.may_copy.wait(20)
        if self._theirs.lost:
            raise DeviceUnavailable(self._theirs.lost)
        for block, into in self._blocks:
            self._ours.block(into)[:] = self._theirs.block(block)


_POOLS: dict[int, HostAsDevice] = {}


@contextmanager
def host_pools(kind: type[HostAsDevice] = HostAsDevice) -> Iterator[tuple[HostAsDevice, HostAsDevice]]:
    """Yields two such pools, the first with content."""
    with kind(BLOCKS, BLOCK_BYTES) as theirs, kind(BLOCKS, BLOCK_BYTES) as ours:
        theirs.block(0).obj[:] = os.urandom(BLOCKS * BLOCK_BYTES)
        _POOLS[id(theirs)] = theirs
        yield theirs, ours
        del _POOLS[id(theirs)]


def gpu_pool(index: int = 0, kept: bool = False) -> DeviceMemory:
    """An empty pool on a GPU, in memory that outlives the process if it is kept."""
    layout = KvLayout("test", "bfloat16", 1, 2, 8, 16, BLOCK_BYTES // (2 * 8 * 16 * 2), BLOCK_BYTES)
    device = torch.device("cuda", index)
    return DeviceMemory(layout, BLOCKS, device, pool_file(BLOCKS * BLOCK_BYTES, device) if kept else None)


def words(pool: DeviceMemory) -> torch.Tensor:
    """Returns the pool as numbers, `[blocks, words]`."""
    return pool.tensor.view(pool.num_blocks, -1).view(torch.int64)


def _offer(pipe: Connection, transport: str, kept: bool, environment: Mapping[str, str]) -> None:
    """The process of an owner; every word of its pool is the word's index."""
    os.environ.update(environment)

    async def serve() -> None:
        pool = gpu_pool(kept=kept)
        torch.arange(words(pool).numel(), out=words(pool).view(-1))
        torch.cuda.synchronize()
        async with open_transports((transport,), memory=pool) as transports:
            [endpoint] = await offer_pool(transports, pool, Exposure("127.0.0.1", "127.0.0.1", EveryBlock()))
            pipe.send(endpoint.SerializeToString())
            await asyncio.to_thread(pipe.recv)

    asyncio.run(serve())


def _read(pipe: Connection, endpoint: bytes, environment: Mapping[str, str]) -> None:
    """The process of a reader: it pulls all blocks, and tells if they are right, or why there are none."""
    os.environ.update(environment)

    async def pull() -> bool | str:
        pool, ids = gpu_pool(), list(range(BLOCKS))
        async with open_transports(("cuda_ipc",), memory=pool) as [transport]:
            offered = handoff_pb2.TransportEndpoint.FromString(endpoint)
            try:
                reader = await transport.open(offered, PoolShape(BLOCKS, BLOCK_BYTES))
            except TransportUnavailable as error:
                return str(error)
            await reader.pull(Transfer(ids, pool, ids, time.monotonic() + 20))
            reader.close()
        return torch.equal(words(pool).view(-1).cpu(), torch.arange(words(pool).numel()))

    pipe.send(asyncio.run(pull()))


async def read_elsewhere(endpoint: handoff_pb2.TransportEndpoint) -> bool | str:
    """Reads an offered pool in a process that sees this process's first GPU only; see `_read`."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_read, args=(there, endpoint.SerializeToString(), seeing_gpu(0)))
    process.start()
    try:
        assert await asyncio.to_thread(here.poll, 60)
        found: bool | str = here.recv()
        return found
    finally:
        process.kill()
        process.join()


@dataclass(frozen=True)
class Owner:
    """An owner in another process."""

    process: BaseProcess
    endpoint: handoff_pb2.TransportEndpoint

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@asynccontextmanager
async def gpu_owner(transport: str = "cuda_ipc", kept: bool = False) -> AsyncIterator[Owner]:
    """A pool on the GPU, in a process of its own; where there are several, on another one than this process's."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_offer, args=(there, transport, kept, seeing_gpu(1)))
    process.start()
    there.close()  # so that the end of the process is noticed
    try:
        assert await asyncio.to_thread(here.poll, 60)
        yield Owner(process, handoff_pb2.TransportEndpoint.FromString(here.recv()))
    finally:
        process.kill()
        process.join()
