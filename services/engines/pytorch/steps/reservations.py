"""Blocks that a request of another worker has here: reserved for KV that it pulls, or lent to it to read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.errors import BatonError
from services.engines.pytorch.sequence import State


@dataclass(eq=False, slots=True)
class BlockReservation:
    """A reservation: blocks for KV of another worker or, while queued, the request for them. Calls `settled` with the
    result.
    """

    num_tokens: int
    hashes: list[bytes]
    settled: Callable[[BatonError | None], None]
    state: State = State.NEW
    blocks: list[int] = field(default_factory=list)
    granted_ids: Sequence[int] = ()
    cached_blocks: int = 0
    passed: int = 0

    @property
    def reserves(self) -> bool:
        """True: it waits for blocks to pull into."""
        return True


@dataclass(frozen=True, slots=True)
class LentBlocks:
    """Full blocks, of a running sequence or of the prefix cache, that others may read, with references of its own.

    `next_token` is that of the sequence.
    """

    block_ids: tuple[int, ...]
    num_tokens: int
    next_token: int
    prefix_hash: bytes
