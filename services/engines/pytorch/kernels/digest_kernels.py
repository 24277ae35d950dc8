"""The Triton kernel that digests KV blocks. It reads each byte once, beside whatever else the GPU does."""

import torch
import triton
import triton.language as tl

_WORDS_OF_A_PROGRAM = 4096


@triton.jit(do_not_specialize=["blocks"])
def _partial_sums(POOL, BLOCKS, WEIGHTS, OUT, words, blocks, CHUNK: tl.constexpr):
    """OUT `[blocks, parts]`: the sum of the words of a part of each block, each times its weight, in 64 bits. A program
    has one part of all blocks, so that their weights, twice as large as a block, are read once.
    """
    part = tl.program_id(0)
    places = part * CHUNK + tl.arange(0, CHUNK)
    inside = places < words
    weights = tl.load(WEIGHTS + places, mask=inside, other=0)
    for row in range(blocks):
        block = tl.load(BLOCKS + row)
        values = tl.load(POOL + block * words + places, mask=inside, other=0).to(tl.int64)
        tl.store(OUT + row * tl.num_programs(0) + part, tl.sum(values * weights, axis=0))


def digest_blocks(pool: torch.Tensor, blocks: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the digests of these blocks of a pool of 32-bit words `[blocks, words]`; ids and weights are int64."""
    words = pool.shape[1]
    parts = triton.cdiv(words, _WORDS_OF_A_PROGRAM)
    sums = torch.empty((len(blocks), parts), dtype=torch.int64, device=pool.device)
    _partial_sums[(parts,)](pool, blocks, weights, sums, words, len(blocks), CHUNK=_WORDS_OF_A_PROGRAM, num_warps=8)
    return sums.sum(1)
