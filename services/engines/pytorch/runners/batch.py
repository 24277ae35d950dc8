"""The tensors of one step, made once and used by every layer: tokens, destinations of KV, and KV to read."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.engines.kv import KvLayout
from services.engines.pytorch.kv_cache.blocks import NULL_BLOCK
from services.engines.pytorch.sequence import TokenSequence

MAX_PADDING_BLOCKS = 64
"""The most padding blocks read in a group of decoding sequences; more padding splits the group."""

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The `count` tokens of a sequence from `start` on. If it `samples`, the step yields the sequence's next token.

    The last of them may be `drafts`, guesses that follow the sequence's tokens: then it yields a token after each.
    One that `continues` goes through some of the model's layers only: a later step has the same chunk again.
    """

    sequence: TokenSequence
    start: int
    count: int
    samples: bool
    drafts: tuple[int, ...] = ()
    continues: bool = False

    @staticmethod
    def next_of(sequence: TokenSequence, count: int) -> "Chunk":
        """The next tokens, after the computed ones and those in flight."""
        start = sequence.computed + sequence.in_flight.tokens
        return Chunk(sequence, start, count, samples=start + count == sequence.length)

    @property
    def end(self) -> int:
        """The number of tokens with KV after the step, or the last one of the same chunk."""
        return self.start + self.count

    @property
    def filled(self) -> int:
        """The tokens that have their KV after the step, and had not before."""
        return 0 if self.continues else self.count


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
    """The pool as attention reads it. A head's keys in a block are one contiguous run, so gathering copies memory."""

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
        """Returns the row numbers of blocks `[count, width]`, in the order `[count, kv_heads, width]`, flat."""
        heads = np.arange(self.layout.kv_heads)
        return self.to_device((blocks[:, None, :] * self.block_rows + heads[None, :, None]).reshape(-1))

    def slots(self, blocks: Indices, offsets: Indices) -> torch.Tensor:
        """Returns the slot numbers of tokens, in the order `[kv_heads, tokens]`, flat."""
        tokens = self.layout.block_tokens
        heads = np.arange(self.layout.kv_heads) * tokens
        first = blocks * (self.block_rows * tokens) + offsets
        return self.to_device((first[None, :] + heads[:, None]).reshape(-1))

    def to_device(self, indices: NDArray[np.generic]) -> torch.Tensor:
        """Returns the array as a tensor on the pool's device."""
        tensor = torch.from_numpy(indices)
        return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class FreshGroup:
    """A sequence whose first tokens are computed, which need no other KV."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """`count` sequences with the same number of new tokens, the tokens `start:stop` of the step.

    `rows` are their blocks for `KvCache`, padded to equal length; `mask` `[count, 1, 1 or heads x new tokens, length]`
    hides later tokens and the padding.
    """

    start: int
    stop: int
    count: int
    rows: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The input of attention for a step."""

    cache: KvCache
    slots: torch.Tensor
    groups: Sequence[FreshGroup | PagedGroup]


@dataclass(frozen=True, slots=True)
class MediaRows:
    """Rows of a medium's embedding, which replace the tokens of the step from `start` on."""

    start: int
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepInput:
    """A step, ready for the model. `chunks` are in the order of the tokens; `last_rows` are the rows to sample from."""

    chunks: Sequence[Chunk]
    token_ids: torch.Tensor
    positions: torch.Tensor
    last_rows: torch.Tensor
    paged: PagedBatch
    media: Sequence[MediaRows]


class BatchBuilder:
    """Lays out the chunks of a step: decoding sequences first, in groups of similar length, then longer chunks."""

    def __init__(self, cache: KvCache, query_heads: int, dtype: torch.dtype) -> None:
        self._cache = cache
        self._heads_per_key = query_heads // cache.layout.kv_heads
        self._dtype = dtype

    def build(self, chunks: Sequence[Chunk]) -> StepInput:
        """Returns the tensors for `chunks`, in another order."""
        decodes = sorted((c for c in chunks if c.count == 1), key=lambda chunk: chunk.start, reverse=True)
        others = [chunk for chunk in chunks if chunk.count > 1]
        ordered = decodes + others
        positions = np.concatenate([np.arange(c.start, c.end) for c in ordered])
        tokens = np.array([t for c in ordered for t in (*c.sequence.tokens[c.start : c.end], *c.drafts)])
        ends = np.cumsum([chunk.count for chunk in ordered])
        sampled = [np.arange(end - 1 - len(c.drafts), end) for c, end in zip(ordered, ends, strict=True) if c.samples]
        last_rows = np.concatenate(sampled).astype(np.int64) if sampled else np.array([], dtype=np.int64)
        move = self._cache.to_device
        return StepInput(
            chunks=ordered,
            token_ids=move(tokens).unsqueeze(0),
            positions=move(positions).unsqueeze(0),
            last_rows=move(last_rows),
            paged=PagedBatch(self._cache, self._slots(ordered, positions), self._groups(decodes, others)),
            media=media_rows(ordered),
        )

    def _slots(self, chunks: Sequence[Chunk], positions: Indices) -> torch.Tensor:
        size = self._cache.layout.block_tokens
        blocks = np.concatenate(
            [
                np.array(c.sequence.blocks[c.start // size : (c.end - 1) // size + 1])[
                    np.arange(c.start, c.end) // size - c.start // size
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
            fresh = chunk.start == 0
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
        queries = torch.arange(chunk.start, chunk.end, device=self._cache.device)
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


def media_rows(chunks: Sequence[Chunk]) -> list[MediaRows]:
    """Returns the part of each embedding that belongs to a chunk; a step may contain only a part."""
    found = []
    first = 0
    for chunk in chunks:
        computed = chunk.start
        for span in chunk.sequence.prompt.media:
            start, end = max(span.start, computed), min(span.end, chunk.end)
            if start < end:
                rows = chunk.sequence.rows_of(span)[start - span.start : end - span.start]
                found.append(MediaRows(first + start - computed, rows))
        first += chunk.count
    return found
