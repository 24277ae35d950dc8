"""The seal of a block outside of the device pool: the block's name, its owner, and a digest of its bytes.

A seal finds accidents: flipped bits, torn writes, a file of another process or layout. It is no defence against someone
who can write to the memory or the file.
"""

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine_protocol.prefix_hash import HASH_BYTES
from services.engines.kv import BlockMemory, KvLayout

SEAL_BYTES = 64
_VERSION = 1
# Chain hash, digest of layout and model, epoch of the process, tokens, version, digest of the content.
_FIELDS = struct.Struct("<16s8sQIIQ")
_SELF_BYTES = SEAL_BYTES - _FIELDS.size
_WORD_BYTES = 4
_MASK = (1 << 64) - 1
_WEIGHTS_SEED = 0x5EA1
# So many bytes are digested at once: few enough to stay in a processor's cache.
_DIGESTED_BYTES = 256 * 1024


class DamagedBlock(Exception):
    """A block is not what its place says: it counts as missing."""


class BlockContents(NamedTuple):
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
        if seal == self.seal(contents, digest):
            return
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


@lru_cache(8)
def digest_weights(block_bytes: int) -> npt.NDArray[np.int64]:
    """The numbers of digests, the same in every process: a digest is the sum of a block's 32-bit words, each times an
    odd random number of 64 bits.

    Any single word that differs changes the sum, and several do with a probability of at least 1 - 2 ** -33.
    """
    numbers = np.random.Generator(np.random.PCG64(_WEIGHTS_SEED)).integers(
        np.iinfo(np.int64).min, np.iinfo(np.int64).max, -(-block_bytes // _WORD_BYTES), dtype=np.int64
    )
    return numbers | 1


def host_digests(memory: BlockMemory, block_ids: Sequence[int]) -> list[int]:
    """Returns the digests of blocks, computed on the host. Blocking: half a second to a second for each GB."""
    size, weights = memory.block_bytes, digest_weights(memory.block_bytes)
    at_once = max(1, _DIGESTED_BYTES // size)
    digests: list[int] = []
    for start in range(0, len(block_ids), at_once):
        for view in memory.read(block_ids[start : start + at_once]):
            rows = np.frombuffer(view, np.uint8).reshape(-1, size)
            if size % _WORD_BYTES:
                rows = np.pad(rows, ((0, 0), (0, -size % _WORD_BYTES)))
            digests += (rows.view(np.int32).astype(np.int64) @ weights).view(np.uint64).tolist()
    return digests


def name_of(seal: bytes) -> bytes:
    """The name of the block that a seal, which need not be whole, is of."""
    return seal[:HASH_BYTES]


def _self_digest(fields: bytes) -> bytes:
    return hashlib.blake2b(fields, digest_size=_SELF_BYTES).digest()
