"""The numbers that a step of the fused model reads, laid out in one array that is copied to the device at once.

The rows of a step whose logits are reported as log probabilities of prompts; most steps have none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.engines.pytorch.kernels.paged_ops import QUERIES_OF_A_TILE, PagedTokens
from services.engines.pytorch.kv_cache.blocks import NULL_BLOCK
from services.engines.pytorch.runners.batch import Chunk
from services.engines.pytorch.sampling.prompt_logprobs import PromptReport
from services.engines.pytorch.sequence import TokenSequence

TILE_NUMBERS = 5
PADDING = -1
KNOWN = -1

Ints = NDArray[np.int32]


def buckets(max_sequences: int) -> list[int]:
    """Returns the batch sizes of captured decode steps, up to `max_sequences`; other sizes are padded to
    the next one.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 257, 16), *range(288, max_sequences, 32)]
    return [size for size in sizes if size < max_sequences] + [max_sequences]


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step on the device. An id whose `sources` is not KNOWN is sampled there by the previous step."""

    token_ids: torch.Tensor
    sources: torch.Tensor
    tokens: PagedTokens


@dataclass(frozen=True, slots=True)
class DecodeArrays:
    """A decode step of a captured size: its flat array."""

    size: int
    flat: Ints


@dataclass(frozen=True, slots=True)
class StepArrays:
    """Any step: its flat array, the array's Layout.shape, its number of single tokens, and the rows to compute logits
    of, int64.
    """

    flat: Ints
    shape: tuple[int, int, int, int]
    singles: int
    rows: NDArray[np.int64]


class Layout:
    """The layout of a step in one flat int32 array.

    The parts in order: ids, sources, positions and table rows of `tokens` tokens; the block tables of `sequences`
    sequences, `width` blocks each; `tiles` tiles of prefill attention.
    """

    def __init__(self, tokens: int, sequences: int, width: int, tiles: int = 0) -> None:
        self.shape = (tokens, sequences, width, tiles)
        self.size = 4 * tokens + sequences * width + TILE_NUMBERS * tiles

    def views(self, flat: torch.Tensor, singles: int) -> StepTensors:
        """Returns the parts of such an array on the device; the first `singles` tokens are decoded one by one."""
        tokens, sequences, width, tiles = self.shape
        ids, sources, positions, rows = flat[: 4 * tokens].view(4, tokens).unbind()
        tables = flat[4 * tokens : 4 * tokens + sequences * width].view(sequences, width)
        parts = flat[4 * tokens + sequences * width : self.size].view(tiles, TILE_NUMBERS) if tiles else None
        return StepTensors(ids, sources, PagedTokens(positions, rows, tables, singles, parts))

    def empty(self) -> Ints:
        """Returns an array in which every token is padding."""
        tokens, sequences, _, _ = self.shape
        flat = np.full(self.size, NULL_BLOCK, dtype=np.int32)
        flat[tokens : 2 * tokens] = KNOWN
        flat[2 * tokens : 3 * tokens] = PADDING
        if tokens == sequences:
            flat[3 * tokens : 4 * tokens] = np.arange(tokens)
        return flat


def fill_decodes(flat: Ints, layout: Layout, chunks: Sequence[Chunk], places: Mapping[TokenSequence, int]) -> None:
    """Writes chunks of one token each; `places` are the indices of ids that the previous step samples."""
    tokens, sequences, width, _ = layout.shape
    ids, sources, positions = flat[: 3 * tokens].reshape(3, tokens)
    tables = flat[4 * tokens : 4 * tokens + sequences * width].reshape(sequences, width)
    for row, chunk in enumerate(chunks):
        sequence = chunk.sequence
        if chunk.start < len(sequence.tokens):
            ids[row] = sequence.tokens[chunk.start]
        else:
            sources[row] = places[sequence]
        positions[row] = chunk.start
        tables[row, : len(sequence.blocks)] = sequence.blocks


def build(chunks: Sequence[Chunk], block_tokens: int, places: Mapping[TokenSequence, int]) -> tuple[Ints, Layout, int]:
    """Returns the array of a step, chunks of one token first, with its layout and the number of those chunks."""
    singles = sum(chunk.count == 1 for chunk in chunks)
    tiles = _tiles(chunks, singles)
    width = max(-(-chunk.end // block_tokens) for chunk in chunks)
    layout = Layout(sum(chunk.count for chunk in chunks), len(chunks), width, len(tiles))
    total = layout.shape[0]
    flat = layout.empty()
    ids, sources, positions, rows = flat[: 4 * total].reshape(4, total)
    tables = flat[4 * total : 4 * total + len(chunks) * width].reshape(len(chunks), width)
    first = 0
    for row, chunk in enumerate(chunks):
        sequence, last = chunk.sequence, first + chunk.count
        known = sequence.tokens[chunk.start : chunk.end]
        ids[first : first + len(known)] = known
        if len(known) < chunk.count:
            sources[last - 1] = places[sequence]
        positions[first:last] = np.arange(chunk.start, chunk.end)
        rows[first:last] = row
        blocks = sequence.blocks[:width]
        tables[row, : len(blocks)] = blocks
        first = last
    flat[4 * total + len(chunks) * width :] = np.array(tiles, dtype=np.int32).reshape(-1)
    return flat, layout, singles


def _tiles(chunks: Sequence[Chunk], singles: int) -> list[tuple[int, int, int, int, int]]:
    """Splits the longer chunks into tiles: first token of the step, tokens, first position, row, and the chunk's tokens
    before it. The longest work comes first.

    Tiles late in a long prompt read much more than others, which then fill the gaps.
    """
    found = []
    first = singles
    for row, chunk in enumerate(chunks[singles:], start=singles):
        for offset in range(0, chunk.count, QUERIES_OF_A_TILE):
            count = min(QUERIES_OF_A_TILE, chunk.count - offset)
            found.append((first + offset, count, chunk.start + offset, row, offset))
        first += chunk.count
    return sorted(found, key=lambda tile: tile[2], reverse=True)


@dataclass(frozen=True, slots=True)
class _Part:
    report: PromptReport
    position: int
    row: int
    count: int


class PromptRows:
    """The rows of `chunks`, in the order of their tokens. The model computes them after the rows to sample from."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._parts: list[_Part] = []
        row = 0
        for chunk in chunks:
            report = chunk.sequence.prompt_report
            if report is not None and (count := report.count(chunk.start, chunk.end)):
                self._parts.append(_Part(report, chunk.start, row, count))
            row += chunk.count

    def after(self, sampled: torch.Tensor) -> torch.Tensor:
        """Returns the rows to compute: those to sample from, and these."""
        if not self._parts:
            return sampled
        rows = np.concatenate([np.arange(part.row, part.row + part.count) for part in self._parts])
        return torch.cat([sampled, torch.from_numpy(rows).to(sampled.device, sampled.dtype)])

    def report(self, logits: torch.Tensor, sampled: int) -> torch.Tensor:
        """Reports the logits of these rows, and returns those of the first `sampled` rows."""
        first = sampled
        for part in self._parts:
            part.report.add(part.position, logits[first : first + part.count])
            first += part.count
        return logits[:sampled]
