"""The pool that a TensorRT-LLM engine does not have: it moves KV itself, and lets nobody read it."""

from collections.abc import Sequence
from dataclasses import dataclass

from rpc.errors import Unsupported
from services.kv import BlockWriter


@dataclass(frozen=True, slots=True)
class NoMemory:
    """A BlockMemory of no blocks."""

    block_bytes: int
    num_blocks: int = 0
    file_descriptor: int | None = None

    def read(self, block_ids: Sequence[int]) -> Sequence[memoryview]:
        """Refuses."""
        raise Unsupported(f"the trtllm engine moves KV itself; there are no blocks {list(block_ids)} to read")

    def write(self, block_ids: Sequence[int]) -> BlockWriter:
        """Refuses."""
        raise Unsupported(f"the trtllm engine moves KV itself; there are no blocks {list(block_ids)} to write")
