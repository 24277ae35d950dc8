"""The prefix cache that outlives the process: the pool in kept memory, and beside it the seals of blocks with content.

The order of writes is the protocol, since a killed process leaves a prefix of its writes. A block's seal is written
after its content is complete, and erased before anything else may be written into the block. A seal that is torn, and
content that is not what the seal says, count as missing: nothing is trusted because it should have happened.
"""

import json
import mmap
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import structlog

from services.engines.journal.journal import FoundDecode
from services.engines.journal.slots import SlotShape
from services.engines.kv import KvLayout
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.kv_cache.memory import HostMemory, anonymous_file
from services.engines.pytorch.model import checkpoint
from services.engines.running import metrics
from services.engines.seals import SEAL_BYTES, BlockContents, DamagedBlock, Sealer, host_digests, name_of
from services.keeper.client import KeeperClient

_log = structlog.get_logger(__name__)

_NAME = "kv"
# Another one for each change of what is kept: pool, seals, slots or their records. Versions of Baton go on with it.
_VERSION = 3
_NO_SEAL = bytes(SEAL_BYTES)
_EPOCH_BYTES = 8


@dataclass(frozen=True, slots=True)
class KeptShape:
    """The sizes of kept memory: the pool's blocks, and the slots of the journal."""

    layout: KvLayout
    num_blocks: int
    slot: SlotShape
    num_slots: int


@dataclass(frozen=True, slots=True)
class KeptPool:
    """The descriptors of a pool, of its seals and of its journal; `is_found` if another process has left them."""

    pool: int
    seals: int
    journal: int
    is_found: bool

    @classmethod
    def open(cls, keeper: KeeperClient, shape: KeptShape, config: PyTorchConfig) -> "KeptPool":
        """Returns what the keeper holds, if it fits, or new memory that it holds from now on."""
        sizes = [shape.layout.digest, shape.num_blocks, shape.num_slots, shape.slot.tokens, shape.slot.blocks]
        form = [_VERSION, *sizes, config.execution, checkpoint.changes(config.model)]
        fingerprint = json.dumps([*form, version("torch"), version("transformers")])
        found = keeper.get(_NAME, fingerprint)
        if found.descriptors:
            pool, seals, journal = found.descriptors
            return cls(pool, seals, journal, is_found=True)
        if found.stale:
            _log.warning("kept KV does not fit; it was freed", kept=found.stale, wanted=fingerprint)
        new = cls(
            anonymous_file(shape.num_blocks * shape.layout.block_bytes),
            anonymous_file(shape.num_blocks * SEAL_BYTES),
            anonymous_file(shape.num_slots * shape.slot.num_bytes),
            is_found=False,
        )
        os.pwrite(new.seals, os.urandom(_EPOCH_BYTES), 0)
        keeper.put(_NAME, fingerprint, [new.pool, new.seals, new.journal])
        return new


class KeptCache:
    """The seals of a pool. Closes their descriptor; the place of block 0, which has no content, has the epoch."""

    def __init__(self, seals: int, memory: HostMemory, layout: KvLayout) -> None:
        self._memory = memory
        self._block_tokens = layout.block_tokens
        self._seals = mmap.mmap(seals, memory.num_blocks * SEAL_BYTES)
        os.close(seals)
        self._sealer = Sealer(layout, int.from_bytes(self._seals[:_EPOCH_BYTES], "little"))

    def stored(self, block: int, block_hash: bytes) -> None:
        """Seals a block whose content is complete."""
        [digest] = host_digests(self._memory, [block])
        self._write(block, self._sealer.seal(BlockContents(block_hash, self._block_tokens), digest))

    def erased(self, block: int) -> None:
        """Removes the seal of a block, before its content changes."""
        self._write(block, _NO_SEAL)

    def recover(self, decodes: Sequence[FoundDecode] = ()) -> Mapping[int, bytes]:
        """Returns the blocks with content and their hashes, and frees the memory of all others, with their seals.

        The blocks of `decodes` stay, too. Of each, what cannot be vouched for is cut off. The last blocks come first:
        they are the ends of prefixes, as far as one can know.
        """
        for block in {block for one in decodes for block in one.blocks[one.computed // self._block_tokens :]}:
            # Its decode writes into it: that the step which filled it came to its end is not in the journal.
            self.erased(block)
        sealed = {block for block in range(1, self._memory.num_blocks) if self._seal(block) != _NO_SEAL}
        found = self._whole()
        owners = Counter(block for one in decodes for block in one.blocks)
        # Two decodes may share what is sealed. What is in the table of one alone is its own, as the order of writes is.
        doubtful = {block for block in owners if block not in found and (block in sealed or owners[block] > 1)}
        for one in decodes:
            _cut(one, doubtful, self._block_tokens)
            one.slot.take_over(one.blocks, one.computed)
        for block in sealed - found.keys():
            self.erased(block)  # only now: a process that dies before does not trust it either
        kept = set(found).union(*(one.blocks for one in decodes))
        self._memory.clear_all_but(kept)
        metrics.RECOVERED_BLOCKS.labels("used").inc(len(kept))
        metrics.RECOVERED_BLOCKS.labels("damaged").inc(len(sealed) - len(found))
        _log.info("kept KV is used again", blocks=len(kept), damaged=len(sealed) - len(found), decodes=len(decodes))
        return found

    def _whole(self) -> dict[int, bytes]:
        """The sealed blocks whose content is what the seal says."""
        found: dict[int, bytes] = {}
        known: set[bytes] = set()
        for block in reversed(range(1, self._memory.num_blocks)):
            seal = self._seal(block)
            if seal == _NO_SEAL:
                continue
            block_hash = name_of(seal)
            if block_hash not in known and self._is_whole(block, seal, block_hash):
                found[block] = block_hash
                known.add(block_hash)
        return found

    def _is_whole(self, block: int, seal: bytes, block_hash: bytes) -> bool:
        [digest] = host_digests(self._memory, [block])
        try:
            self._sealer.check(seal, BlockContents(block_hash, self._block_tokens), digest)
        except DamagedBlock as damage:
            _log.warning("a kept block is damaged", block=block, differs=str(damage))
            return False
        return True

    def _seal(self, block: int) -> bytes:
        return self._seals[block * SEAL_BYTES : (block + 1) * SEAL_BYTES]

    def _write(self, block: int, seal: bytes) -> None:
        self._seals[block * SEAL_BYTES : (block + 1) * SEAL_BYTES] = seal


def _cut(decode: FoundDecode, doubtful: Collection[int], block_tokens: int) -> None:
    """Takes off a decode what begins with a doubtful block: it is computed again from its ids."""
    first = next((index for index, block in enumerate(decode.blocks) if block in doubtful), None)
    if first is not None:
        decode.blocks, decode.computed = decode.blocks[:first], first * block_tokens
