"""Held KV, loans and reservations of the simulated engine."""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from baton.errors import BatonError
from services.engines.answer import FinishReason, TokenLogprob
from services.engines.memory.shared_pool import OwnedBlocks
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
        self.block_ids = self._owned = block_ids
        self._release = release
        self.first_token = sequence.ids[-1]

    @property
    def logprob(self) -> TokenLogprob | None:
        return self._sequence.logprobs[0] if self._sequence.logprobs else None

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self._sequence.yields else self._sequence.finish

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


class SimulatedLoan(OwnedBlocks):
    """A LentKv."""

    def __init__(self, sequence: Sequence, block_ids: tuple[int, ...], num_tokens: int, release: Release) -> None:
        super().__init__(block_ids, num_tokens, release)
        self.next_token = sequence.ids[num_tokens]
        self.prefix_hash = sequence.previous_hash(len(block_ids))


class SimulatedReservation:
    """A Reservation. `take` moves the blocks to a decode, `release` frees them; the first call wins."""

    def __init__(self, claim: Claim, num_tokens: int, release: Release, fill: Fill) -> None:
        block_ids, claim.blocks = tuple(claim.blocks), []
        self._fill = fill
        self._hashes = claim.hashes
        self.block_ids = self._owned = block_ids
        self.cached_blocks = claim.cached_blocks
        self.num_tokens = num_tokens
        self._release = release

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
