"""The messages among the ranks of a group: over a pipe between processes of one host, or over TCP."""

from dataclasses import dataclass

from services.engines.pytorch.runners.fused_runner import Sizes
from services.engines.pytorch.runners.step_tensors import DecodeArrays, StepArrays


@dataclass(frozen=True, slots=True)
class Loaded:
    """A follower's answer: it has its weights, and memory for so many blocks."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """A follower's answer: it cannot start, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Begin:
    """The pool's size and the limits of steps, as rank 0 has them.

    Where the pool is shared, its file follows. Otherwise `store_port` is the port of rank 0's store.
    """

    num_blocks: int
    sizes: Sizes
    store_port: int = 0


@dataclass(frozen=True, slots=True)
class ZeroBlocks:
    """Zeroes blocks: NaN would spread from them."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """The group is ready: rank 0's engine has warmed up, and every rank with it."""


Order = Begin | DecodeArrays | StepArrays | ZeroBlocks | Ready | None
"""None ends the follower."""
