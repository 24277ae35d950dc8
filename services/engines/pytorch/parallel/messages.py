"""What rank 0 tells the other ranks, over a pipe between processes of one host."""

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
    """The pool's size and the limits of steps, as rank 0 has them. On a CPU the pool's file follows."""

    num_blocks: int
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class ZeroBlocks:
    """Zeroes blocks: NaN would spread from them."""

    block_ids: tuple[int, ...]


Order = Begin | DecodeArrays | StepArrays | ZeroBlocks | None
"""None ends the follower."""
