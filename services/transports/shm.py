"""The transport within a host: the pool is a file in memory, which the reader maps and copies from."""

import asyncio
import mmap
import os
import re
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from threading import Event

import numpy as np
import numpy.typing as npt

from baton.engine.v1 import handoff_pb2
from runtime.aio import wait_until_done
from runtime.clock import monotonic
from services.engines.kv import BlockMemory
from services.transports.base import (
    Endpoint,
    Exposure,
    PoolShape,
    Transfer,
    TransferFailed,
    Transport,
    TransportContext,
    TransportUnavailable,
)

Bytes = npt.NDArray[np.uint8]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PATH = re.compile(r"/proc/\d+/fd/\d+")
# The bytes copied between two checks of the deadline and of a cancellation.
_STRIDE_BYTES = 4 * 1024 * 1024
# Below this size, a copy that holds the interpreter's lock costs less than releasing it.
_CHEAP_BYTES = 64 * 1024


def host_id() -> str:
    """Returns an id that is equal in two processes if and only if each can open the other's memory files; empty outside
    Linux.
    """
    if not _BOOT_ID.exists():
        return ""
    boot = _BOOT_ID.read_text(encoding="ascii").strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}:{os.getuid()}"


def _endpoint(memory: BlockMemory) -> Endpoint | None:
    """Returns the endpoint of a pool; None if it is not in host memory."""
    if memory.file_descriptor is None or not host_id():
        return None
    shm = handoff_pb2.ShmEndpoint(
        host_id=host_id(),
        path=f"/proc/{os.getpid()}/fd/{memory.file_descriptor}",
        size=memory.num_blocks * memory.block_bytes,
    )
    return Endpoint(shm=shm)


class ShmTransport(Transport):
    """Maps pools read-only. A mapped pool stays readable after its owner has ended."""

    name = "shm"
    supports_tls = True
    reads_early = True

    def __init__(self, context: TransportContext) -> None:
        del context
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="shm")

    async def __aexit__(self, *exception: object) -> None:
        self._threads.shutdown()

    async def offer(self, memory: BlockMemory, exposure: Exposure) -> Endpoint | None:
        """Offers the pool's file, which processes of the same user can open. See Transport."""
        del exposure
        return _endpoint(memory)

    async def open(self, endpoint: Endpoint, shape: PoolShape) -> "ShmPool":
        """Maps the pool. See Transport."""
        shm = endpoint.shm
        if not shm.host_id or shm.host_id != host_id():
            raise TransportUnavailable("the pool is in the memory of another host, container or user")
        if not _PATH.fullmatch(shm.path):
            raise TransportUnavailable(f"{shm.path[:80]} is not a file of another process")
        if shm.size < shape.num_bytes:
            raise TransportUnavailable(f"{shm.size} bytes are too few for {shape.num_blocks} blocks")
        mapping = asyncio.get_running_loop().run_in_executor(self._threads, _map, shm.path, shape.num_bytes)
        return ShmPool(await mapping, shape.block_bytes, self._threads)


class ShmPool:
    """A mapped pool."""

    def __init__(self, mapping: mmap.mmap, block_bytes: int, threads: ThreadPoolExecutor) -> None:
        self._bytes = memoryview(mapping)
        self._blocks: Bytes = np.frombuffer(mapping, np.uint8).reshape(-1, block_bytes)
        self._threads = threads

    async def pull(self, transfer: Transfer) -> None:
        """Copies in a thread. See PoolReader."""
        unwanted = Event()
        copying = asyncio.get_running_loop().run_in_executor(self._threads, self._copy, transfer, unwanted)
        try:
            await asyncio.shield(copying)
        finally:
            unwanted.set()
            await wait_until_done(copying)

    def close(self) -> None:
        """Drops the mapping, which is freed with its last view."""
        self._blocks = np.empty((0, 1), np.uint8)
        self._bytes = memoryview(b"")

    def _copy(self, transfer: Transfer, unwanted: Event) -> None:
        writer = transfer.memory.write(transfer.destination)
        for into, ids in _pieces(writer.views, transfer.source, self._blocks.shape[1]):
            if unwanted.is_set():
                return
            if monotonic() > transfer.deadline:
                raise TransferFailed("deadline exceeded")
            self._gather(ids, into)
        writer.commit()

    def _gather(self, ids: Sequence[int], into: memoryview) -> None:
        size = self._blocks.shape[1]
        if len(ids) == 1 or _neighbours(ids):
            start = ids[0] * size
            source = self._bytes[start : start + len(into)]
            if len(into) < _CHEAP_BYTES:
                into[:] = source
            else:
                np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))
            return
        # The ids are checked, so `clip` changes none; any other mode copies twice.
        np.take(self._blocks, ids, axis=0, out=np.frombuffer(into, np.uint8).reshape(-1, size), mode="clip")


def _map(path: str, size: int) -> mmap.mmap:
    try:
        # Without blocking: the owner may have ended, and another process with its id may have a pipe there without a
        # writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise TransportUnavailable(f"cannot open {path}: {error.strerror}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise TransportUnavailable(f"{path} is not a file in memory")
        if found.st_size < size:
            raise TransportUnavailable(f"{path} is smaller than the pool")
        return mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
    except OSError as error:
        raise TransportUnavailable(f"cannot map {path}: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _pieces(
    views: Sequence[memoryview], source: Sequence[int], block_bytes: int
) -> Iterator[tuple[memoryview, Sequence[int]]]:
    """Yields the destination in strides, each with the ids of its blocks."""
    stride = max(1, _STRIDE_BYTES // block_bytes)
    position = 0
    for view in views:
        for start in range(0, len(view), stride * block_bytes):
            into = view[start : start + stride * block_bytes]
            count = len(into) // block_bytes
            yield into, source[position : position + count]
            position += count


def _neighbours(ids: Sequence[int]) -> bool:
    return ids[-1] - ids[0] == len(ids) - 1 and all(second == first + 1 for first, second in pairwise(ids))
