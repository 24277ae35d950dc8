"""The transport of one host: the pool is a file in memory, which the reader maps and copies from."""

import asyncio
import mmap
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from threading import Event
from types import TracebackType

import numpy as np
import numpy.typing as npt
from baton.engine.v1 import handoff_pb2

from rpc.settle import settle
from services.kv import BlockMemory
from services.transports.transport import Transfer, TransferFailed, TransportUnavailable

Bytes = npt.NDArray[np.uint8]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PATH = re.compile(r"/proc/\d+/fd/\d+")
# What is copied between two looks at the clock and at whether anybody still wants it.
_STRIDE_BYTES = 4 * 1024 * 1024
# Below this, a copy that holds the interpreter's lock costs less than letting go of it.
_CHEAP_BYTES = 64 * 1024


def host_id() -> str:
    """Equal in two processes exactly if each can open the other's files in memory; empty outside Linux."""
    if not _BOOT_ID.exists():
        return ""
    boot = _BOOT_ID.read_text(encoding="ascii").strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}:{os.getuid()}"


def endpoint(memory: BlockMemory) -> handoff_pb2.TransportEndpoint | None:
    """How others map this pool; None if it is not in host memory."""
    if memory.file_descriptor is None or not host_id():
        return None
    shm = handoff_pb2.ShmEndpoint(
        host_id=host_id(),
        path=f"/proc/{os.getpid()}/fd/{memory.file_descriptor}",
        size=memory.num_blocks * memory.block_bytes,
    )
    return handoff_pb2.TransportEndpoint(shm=shm)


class ShmTransport:
    """Maps pools read-only. What is mapped stays readable when its owner is gone."""

    name = "shm"

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="shm")

    def __enter__(self) -> "ShmTransport":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown()

    async def open(self, endpoint: handoff_pb2.TransportEndpoint, num_blocks: int, block_bytes: int) -> "ShmPool":
        """Maps the pool. See Transport."""
        shm = endpoint.shm
        if not shm.host_id or shm.host_id != host_id():
            raise TransportUnavailable("the pool is in the memory of another host, container or user")
        if not _PATH.fullmatch(shm.path):
            raise TransportUnavailable(f"{shm.path} is no file of another process")
        if shm.size < num_blocks * block_bytes:
            raise TransportUnavailable(f"{shm.size} bytes are too few for {num_blocks} blocks")
        return ShmPool(_map(shm.path, num_blocks * block_bytes), block_bytes, self._threads)


class ShmPool:
    """One mapped pool."""

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
            await settle(copying)

    def close(self) -> None:
        """Drops the mapping, with the last view of it."""
        self._blocks = np.empty((0, 1), np.uint8)
        self._bytes = memoryview(b"")

    def _copy(self, transfer: Transfer, unwanted: Event) -> None:
        writer = transfer.memory.write(transfer.destination)
        for into, ids in _pieces(writer.views, transfer.source, self._blocks.shape[1]):
            if unwanted.is_set():
                return
            if time.monotonic() > transfer.deadline:
                raise TransferFailed("copying took too long")
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
        # Never out of bounds: the ids are checked. Any other mode copies twice.
        np.take(self._blocks, ids, axis=0, out=np.frombuffer(into, np.uint8).reshape(-1, size), mode="clip")


def _map(path: str, size: int) -> mmap.mmap:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise TransportUnavailable(f"cannot open {path}: {error.strerror}") from error
    try:
        if os.fstat(descriptor).st_size < size:
            raise TransportUnavailable(f"{path} is smaller than the pool")
        return mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
    except OSError as error:
        raise TransportUnavailable(f"cannot map {path}: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _pieces(
    views: Sequence[memoryview], source: Sequence[int], block_bytes: int
) -> Iterator[tuple[memoryview, Sequence[int]]]:
    """The destination in strides, each with the ids of the blocks that belong there."""
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
