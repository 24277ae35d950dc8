"""A block pool's memory in a memfd, which other processes of the host can map.

Blocks in private memory, for bytes that are only passing through.
"""

import mmap
import os
from collections.abc import Sequence
from types import TracebackType

from services.engines.kv import BlockWriter


class SharedPool:
    """`num_blocks` blocks of `block_bytes` bytes. A context manager: leaving closes the file.

    A process that has mapped the file keeps its pages, even after this process has ended.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._num_blocks = num_blocks
        self._block_bytes = block_bytes
        self._file = os.memfd_create("baton-kv", os.MFD_CLOEXEC)
        os.ftruncate(self._file, num_blocks * block_bytes)
        self._bytes = memoryview(mmap.mmap(self._file, num_blocks * block_bytes))

    def __enter__(self) -> "SharedPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The mapping is freed with its last view, which a transfer may still hold.
        os.close(self._file)

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    @property
    def file_descriptor(self) -> int:
        return self._file

    def block(self, block_id: int) -> memoryview:
        """Returns one block's bytes, writable."""
        return self._bytes[block_id * self._block_bytes : (block_id + 1) * self._block_bytes]

    def read(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Returns the blocks' bytes, neighbours merged."""
        return [view.toreadonly() for view in self._views(block_ids)]

    def write(self, block_ids: Sequence[int]) -> BlockWriter:
        """Opens the blocks for writing; the caller has reserved them."""
        return ViewWriter(self._views(block_ids))

    def _views(self, block_ids: Sequence[int]) -> list[memoryview]:
        size = self._block_bytes
        return [self._bytes[first * size : (first + count) * size] for first, count in runs(block_ids)]


def runs(block_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Yields neighbouring ids as (first, count), in order."""
    found: list[tuple[int, int]] = []
    first = count = 0
    for block_id in block_ids:
        if count and block_id == first + count:
            count += 1
            continue
        if count:
            found.append((first, count))
        first, count = block_id, 1
    if count:
        found.append((first, count))
    return found


class ViewWriter:
    """A BlockWriter that writes directly into memory."""

    def __init__(self, views: list[memoryview]) -> None:
        self._views = views

    @property
    def views(self) -> list[memoryview]:
        return self._views

    def commit(self) -> None:
        """No-op: the bytes are in place."""


class Scratch:
    """A BlockMemory that other processes cannot read."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._num_blocks = num_blocks
        self._block_bytes = block_bytes
        self._bytes = bytearray(num_blocks * block_bytes)

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    @property
    def file_descriptor(self) -> None:
        return None

    def read(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Returns the blocks' bytes, neighbours merged."""
        return [view.toreadonly() for view in self._views(block_ids)]

    def write(self, block_ids: Sequence[int]) -> BlockWriter:
        """Opens the blocks for writing."""
        return ViewWriter(self._views(block_ids))

    def take(self, num_bytes: int) -> bytes:
        """Returns a copy of the first bytes."""
        return bytes(memoryview(self._bytes)[:num_bytes])

    def _views(self, block_ids: Sequence[int]) -> list[memoryview]:
        size = self._block_bytes
        whole = memoryview(self._bytes)
        return [whole[first * size : (first + count) * size] for first, count in runs(block_ids)]
