"""The operations of the fused model by Triton kernels. Importable only where Triton is installed."""

import math

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from services.engines.pytorch.kernels import chunk_kernels, triton_kernels
from services.engines.pytorch.kernels.paged_ops import QUERIES_OF_A_TILE, HeadNorms, HeadShape, PagedTokens

_KEYS_OF_A_TILE = 64
_GATE_BLOCK = 1024
_HEADS_AT_ONCE = 16
# The programs that keep the memory of a large GPU busy; a split of a context is one program for each KV head.
_PROGRAMS = 512
_MAX_SPLITS = 16
# A few new tokens behind a long context are few programs, each of which goes through all of it.
_TILE_SPLITS, _FEW_TILE_PROGRAMS, _LONG_CONTEXT = 8, 256, 8192
_LOG2_E = math.log2(math.e)


def splits(singles: int, kv_heads: int) -> int:
    """Returns into how many parts each context is split for this number of sequences: a power of 2."""
    wanted = max(1, _PROGRAMS // (singles * kv_heads))
    return min(_MAX_SPLITS, 1 << (wanted.bit_length() - 1))


def tile_splits(programs: int, context_tokens: int) -> int:
    """Returns into how many parts each context is split for so many tiles and heads: 1 or one other number, since each
    is a kernel to compile.
    """
    return _TILE_SPLITS if programs <= _FEW_TILE_PROGRAMS and context_tokens >= _LONG_CONTEXT else 1


def short_chunk_splits(programs: int) -> int:
    """Returns into how many parts each context is split for so many tiles and KV heads: a power of 2. Some of the tiles
    may be padding.
    """
    wanted = max(2, _PROGRAMS // programs)
    return min(_MAX_SPLITS, 1 << (wanted - 1).bit_length())


class TritonOps:
    """PagedOps on a GPU. Only launches kernels: nothing waits, and everything can be captured in a graph."""

    def rms_norm(
        self, delta: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        count, size = residual.shape
        out = torch.empty_like(residual)
        block = triton.next_power_of_2(size)
        triton_kernels.rms_norm[(count,)](
            residual if delta is None else delta,
            residual,
            weight,
            out,
            size,
            eps,
            ADDS=delta is not None,
            BLOCK=block,
            num_warps=8 if block >= 2048 else 4,
        )
        return out

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        count, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(count, size)
        triton_kernels.gate[(count, triton.cdiv(size, _GATE_BLOCK))](gate_up, out, size, BLOCK=_GATE_BLOCK)
        return out

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
        cos, sin = angles
        programs = triton.cdiv(heads + 2 * kv_heads, _HEADS_AT_ONCE)
        triton_kernels.rotate_and_write[(len(qkv), programs)](
            qkv,
            cos,
            sin,
            tokens.positions,
            tokens.rows,
            tokens.tables,
            cos if norms is None else norms.query,
            cos if norms is None else norms.key,
            layer,
            layer.stride(0),
            layer.stride(1),
            tokens.tables.stride(0),
            0.0 if norms is None else norms.eps,
            NORMS=norms is not None,
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=head_dim,
            HALF=triton.next_power_of_2(head_dim // 2),
            BLOCK_TOKENS=block_tokens,
            AT_ONCE=_HEADS_AT_ONCE,
            num_warps=4,
        )

    def attend(self, qkv: torch.Tensor, tokens: PagedTokens, layer: torch.Tensor, shape: HeadShape) -> torch.Tensor:
        out = qkv.new_empty(len(qkv), shape.heads * shape.head_dim)
        if tokens.singles:
            self._attend_singly(qkv, tokens, layer, shape, out)
        if tokens.tiles is not None and tokens.tile_tokens == QUERIES_OF_A_TILE:
            self._attend_in_tiles(qkv, tokens, tokens.tiles, layer, shape, out)
        elif tokens.tiles is not None:
            self._attend_short_chunks(qkv, tokens, tokens.tiles, layer, shape, out)
        return out

    def _attend_singly(
        self, qkv: torch.Tensor, tokens: PagedTokens, layer: torch.Tensor, shape: HeadShape, out: torch.Tensor
    ) -> None:
        group = shape.heads // shape.kv_heads
        rows, wide = max(16, triton.next_power_of_2(group)), max(16, triton.next_power_of_2(shape.head_dim))
        parts = splits(tokens.singles, shape.kv_heads)
        count = tokens.singles * shape.kv_heads * parts * rows if parts > 1 else 0
        partial = torch.empty(count * wide, dtype=torch.float32, device=qkv.device)
        extremes = torch.empty(count * 2, dtype=torch.float32, device=qkv.device)
        triton_kernels.decode_attention[(tokens.singles, shape.kv_heads, parts)](
            qkv,
            layer,
            tokens.tables,
            tokens.positions,
            tokens.rows,
            out,
            partial,
            extremes,
            layer.stride(0),
            layer.stride(1),
            tokens.tables.stride(0),
            shape.scaling,
            GROUP=group,
            ROWS_OF_Q=rows,
            HEADS=shape.heads,
            KV_HEADS=shape.kv_heads,
            DIM=shape.head_dim,
            WIDE=wide,
            BLOCK_TOKENS=layer.shape[3],
            TILE=_KEYS_OF_A_TILE,
            SPLITS=parts,
            num_warps=4,
            num_stages=3,
        )
        if parts > 1:
            triton_kernels.merge_splits[(tokens.singles, shape.heads)](
                partial,
                extremes,
                out,
                GROUP=group,
                ROWS_OF_Q=rows,
                HEADS=shape.heads,
                KV_HEADS=shape.kv_heads,
                DIM=shape.head_dim,
                WIDE=wide,
                SPLITS=parts,
                num_warps=1,
            )

    def _attend_in_tiles(
        self,
        qkv: torch.Tensor,
        tokens: PagedTokens,
        tiles: torch.Tensor,
        layer: torch.Tensor,
        shape: HeadShape,
        out: torch.Tensor,
    ) -> None:
        wide = max(16, triton.next_power_of_2(shape.head_dim))
        step = TensorDescriptor(qkv, list(qkv.shape), [qkv.shape[1], 1], [QUERIES_OF_A_TILE, wide])
        parts = tile_splits(len(tiles) * shape.heads, tokens.tables.shape[1] * layer.shape[3])
        count = len(tiles) * shape.heads * parts * QUERIES_OF_A_TILE if parts > 1 else 0
        partial = torch.empty(count * wide, dtype=torch.float32, device=qkv.device)
        extremes = torch.empty(count * 2, dtype=torch.float32, device=qkv.device)
        chunk_kernels.prefill_attention[(shape.heads, len(tiles), parts)](
            step,
            layer,
            tokens.tables,
            tiles,
            out,
            partial,
            extremes,
            layer.stride(0),
            layer.stride(1),
            tokens.tables.stride(0),
            shape.scaling * _LOG2_E,
            GROUP=shape.heads // shape.kv_heads,
            HEADS=shape.heads,
            KV_HEADS=shape.kv_heads,
            DIM=shape.head_dim,
            WIDE=wide,
            BLOCK_TOKENS=layer.shape[3],
            TILE=QUERIES_OF_A_TILE,
            SPLITS=parts,
            num_warps=4,
            num_stages=3 if qkv.dtype == torch.bfloat16 else 1,
        )
        if parts > 1:
            self._merge_tiles(tokens, partial, extremes, out, shape, parts)

    def _attend_short_chunks(
        self,
        qkv: torch.Tensor,
        tokens: PagedTokens,
        tiles: torch.Tensor,
        layer: torch.Tensor,
        shape: HeadShape,
        out: torch.Tensor,
    ) -> None:
        group, wide = shape.heads // shape.kv_heads, max(16, triton.next_power_of_2(shape.head_dim))
        parts = short_chunk_splits(len(tiles) * shape.kv_heads)
        count = len(tiles) * shape.heads * parts * tokens.tile_tokens
        partial = torch.empty(count * wide, dtype=torch.float32, device=qkv.device)
        extremes = torch.empty(count * 2, dtype=torch.float32, device=qkv.device)
        chunk_kernels.short_chunk_attention[(shape.kv_heads, len(tiles), parts)](
            qkv,
            layer,
            tokens.tables,
            tiles,
            partial,
            extremes,
            layer.stride(0),
            layer.stride(1),
            tokens.tables.stride(0),
            shape.scaling * _LOG2_E,
            GROUP=group,
            HEADS=shape.heads,
            KV_HEADS=shape.kv_heads,
            DIM=shape.head_dim,
            WIDE=wide,
            BLOCK_TOKENS=layer.shape[3],
            TILE=tokens.tile_tokens,
            ROWS_OF_Q=max(16, triton.next_power_of_2(tokens.tile_tokens * group)),
            KEYS=_KEYS_OF_A_TILE,
            SPLITS=parts,
            num_warps=4,
            num_stages=3 if qkv.dtype == torch.bfloat16 else 1,
        )
        self._merge_tiles(tokens, partial, extremes, out, shape, parts)

    def _merge_tiles(
        self,
        tokens: PagedTokens,
        partial: torch.Tensor,
        extremes: torch.Tensor,
        out: torch.Tensor,
        shape: HeadShape,
        parts: int,
    ) -> None:
        assert tokens.tiles is not None
        chunk_kernels.merge_tiles[(shape.heads, len(tokens.tiles), tokens.tile_tokens)](
            partial,
            extremes,
            tokens.tiles,
            out,
            HEADS=shape.heads,
            DIM=shape.head_dim,
            WIDE=max(16, triton.next_power_of_2(shape.head_dim)),
            TILE=tokens.tile_tokens,
            SPLITS=parts,
            num_warps=1,
        )
