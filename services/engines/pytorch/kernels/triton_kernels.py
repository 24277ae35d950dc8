"""Triton kernels of the fused model: attention over the block pool, and the operations between two matrix products.

Every kernel rounds where transformers' modules round, so that bfloat16 models compute the same numbers. The pool is
`[blocks, layers, 2, kv_heads, block_tokens, head_dim]`; block tables are read in place. A position below 0 is padding.
Kernels are not specialised on numbers that change from step to step: a compilation would stop all requests.
"""

import triton
import triton.language as tl


@triton.jit
def rms_norm(DELTA, RESIDUAL, WEIGHT, OUT, size, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    """A row of `OUT` is the normalised row of `RESIDUAL`, to which, if it ADDS, `DELTA` is added first."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(RESIDUAL + row * size + at, mask=inside, other=0.0)
    if ADDS:
        delta = tl.load(DELTA + row * size + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(RESIDUAL + row * size + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    weight = tl.load(WEIGHT + at, mask=inside, other=0.0)
    normal = (wide * scale).to(x.dtype)
    tl.store(OUT + row * size + at, (normal.to(tl.float32) * weight.to(tl.float32)).to(x.dtype), mask=inside)


@triton.jit
def gate(GATE_UP, OUT, size, BLOCK: tl.constexpr):
    """`silu(gate) * up`, of rows that contain the gate's numbers and then up's."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(GATE_UP + row * 2 * size + at, mask=inside, other=0.0)
    up = tl.load(GATE_UP + row * 2 * size + size + at, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(x.dtype)
    tl.store(OUT + row * size + at, (active.to(tl.float32) * up.to(tl.float32)).to(x.dtype), mask=inside)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["POSITIONS", "ROWS", "TABLE"],
)
def rotate_and_write(
    QKV,
    COS,
    SIN,
    POSITIONS,
    ROWS,
    TABLE,
    Q_WEIGHT,
    K_WEIGHT,
    POOL,
    block_stride,
    kv_stride,
    table_stride,
    eps,
    NORMS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """One head of one token: rotates a query in place, rotates a key into its block, copies a value into its block."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(POSITIONS + token)
    if position < 0:
        return
    half: tl.constexpr = DIM // 2
    at = tl.arange(0, HALF)
    inside = at < half
    source = QKV + (token * (HEADS + 2 * KV_HEADS) + head) * DIM
    low = tl.load(source + at, mask=inside, other=0.0)
    high = tl.load(source + half + at, mask=inside, other=0.0)
    kind = low.dtype
    if head < HEADS + KV_HEADS:
        if NORMS:
            weight = Q_WEIGHT if head < HEADS else K_WEIGHT
            wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
            squares = tl.sum(wide_low * wide_low, 0) + tl.sum(wide_high * wide_high, 0)
            scale = tl.rsqrt(squares / DIM + eps)
            low_weight = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
            high_weight = tl.load(weight + half + at, mask=inside, other=0.0).to(tl.float32)
            low = ((wide_low * scale).to(kind).to(tl.float32) * low_weight).to(kind)
            high = ((wide_high * scale).to(kind).to(tl.float32) * high_weight).to(kind)
        angle = position.to(tl.int64) * DIM
        low_cos = tl.load(COS + angle + at, mask=inside, other=0.0).to(tl.float32)
        low_sin = tl.load(SIN + angle + at, mask=inside, other=0.0).to(tl.float32)
        high_cos = tl.load(COS + angle + half + at, mask=inside, other=0.0).to(tl.float32)
        high_sin = tl.load(SIN + angle + half + at, mask=inside, other=0.0).to(tl.float32)
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        low = ((wide_low * low_cos).to(kind).to(tl.float32) - (wide_high * low_sin).to(kind).to(tl.float32)).to(kind)
        high = ((wide_high * high_cos).to(kind).to(tl.float32) + (wide_low * high_sin).to(kind).to(tl.float32)).to(kind)
    if head < HEADS:
        tl.store(source + at, low, mask=inside)
        tl.store(source + half + at, high, mask=inside)
    else:
        row = tl.load(ROWS + token).to(tl.int64)
        block = tl.load(TABLE + row * table_stride + position // BLOCK_TOKENS).to(tl.int64)
        into = POOL + block * block_stride + (position % BLOCK_TOKENS) * DIM
        if head < HEADS + KV_HEADS:
            into += (head - HEADS) * (BLOCK_TOKENS * DIM)
        else:
            into += kv_stride + (head - HEADS - KV_HEADS) * (BLOCK_TOKENS * DIM)
        tl.store(into + at, low, mask=inside)
        tl.store(into + half + at, high, mask=inside)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["TABLE", "POSITIONS", "ROWS"],
)
def decode_attention(
    QKV,
    POOL,
    TABLE,
    POSITIONS,
    ROWS,
    OUT,
    PARTS,
    EXTREMES,
    block_stride,
    kv_stride,
    table_stride,
    scale,
    GROUP: tl.constexpr,
    ROWS_OF_Q: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One token's queries of one KV head against one split of its context: a part of the result, or all of it."""
    token, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(POSITIONS + token) + 1
    table = TABLE + tl.load(ROWS + token).to(tl.int64) * table_stride
    share = tl.cdiv(tl.cdiv(length, SPLITS), TILE) * TILE
    first = split * share
    last = tl.minimum(first + share, length)
    group, at = tl.arange(0, ROWS_OF_Q), tl.arange(0, WIDE)
    real = (group < GROUP)[:, None] & (at < DIM)[None, :]
    queries = QKV + token * (HEADS + 2 * KV_HEADS) * DIM
    q = tl.load(queries + (head * GROUP + group)[:, None] * DIM + at[None, :], mask=real, other=0.0)
    largest = tl.full([ROWS_OF_Q], -1e30, tl.float32)
    total = tl.zeros([ROWS_OF_Q], tl.float32)
    answer = tl.zeros([ROWS_OF_Q, WIDE], tl.float32)
    keys = POOL + head * (BLOCK_TOKENS * DIM)
    for start in range(first, last, TILE):
        position = start + tl.arange(0, TILE)
        seen = position < last
        block = tl.load(table + position // BLOCK_TOKENS, mask=seen, other=0).to(tl.int64)
        place = block * block_stride + (position % BLOCK_TOKENS) * DIM
        inside = seen[:, None] & (at < DIM)[None, :]
        k = tl.load(keys + place[:, None] + at[None, :], mask=inside, other=0.0)
        v = tl.load(keys + kv_stride + place[:, None] + at[None, :], mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, -1e30)
        new = tl.maximum(largest, tl.max(scores, 1))
        fade = tl.exp(largest - new)
        weights = tl.exp(scores - new[:, None])
        total = total * fade + tl.sum(weights, 1)
        answer = answer * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = new
    if SPLITS == 1:
        answer = answer / tl.maximum(total, 1e-30)[:, None]
        into = OUT + token * HEADS * DIM + (head * GROUP + group)[:, None] * DIM + at[None, :]
        tl.store(into, answer.to(OUT.dtype.element_ty), mask=real)
    else:
        part = ((token * KV_HEADS + head) * SPLITS + split) * ROWS_OF_Q + group
        tl.store(PARTS + part[:, None] * WIDE + at[None, :], answer)
        tl.store(EXTREMES + part * 2, largest)
        tl.store(EXTREMES + part * 2 + 1, total)


@triton.jit
def merge_splits(
    PARTS,
    EXTREMES,
    OUT,
    GROUP: tl.constexpr,
    ROWS_OF_Q: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Combines the results of the splits for one query head."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, at = tl.arange(0, SPLITS), tl.arange(0, WIDE)
    part = ((token * KV_HEADS + head // GROUP) * SPLITS + split) * ROWS_OF_Q + head % GROUP
    largest = tl.load(EXTREMES + part * 2)
    total = tl.load(EXTREMES + part * 2 + 1)
    weight = tl.exp(largest - tl.max(largest, 0))
    answer = tl.load(PARTS + part[:, None] * WIDE + at[None, :])
    answer = tl.sum(answer * weight[:, None], 0) / tl.maximum(tl.sum(weight * total, 0), 1e-30)
    into = OUT + token * HEADS * DIM + head * DIM + at
    tl.store(into, answer.to(OUT.dtype.element_ty), mask=at < DIM)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["TABLE", "TILES"],
)
def prefill_attention(
    QKV,
    POOL,
    TABLE,
    TILES,
    OUT,
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
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
):
    """One query head of up to QUERIES neighbouring tokens of one sequence, causally, against all tokens before them.

    A row of TILES is: index of the first token, number of tokens, the first one's position, the table's row.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(TILES + tile * 4).to(tl.int64)
    count = tl.load(TILES + tile * 4 + 1)
    position = tl.load(TILES + tile * 4 + 2)
    table = TABLE + tl.load(TILES + tile * 4 + 3).to(tl.int64) * table_stride
    row, at = tl.arange(0, QUERIES), tl.arange(0, WIDE)
    real = (row < count)[:, None] & (at < DIM)[None, :]
    place = (first + row) * (HEADS + 2 * KV_HEADS) * DIM + head * DIM
    q = tl.load(QKV + place[:, None] + at[None, :], mask=real, other=0.0)
    largest = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    answer = tl.zeros([QUERIES, WIDE], tl.float32)
    keys = POOL + (head // GROUP) * (BLOCK_TOKENS * DIM)
    end = position + count
    for start in range(0, end, TILE):
        key = start + tl.arange(0, TILE)
        known = key < end
        block = tl.load(table + key // BLOCK_TOKENS, mask=known, other=0).to(tl.int64)
        offset = block * block_stride + (key % BLOCK_TOKENS) * DIM
        inside = known[:, None] & (at < DIM)[None, :]
        k = tl.load(keys + offset[:, None] + at[None, :], mask=inside, other=0.0)
        v = tl.load(keys + kv_stride + offset[:, None] + at[None, :], mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if start + TILE > position:
            scores = tl.where(key[None, :] <= (position + row)[:, None], scores, -1e30)
        new = tl.maximum(largest, tl.max(scores, 1))
        fade = tl.exp(largest - new)
        weights = tl.exp(scores - new[:, None])
        total = total * fade + tl.sum(weights, 1)
        answer = answer * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = new
    into = OUT + ((first + row) * HEADS + head)[:, None] * DIM + at[None, :]
    tl.store(into, (answer / total[:, None]).to(OUT.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["IDS"])
def gather_blocks(SOURCE, POOL, IDS, words, count, PROGRAMS: tl.constexpr, CHUNK: tl.constexpr):
    """Copies blocks of `words` 8-byte words from another process's pool, whose address is a number, into this one's.

    IDS has `count` ids of the other pool, then as many of this one. PROGRAMS programs share the chunks of all blocks.
    """
    source = SOURCE.to(tl.pointer_type(tl.int64))
    chunks = tl.cdiv(words, CHUNK)
    for piece in range(tl.program_id(0), count * chunks, PROGRAMS):
        index = piece // chunks
        at = (piece % chunks) * CHUNK + tl.arange(0, CHUNK)
        inside = at < words
        start = tl.load(IDS + index).to(tl.int64) * words
        into = tl.load(IDS + count + index).to(tl.int64) * words
        tl.store(POOL + into + at, tl.load(source + start + at, mask=inside), mask=inside)
