"""KV blocks as services see them: their layout, their memory, and who holds them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from services.answer import FinishReason, TokenLogprob
from services.prompt import Prompt


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The shape of a pool's blocks, `[blocks, layers, kv_factor, kv_heads, block_tokens, head_dim]`, and what fills it.

    Two pools may exchange blocks exactly if their digests are equal.
    """

    model: str  # fingerprint of the weights and configuration, not merely a name
    dtype: str  # numpy's or torch's name, such as float32, bfloat16
    num_layers: int
    kv_factor: int
    kv_heads: int
    block_tokens: int
    head_dim: int
    block_bytes: int
    contract_version: int = 1

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 over all fields."""
        text = "\n".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))
        return hashlib.sha256(text.encode()).hexdigest()


EMBEDDING_BLOCK_ROWS = 16


_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}


def embedding_bytes(shape: tuple[int, int], dtype: str) -> int | None:
    """What an embedding of this shape takes; None for a dtype that embeddings do not have."""
    width = _WIDTHS.get(dtype)
    return None if width is None else shape[0] * shape[1] * width


def embedding_layout(model: str, dtype: str, hidden_size: int) -> KvLayout:
    """The layout of pools of embeddings: a block is some rows, and in no way KV. `model` is the KV layout's."""
    return KvLayout(
        model=f"embeddings of {model}",
        dtype=dtype,
        num_layers=1,
        kv_factor=1,
        kv_heads=1,
        block_tokens=EMBEDDING_BLOCK_ROWS,
        head_dim=hidden_size,
        block_bytes=EMBEDDING_BLOCK_ROWS * hidden_size * _WIDTHS[dtype],
    )


class BlockMemory(Protocol):
    """A pool's memory, registered once and kept for the life of the process."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def file_descriptor(self) -> int | None:
        """An mmap-able file that is the pool (a memfd), or None where the pool is not in host memory."""

    def read(self, block_ids: Sequence[int]) -> Sequence[memoryview]:
        """The blocks' bytes, in order; neighbouring ids share one view. Copies only if the pool is not in host memory.

        Blocking; call it in a thread. Ids are checked by the caller.
        """

    def write(self, block_ids: Sequence[int]) -> "BlockWriter":
        """Opens blocks that the caller has reserved for writing, in a thread of the caller's choice."""


class BlockWriter(Protocol):
    """Where pulled bytes go. `views` are writable, in the order of the ids, neighbours merged; `commit` ends it."""

    @property
    def views(self) -> Sequence[memoryview]: ...

    def commit(self) -> None:
        """Makes the bytes the pool's: nothing to do in host memory, a copy to the device elsewhere. Blocking."""


class HeldBlocks(Protocol):
    """Blocks of a pool in somebody's hands, until `release`, which is idempotent and quick."""

    @property
    def block_ids(self) -> tuple[int, ...]: ...

    @property
    def num_tokens(self) -> int:
        """Tokens that the blocks are for."""

    async def release(self) -> int:
        """Gives the blocks back; returns how many, 0 if they were back already."""


class HeldKv(Protocol):
    """A prompt's KV cache and first token. The holder owns the blocks until `release`, which is idempotent and quick.

    If `finish_reason` is set, the first token ended the request and there are no blocks.
    """

    @property
    def first_token(self) -> int: ...

    @property
    def logprob(self) -> TokenLogprob | None: ...

    @property
    def finish_reason(self) -> FinishReason | None: ...

    @property
    def block_ids(self) -> tuple[int, ...]: ...

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is in the blocks: the whole context of the prompt, without the first token."""

    @property
    def prefix_hash(self) -> bytes: ...

    @property
    def cached_tokens(self) -> int: ...

    @property
    def queue_seconds(self) -> float: ...

    @property
    def compute_seconds(self) -> float: ...

    async def release(self) -> int:
        """Gives the blocks back; returns how many, 0 if they were back already."""


class Reservation(Protocol):
    """Blocks on the decode side, for `num_tokens` tokens of KV to be pulled.

    The first `cached_blocks` of them hold the right KV already, from this worker's own prefix cache, and must not be
    written. The caller owns it until it is given to `decode` in a PulledKv, or until `release`.
    """

    @property
    def block_ids(self) -> tuple[int, ...]: ...

    @property
    def cached_blocks(self) -> int: ...

    async def release(self) -> int:
        """Gives the blocks back; returns how many, 0 if they were back already, or if decode took them over.

        Must not be called while a transfer may still write into them.
        """


@dataclass(frozen=True, slots=True)
class PulledKv:
    """A prompt whose KV has arrived and been confirmed. `prompt.emitted` is at least the handoff's first token."""

    prompt: Prompt
    reservation: Reservation
