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
    AT_ONCE: tl.constexpr,
):
    """AT_ONCE heads of one token: rotates queries and keys in place, and copies keys and values into their block."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(POSITIONS + token)
    if position < 0:
        return
    half: tl.constexpr = DIM // 2
    head = (tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE))[:, None]
    at = tl.arange(0, HALF)[None, :]
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    real = (head < HEADS + 2 * KV_HEADS) & (at < half)
    source = QKV + token * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM + at
    low = tl.load(source, mask=real, other=0.0)
    high = tl.load(source + half, mask=real, other=0.0)
    kind = low.dtype
    turned_low, turned_high = low, high
    if NORMS:
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        squares = tl.sum(wide_low * wide_low, 1) + tl.sum(wide_high * wide_high, 1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        weight = tl.where(is_query, Q_WEIGHT, K_WEIGHT) + at
        low_weight = tl.load(weight, mask=real, other=0.0).to(tl.float32)
        high_weight = tl.load(weight + half, mask=real, other=0.0).to(tl.float32)
        turned_low = ((wide_low * scale).to(kind).to(tl.float32) * low_weight).to(kind)
        turned_high = ((wide_high * scale).to(kind).to(tl.float32) * high_weight).to(kind)
    angle = position.to(tl.int64) * DIM + at
    inside = at < half
    low_cos = tl.load(COS + angle, mask=inside, other=0.0).to(tl.float32)
    low_sin = tl.load(SIN + angle, mask=inside, other=0.0).to(tl.float32)
    high_cos = tl.load(COS + angle + half, mask=inside, other=0.0).to(tl.float32)
    high_sin = tl.load(SIN + angle + half, mask=inside, other=0.0).to(tl.float32)
    a, b = turned_low.to(tl.float32), turned_high.to(tl.float32)
    turned_low = ((a * low_cos).to(kind).to(tl.float32) - (b * low_sin).to(kind).to(tl.float32)).to(kind)
    turned_high = ((b * high_cos).to(kind).to(tl.float32) + (a * high_sin).to(kind).to(tl.float32)).to(kind)
    tl.store(source, turned_low, mask=real & ~is_value)
    tl.store(source + half, turned_high, mask=real & ~is_value)
    row = tl.load(ROWS + token).to(tl.int64)
    block = tl.load(TABLE + row * table_stride + position // BLOCK_TOKENS).to(tl.int64)
    of_kind = tl.where(is_value, kv_stride - KV_HEADS * (BLOCK_TOKENS * DIM), 0)
    into = POOL + block * block_stride + (position % BLOCK_TOKENS) * DIM
    into = into + of_kind + (head - HEADS) * (BLOCK_TOKENS * DIM) + at
    tl.store(into, tl.where(is_value, low, turned_low), mask=real & (head >= HEADS))
    tl.store(into + half, tl.where(is_value, high, turned_high), mask=real & (head >= HEADS))


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


@triton.jit(do_not_specialize=["SOURCE", "INTO", "words", "source_stride", "into_stride"])
def copy_rows(SOURCE, INTO, words, source_stride, into_stride, CHUNK: tl.constexpr):
    """Copies rows of `words` 4-byte words between addresses, of which either may be pinned host memory."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    source = SOURCE.to(tl.pointer_type(tl.int32)) + row * source_stride
    into = INTO.to(tl.pointer_type(tl.int32)) + row * into_stride
    tl.store(into + at, tl.load(source + at, mask=at < words, other=0), mask=at < words)
