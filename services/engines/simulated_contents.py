"""What the simulated pool's blocks contain: bytes that follow from the tokens, so that wrong ones are noticed."""

from rpc.errors import EngineFailed
from services.engines.shared_pool import SharedPool
from services.engines.simulated_blocks import Blocks
from services.engines.simulated_sequence import Sequence


class Contents:
    """Writes and checks blocks, and makes the full ones findable."""

    def __init__(self, memory: SharedPool, blocks: Blocks, block_tokens: int) -> None:
        self._memory = memory
        self._blocks = blocks
        self._block_tokens = block_tokens

    def write(self, sequence: Sequence, before: int) -> None:
        """Fills the blocks that have got new tokens since `before` were computed."""
        size = self._block_tokens
        for index in range(before // size, -(-sequence.computed // size)):
            full = (index + 1) * size <= sequence.computed
            # A block that others may read is written whole; that of a running decode when it is full.
            if not full and not sequence.held:
                continue
            content_hash = sequence.content_hash(index, sequence.computed)
            self._memory.block(sequence.blocks[index])[:] = self._bytes(content_hash)
            if full:
                sequence.learn(index, content_hash)
                self._blocks.register(sequence.blocks[index], content_hash)

    def verify(self, sequence: Sequence) -> None:
        """Raises EngineFailed if what was pulled is not this prompt's. To be called before anything is computed."""
        for index, block_id in enumerate(sequence.blocks):
            if self._memory.block(block_id) != self._bytes(sequence.content_hash(index, sequence.computed)):
                raise EngineFailed(f"block {index} of the pulled KV does not belong to this prompt")
        for index in range(sequence.computed // self._block_tokens):
            self._blocks.register(sequence.blocks[index], sequence.hashes[index])

    def _bytes(self, content_hash: bytes) -> bytes:
        size = self._memory.block_bytes
        return (content_hash * (size // len(content_hash) + 1))[:size]
