"""The pool's memory: one tensor of blocks that other processes can map, and the reads and writes of transfers."""

import mmap
import os
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache

import structlog
import torch

from services.engines.kv import BlockMemory, BlockWriter, KvLayout
from services.engines.memory.cuda_driver import synchronize
from services.engines.memory.device_file import device_file, map_device_file
from services.engines.memory.device_memory import (
    DeviceArea,
    DeviceExport,
    DeviceReader,
    DeviceStaging,
    DeviceUnavailable,
)
from services.engines.memory.shared_pool import ViewWriter, block_views, gaps, runs
from services.engines.pytorch.kv_cache.cuda_ipc import attach_pool, export_pool
from services.engines.pytorch.kv_cache.digester import Digester, Digests
from services.engines.seals import host_digests

log = structlog.get_logger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def open_memory(
    layout: KvLayout, num_blocks: int, device: torch.device, kept: int | None = None
) -> "HostMemory | DeviceMemory":
    """Allocates zeroed memory for `num_blocks` blocks: a mapped file in host memory, or a tensor on the device.

    `kept` is the descriptor of a file of `pool_file` that is there already, which the memory then owns.

    Raises DeviceUnavailable if there is no such device.
    """
    if device.type == "cpu":
        return HostMemory(layout, num_blocks, kept)
    return DeviceMemory(layout, num_blocks, device, kept)


def pool_file(size: int, device: torch.device) -> int:
    """Returns the descriptor of new zeroed memory, which outlives the process with it. Raises DeviceUnavailable."""
    return anonymous_file(size) if device.type == "cpu" else device_file(size, device)


def block_shape(layout: KvLayout) -> tuple[int, ...]:
    """Returns the shape of a block, `[layers, kv_factor, kv_heads, block_tokens, head_dim]`."""
    return (layout.num_layers, layout.kv_factor, layout.kv_heads, layout.block_tokens, layout.head_dim)


class HostMemory(BlockMemory):
    """A pool in a file without a name (memfd). Pages are allocated when they are first written."""

    digests_beside_steps = False

    def __init__(self, layout: KvLayout, num_blocks: int, kept: int | None = None) -> None:
        self._num_blocks = num_blocks
        self._block_bytes = layout.block_bytes
        size = num_blocks * layout.block_bytes
        self._descriptor = anonymous_file(size) if kept is None else kept
        self._mapping = mmap.mmap(self._descriptor, size)
        _prefer_huge_pages(self._mapping)
        flat = torch.frombuffer(self._mapping, dtype=DTYPES[layout.dtype])
        self.tensor = flat.view(num_blocks, *block_shape(layout))

    @property
    def num_blocks(self) -> int:
        """The number of blocks, including the one for padding."""
        return self._num_blocks

    @property
    def block_bytes(self) -> int:
        """The bytes of a block."""
        return self._block_bytes

    @property
    def file_descriptor(self) -> int | None:
        """The pool's file."""
        return self._descriptor

    def read(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Returns views of the pool itself."""
        return self._views(block_ids)

    def write(self, block_ids: Sequence[int]) -> BlockWriter:
        """Returns views of the pool itself."""
        return ViewWriter(self._views(block_ids))

    def digest(self, block_ids: Sequence[int]) -> list[int]:
        """The digests of blocks."""
        return host_digests(self, block_ids)

    def begin_digest(self, block_ids: Sequence[int]) -> Digests:
        """The digests of blocks, at once."""
        return Digests(torch.tensor(self.digest(block_ids), dtype=torch.uint64))

    def clear_all_but(self, blocks: Collection[int]) -> None:
        """Zeroes all other blocks, and frees their memory."""
        for block, count in gaps(blocks, self._num_blocks):
            start, end = block * self._block_bytes, (block + count) * self._block_bytes
            # Whole pages are freed; the rest of a page is another block's.
            first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last:
                self._mapping.madvise(mmap.MADV_REMOVE, first, last - first)
            for piece in (slice(start, min(first, end)), slice(max(last, start), end)):
                self._mapping[piece] = bytes(piece.stop - piece.start)

    def close(self) -> None:
        """Closes the file, once. The mapping is freed with its last view."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _views(self, block_ids: Sequence[int]) -> list[memoryview]:
        return block_views(memoryview(self._mapping), self._block_bytes, block_ids)


@dataclass(frozen=True, slots=True)
class DeviceWriter:
    """Collects bytes in pinned host memory and copies them to the device at the end."""

    memory: "DeviceMemory"
    block_ids: Sequence[int]
    staging: torch.Tensor
    views: Sequence[memoryview]

    def commit(self) -> None:
        """Copies the bytes, and waits for the copy."""
        self.memory.store(self.block_ids, self.staging)


class DeviceMemory(BlockMemory):
    """A pool on a device. Blocks are read and written through pinned host memory, on a separate stream."""

    digests_beside_steps = True

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device, kept: int | None = None) -> None:
        if (device.index or 0) >= torch.cuda.device_count():
            raise DeviceUnavailable(f"{device} does not exist: this process sees {torch.cuda.device_count()} GPUs")
        self._block_bytes = layout.block_bytes
        self._descriptor = None if kept is None else os.dup(kept)
        shape, dtype = (num_blocks, *block_shape(layout)), DTYPES[layout.dtype]
        if kept is None:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        else:
            self.tensor = map_device_file(kept, num_blocks * layout.block_bytes, device).view(dtype).view(shape)
        self._bytes = self.tensor.view(num_blocks, -1).view(torch.uint8)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._digester = Digester(layout.block_bytes, device)

    @property
    def num_blocks(self) -> int:
        """The number of blocks, including the one for padding."""
        return self.tensor.shape[0]

    @property
    def block_bytes(self) -> int:
        """The bytes of a block."""
        return self._block_bytes

    @property
    def file_descriptor(self) -> int | None:
        """None: the pool is not in host memory."""
        return None

    def read(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Returns views of a copy in host memory."""
        staging = self._staging(len(block_ids))
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            staging.copy_(self._bytes.index_select(0, self._index(block_ids)), non_blocking=True)
        self._stream.synchronize()
        return self._views(staging, block_ids)

    def write(self, block_ids: Sequence[int]) -> BlockWriter:
        """Returns views of host memory, which `commit` copies to the device."""
        staging = self._staging(len(block_ids))
        return DeviceWriter(self, tuple(block_ids), staging, self._views(staging, block_ids))

    def store(self, block_ids: Sequence[int], staging: torch.Tensor) -> None:
        """Copies staged blocks into the pool, and waits for the copy."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._bytes.index_copy_(0, self._index(block_ids), staging.to(self._bytes.device, non_blocking=True))
        self._stream.synchronize()

    def digest(self, block_ids: Sequence[int]) -> list[int]:
        """The digests of blocks, computed on the device."""
        if not block_ids:
            return []
        return [each % 2**64 for each in self.begin_digest(block_ids).read()]

    def begin_digest(self, block_ids: Sequence[int]) -> Digests:
        """Starts to compute the digests of blocks on the device, and does not wait. Their steps have ended."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            return self._digester.begin(self._bytes.view(torch.int32), block_ids)

    def clear_all_but(self, blocks: Collection[int]) -> None:
        """Zeroes all other blocks."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for first, count in gaps(blocks, self.num_blocks):
                self._bytes[first : first + count].zero_()
        self._stream.synchronize()

    def export(self) -> DeviceExport:
        return export_pool(self.tensor, self._descriptor)

    def attach(self, export: DeviceExport) -> DeviceReader:
        return attach_pool(self.tensor, export)

    def area(self) -> DeviceArea:
        return area_of(self.tensor)

    def stage(self, num_blocks: int) -> DeviceStaging:
        return _Staging(self, num_blocks)

    def place(self, block_ids: Sequence[int], rows: torch.Tensor) -> None:
        """Copies rows `[blocks, bytes]` on the device into the pool, and waits for the copy."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._bytes.index_copy_(0, self._index(block_ids), rows)
        self._stream.synchronize()

    def close(self) -> None:
        """Closes the descriptor of kept memory, once. The memory is freed with the tensor."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _index(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self._bytes.device)

    def _staging(self, count: int) -> torch.Tensor:
        return staging_memory(count, self._block_bytes)

    def _views(self, staging: torch.Tensor, block_ids: Sequence[int]) -> list[memoryview]:
        whole = staging.view(-1).numpy().data
        views, start = [], 0
        for _, count in runs(block_ids):
            views.append(whole[start : start + count * self._block_bytes])
            start += count * self._block_bytes
        return views


def staging_memory(count: int, size: int) -> torch.Tensor:
    """Returns `[count, size]` bytes of pinned host memory, or, with one warning in a process, of pageable memory if
    none can be pinned: the device then copies more slowly.
    """
    try:
        return torch.empty((count, size), dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:  # PyTorch raises it for almost every failure of a device
        _warn_of_pageable_memory(str(error).partition("\n")[0])
        return torch.empty((count, size), dtype=torch.uint8)


@cache
def _warn_of_pageable_memory(reason: str) -> None:
    log.warning("host memory cannot be pinned; transfers are slower", reason=reason)


class _Staging:
    """A DeviceStaging."""

    def __init__(self, pool: DeviceMemory, num_blocks: int) -> None:
        self._pool = pool
        torch.cuda.set_device(pool.tensor.device)
        self._rows = torch.empty((num_blocks, pool.block_bytes), dtype=torch.uint8, device=pool.tensor.device)
        self.area = area_of(self._rows)

    def make_current(self) -> None:
        torch.cuda.set_device(self._rows.device)

    def store(self, destination: Sequence[int]) -> None:
        self._pool.place(destination, self._rows[: len(destination)])


def area_of(tensor: torch.Tensor) -> DeviceArea:
    """Returns where a tensor is, and makes its device current, with its context, in the calling thread."""
    torch.cuda.set_device(tensor.device)
    synchronize(tensor.device)
    return DeviceArea(tensor.data_ptr(), tensor.numel() * tensor.itemsize, tensor.device.index or 0)


def anonymous_file(size: int) -> int:
    """Returns the descriptor of a file of zeros without a name; outside Linux that of a deleted temporary file."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("baton-kv")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def _prefer_huge_pages(mapping: mmap.mmap) -> None:
    """Asks for huge pages, which cause fewer page faults and TLB misses, where the kernel allows it for
    shared memory.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return
