"""The Triton kernel that digests KV blocks. It reads each byte once, beside whatever else the GPU does."""

import torch
import triton
import triton.language as tl

_WORDS_OF_A_PROGRAM = 8192


@triton.jit
def _partial_sums(POOL, BLOCKS, WEIGHTS, OUT, words, CHUNK: tl.constexpr):
    """OUT `[blocks, parts]`: the sum of the words of a part of a block, each times its weight, in 64 bits."""
    row, part = tl.program_id(0), tl.program_id(1)
    block = tl.load(BLOCKS + row)
    places = part * CHUNK + tl.arange(0, CHUNK)
    inside = places < words
    values = tl.load(POOL + block * words + places, mask=inside, other=0).to(tl.int64)
    weights = tl.load(WEIGHTS + places, mask=inside, other=0)
    tl.store(OUT + row * tl.num_programs(1) + part, tl.sum(values * weights, axis=0))


def digest_blocks(pool: torch.Tensor, blocks: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the digests of these blocks of a pool of 32-bit words `[blocks, words]`; ids and weights are int64."""
    words = pool.shape[1]
    parts = triton.cdiv(words, _WORDS_OF_A_PROGRAM)
    sums = torch.empty((len(blocks), parts), dtype=torch.int64, device=pool.device)
    _partial_sums[(len(blocks), parts)](pool, blocks, weights, sums, words, CHUNK=_WORDS_OF_A_PROGRAM)
    return sums.sum(1)
