"""Held KV, loans and reservations of the simulated engine."""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from baton.errors import BatonError
from services.engines.answer import FinishReason, TokenLogprob
from services.engines.simulated.sequence import Sequence

Release = Callable[[tuple[int, ...]], int]
Fill = Callable[[tuple[int, ...], Items[bytes]], None]


@dataclass(eq=False, slots=True)
class Claim:
    """A request for `count` blocks. Those of `hashes` that are cached need no pull."""

    count: int
    hashes: list[bytes]
    blocks: list[int] = field(default_factory=list)
    cached_blocks: int = 0
    passed: int = 0
    error: BatonError | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def reserves(self) -> bool:
        """True: it waits for blocks to pull into."""
        return True


class SimulatedKv:
    """A HeldKv. `release` gives the blocks back."""

    def __init__(self, sequence: Sequence, block_ids: tuple[int, ...], release: Release) -> None:
        self._sequence = sequence
        self._block_ids = block_ids
        self._owned = block_ids
        self._release = release
        self._first_token = sequence.ids[-1]

    @property
    def first_token(self) -> int:
        return self._first_token

    @property
    def logprob(self) -> TokenLogprob | None:
        return self._sequence.logprobs[0] if self._sequence.logprobs else None

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self._sequence.yields else self._sequence.finish

    @property
    def block_ids(self) -> tuple[int, ...]:
        return self._block_ids

    @property
    def num_tokens(self) -> int:
        return self._sequence.computed

    @property
    def prefix_hash(self) -> bytes:
        return self._sequence.previous_hash(len(self._sequence.hashes))

    @property
    def cached_tokens(self) -> int:
        return self._sequence.cached_tokens or 0

    @property
    def queue_seconds(self) -> float:
        return self._sequence.clock.queue_seconds

    @property
    def compute_seconds(self) -> float:
        return self._sequence.clock.prefill_seconds

    async def release(self) -> int:
        """Frees the blocks; returns how many, 0 if they were free already."""
        blocks, self._owned = self._owned, ()
        return self._release(blocks)


class SimulatedBlocks:
    """HeldBlocks of the prefix cache. `release` gives them back."""

    def __init__(self, block_ids: tuple[int, ...], num_tokens: int, release: Release) -> None:
        self._block_ids = self._owned = block_ids
        self._num_tokens = num_tokens
        self._release = release

    @property
    def block_ids(self) -> tuple[int, ...]:
        return self._block_ids

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    async def release(self) -> int:
        """Gives the blocks back; returns how many, 0 if they were given back already."""
        blocks, self._owned = self._owned, ()
        return self._release(blocks) if blocks else 0


class SimulatedLoan(SimulatedBlocks):
    """A LentKv."""

    def __init__(self, sequence: Sequence, block_ids: tuple[int, ...], num_tokens: int, release: Release) -> None:
        super().__init__(block_ids, num_tokens, release)
        self._next_token = sequence.ids[num_tokens]
        self._prefix_hash = sequence.previous_hash(len(block_ids))

    @property
    def next_token(self) -> int:
        return self._next_token

    @property
    def prefix_hash(self) -> bytes:
        return self._prefix_hash


class SimulatedReservation:
    """A Reservation. `take` moves the blocks to a decode, `release` frees them; the first call wins."""

    def __init__(self, claim: Claim, num_tokens: int, release: Release, fill: Fill) -> None:
        block_ids, claim.blocks = tuple(claim.blocks), []
        self._fill = fill
        self._hashes = claim.hashes
        self._block_ids = block_ids
        self._owned = block_ids
        self._cached_blocks = claim.cached_blocks
        self.num_tokens = num_tokens
        self._release = release

    @property
    def block_ids(self) -> tuple[int, ...]:
        return self._block_ids

    @property
    def cached_blocks(self) -> int:
        return self._cached_blocks

    def take(self) -> tuple[int, ...]:
        """Returns the blocks, which the caller then owns."""
        blocks, self._owned = self._owned, ()
        return blocks

    async def release(self) -> int:
        """Frees the blocks; returns how many, 0 if they were taken or free already."""
        return self._release(self.take())

    @property
    def block_hashes(self) -> Items[bytes]:
        return self._hashes

    async def cache(self, num_blocks: int) -> None:
        """Frees the blocks; the prefix cache keeps the full ones of the first `num_blocks`, which have their KV.

        Raises EngineFailed if one belongs to another prompt.
        """
        blocks = self.take()
        try:
            self._fill(blocks[:num_blocks], self._hashes)
        finally:
            self._release(blocks)
