"""Memory of blocks on a host: in a memfd, which other processes can map, or private, for bytes that pass through."""

import mmap
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from services.engines.kv import BlockWriter


class SharedPool:
    """`num_blocks` blocks of `block_bytes` bytes. A context manager: leaving closes the file.

    A process that has mapped the file keeps its pages, even after this process has ended.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._file = os.memfd_create("baton-kv", os.MFD_CLOEXEC)
        os.ftruncate(self._file, num_blocks * block_bytes)
        self._mapping = mmap.mmap(self._file, num_blocks * block_bytes)
        self._bytes = memoryview(self._mapping)

    def __enter__(self) -> "SharedPool":
        return self

    def __exit__(self, *exception: object) -> None:
        # The mapping is freed with its last view, which a transfer may still hold.
        os.close(self._file)

    @property
    def file_descriptor(self) -> int:
        return self._file

    def clear(self) -> None:
        """Zeroes all blocks, and frees their memory."""
        self._mapping.madvise(mmap.MADV_REMOVE)

    def block(self, block_id: int) -> memoryview:
        """Returns one block's bytes, writable."""
        return self._bytes[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]

    def read(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Returns the blocks' bytes, neighbours merged."""
        return [view.toreadonly() for view in block_views(self._bytes, self.block_bytes, block_ids)]

    def write(self, block_ids: Sequence[int]) -> BlockWriter:
        """Opens the blocks for writing; the caller has reserved them."""
        return ViewWriter(block_views(self._bytes, self.block_bytes, block_ids))


def block_views(memory: memoryview, size: int, block_ids: Sequence[int]) -> list[memoryview]:
    """Returns the bytes of blocks of a size in a memory, neighbours merged."""
    return [memory[first * size : (first + count) * size] for first, count in runs(block_ids)]


def runs(block_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Returns neighbouring ids as (first, count), in order."""
    found: list[tuple[int, int]] = []
    for block in block_ids:
        if found and sum(found[-1]) == block:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((block, 1))
    return found


def gaps(block_ids: Collection[int], num_blocks: int) -> list[tuple[int, int]]:
    """Returns all other ids below `num_blocks` as (first, count), in order."""
    found, start = [], 0
    for block in [*sorted(block_ids), num_blocks]:
        if block > start:
            found.append((start, block - start))
        start = block + 1
    return found


@dataclass(frozen=True, slots=True)
class ViewWriter:
    """A BlockWriter that writes directly into memory."""

    views: Sequence[memoryview]

    def commit(self) -> None:
        """No-op: the bytes are in place."""


class Scratch:
    """A BlockMemory that other processes cannot read."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.file_descriptor = None
        self._bytes = memoryview(bytearray(num_blocks * block_bytes))

    def read(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Returns the blocks' bytes, neighbours merged."""
        return [view.toreadonly() for view in block_views(self._bytes, self.block_bytes, block_ids)]

    def write(self, block_ids: Sequence[int]) -> BlockWriter:
        """Opens the blocks for writing."""
        return ViewWriter(block_views(self._bytes, self.block_bytes, block_ids))

    def take(self, num_bytes: int) -> bytes:
        """Returns a copy of the first bytes."""
        return bytes(self._bytes[:num_bytes])


class OwnedBlocks:
    """A HeldBlocks of a pool. `release` gives them back."""

    def __init__(self, block_ids: tuple[int, ...], num_tokens: int, release: Callable[[tuple[int, ...]], int]) -> None:
        self.block_ids = self._owned = block_ids
        self.num_tokens = num_tokens
        self._release = release

    async def release(self) -> int:
        """Gives the blocks back; returns how many, 0 if they were given back already."""
        blocks, self._owned = self._owned, ()
        return self._release(blocks) if blocks else 0
