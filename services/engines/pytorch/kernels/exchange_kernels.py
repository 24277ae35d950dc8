"""Triton kernels by which the ranks of one host exchange rows directly, in each other's GPU memory.

Each rank has a region of the same layout. A rank writes its part into the regions of the others, raises a flag there,
and waits for the flags of the others in its own. Flags and counters are numbers of turns, which only grow: they are
in device memory, so a captured graph counts on. A row has two places, used in turn. A rank that writes turn t has seen
the flags of turn t - 1, which the others raised after they had read turn t - 2: nothing is overwritten before it is
read.

A wait ends with the flag, or when the host has set STOPPED, or after _MOST_POLLS polls (minutes) by a trap, which ends
the process's CUDA context.
"""

import triton
import triton.language as tl

_MOST_POLLS = tl.constexpr(1 << 28)
_POLLS_BETWEEN_LOOKS = tl.constexpr(4096)


@triton.jit
def _wait(flag, turn, STOPPED):
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    polls = 0
    while seen < turn:
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        polls += 1
        if polls % _POLLS_BETWEEN_LOOKS == 0:
            if tl.load(STOPPED, volatile=True) != 0:
                seen = turn
        if polls == _MOST_POLLS:
            tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def exchange_rows(
    PART,
    REGION,
    FLAGS,
    OFFSETS,
    COUNTERS,
    STOPPED,
    RESIDUAL,
    WEIGHT,
    OUT,
    eps,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ITEM: tl.constexpr,
    SHARES: tl.constexpr,
    NORMALISES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row of OUT is the sum of the ranks' rows of PART, in the order of ranks; if it SHARES, rank 0's row.

    If it NORMALISES, the sum is added to the row of RESIDUAL, and OUT is the normalised result. OFFSETS has, for each
    rank, the bytes from this rank's region to that one's. REGION is `[2, RANKS, ROWS, WIDTH]`, FLAGS `[RANKS, ROWS]`.
    """
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    turn = tl.load(COUNTERS + row) + 1
    place = turn % 2 * (RANKS * ROWS * WIDTH) + row * WIDTH
    part = tl.load(PART + row * WIDTH + at, mask=inside, other=0.0)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            theirs = tl.multiple_of(tl.load(OFFSETS + peer) // ITEM, 16)
            tl.store(REGION + theirs + place + RANK * ROWS * WIDTH + at, part, mask=inside)
    tl.debug_barrier()
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            flags = FLAGS + tl.load(OFFSETS + peer) // 8
            tl.atomic_xchg(flags + RANK * ROWS + row, turn, sem="release", scope="sys")
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            _wait(FLAGS + peer * ROWS + row, turn, STOPPED)
    tl.debug_barrier()
    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(1 if SHARES else RANKS):
        if peer == RANK:
            total += part.to(tl.float32)
        else:
            written = REGION + place + peer * ROWS * WIDTH + at
            total += tl.load(written, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    result = total.to(part.dtype)
    if NORMALISES:
        x = tl.load(RESIDUAL + row * WIDTH + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + result.to(tl.float32)).to(x.dtype)
        tl.store(RESIDUAL + row * WIDTH + at, x, mask=inside)
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
        weight = tl.load(WEIGHT + at, mask=inside, other=0.0)
        normal = (wide * scale).to(x.dtype)
        result = (normal.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
    tl.store(OUT + row * WIDTH + at, result, mask=inside)
    tl.store(COUNTERS + row, turn)


@triton.jit
def gather_columns(
    PART,
    REGION,
    FLAGS,
    OFFSETS,
    COUNTERS,
    STOPPED,
    OUT,
    width,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ITEM: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """On rank 0, a row of OUT is the ranks' rows of PART, one behind the other, cut off at `width`.

    REGION is `[RANKS, ROWS, WIDTH]`, FLAGS `[RANKS, ROWS * CHUNKS]`. There is one place for each row: between two calls
    the ranks must have exchanged rows, so that rank 0 has read what the others overwrite.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    index = row * CHUNKS + chunk
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    turn = tl.load(COUNTERS + index) + 1
    part = tl.load(PART + row * WIDTH + at, mask=inside, other=0.0)
    if RANK == 0:
        tl.store(OUT + row * width + at, part, mask=inside & (at < width))
        for peer in tl.static_range(1, RANKS):
            _wait(FLAGS + peer * ROWS * CHUNKS + index, turn, STOPPED)
            tl.debug_barrier()
            place = peer * ROWS * WIDTH + row * WIDTH + at
            theirs = tl.load(REGION + place, mask=inside, other=0.0, cache_modifier=".cg")
            column = peer * WIDTH + at
            tl.store(OUT + row * width + column, theirs, mask=inside & (column < width))
    else:
        leader = tl.multiple_of(tl.load(OFFSETS) // ITEM, 16)
        tl.store(REGION + leader + RANK * ROWS * WIDTH + row * WIDTH + at, part, mask=inside)
        tl.debug_barrier()
        flags = FLAGS + tl.load(OFFSETS) // 8
        tl.atomic_xchg(flags + RANK * ROWS * CHUNKS + index, turn, sem="release", scope="sys")
    tl.store(COUNTERS + index, turn)
