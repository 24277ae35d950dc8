"""The pool of large embeddings that wait for their readers: fixed-size blocks, which other processes can map."""

import heapq
from contextlib import ExitStack
from types import TracebackType

from baton.errors import Overloaded
from services.engines.kv import BlockMemory, KvLayout
from services.engines.memory.shared_pool import SharedPool
from services.engines.prompt import Embedding

_RETRY_SECONDS = 1.0


class HeldEmbedding:
    """A HeldBlocks: an embedding in the pool, until it is released."""

    def __init__(self, pool: "EmbeddingPool", block_ids: tuple[int, ...], num_tokens: int) -> None:
        self._pool = pool
        self._block_ids = block_ids
        self._owned = block_ids
        self._num_tokens = num_tokens

    @property
    def block_ids(self) -> tuple[int, ...]:
        return self._block_ids

    @property
    def num_tokens(self) -> int:
        """The number of rows of the embedding."""
        return self._num_tokens

    async def release(self) -> int:
        """Frees the blocks; returns how many, 0 if they were free already."""
        blocks, self._owned = self._owned, ()
        return self._pool.free(blocks)


class EmbeddingPool:
    """Blocks of one layout, as many as fit in `pool_bytes`. A context manager: leaving closes the memory."""

    def __init__(self, layout: KvLayout, pool_bytes: int) -> None:
        self.layout = layout
        self._num_blocks = max(1, pool_bytes // layout.block_bytes)
        # Lowest ids first, so that the blocks of an embedding are neighbours and are read in one piece.
        self._free = list(range(self._num_blocks))
        self._open = ExitStack()

    def __enter__(self) -> "EmbeddingPool":
        self._memory = self._open.enter_context(SharedPool(self._num_blocks, self.layout.block_bytes))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    @property
    def memory(self) -> BlockMemory:
        return self._memory

    @property
    def total(self) -> int:
        return self._num_blocks

    @property
    def used(self) -> int:
        return self._num_blocks - len(self._free)

    def store(self, embedding: Embedding) -> HeldEmbedding:
        """Copies an embedding into blocks. Raises Overloaded if there are not enough."""
        size = self.layout.block_bytes
        count = -(-len(embedding.data) // size)
        if count > len(self._free):
            text = f"the embedding needs {count} blocks and {len(self._free)} of {self._num_blocks} are free"
            raise Overloaded(text, retry_after_seconds=_RETRY_SECONDS)
        blocks = tuple(heapq.heappop(self._free) for _ in range(count))
        for index, block in enumerate(blocks):
            part = embedding.data[index * size : (index + 1) * size]
            self._memory.block(block)[: len(part)] = part
        return HeldEmbedding(self, blocks, embedding.shape[0])

    def free(self, blocks: tuple[int, ...]) -> int:
        """Frees blocks; returns how many."""
        for block in blocks:
            heapq.heappush(self._free, block)
        return len(blocks)
