"""The last tokens of a long prompt beside decodes, which go through the layers in groups, one in each of several steps.

To read such a context takes as long as a good part of a decode step, for which all streams would wait at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from services.engines.pytorch.runners.batch import Chunk
from services.engines.pytorch.runners.mixed_steps import MixedSize, MixedStep
from services.engines.pytorch.sequence import TokenSequence

MOST_GROUPS = 8
"""So many steps compute such a prompt."""
LONG_CONTEXT = 8192
"""Shorter ones are computed at once."""


class GroupSize(NamedTuple):
    """One group of layers of a step's size."""

    size: MixedSize
    group: int


@dataclass(frozen=True, slots=True)
class _Begun:
    """A chunk of which the first `groups` are computed. A sequence that has lost its blocks gets another list."""

    sequence: TokenSequence
    blocks: list[int]
    start: int
    count: int
    groups: int


class LayerGroups:
    """The groups of so many layers, and which comes next.

    Only the step right after one that has begun a chunk goes on with it.
    """

    def __init__(self, layers: int) -> None:
        count = min(MOST_GROUPS, layers)
        self.ranges = [range(layers * index // count, layers * (index + 1) // count) for index in range(count)]
        self._begun: _Begun | None = None

    def is_last(self, group: int) -> bool:
        """True if a chunk is computed after this group."""
        return group == len(self.ranges) - 1

    def forget(self) -> None:
        """Begins again: what was kept of a chunk is no longer there."""
        self._begun = None

    def next_of(self, step: MixedStep, chunks: Sequence[Chunk]) -> int | None:
        """Returns the group of layers that a step computes of its last chunk; None for all of them at once."""
        begun, self._begun = self._begun, None
        if len(step.groups) < len(self.ranges) or not _is_worth_it(chunks):
            return None
        chunk = chunks[-1]
        group = begun.groups if begun is not None and _is_same(begun, chunk) else 0
        if not self.is_last(group):
            self._begun = _Begun(chunk.sequence, chunk.sequence.blocks, chunk.start, chunk.count, group + 1)
        return group


def _is_worth_it(chunks: Sequence[Chunk]) -> bool:
    """True for decodes and the end of one prompt with a long context."""
    singles = sum(chunk.count == 1 for chunk in chunks)
    return singles == len(chunks) - 1 > 0 and chunks[-1].start >= LONG_CONTEXT


def _is_same(begun: _Begun, chunk: Chunk) -> bool:
    return (
        begun.sequence is chunk.sequence
        and begun.blocks is chunk.sequence.blocks
        and (begun.start, begun.count) == (chunk.start, chunk.count)
    )


def continued(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Returns the chunks with the last one going on in a later step."""
    return [*chunks[:-1], replace(chunks[-1], samples=False, continues=True)]
