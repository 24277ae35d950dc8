"""The pool's memory: one tensor of blocks that other processes can map, and the bytes of those that are moved."""

import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.kv import BlockMemory, BlockWriter, KvLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def open_memory(layout: KvLayout, num_blocks: int, device: torch.device) -> "HostMemory | DeviceMemory":
    """Zeroed memory for `num_blocks` blocks: a mapped file in host memory, or a tensor of the device."""
    return HostMemory(layout, num_blocks) if device.type == "cpu" else DeviceMemory(layout, num_blocks, device)


def block_shape(layout: KvLayout) -> tuple[int, ...]:
    """A block's shape, `[layers, kv_factor, kv_heads, block_tokens, head_dim]`."""
    return (layout.num_layers, layout.kv_factor, layout.kv_heads, layout.block_tokens, layout.head_dim)


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring blocks."""

    first: int
    count: int


def runs(block_ids: Sequence[int]) -> list[Run]:
    """Merges ids that follow one another."""
    found: list[Run] = []
    for block in block_ids:
        if found and found[-1].first + found[-1].count == block:
            found[-1] = Run(found[-1].first, found[-1].count + 1)
        else:
            found.append(Run(block, 1))
    return found


@dataclass(frozen=True, slots=True)
class HostWriter:
    """Writes straight into the pool."""

    views: Sequence[memoryview]

    def commit(self) -> None:
        """Nothing to do: the bytes are where they belong."""


class HostMemory(BlockMemory):
    """A pool in a file without a name (memfd). The pages come into being when they are first written."""

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._block_bytes = layout.block_bytes
        size = num_blocks * layout.block_bytes
        self._descriptor = _anonymous_file(size)
        self._mapping = mmap.mmap(self._descriptor, size)
        _prefer_huge_pages(self._mapping)
        flat = torch.frombuffer(self._mapping, dtype=DTYPES[layout.dtype])
        self.tensor = flat.view(num_blocks, *block_shape(layout))

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the one for padding included."""
        return self._num_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self._block_bytes

    @property
    def file_descriptor(self) -> int | None:
        """The file that is the pool."""
        return self._descriptor

    def read(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Views of the pool itself."""
        return self._views(block_ids)

    def write(self, block_ids: Sequence[int]) -> BlockWriter:
        """Views of the pool itself."""
        return HostWriter(self._views(block_ids))

    def close(self) -> None:
        """Closes the file. The mapping goes when the last view of it does."""
        os.close(self._descriptor)

    def _views(self, block_ids: Sequence[int]) -> list[memoryview]:
        pool = memoryview(self._mapping)
        size = self._block_bytes
        return [pool[run.first * size : (run.first + run.count) * size] for run in runs(block_ids)]


@dataclass(frozen=True, slots=True)
class DeviceWriter:
    """Collects bytes in pinned host memory and copies them to the device at the end."""

    memory: "DeviceMemory"
    block_ids: Sequence[int]
    staging: torch.Tensor
    views: Sequence[memoryview]

    def commit(self) -> None:
        """Copies, and waits for it."""
        self.memory.store(self.block_ids, self.staging)


class DeviceMemory(BlockMemory):
    """A pool on a device. Blocks are read and written through pinned host memory, on a stream of their own."""

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        self._block_bytes = layout.block_bytes
        self.tensor = torch.zeros((num_blocks, *block_shape(layout)), dtype=DTYPES[layout.dtype], device=device)
        self._bytes = self.tensor.view(num_blocks, -1).view(torch.uint8)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the one for padding included."""
        return self.tensor.shape[0]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self._block_bytes

    @property
    def file_descriptor(self) -> int | None:
        """None: the pool is not in host memory."""
        return None

    def read(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Views of a copy in host memory."""
        staging = self._staging(len(block_ids))
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            staging.copy_(self._bytes.index_select(0, self._index(block_ids)), non_blocking=True)
        self._stream.synchronize()
        return self._views(staging, block_ids)

    def write(self, block_ids: Sequence[int]) -> BlockWriter:
        """Views of host memory, copied to the device by `commit`."""
        staging = self._staging(len(block_ids))
        return DeviceWriter(self, tuple(block_ids), staging, self._views(staging, block_ids))

    def store(self, block_ids: Sequence[int], staging: torch.Tensor) -> None:
        """Copies staged blocks into the pool and waits until they are there."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._bytes.index_copy_(0, self._index(block_ids), staging.to(self._bytes.device, non_blocking=True))
        self._stream.synchronize()

    def close(self) -> None:
        """Nothing to close: the memory goes with the tensor."""

    def _index(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self._bytes.device)

    def _staging(self, count: int) -> torch.Tensor:
        return torch.empty((count, self._block_bytes), dtype=torch.uint8, pin_memory=True)

    def _views(self, staging: torch.Tensor, block_ids: Sequence[int]) -> list[memoryview]:
        whole = staging.view(-1).numpy().data
        views, start = [], 0
        for run in runs(block_ids):
            views.append(whole[start : start + run.count * self._block_bytes])
            start += run.count * self._block_bytes
        return views


def _anonymous_file(size: int) -> int:
    """A file of zeros without a name; outside Linux a deleted temporary one."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("baton-kv")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def _prefer_huge_pages(mapping: mmap.mmap) -> None:
    """Fewer page faults and TLB misses, where the kernel allows it for shared memory."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return
