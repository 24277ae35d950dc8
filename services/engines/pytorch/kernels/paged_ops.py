"""The operations of the fused model in plain PyTorch: the reference for the Triton kernels, and the version for CPUs.

The pool is `[blocks, layers, 2, kv_heads, block_tokens, head_dim]`, and a row `qkv` of a token contains its query
heads, key heads and value heads. A position below 0 is padding; the output rows of padding are undefined.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import silu

QUERIES_OF_A_TILE = 64
"""Tokens of one sequence in a tile of the prefill attention kernel."""

QUERIES_OF_A_SHORT_TILE = 16
"""Tokens of one sequence in a tile of the attention kernel for short chunks, which reads the context once for all query
heads of a KV head.
"""


@dataclass(frozen=True, slots=True)
class PagedTokens:
    """The tokens of a step, and where their KV is.

    `positions` `[tokens]` int32; `rows` `[tokens]` int32, the row of the token's sequence in `tables` `[sequences,
    blocks]` int32. The first `singles` tokens are computed one by one; the others in `tiles` `[tiles, 5]` int32: first
    token of the step, tokens, first position, row, and the chunk's tokens before the first one. A tile has up to
    `tile_tokens` tokens, and one of padding none from position -1 on.
    """

    positions: torch.Tensor
    rows: torch.Tensor
    tables: torch.Tensor
    singles: int
    tiles: torch.Tensor | None
    tile_tokens: int = QUERIES_OF_A_TILE

    def without_tiles(self) -> "PagedTokens":
        """The single tokens alone."""
        count = self.singles
        return PagedTokens(self.positions[:count], self.rows[:count], self.tables, count, None)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The weights by which queries and keys are normalised, each `[head_dim]`, and the epsilon."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of queries and of keys, and the factor of attention scores."""

    heads: int
    kv_heads: int
    head_dim: int
    scaling: float


class PagedOps(Protocol):
    """The operations between two matrix products. Numbers are in the model's dtype unless stated otherwise."""

    def rms_norm(
        self, delta: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds `delta` to `residual`, both `[tokens, size]`, in place, and returns the normalised sum."""

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns `silu(gate) * up` `[tokens, size]`, of `[tokens, 2 * size]`."""

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        tokens: PagedTokens,
        layer: torch.Tensor,
        norms: HeadNorms | None,
    ) -> None:
        """Normalises and rotates queries and keys in place, and writes keys and values into the blocks of `layer`.

        `layer` is the pool's view `[blocks, 2, kv_heads, block_tokens, head_dim]`; `angles` are cosine and sine of
        every position, `[positions, head_dim]`.
        """

    def attend(self, qkv: torch.Tensor, tokens: PagedTokens, layer: torch.Tensor, shape: HeadShape) -> torch.Tensor:
        """Returns the attention of every token's queries, `[tokens, heads * head_dim]`."""


class TorchOps:
    """PagedOps in plain PyTorch, with loops over sequences: for CPUs, and as the reference."""

    def rms_norm(
        self, delta: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if delta is not None:
            residual += delta
        return _normal(residual, weight, eps)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        tokens: PagedTokens,
        layer: torch.Tensor,
        norms: HeadNorms | None,
    ) -> None:
        kv_heads, block_tokens, head_dim = layer.shape[2:]
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        real = tokens.positions >= 0
        positions = tokens.positions[real].long()
        by_head = qkv.view(len(qkv), -1, head_dim)
        query, key, value = by_head[:, :heads], by_head[:, heads : heads + kv_heads], by_head[:, heads + kv_heads :]
        blocks = tokens.tables[tokens.rows[real].long(), positions // block_tokens].long()
        new_query, new_key = query[real], key[real]
        if norms is not None:
            new_query = _normal(new_query, norms.query, norms.eps)
            new_key = _normal(new_key, norms.key, norms.eps)
        cos, sin = (angle[positions].unsqueeze(1) for angle in angles)
        query[real], key[real] = _rotated(new_query, cos, sin), _rotated(new_key, cos, sin)
        layer[blocks, 0, :, positions % block_tokens] = key[real]
        layer[blocks, 1, :, positions % block_tokens] = value[real]

    def attend(self, qkv: torch.Tensor, tokens: PagedTokens, layer: torch.Tensor, shape: HeadShape) -> torch.Tensor:
        query = qkv.view(len(qkv), -1, shape.head_dim)[:, : shape.heads]
        output = torch.zeros_like(query)
        positions, rows = tokens.positions.tolist(), tokens.rows.tolist()
        pieces = [(token, 1, positions[token], rows[token], 0) for token in range(tokens.singles)]
        for first, count, position, row, _ in pieces + ([] if tokens.tiles is None else tokens.tiles.tolist()):
            if position >= 0:
                piece = slice(first, first + count)
                output[piece] = _attend(query[piece], position, tokens.tables[row], layer, shape)
        return output.view(len(qkv), -1)


def _attend(
    query: torch.Tensor, position: int, table: torch.Tensor, layer: torch.Tensor, shape: HeadShape
) -> torch.Tensor:
    """Returns the attention `[tokens, heads, head_dim]`, for tokens from `position` on."""
    end = position + len(query)
    blocks = table[: -(-end // layer.shape[3])].long()
    key, value = layer[blocks].permute(1, 2, 0, 3, 4).reshape(2, shape.kv_heads, -1, shape.head_dim)[:, :, :end]
    seen = torch.arange(end, device=query.device) <= torch.arange(position, end, device=query.device).unsqueeze(1)
    answer = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        attn_mask=seen,
        scale=shape.scaling,
        enable_gqa=True,
    )
    return answer[0].transpose(0, 1)


def _normal(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
