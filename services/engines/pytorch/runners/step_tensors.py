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
    """A step on the device. An id whose `sources` is not KNOWN is sampled there by the previous step.

    `last_rows` are the rows to compute logits of; None for all.
    """

    token_ids: torch.Tensor
    sources: torch.Tensor
    tokens: PagedTokens
    last_rows: torch.Tensor | None = None


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


@dataclass(frozen=True, slots=True)
class HostParts:
    """The parts of a step's array in host memory."""

    ids: Ints
    sources: Ints
    positions: Ints
    rows: Ints
    tables: Ints
    tiles: Ints
    last_rows: Ints

    def write(self, chunk: Chunk, row: int, first: int, places: Mapping[TokenSequence, int]) -> None:
        """Writes a chunk: its tokens from `first` on, and the table `row` of its sequence."""
        sequence, last = chunk.sequence, first + chunk.count
        known = sequence.tokens[chunk.start : chunk.end]
        self.ids[first : first + len(known)] = known
        if len(known) < chunk.count:
            self.sources[last - 1] = places[sequence]
        self.positions[first:last] = np.arange(chunk.start, chunk.end)
        self.rows[first:last] = row
        blocks = sequence.blocks[: self.tables.shape[1]]
        self.tables[row, : len(blocks)] = blocks


class Layout:
    """The layout of a step in one flat int32 array.

    The parts in order: ids, sources, positions and table rows of `tokens` tokens; the block tables of `sequences`
    sequences, `width` blocks each; `tiles` tiles of prefill attention; `last_rows` rows to compute logits of.
    """

    def __init__(
        self,
        tokens: int,
        sequences: int,
        width: int,
        tiles: int = 0,
        last_rows: int = 0,
        tile_tokens: int = QUERIES_OF_A_TILE,
    ) -> None:
        self.shape = (tokens, sequences, width, tiles)
        self.last_rows, self.tile_tokens = last_rows, tile_tokens
        self.size = 4 * tokens + sequences * width + TILE_NUMBERS * tiles + last_rows

    def views(self, flat: torch.Tensor, singles: int) -> StepTensors:
        """Returns the parts of such an array on the device; the first `singles` tokens are decoded one by one."""
        tokens, sequences, width, tiles = self.shape
        numbers, tables, rows_of_tiles, last_rows = torch.split(flat, self._sizes)
        ids, sources, positions, rows = numbers.view(4, tokens).unbind()
        parts = rows_of_tiles.view(tiles, TILE_NUMBERS) if tiles else None
        paged = PagedTokens(positions, rows, tables.view(sequences, width), singles, parts, self.tile_tokens)
        return StepTensors(ids, sources, paged, last_rows if self.last_rows else None)

    def parts(self, flat: Ints) -> HostParts:
        """Returns the parts of such an array in host memory, as views."""
        tokens, sequences, width, tiles = self.shape
        numbers, tables, rows_of_tiles, last_rows = np.split(flat, np.cumsum(self._sizes)[:-1])
        ids, sources, positions, rows = numbers.reshape(4, tokens)
        of_tiles = rows_of_tiles.reshape(tiles, TILE_NUMBERS)
        return HostParts(ids, sources, positions, rows, tables.reshape(sequences, width), of_tiles, last_rows)

    def empty(self) -> Ints:
        """Returns an array in which every token is padding."""
        tokens, sequences, _, _ = self.shape
        flat = np.full(self.size, NULL_BLOCK, dtype=np.int32)
        flat[tokens : 2 * tokens] = KNOWN
        flat[2 * tokens : 3 * tokens] = PADDING
        if tokens == sequences:
            flat[3 * tokens : 4 * tokens] = np.arange(tokens)
        return flat

    @property
    def _sizes(self) -> list[int]:
        tokens, sequences, width, tiles = self.shape
        return [4 * tokens, sequences * width, TILE_NUMBERS * tiles, self.last_rows]


def fill_decodes(flat: Ints, layout: Layout, chunks: Sequence[Chunk], places: Mapping[TokenSequence, int]) -> None:
    """Writes chunks of one token each; `places` are the indices of ids that the previous step samples."""
    parts = layout.parts(flat)
    for row, chunk in enumerate(chunks):
        sequence = chunk.sequence
        if chunk.start < len(sequence.tokens):
            parts.ids[row] = sequence.tokens[chunk.start]
        else:
            parts.sources[row] = places[sequence]
        parts.positions[row] = chunk.start
        parts.tables[row, : len(sequence.blocks)] = sequence.blocks


def build(chunks: Sequence[Chunk], block_tokens: int, places: Mapping[TokenSequence, int]) -> tuple[Ints, Layout, int]:
    """Returns the array of a step, chunks of one token first, with its layout and the number of those chunks."""
    singles = sum(chunk.count == 1 for chunk in chunks)
    tiles = tiles_of(chunks[singles:], singles, singles)
    width = max(-(-chunk.end // block_tokens) for chunk in chunks)
    layout = Layout(sum(chunk.count for chunk in chunks), len(chunks), width, len(tiles))
    flat = layout.empty()
    parts = layout.parts(flat)
    first = 0
    for row, chunk in enumerate(chunks):
        parts.write(chunk, row, first, places)
        first += chunk.count
    parts.tiles[:] = np.array(tiles, dtype=np.int32).reshape(-1, TILE_NUMBERS)
    return flat, layout, singles


def tiles_of(
    chunks: Sequence[Chunk], first: int, row: int, tile_tokens: int = QUERIES_OF_A_TILE
) -> list[tuple[int, int, int, int, int]]:
    """Splits chunks into tiles: first token of the step, tokens, first position, row, and the chunk's tokens before it.
    The longest work comes first. The chunks' tokens begin at `first`, and their rows at `row`.

    Tiles late in a long prompt read much more than others, which then fill the gaps.
    """
    found = []
    for index, chunk in enumerate(chunks, start=row):
        for offset in range(0, chunk.count, tile_tokens):
            count = min(tile_tokens, chunk.count - offset)
            found.append((first + offset, count, chunk.start + offset, index, offset))
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
