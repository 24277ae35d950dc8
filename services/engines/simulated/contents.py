"""The content of the simulated pool's blocks: bytes that follow from the tokens, so that wrong blocks are detected."""

from baton.errors import EngineFailed
from services.engines.memory.shared_pool import SharedPool
from services.engines.simulated.blocks import Blocks
from services.engines.simulated.sequence import Sequence


class Contents:
    """Writes and checks blocks, and adds full ones to the prefix cache."""

    def __init__(self, memory: SharedPool, blocks: Blocks, block_tokens: int) -> None:
        self._memory = memory
        self._blocks = blocks
        self._block_tokens = block_tokens

    def write(self, sequence: Sequence, before: int) -> None:
        """Fills the blocks that have got new tokens since `before` tokens were computed."""
        size = self._block_tokens
        for index in range(before // size, -(-sequence.computed // size)):
            full = (index + 1) * size <= sequence.computed
            # Blocks that others may read are written whole; those of a running decode when they are full.
            if not full and not sequence.held:
                continue
            content_hash = sequence.content_hash(index, sequence.computed)
            self._memory.block(sequence.blocks[index])[:] = self._bytes(content_hash)
            if full:
                sequence.learn(index, content_hash)
                self._blocks.register(sequence.blocks[index], content_hash)

    def verify(self, sequence: Sequence) -> None:
        """Raises EngineFailed if the pulled blocks belong to another prompt. Call it before anything is computed."""
        for index, block_id in enumerate(sequence.blocks):
            if self._memory.block(block_id) != self._bytes(sequence.content_hash(index, sequence.computed)):
                raise EngineFailed(f"block {index} of the pulled KV does not belong to this prompt")
        for index in range(sequence.computed // self._block_tokens):
            self._blocks.register(sequence.blocks[index], sequence.hashes[index])

    def _bytes(self, content_hash: bytes) -> bytes:
        size = self._memory.block_bytes
        return (content_hash * (size // len(content_hash) + 1))[:size]
