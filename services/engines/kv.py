"""KV blocks for everything outside of the engines: layout, memory, held KV and reservations."""

import hashlib
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol, runtime_checkable

from baton.errors import Overloaded
from services.engines.answer import FinishReason, FromTiers, PromptLogprobs, TokenLogprob
from services.engines.prompt import Prompt, Retained


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The shape of a pool's blocks, `[blocks, layers, kv_factor, kv_heads, block_tokens, head_dim]`, and their content.

    Two pools may exchange blocks if and only if their digests are equal.
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

    @property
    def in_words(self) -> str:
        """The fields that explain why two digests differ, for people."""
        weights = hashlib.sha256(self.model.encode()).hexdigest()[:8]
        return (
            f"({self.dtype}, {self.block_tokens} tokens a block, {self.num_layers} layers, "
            f"{self.kv_heads} heads of {self.head_dim}, model {weights})"
        )


EMBEDDING_BLOCK_ROWS = 16


_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}


def embedding_bytes(shape: tuple[int, int], dtype: str) -> int | None:
    """Returns the bytes of an embedding; None if embeddings do not support the dtype."""
    width = _WIDTHS.get(dtype)
    return None if width is None else shape[0] * shape[1] * width


def embedding_layout(model: str, dtype: str, hidden_size: int) -> KvLayout:
    """Returns the layout of embedding pools, whose blocks are rows of embeddings. `model` is that of the KV layout."""
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


def packed_ids(block_ids: Sequence[int]) -> "array[int]":
    """Returns ids as C integers of 32 bits, which kernels and sockets take without a look at each; they are from 0 to
    2 ** 32 - 1.
    """
    if isinstance(block_ids, array) and block_ids.typecode == "I":
        return block_ids
    packed = array("I")
    # Of all ways from Python's integers to C's the fastest one, twice as fast as array's own and NumPy's.
    packed.frombytes(struct.pack(f"{len(block_ids)}I", *block_ids))
    return packed


class BlockMemory(Protocol):
    """A pool's memory, registered once and kept for the life of the process."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def file_descriptor(self) -> int | None:
        """The file (a memfd) that others can map to read the pool; None if the pool is not in host memory."""

    def read(self, block_ids: Sequence[int]) -> Sequence[memoryview]:
        """Returns the blocks' bytes, in order; neighbouring ids share one view. Copies only if the pool is not in host
        memory.

        Blocking; call it in a thread. The caller has checked the ids.
        """

    def write(self, block_ids: Sequence[int]) -> "BlockWriter":
        """Opens blocks for writing, which the caller has reserved. Any thread may call it."""


class BlockWriter(Protocol):
    """The destination of pulled bytes. `views` are writable, in the order of the ids, neighbours merged."""

    @property
    def views(self) -> Sequence[memoryview]: ...

    def commit(self) -> None:
        """Writes the bytes to the pool: a copy to the device, and nothing in host memory. Blocking; the last call."""


class HeldBlocks(Protocol):
    """Held blocks of a pool. Their holder owns them until `release`, which is idempotent and quick."""

    @property
    def block_ids(self) -> tuple[int, ...]: ...

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the blocks are for."""

    async def release(self) -> int:
        """Frees the blocks; returns how many, 0 if they were free already."""


class LentKv(HeldBlocks, Protocol):
    """The full blocks of a decode that goes on: their content is final."""

    @property
    def next_token(self) -> int:
        """The id that follows those in the blocks."""

    @property
    def prefix_hash(self) -> bytes: ...


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
        """The number of tokens whose KV is in the blocks: the whole context of the prompt, without the first token."""

    @property
    def prefix_hash(self) -> bytes: ...

    @property
    def cached_tokens(self) -> int: ...

    @property
    def queue_seconds(self) -> float: ...

    @property
    def compute_seconds(self) -> float: ...

    async def release(self) -> int:
        """Frees the blocks; returns how many, 0 if they were free already."""


@runtime_checkable
class ReportedPrompt(HeldKv, Protocol):
    """Held KV of an engine that can report log probabilities of prompts."""

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None: ...


@runtime_checkable
class RetainedPrompt(HeldKv, Protocol):
    """Held KV of an engine that retains beginnings of prompts in its prefix cache."""

    @property
    def retained(self) -> Retained | None: ...


@runtime_checkable
class TieredPrompt(HeldKv, Protocol):
    """Held KV of an engine with tiers below its pool."""

    @property
    def from_tiers(self) -> FromTiers: ...


class NoFreeBlocks(Overloaded):
    """A reservation failed because KV that is held here for other workers has filled the pool for too long.

    The reader then releases its handoff, and the prompt runs again. So workers that hold KV for one another never wait
    for ever.
    """


class Reservation(Protocol):
    """Blocks on the decode side, for `num_tokens` tokens of KV to be pulled.

    The first `cached_blocks` come from this worker's own prefix cache, with their KV, and must not be written. The
    caller owns the reservation until it passes it to `decode` in a PulledKv, or until `release`.
    """

    @property
    def block_ids(self) -> Sequence[int]: ...

    @property
    def cached_blocks(self) -> int: ...

    async def release(self) -> int:
        """Frees the blocks; returns how many, 0 if they were free already, or if `decode` took them over.

        Call it only when no transfer can write into the blocks any more.
        """

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """The names of the full blocks, in the order of the tokens."""

    async def cache(self, num_blocks: int) -> None:
        """Frees the blocks, of which the first `num_blocks` have got their KV: the prefix cache keeps those of them
        that are full, where it is on.
        """


@dataclass(frozen=True, slots=True)
class PulledKv:
    """A prompt whose KV was pulled and confirmed. `prompt.emitted` is at least the handoff's first token."""

    prompt: Prompt
    reservation: Reservation
