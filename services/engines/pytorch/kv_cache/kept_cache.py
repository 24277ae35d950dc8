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

import numpy as np
import structlog
import torch

from services.engines.journal.journal import FoundDecode
from services.engines.journal.slots import SlotShape
from services.engines.kv import KvLayout
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.kv_cache.digester import Digests
from services.engines.pytorch.kv_cache.memory import DeviceMemory, HostMemory, anonymous_file, pool_file
from services.engines.pytorch.model import checkpoint
from services.engines.running import metrics
from services.engines.seals import SEAL_BYTES, BlockContents, DamagedBlock, Sealer, name_of
from services.keeper.client import KeeperClient

_log = structlog.get_logger(__name__)

_NAME = "kv"
# Another one for each change of what is kept: pool, seals, slots or their records. Versions of Baton go on with it.
_VERSION = 4
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
    """The descriptors of a pool of `num_blocks` blocks, of its seals and of its journal; `is_found` if another process
    has left them.
    """

    pool: int
    seals: int
    journal: int
    num_blocks: int
    is_found: bool

    @classmethod
    def find(cls, keeper: KeeperClient, form: str) -> "KeptPool | None":
        """Returns what the keeper holds of this form; None if there is nothing. A successor waits here for its turn."""
        found = keeper.get(_NAME, form)
        if found.stale:
            _log.warning("kept KV does not fit; it was freed", kept=found.stale, wanted=form)
        if not found.descriptors:
            return None
        pool, seals, journal = found.descriptors
        return cls(pool, seals, journal, os.fstat(seals).st_size // SEAL_BYTES, is_found=True)

    @classmethod
    def create(cls, keeper: KeeperClient, form: str, shape: KeptShape, device: torch.device) -> "KeptPool":
        """Returns new memory, which the keeper holds from now on. Raises DeviceUnavailable if a GPU has no room."""
        new = cls(
            pool_file(shape.num_blocks * shape.layout.block_bytes, device),
            anonymous_file(shape.num_blocks * SEAL_BYTES),
            anonymous_file(shape.num_slots * shape.slot.num_bytes),
            shape.num_blocks,
            is_found=False,
        )
        os.pwrite(new.seals, os.urandom(_EPOCH_BYTES), 0)
        keeper.put(_NAME, form, [new.pool, new.seals, new.journal])
        return new


def form_of(config: PyTorchConfig, layout: KvLayout) -> str:
    """The form of kept KV: equal for processes that can go on with one another's.

    It has what decides the number of blocks, not the number: that depends on the free memory of a GPU.
    """
    sizes = [config.kv_cache_bytes, config.kv_cache_fraction, config.gpu_memory_share, config.max_step_tokens]
    limits = [config.max_sequences, config.max_context_tokens]
    versions = [version("torch"), version("transformers")]
    files = checkpoint.changes(config.model)
    ranks = [config.tensor_parallel_size] if config.tensor_parallel_size > 1 else []
    kind = [config.device, config.execution, *ranks]
    return json.dumps([_VERSION, layout.digest, *sizes, *limits, *kind, files, *versions])


@dataclass(frozen=True, slots=True)
class _Batch:
    """Blocks whose digests are computed together, and the names of those that are to be sealed."""

    blocks: Sequence[int]
    names: dict[int, bytes]
    digests: Digests


class KeptCache:
    """The seals of a pool. Closes their descriptor; the place of block 0, which has no content, has the epoch.

    Behind it stands whether nothing in the pool can be trusted any more.
    """

    def __init__(self, seals: int, memory: HostMemory | DeviceMemory, layout: KvLayout) -> None:
        self._memory = memory
        self._block_tokens = layout.block_tokens
        self._seals = mmap.mmap(seals, memory.num_blocks * SEAL_BYTES)
        os.close(seals)
        self._sealer = Sealer(layout, int.from_bytes(self._seals[:_EPOCH_BYTES], "little"))
        self._unsealed: dict[int, bytes] = {}
        self._batch: _Batch | None = None

    def stored(self, block: int, block_hash: bytes) -> None:
        """Seals a block whose content is complete: at once in host memory, by `flush` on a GPU."""
        self._unsealed[block] = block_hash
        if not self._memory.digests_beside_steps:
            self.flush()

    def flush(self) -> None:
        """Writes the seals whose digests are there, and begins to compute those of the blocks that were stored since.

        Does not wait. A block that has no seal yet when the process dies is lost to the cache.
        """
        if self._batch is not None and not self._batch.digests.is_there:
            return
        self._write_batch()
        if self._unsealed:
            blocks = list(self._unsealed)
            self._batch = _Batch(blocks, self._unsealed, self._memory.begin_digest(blocks))
            self._unsealed = {}
            if not self._memory.digests_beside_steps:
                self._write_batch()

    def finish(self) -> None:
        """Writes all seals, and waits for their digests."""
        while self._unsealed or self._batch is not None:
            self._write_batch()
            self.flush()

    def erased(self, block: int) -> None:
        """Removes the seal of a block, before its content changes."""
        self._unsealed.pop(block, None)
        if self._batch is not None:
            self._batch.names.pop(block, None)
        self._write(block, _NO_SEAL)

    def distrust(self) -> None:
        """Has the next process drop all that is in the pool: anything may have been written anywhere."""
        self._seals[_EPOCH_BYTES] = 1

    def _write_batch(self) -> None:
        batch, self._batch = self._batch, None
        if batch is None:
            return
        for block, digest in zip(batch.blocks, batch.digests.read(), strict=True):
            if block in batch.names:
                contents = BlockContents(batch.names[block], self._block_tokens)
                self._write(block, self._sealer.seal(contents, digest))

    def recover(self, decodes: Sequence[FoundDecode] = ()) -> Mapping[int, bytes]:
        """Returns the blocks with content and their hashes, and frees the memory of all others, with their seals.

        The blocks of `decodes` stay, too. Of each, what cannot be vouched for is cut off. The last blocks come first:
        they are the ends of prefixes, as far as one can know.
        """
        if self._seals[_EPOCH_BYTES]:
            self._drop_all(decodes)
        for block in {block for one in decodes for block in one.blocks[one.computed // self._block_tokens :]}:
            # Its decode writes into it: that the step which filled it came to its end is not in the journal.
            self.erased(block)
        sealed = self._sealed()
        found = self._whole(sealed)
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
        self._seals[_EPOCH_BYTES] = 0
        metrics.RECOVERED_BLOCKS.labels("used").inc(len(kept))
        metrics.RECOVERED_BLOCKS.labels("damaged").inc(len(sealed) - len(found))
        _log.info("kept KV is used again", blocks=len(kept), damaged=len(sealed) - len(found), decodes=len(decodes))
        return found

    def _drop_all(self, decodes: Sequence[FoundDecode]) -> None:
        """Drops all content; of decodes their ids alone stay."""
        _log.warning("kept KV is dropped: a device has failed, which may have written anything into it")
        for block in range(1, self._memory.num_blocks):
            self.erased(block)
        for one in decodes:
            one.blocks, one.computed = [], 0

    def _sealed(self) -> set[int]:
        """The blocks that have a seal."""
        seals = np.frombuffer(self._seals, np.uint64).reshape(self._memory.num_blocks, -1)
        return set(np.flatnonzero(seals.any(axis=1)).tolist()) - {0}

    def _whole(self, sealed: Collection[int]) -> dict[int, bytes]:
        """The sealed blocks whose content is what the seal says, the last first."""
        found: dict[int, bytes] = {}
        known: set[bytes] = set()
        blocks = sorted(sealed, reverse=True)
        for block, digest in zip(blocks, self._memory.digest(blocks), strict=True):
            seal = self._seal(block)
            block_hash = name_of(seal)
            if block_hash not in known and self._is_whole(block, seal, digest):
                found[block] = block_hash
                known.add(block_hash)
        return found

    def _is_whole(self, block: int, seal: bytes, digest: int) -> bool:
        try:
            self._sealer.check(seal, BlockContents(name_of(seal), self._block_tokens), digest)
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
