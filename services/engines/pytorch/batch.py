"""The tensors of one step, made once and used by every layer: what is computed, where KV goes, and where it lies."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.engines.pytorch.blocks import NULL_BLOCK
from services.engines.pytorch.sequence import TokenSequence
from services.kv import KvLayout

MAX_PADDING_BLOCKS = 64
"""Blocks read in vain in one group of decoding sequences, before the shorter ones get a group of their own."""

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `count` tokens of a sequence."""

    sequence: TokenSequence
    count: int

    @property
    def end(self) -> int:
        """Tokens with KV after the step."""
        return self.sequence.computed + self.count

    @property
    def samples(self) -> bool:
        """Whether the step yields the sequence's next token."""
        return self.end == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class LayerViews:
    """One layer's part of the pool: `keys` has a row for each block and head, `key_slots` for each token and head.

    The views start at the layer's own offset, so that the same row numbers serve every layer.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_slots: torch.Tensor
    value_slots: torch.Tensor


class KvCache:
    """The pool as attention sees it. A head's keys in a block are one contiguous run, so gathering is plain copying."""

    def __init__(self, pool: torch.Tensor, layout: KvLayout) -> None:
        self.layout = layout
        self.device = pool.device
        self.block_rows = layout.num_layers * layout.kv_factor * layout.kv_heads
        heads, tokens = layout.kv_heads, layout.block_tokens
        rows = pool.view(-1, tokens * layout.head_dim)
        slots = pool.view(-1, layout.head_dim)
        self.layers = [
            LayerViews(
                keys=rows[first:],
                values=rows[first + heads :],
                key_slots=slots[first * tokens :],
                value_slots=slots[(first + heads) * tokens :],
            )
            for first in range(0, self.block_rows, layout.kv_factor * heads)
        ]

    def rows(self, blocks: Indices) -> torch.Tensor:
        """Row numbers of blocks `[count, width]`, in the order `[count, kv_heads, width]`, flat."""
        heads = np.arange(self.layout.kv_heads)
        return self.to_device((blocks[:, None, :] * self.block_rows + heads[None, :, None]).reshape(-1))

    def slots(self, blocks: Indices, offsets: Indices) -> torch.Tensor:
        """Slot numbers of tokens, in the order `[kv_heads, tokens]`, flat."""
        tokens = self.layout.block_tokens
        heads = np.arange(self.layout.kv_heads) * tokens
        first = blocks * (self.block_rows * tokens) + offsets
        return self.to_device((first[None, :] + heads[:, None]).reshape(-1))

    def to_device(self, indices: NDArray[np.generic]) -> torch.Tensor:
        """The array as a tensor of the pool's device."""
        tensor = torch.from_numpy(indices)
        return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class FreshGroup:
    """A sequence whose first tokens are computed: they need no KV but their own."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """`count` sequences of equally many new tokens each, the tokens `start:stop` of the step.

    `rows` are their blocks for `KvCache`, padded to equal length; `mask` `[count, 1, 1 or heads x new tokens, length]`
    hides what a query must not see, the padding included.
    """

    start: int
    stop: int
    count: int
    rows: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """What attention needs to know of a step."""

    cache: KvCache
    slots: torch.Tensor
    groups: Sequence[FreshGroup | PagedGroup]


@dataclass(frozen=True, slots=True)
class MediaRows:
    """Rows of a medium's embedding, which stand for the tokens of the step from `start` on."""

    start: int
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepInput:
    """A step, ready for the model. `chunks` are in the order of the tokens; `last_rows` are those that sample."""

    chunks: Sequence[Chunk]
    token_ids: torch.Tensor
    positions: torch.Tensor
    last_rows: torch.Tensor
    paged: PagedBatch
    media: Sequence[MediaRows]


class BatchBuilder:
    """Lays the chunks of a step out: decoding sequences first, in groups of similar length, then the longer chunks."""

    def __init__(self, cache: KvCache, query_heads: int, dtype: torch.dtype) -> None:
        self._cache = cache
        self._heads_per_key = query_heads // cache.layout.kv_heads
        self._dtype = dtype

    def build(self, chunks: Sequence[Chunk]) -> StepInput:
        """The tensors for `chunks`, which are put in another order."""
        decodes = sorted((c for c in chunks if c.count == 1), key=_length, reverse=True)
        others = [chunk for chunk in chunks if chunk.count > 1]
        ordered = decodes + others
        positions = np.concatenate([np.arange(c.sequence.computed, c.end) for c in ordered])
        tokens = np.array([t for c in ordered for t in c.sequence.tokens[c.sequence.computed : c.end]])
        ends = np.cumsum([chunk.count for chunk in ordered])
        last_rows = np.array([end - 1 for c, end in zip(ordered, ends, strict=True) if c.samples], dtype=np.int64)
        move = self._cache.to_device
        return StepInput(
            chunks=ordered,
            token_ids=move(tokens).unsqueeze(0),
            positions=move(positions).unsqueeze(0),
            last_rows=move(last_rows),
            paged=PagedBatch(self._cache, self._slots(ordered, positions), self._groups(decodes, others)),
            media=_media_rows(ordered),
        )

    def _slots(self, chunks: Sequence[Chunk], positions: Indices) -> torch.Tensor:
        size = self._cache.layout.block_tokens
        blocks = np.concatenate(
            [
                np.array(c.sequence.blocks[c.sequence.computed // size : (c.end - 1) // size + 1])[
                    np.arange(c.sequence.computed, c.end) // size - c.sequence.computed // size
                ]
                for c in chunks
            ]
        )
        return self._cache.slots(blocks, positions % size)

    def _groups(self, decodes: Sequence[Chunk], others: Sequence[Chunk]) -> list[FreshGroup | PagedGroup]:
        groups: list[FreshGroup | PagedGroup] = []
        start = 0
        for members in self._by_length(decodes):
            groups.append(self._decode_group(start, members))
            start += len(members)
        for chunk in others:
            fresh = chunk.sequence.computed == 0
            groups.append(FreshGroup(start, start + chunk.count) if fresh else self._chunk_group(start, chunk))
            start += chunk.count
        return groups

    def _by_length(self, decodes: Sequence[Chunk]) -> list[list[Chunk]]:
        """Splits chunks, longest first, where padding would cost more than another call."""
        groups: list[list[Chunk]] = []
        widest = wasted = 0
        for chunk in decodes:
            blocks = self._num_blocks(chunk)
            wasted += widest - blocks
            if not groups or wasted > MAX_PADDING_BLOCKS:
                groups.append([])
                widest, wasted = blocks, 0
            groups[-1].append(chunk)
        return groups

    def _decode_group(self, start: int, members: Sequence[Chunk]) -> PagedGroup:
        width = self._num_blocks(members[0])
        table = np.full((len(members), width), NULL_BLOCK, dtype=np.int64)
        for row, chunk in enumerate(members):
            count = self._num_blocks(chunk)
            table[row, :count] = chunk.sequence.blocks[:count]
        lengths = self._cache.to_device(np.array([chunk.end for chunk in members]))
        seen = self._key_positions(width) < lengths[:, None]
        return PagedGroup(
            start, start + len(members), len(members), self._cache.rows(table), self._mask(seen[:, None, None])
        )

    def _chunk_group(self, start: int, chunk: Chunk) -> PagedGroup:
        width = self._num_blocks(chunk)
        rows = self._cache.rows(np.array([chunk.sequence.blocks[:width]]))
        queries = torch.arange(chunk.sequence.computed, chunk.end, device=self._cache.device)
        seen = self._key_positions(width)[None] <= queries[:, None]
        mask = self._mask(seen.repeat(self._heads_per_key, 1)[None, None])
        return PagedGroup(start, start + chunk.count, 1, rows, mask)

    def _num_blocks(self, chunk: Chunk) -> int:
        return -(-chunk.end // self._cache.layout.block_tokens)

    def _key_positions(self, blocks: int) -> torch.Tensor:
        return torch.arange(blocks * self._cache.layout.block_tokens, device=self._cache.device)

    def _mask(self, seen: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=seen.device)
        return mask.masked_fill_(~seen, -torch.inf)


def _length(chunk: Chunk) -> int:
    return chunk.sequence.computed


def _media_rows(chunks: Sequence[Chunk]) -> list[MediaRows]:
    """The part of each embedding that belongs to a chunk: one may be split over several steps."""
    found = []
    first = 0
    for chunk in chunks:
        computed = chunk.sequence.computed
        for span in chunk.sequence.prompt.media:
            start, end = max(span.start, computed), min(span.end, chunk.end)
            if start < end:
                rows = chunk.sequence.rows_of(span)[start - span.start : end - span.start]
                found.append(MediaRows(first + start - computed, rows))
        first += chunk.count
    return found
