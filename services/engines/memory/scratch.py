"""Blocks in private memory, for bytes that are only passing through."""

from collections.abc import Sequence

from services.engines.kv import BlockWriter
from services.engines.memory.shared_pool import ViewWriter, runs


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
