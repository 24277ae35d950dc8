"""Triton kernels of attention for chunks of prompts: tiles of neighbouring tokens against their context in the pool.

The pool, its tables and positions are those of triton_kernels.py.
"""

import triton
import triton.language as tl


@triton.jit
def load_context(
    keys,
    kv_stride,
    table,
    block_stride,
    key,
    last,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The keys and values `[tokens, WIDE]` of positions `key`, from blocks; those from `last` on are zeros."""
    at = tl.arange(0, WIDE)
    if WHOLE and DIM == WIDE:
        block = tl.load(table + key // BLOCK_TOKENS).to(tl.int64)
        source = keys + (block * block_stride + (key % BLOCK_TOKENS) * DIM)[:, None] + at[None, :]
        k, v = tl.load(source), tl.load(source + kv_stride)
    else:
        block = tl.load(table + key // BLOCK_TOKENS, mask=key < last, other=0).to(tl.int64)
        source = keys + (block * block_stride + (key % BLOCK_TOKENS) * DIM)[:, None] + at[None, :]
        inside = (key < last)[:, None] & (at < DIM)[None, :]
        k, v = tl.load(source, mask=inside, other=0.0), tl.load(source + kv_stride, mask=inside, other=0.0)
    return k, v


@triton.jit
def attend(largest, total, answer, q, k, v, scale, seen, MASKED: tl.constexpr):
    """Adds keys to the largest scores, the sums and the answers of queries; all powers are of 2. `seen` is a mask."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if MASKED:
        scores = tl.where(seen, scores, -1e30)
    new = tl.maximum(largest, tl.max(scores, 1))
    fade = tl.math.exp2(largest - new)
    weights = tl.math.exp2(scores - new[:, None])
    total = total * fade + tl.sum(weights, 1)
    answer = tl.dot(weights.to(v.dtype), v, answer * fade[:, None], input_precision="ieee")
    return new, total, answer


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["TABLE", "TILES"],
)
def prefill_attention(
    STEP,
    POOL,
    TABLE,
    TILES,
    OUT,
    PARTS,
    EXTREMES,
    block_stride,
    kv_stride,
    table_stride,
    scale,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One query head of up to TILE neighbouring tokens of a chunk, against one split of the context before the chunk:
    a part of the result, or all of it. The last split has the chunk's own tokens too, causally.

    The context is read from the pool, the chunk's keys and values from STEP, a descriptor of the step's rows, by TMA.
    A row of TILES is: index of the first token, number of tokens, the first one's position, the table's row, and the
    number of the chunk's tokens before the first one, a multiple of TILE. A tile of padding has 0 tokens from position
    -1 on. `scale` is that of powers of 2.
    """
    head, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(TILES + tile * 5)
    count = tl.load(TILES + tile * 5 + 1)
    table = TABLE + tl.load(TILES + tile * 5 + 3).to(tl.int64) * table_stride
    before = tl.load(TILES + tile * 5 + 4)
    context = tl.load(TILES + tile * 5 + 2) - before
    row, at = tl.arange(0, TILE), tl.arange(0, WIDE)
    q = STEP.load([first, head * DIM])
    if DIM != WIDE:
        q = tl.where((at < DIM)[None, :], q, 0.0)
    largest = tl.full([TILE], -1e30, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    answer = tl.zeros([TILE, WIDE], tl.float32)
    keys = POOL + (head // GROUP) * (BLOCK_TOKENS * DIM)
    share = tl.cdiv(tl.cdiv(context, SPLITS), TILE) * TILE
    begin = tl.minimum(split * share, context)
    last = tl.minimum(begin + share, context)
    whole = begin + (last - begin) // TILE * TILE
    for start in range(begin, whole, TILE):
        k, v = load_context(keys, kv_stride, table, block_stride, start + row, last, DIM, WIDE, BLOCK_TOKENS, True)
        largest, total, answer = attend(largest, total, answer, q, k, v, scale, True, False)
    if whole < last:
        k, v = load_context(keys, kv_stride, table, block_stride, whole + row, last, DIM, WIDE, BLOCK_TOKENS, False)
        largest, total, answer = attend(largest, total, answer, q, k, v, scale, (whole + row < last)[None, :], True)
    if split == SPLITS - 1:
        key_column = (HEADS + head // GROUP) * DIM
        value_column = key_column + KV_HEADS * DIM
        for start in range(first - before, first, TILE):
            k, v = STEP.load([start, key_column]), STEP.load([start, value_column])
            largest, total, answer = attend(largest, total, answer, q, k, v, scale, True, False)
        seen = row[None, :] <= row[:, None]
        k, v = STEP.load([first, key_column]), STEP.load([first, value_column])
        if count < TILE:
            # What follows is another request's: if its values are no numbers, their product with 0 is none either.
            v = tl.where((row < count)[:, None], v, 0.0)
            largest, total, answer = attend(largest, total, answer, q, k, v, scale, seen, True)
        else:
            largest, total, answer = attend(largest, total, answer, q, k, v, scale, seen, True)
    if SPLITS == 1:
        real = (row < count)[:, None] & (at < DIM)[None, :]
        into = OUT + ((first + row).to(tl.int64) * HEADS + head)[:, None] * DIM + at[None, :]
        tl.store(into, (answer / total[:, None]).to(OUT.dtype.element_ty), mask=real)
    else:
        part = ((tile * HEADS + head) * SPLITS + split) * TILE + row
        real = row < count
        tl.store(PARTS + part[:, None].to(tl.int64) * WIDE + at[None, :], answer, mask=real[:, None])
        tl.store(EXTREMES + part * 2, largest, mask=real)
        tl.store(EXTREMES + part * 2 + 1, total, mask=real)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["TABLE", "TILES"],
)
def short_chunk_attention(
    QKV,
    POOL,
    TABLE,
    TILES,
    PARTS,
    EXTREMES,
    block_stride,
    kv_stride,
    table_stride,
    scale,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS_OF_Q: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """All query heads of one KV head of up to TILE neighbouring tokens of a chunk, against one split of the keys up to
    the last of them: a part of the result. All keys are read from the pool, once for all these heads.

    A row of TILES is that of `prefill_attention`. `scale` is that of powers of 2.
    """
    head, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(TILES + tile * 5)
    count = tl.load(TILES + tile * 5 + 1)
    position = tl.load(TILES + tile * 5 + 2)
    table = TABLE + tl.load(TILES + tile * 5 + 3).to(tl.int64) * table_stride
    context = position + count
    row, at = tl.arange(0, ROWS_OF_Q), tl.arange(0, WIDE)
    token, query_head = row // GROUP, head * GROUP + row % GROUP
    real = token < count
    queries = QKV + (first + token).to(tl.int64)[:, None] * ((HEADS + 2 * KV_HEADS) * DIM)
    q = tl.load(queries + query_head[:, None] * DIM + at[None, :], mask=real[:, None] & (at < DIM)[None, :], other=0.0)
    largest = tl.full([ROWS_OF_Q], -1e30, tl.float32)
    total = tl.zeros([ROWS_OF_Q], tl.float32)
    answer = tl.zeros([ROWS_OF_Q, WIDE], tl.float32)
    keys = POOL + head * (BLOCK_TOKENS * DIM)
    share = tl.cdiv(tl.cdiv(context, SPLITS), KEYS) * KEYS
    begin = tl.minimum(split * share, context)
    last = tl.minimum(begin + share, context)
    # All tokens see the keys up to the first one's own.
    whole = begin + tl.maximum(tl.minimum(last, position + 1) - begin, 0) // KEYS * KEYS
    key = tl.arange(0, KEYS)
    for start in range(begin, whole, KEYS):
        k, v = load_context(keys, kv_stride, table, block_stride, start + key, last, DIM, WIDE, BLOCK_TOKENS, True)
        largest, total, answer = attend(largest, total, answer, q, k, v, scale, True, False)
    for start in range(whole, last, KEYS):
        k, v = load_context(keys, kv_stride, table, block_stride, start + key, last, DIM, WIDE, BLOCK_TOKENS, False)
        seen = (start + key)[None, :] <= tl.minimum(position + token, last - 1)[:, None]
        largest, total, answer = attend(largest, total, answer, q, k, v, scale, seen, True)
    part = ((tile * HEADS + query_head) * SPLITS + split) * TILE + token
    tl.store(PARTS + part[:, None].to(tl.int64) * WIDE + at[None, :], answer, mask=real[:, None])
    tl.store(EXTREMES + part * 2, largest, mask=real)
    tl.store(EXTREMES + part * 2 + 1, total, mask=real)


@triton.jit(do_not_specialize_on_alignment=["TILES"])
def merge_tiles(
    PARTS,
    EXTREMES,
    TILES,
    OUT,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Combines the results of the splits for one query head of one token of a tile."""
    head, tile, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if row >= tl.load(TILES + tile * 5 + 1):
        return
    token = tl.load(TILES + tile * 5).to(tl.int64) + row
    split, at = tl.arange(0, SPLITS), tl.arange(0, WIDE)
    part = ((tile * HEADS + head) * SPLITS + split) * TILE + row
    largest = tl.load(EXTREMES + part * 2)
    total = tl.load(EXTREMES + part * 2 + 1)
    weight = tl.math.exp2(largest - tl.max(largest, 0))
    answer = tl.load(PARTS + part[:, None].to(tl.int64) * WIDE + at[None, :])
    answer = tl.sum(answer * weight[:, None], 0) / tl.sum(weight * total, 0)
    tl.store(OUT + (token * HEADS + head) * DIM + at, answer.to(OUT.dtype.element_ty), mask=at < DIM)
