"""The Triton kernels compute the same as plain PyTorch: on a GPU, or on a CPU in Triton's interpreter.

The interpreter is slow, and Triton is not installed without a GPU: TRITON_INTERPRET=1 enables these tests there.
"""

import os
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from support.engines.device import DEVICE

from services.engines.pytorch.kernels.paged_ops import (
    QUERIES_OF_A_SHORT_TILE,
    QUERIES_OF_A_TILE,
    HeadNorms,
    HeadShape,
    PagedTokens,
    TorchOps,
)

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or (DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="Triton is not installed, or there is neither a GPU nor TRITON_INTERPRET=1",
)

# The interpreter truncates bfloat16; a GPU rounds it.
DTYPES = [torch.float32] if DEVICE == "cpu" else [torch.float32, torch.bfloat16]

SHAPES = [
    pytest.param(HeadShape(6, 2, 16, 0.25), 4, id="6-heads-over-2-of-16"),
    pytest.param(HeadShape(4, 4, 32, 0.2), 16, id="4-heads-over-4-of-32"),
    pytest.param(HeadShape(8, 1, 48, 0.15), 32, id="8-heads-over-1-of-48"),
]


def _triton() -> object:
    from services.engines.pytorch.kernels.triton_ops import TritonOps

    return TritonOps()


def _pool(shape: HeadShape, block_tokens: int, blocks: int, dtype: torch.dtype) -> torch.Tensor:
    pool = torch.randn(blocks, 3, 2, shape.kv_heads, block_tokens, shape.head_dim, device=DEVICE)
    return pool.to(dtype)


def _tokens(
    singles: list[int], chunks: list[tuple[int, int]], block_tokens: int, tile_tokens: int = QUERIES_OF_A_TILE
) -> tuple[PagedTokens, int]:
    """Sequences that decode at positions `singles`, and chunks of (first position, tokens), in scattered blocks."""
    ends = [position + 1 for position in singles] + [first + count for first, count in chunks]
    needs = [max(0, -(-end // block_tokens)) for end in ends]
    blocks = (torch.randperm(sum(needs)) + 1).tolist()
    tables = torch.zeros(len(ends), max(needs), dtype=torch.int32)
    for row, need in enumerate(needs):
        tables[row, :need] = torch.tensor(blocks[:need], dtype=torch.int32)
        blocks = blocks[need:]
    positions, rows = list(singles), list(range(len(singles)))
    tiles = []
    for index, (first, count) in enumerate(chunks):
        row = len(singles) + index
        for start in range(0, count, tile_tokens):
            tiles.append([len(positions) + start, min(tile_tokens, count - start), first + start, row, start])
        positions += range(first, first + count)
        rows += [row] * count

    def on_device(values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    found_tiles = on_device(tiles) if tiles else None
    tokens = PagedTokens(
        on_device(positions), on_device(rows), tables.to(DEVICE), len(singles), found_tiles, tile_tokens
    )
    return tokens, sum(needs) + 1


@pytest.mark.parametrize(("shape", "block_tokens"), SHAPES)
@pytest.mark.parametrize(
    ("singles", "chunks"),
    [
        pytest.param([0], [], id="one-first-token"),
        pytest.param([70, 0, 31, 32, 200], [], id="decodes-of-different-lengths"),
        pytest.param([40] * 40, [], id="so-many-that-no-context-is-split"),
        pytest.param([], [(0, 150), (0, 2), (37, 20)], id="prompts-and-a-later-chunk"),
        pytest.param([33, -1, 5], [(0, 7), (130, 140)], id="both-with-padding-between"),
        pytest.param([], [(2500, 33), (0, 5), (700, 2)], id="a-few-tokens-behind-a-long-context"),
    ],
)
@pytest.mark.parametrize("tile_tokens", [QUERIES_OF_A_TILE, QUERIES_OF_A_SHORT_TILE], ids=["tiles", "short-tiles"])
def test_attention_equals_plain_attention(
    shape: HeadShape,
    block_tokens: int,
    singles: list[int],
    chunks: list[tuple[int, int]],
    tile_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from services.engines.pytorch.kernels import triton_ops

    monkeypatch.setattr(triton_ops, "_LONG_CONTEXT", 2048)
    torch.manual_seed(3)
    tokens, blocks = _tokens(singles, chunks, block_tokens, tile_tokens)
    pool = _pool(shape, block_tokens, blocks, torch.float32)
    qkv = torch.randn(len(tokens.positions), (shape.heads + 2 * shape.kv_heads) * shape.head_dim, device=DEVICE)
    real = tokens.positions >= 0
    still = torch.ones(3000, shape.head_dim, device=DEVICE), torch.zeros(3000, shape.head_dim, device=DEVICE)

    for layer in range(3):
        TorchOps().rotate_and_write(qkv, still, tokens, pool[:, layer], None)
        expected = TorchOps().attend(qkv, tokens, pool[:, layer], shape)
        found = _triton().attend(qkv, tokens, pool[:, layer], shape)  # type: ignore[attr-defined]
        torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("splits_from", "tile_tokens"),
    [(0, QUERIES_OF_A_TILE), (1 << 30, QUERIES_OF_A_TILE), (0, QUERIES_OF_A_SHORT_TILE)],
    ids=["split", "whole", "short"],
)
def test_tiles_of_padding_and_tokens_of_padding_between_change_nothing(
    splits_from: int, tile_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.engines.pytorch.kernels import triton_ops

    monkeypatch.setattr(triton_ops, "_LONG_CONTEXT", splits_from)
    shape, block_tokens = HeadShape(6, 2, 16, 0.25), 4
    torch.manual_seed(6)
    tokens, blocks = _tokens([33, 5, -1, -1], [(0, 70), (130, 3)], block_tokens, tile_tokens)
    assert tokens.tiles is not None
    padded = replace(tokens, tiles=torch.cat([tokens.tiles, tokens.tiles.new_tensor([[0, 0, -1, 0, 0]] * 3)]))
    pool = _pool(shape, block_tokens, blocks, torch.float32)
    qkv = torch.randn(len(tokens.positions), (shape.heads + 2 * shape.kv_heads) * shape.head_dim, device=DEVICE)
    qkv[2:4] = float("nan")
    expected = _triton().attend(qkv, tokens, pool[:, 0], shape)  # type: ignore[attr-defined]
    found = _triton().attend(qkv, padded, pool[:, 0], shape)  # type: ignore[attr-defined]
    real = tokens.positions >= 0
    assert torch.equal(found[real], expected[real])


def test_values_that_are_no_numbers_harm_no_other_request_of_the_step() -> None:
    shape, block_tokens = HeadShape(4, 4, 32, 0.2), 16
    tokens, blocks = _tokens([], [(0, 7), (0, 9)], block_tokens)
    pool = _pool(shape, block_tokens, blocks, torch.float32)
    qkv = torch.randn(16, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, device=DEVICE)
    expected = _triton().attend(qkv.clone(), tokens, pool[:, 0], shape)  # type: ignore[attr-defined]
    qkv[7:] = float("nan")
    found = _triton().attend(qkv, tokens, pool[:, 0], shape)  # type: ignore[attr-defined]
    assert torch.equal(found[:7], expected[:7])


@pytest.mark.parametrize(("shape", "block_tokens"), SHAPES)
@pytest.mark.parametrize("normalises", [False, True], ids=["plain", "normalised"])
def test_rotated_keys_and_values_land_in_their_blocks_and_nowhere_else(
    shape: HeadShape, block_tokens: int, normalises: bool
) -> None:
    torch.manual_seed(4)
    tokens, blocks = _tokens([33, -1, 5], [(0, 7), (30, 20)], block_tokens)
    pools = [torch.zeros(blocks, 3, 2, shape.kv_heads, block_tokens, shape.head_dim, device=DEVICE) for _ in range(2)]
    qkv = torch.randn(len(tokens.positions), (shape.heads + 2 * shape.kv_heads) * shape.head_dim, device=DEVICE)
    weights = torch.rand(2, shape.head_dim, device=DEVICE)
    norms = HeadNorms(weights[0], weights[1], 1e-6) if normalises else None
    turns = torch.rand(64, shape.head_dim, device=DEVICE) * 6
    rows = [qkv.clone(), qkv.clone()]

    for ops, pool, row in zip((TorchOps(), _triton()), pools, rows, strict=True):
        ops.rotate_and_write(row, (turns.cos(), turns.sin()), tokens, pool[:, 1], norms)  # type: ignore[attr-defined]

    real = tokens.positions >= 0
    torch.testing.assert_close(rows[1][real], rows[0][real], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pools[1], pools[0], rtol=1e-5, atol=1e-5)
    assert not pools[1][0].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_and_gate_round_as_the_library_does(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    x, delta = (torch.randn(5, 96, device=DEVICE).to(dtype) for _ in range(2))
    weight = torch.rand(96, device=DEVICE).to(dtype)
    sums = [x.clone(), x.clone()]

    expected, found = (
        ops.rms_norm(delta, total, weight, 1e-5)  # type: ignore[attr-defined]
        for ops, total in zip((TorchOps(), _triton()), sums, strict=True)
    )

    assert torch.equal(sums[0], sums[1])
    torch.testing.assert_close(found, expected, rtol=0.008 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    both = torch.randn(5, 192, device=DEVICE).to(dtype)
    gated = _triton().gate(both)  # type: ignore[attr-defined]
    torch.testing.assert_close(gated, TorchOps().gate(both), rtol=0.008 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def test_gathered_blocks_are_those_of_the_other_pool() -> None:
    from services.engines.pytorch.kernels import triton_kernels

    source = torch.randint(0, 1 << 40, (9, 300), device=DEVICE)
    pool = torch.zeros(7, 300, dtype=torch.int64, device=DEVICE)
    source_ids, ids = [8, 0, 3, 4], [1, 6, 2, 3]
    both = torch.tensor([*source_ids, *ids], dtype=torch.int32, device=DEVICE)

    triton_kernels.gather_blocks[(4,)](source.data_ptr(), pool, both, 300, 4, PROGRAMS=4, CHUNK=128)

    expected = torch.zeros_like(pool)
    expected[ids] = source[source_ids]
    assert torch.equal(pool, expected)
