"""The seal of a block outside of the device pool: the block's name, its owner, and a digest of its bytes.

A seal finds accidents: flipped bits, torn writes, a file of another process or layout. It is no defence against someone
who can write to the memory or the file.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch

from services.engines.kv import KvLayout

SEAL_BYTES = 64
_VERSION = 1
# Chain hash, digest of layout and model, epoch of the process, tokens, version, digest of the content.
_FIELDS = struct.Struct("<16s8sQIIQ")
_SELF_BYTES = SEAL_BYTES - _FIELDS.size
_WORD_BYTES = 4
_MASK = (1 << 64) - 1
_WEIGHTS_SEED = 0x5EA1
_Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class DamagedBlock(Exception):
    """A block is not what its place says: it counts as missing."""


@dataclass(frozen=True, slots=True)
class BlockContents:
    """The contents that a block must have: its name, and for how many tokens."""

    block_hash: bytes
    tokens: int


class Sealer:
    """Makes and checks the seals of one process (`epoch`) and one layout."""

    def __init__(self, layout: KvLayout, epoch: int) -> None:
        self._layout = bytes.fromhex(layout.digest)[:8]
        self._epoch = epoch

    def seal(self, contents: BlockContents, digest: int) -> bytes:
        """Returns the seal of a block with these contents and this digest of its bytes."""
        fields = _FIELDS.pack(contents.block_hash, self._layout, self._epoch, contents.tokens, _VERSION, digest & _MASK)
        return fields + _self_digest(fields)

    def check(self, seal: bytes, contents: BlockContents, digest: int) -> None:
        """Checks a block that was loaded. Raises DamagedBlock, which says what differs."""
        fields = seal[: _FIELDS.size]
        if _self_digest(fields) != seal[_FIELDS.size :]:
            raise DamagedBlock("seal")
        block_hash, layout, epoch, tokens, version, content = _FIELDS.unpack(fields)
        found = {
            "version": version == _VERSION,
            "layout": layout == self._layout,
            "epoch": epoch == self._epoch,
            "chain hash": block_hash == contents.block_hash,
            "length": tokens == contents.tokens,
            "content": content == digest & _MASK,
        }
        for name, is_right in found.items():
            if not is_right:
                raise DamagedBlock(name)


class Digester:
    """Digests of blocks on a device: the sum of their 32-bit words, each times an odd random number of 64 bits.

    Any single word that differs changes the sum, and several do with a probability of at least 1 - 2 ** -33. The
    numbers are the same in every process.
    """

    def __init__(self, block_bytes: int, device: torch.device) -> None:
        numbers = np.random.Generator(np.random.PCG64(_WEIGHTS_SEED)).integers(
            np.iinfo(np.int64).min, np.iinfo(np.int64).max, block_bytes // _WORD_BYTES, dtype=np.int64
        )
        self._kernel = _kernel_of(device)
        self._weights = torch.from_numpy(numbers | 1).to(device)

    def digest(self, pool: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
        """Starts to digest blocks of a pool `[blocks, words]`; returns numbers on the device."""
        if self._kernel is not None:
            return self._kernel(pool, torch.tensor(blocks, device=pool.device), self._weights)
        return torch.stack([(pool[block] * self._weights).sum() for block in blocks])


def _kernel_of(device: torch.device) -> _Kernel | None:
    """The kernel for a GPU with Triton, which reads the blocks once; None to use PyTorch's operations."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from services.engines.pytorch.kernels.digest_kernels import digest_blocks

    return digest_blocks


def _self_digest(fields: bytes) -> bytes:
    return hashlib.blake2b(fields, digest_size=_SELF_BYTES).digest()
