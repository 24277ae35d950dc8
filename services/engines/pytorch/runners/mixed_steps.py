"""Steps of decodes and short chunks of prompts, padded to a few sizes: each can be captured in a CUDA graph.

Most of an agent's prompt is cached: what is left to compute of it has a few tokens. Started operation by operation, a
step with them takes the host longer than the device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from services.engines.pytorch.kernels.paged_ops import QUERIES_OF_A_SHORT_TILE
from services.engines.pytorch.runners.batch import Chunk
from services.engines.pytorch.runners.step_tensors import PADDING, Ints, Layout, tiles_of
from services.engines.pytorch.sequence import TokenSequence

MAX_PROMPTS = 4
"""The most prompts of such a step."""
_LEAST_TOKENS = 32
_SINGLES = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True, order=True)
class MixedSize:
    """Up to `singles` chunks of one token, and up to MAX_PROMPTS longer ones of `prompt_tokens` together."""

    singles: int
    prompt_tokens: int

    @property
    def rows(self) -> int:
        """The most sequences, each of which has a row of logits."""
        return self.singles + MAX_PROMPTS

    @property
    def tokens(self) -> int:
        """All tokens, padding too."""
        return self.singles + self.prompt_tokens

    def layout(self, width: int) -> Layout:
        """The layout of such a step, with the most tiles that its prompts can have, and with a row of logits for each
        sequence.
        """
        tiles = -(-self.prompt_tokens // QUERIES_OF_A_SHORT_TILE) + MAX_PROMPTS - 1
        return Layout(self.tokens, self.rows, width, tiles, self.rows, QUERIES_OF_A_SHORT_TILE)

    def holds(self, singles: int, prompts: int, tokens: int) -> bool:
        """True if a step of so many single tokens, and of so many prompts with their tokens, fits."""
        return singles <= self.singles and prompts <= MAX_PROMPTS and tokens <= self.prompt_tokens


@dataclass(frozen=True, slots=True)
class MixedStep:
    """A step of one size, with its own `flat` array on the device. `run` computes `logits` `[rows, vocabulary]` and
    `outcome` `[2, rows]`, that of `drawing.choose`; both are overwritten by the next step of any size.

    `groups` compute the same one after the other: each all layers of single tokens, and a group of layers of prompts.
    """

    size: MixedSize
    layout: Layout
    flat: torch.Tensor
    logits: torch.Tensor
    outcome: torch.Tensor
    run: Callable[[], None]
    groups: Sequence[Callable[[], None]] = ()


def mixed_sizes(max_sequences: int, most_tokens: int) -> list[MixedSize]:
    """Returns the sizes in ascending order, for prompts of up to `most_tokens` together; none for 0."""
    singles = [size for size in _SINGLES if size < max_sequences] + [min(max_sequences, _SINGLES[-1])]
    tokens = [most_tokens] if most_tokens else []
    while tokens and tokens[0] > _LEAST_TOKENS:
        tokens.insert(0, max(_LEAST_TOKENS, tokens[0] // 2))
    return [MixedSize(few, some) for few in dict.fromkeys(singles) for some in tokens]


def smallest_step(steps: Sequence[MixedStep], chunks: Sequence[Chunk]) -> MixedStep | None:
    """Returns the step with the least padding that has room for the chunks; None if none has, or if they need more than
    ids and one row of logits each.
    """
    counts = [chunk.count for chunk in chunks if chunk.count > 1]
    if not all(chunk.samples and chunk.sequence.prompt_report is None for chunk in chunks):
        return None
    if any(span.end > chunk.start for chunk in chunks for span in chunk.sequence.prompt.media):
        return None
    fit = [step for step in steps if step.size.holds(len(chunks) - len(counts), len(counts), sum(counts))]
    return min(fit, key=lambda step: step.size.tokens, default=None)


def fill_mixed(size: MixedSize, layout: Layout, chunks: Sequence[Chunk], places: Mapping[TokenSequence, int]) -> Ints:
    """Returns the array of such a step, for chunks of one token, then longer ones. The logits are in their order."""
    flat = layout.empty()
    parts = layout.parts(flat)
    singles = sum(chunk.count == 1 for chunk in chunks)
    first = row = 0
    for index, chunk in enumerate(chunks):
        if index == singles:
            first = row = size.singles
        parts.write(chunk, row, first, places)
        first, row = first + chunk.count, row + 1
        if chunk.samples:
            parts.last_rows[index] = first - 1
    parts.tiles[:, 2] = PADDING
    tiles = tiles_of(chunks[singles:], size.singles, size.singles, layout.tile_tokens)
    parts.tiles[: len(tiles)] = tiles
    return flat
