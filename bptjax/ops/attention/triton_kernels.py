"""Attention as Triton kernels: what one program does. `triton` launches them.

A program of the forward pass and of dq owns a block of queries of one head and walks the key blocks
that it may see; one of dk and dv owns a block of keys of one key head and walks, for each query
head that reads it, the query blocks that may see it. `ranges` `[B or 1, blocks, 4]` says which:
tiles of [first, whole) and [part, last) need the mask, those of [whole, part) are seen whole, and
dead ones outside are not visited. With LISTED they are ranges of the list `tiles` `[B or 1, blocks,
LISTED]`; else of the blocks themselves.

Logits are kept in units of log 2, for exp2: UNIT is what a product, or its capped form, is worth in
them. ALiBi is counted from the first position of the block that the program owns; in causal
attention it is linear in both positions, and the queries' part, the same for all keys, is left out
of the logits and put into lse. Rows past the end are loaded as 0 and never stored.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(base, rows, columns, stride, limit, H: tl.constexpr, BH: tl.constexpr, ALL: tl.constexpr):
    """Tile [rows, columns]; ALL: every row is there."""
    at = base + rows[:, None] * stride + columns[None, :]
    if ALL and H == BH:
        return tl.load(at)
    if ALL:
        return tl.load(at, mask=columns[None, :] < H, other=0.0)
    return tl.load(at, mask=(rows[:, None] < limit) & (columns[None, :] < H), other=0.0)


@triton.jit
def _load_turned(
    base, rows, columns, stride, limit, H: tl.constexpr, BH: tl.constexpr, ALL: tl.constexpr
):
    """The same tile transposed, [columns, rows]."""
    at = base + rows[None, :] * stride + columns[:, None]
    if ALL and H == BH:
        return tl.load(at)
    if ALL:
        return tl.load(at, mask=columns[:, None] < H, other=0.0)
    return tl.load(at, mask=(rows[None, :] < limit) & (columns[:, None] < H), other=0.0)


@triton.jit
def _round(x0, x1, turn: tl.constexpr):
    x0 += x1
    x1 = (x1 << turn) | (x1 >> (32 - turn))
    return x0, x1 ^ x0


@triton.jit
def _odd_rounds(x0, x1):
    x0, x1 = _round(x0, x1, 13)
    x0, x1 = _round(x0, x1, 15)
    x0, x1 = _round(x0, x1, 26)
    return _round(x0, x1, 6)


@triton.jit
def _even_rounds(x0, x1):
    x0, x1 = _round(x0, x1, 17)
    x0, x1 = _round(x0, x1, 29)
    x0, x1 = _round(x0, x1, 16)
    return _round(x0, x1, 24)


@triton.jit
def _threefry(key0, key1, x0, x1):
    """First word of Threefry-2x32 with 20 rounds, all uint32. Salmon et al. 2011."""
    key2 = key0 ^ key1 ^ 0x1BD11BDA
    x0, x1 = _odd_rounds(x0 + key0, x1 + key1)
    x0, x1 = _even_rounds(x0 + key1, x1 + (key2 + 1))
    x0, x1 = _odd_rounds(x0 + key2, x1 + (key0 + 2))
    x0, x1 = _even_rounds(x0 + key0, x1 + (key1 + 3))
    x0, x1 = _odd_rounds(x0 + key1, x1 + (key2 + 4))
    return x0 + key2


@triton.jit
def _cap(raw, scale: tl.constexpr, SOFTCAP: tl.constexpr, FAST: tl.constexpr):
    """Raw products q·k, or under a soft cap tanh(scale · raw / SOFTCAP), and the cap's derivative.
    FAST: by the GPU's own tanh, to 11 bits."""
    if SOFTCAP is None:
        bent, slope = raw, 1.0
    else:
        if FAST:
            bent = tl.inline_asm_elementwise(
                "tanh.approx.f32 $0, $1;",
                "=f,f",
                [raw * (scale / SOFTCAP)],
                dtype=tl.float32,
                is_pure=True,
                pack=1,
            )
        else:
            # tanh(x) = 1 - 2 / (exp(2x) + 1)
            bent = 1.0 - 2.0 / (tl.exp2(raw * (2.0 * scale / SOFTCAP * LOG2E)) + 1.0)
        slope = 1.0 - bent * bent
    return bent, slope


@triton.jit
def _biased(logits, p, s, slope, ALIBI: tl.constexpr, CAUSAL: tl.constexpr):
    """With ALiBi from float positions that are shaped to broadcast; in causal attention without the
    queries' part."""
    if ALIBI:
        if CAUSAL:
            logits += s * slope
        else:
            logits -= tl.abs(p - s) * slope
    return logits


@triton.jit
def _seen(
    p,
    s,
    p_segment,
    s_segment,
    inside,
    p_global,
    s_global,
    block_mask,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SEGMENTS: tl.constexpr,
    GLOBAL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Which pairs are seen; `inside`: both are there. All are shaped to broadcast."""
    seen = inside
    if CAUSAL:
        seen &= s <= p
    before = seen
    if WINDOW is not None:
        seen &= p - s < WINDOW
        if not CAUSAL:
            seen &= s - p < WINDOW
    if BLOCK_SIZE is not None:
        row, column = p // BLOCK_SIZE, s // BLOCK_SIZE
        known = seen & (row < BLOCK_ROWS) & (column < BLOCK_COLUMNS)
        seen = tl.load(block_mask + row * BLOCK_COLUMNS + column, mask=known, other=0) != 0
    if GLOBAL:
        seen |= before & ((p_global != 0) | (s_global != 0))
    if SEGMENTS:
        seen &= (p_segment == s_segment) & (p_segment != 0)
    return seen


@triton.jit
def _kept(key0, key1, p, s, DROPOUT: tl.constexpr, LEAST: tl.constexpr):
    """Dropout's factors: 0, or 1 / (1 - rate) where the random bits are at least LEAST."""
    zero = p * 0 + s * 0
    bits = _threefry(key0, key1, (p + zero).to(tl.uint32), (s + zero).to(tl.uint32))
    return tl.where(bits >= LEAST, 1.0 / (1.0 - DROPOUT), 0.0)


@triton.jit
def _forward_range(
    acc,
    top,
    total,
    q,
    first,
    last,
    gap_at,
    gap,
    k_base,
    v_base,
    p,
    p_near,
    p_segment,
    rows_inside,
    k_positions,
    k_segments,
    slope,
    origin,
    key0,
    key1,
    tiles,
    p_global,
    k_globals,
    block_mask,
    S: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    scale: tl.constexpr,
    UNIT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr,
    LEAST: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SEGMENTS: tl.constexpr,
    LISTED: tl.constexpr,
    GLOBAL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Takes key blocks [first, last) into the running softmax; where not WHOLE, `gap` numbers are
    left out at `gap_at`."""
    h = tl.arange(0, BH)
    # A tile of the block mask needs the shared memory of a pipeline.
    for x in tl.range(first, last, num_stages=None if WHOLE or BLOCK_SIZE is None else 1):
        number = x if WHOLE else x + tl.where(x >= gap_at, gap, 0)
        j = tl.load(tiles + number) if LISTED else number
        here, columns = tl.arange(0, BK), j * BK + tl.arange(0, BK)
        # A row's offset may need 64 bits: T · N · H passes 2³¹.
        at = tl.cast(j, tl.int64) * (BK * K * H)
        k = _load_turned(k_base + at, here, h, K * H, S - j * BK, H, BH, WHOLE)
        raw = tl.dot(q, k, input_precision="ieee")
        s = columns
        if ALIBI or DROPOUT > 0.0 or not WHOLE:
            s = tl.load(k_positions + columns, mask=columns < S, other=0)
        capped, _ = _cap(raw, scale, SOFTCAP, FAST)
        s_near = (s - origin).to(tl.float32)
        logits = _biased(capped * UNIT, p_near[:, None], s_near[None, :], slope, ALIBI, CAUSAL)
        if not WHOLE:
            s_segment = columns
            if SEGMENTS:
                s_segment = tl.load(k_segments + columns, mask=columns < S, other=0)
            s_global = columns
            if GLOBAL:
                s_global = tl.load(k_globals + columns, mask=columns < S, other=0)
            seen = _seen(
                p[:, None],
                s[None, :],
                p_segment[:, None],
                s_segment[None, :],
                rows_inside[:, None] & (columns[None, :] < S),
                p_global[:, None],
                s_global[None, :],
                block_mask,
                CAUSAL,
                WINDOW,
                SEGMENTS,
                GLOBAL,
                BLOCK_SIZE,
                BLOCK_ROWS,
                BLOCK_COLUMNS,
            )
            logits = tl.where(seen, logits, float("-inf"))
        if WHOLE and not ALIBI and UNIT > 0.0:
            # One multiply-add a weight.
            highest = tl.maximum(top, tl.max(capped, 1) * UNIT)
            anchor = highest
            weights = tl.exp2(capped * UNIT - anchor[:, None])
        else:
            highest = tl.maximum(top, tl.max(logits, 1))
            # A row that has seen nothing yet keeps its exponents finite.
            anchor = tl.where(highest == float("-inf"), 0.0, highest) if not WHOLE else highest
            weights = tl.exp2(logits - anchor[:, None])
        fade = tl.exp2(top - anchor)
        total = total * fade + tl.sum(weights, 1)
        if DROPOUT > 0.0:
            weights *= _kept(key0, key1, p[:, None], s[None, :], DROPOUT, LEAST)
        acc = acc * fade[:, None]
        v = _load(v_base + at, here, h, K * H, S - j * BK, H, BH, WHOLE)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        top = highest
    return acc, top, total


@triton.jit
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    ranges_ptr,
    positions_ptr,
    k_positions_ptr,
    segments_ptr,
    k_segments_ptr,
    slopes_ptr,
    keys_ptr,
    tiles_ptr,
    globals_ptr,
    k_globals_ptr,
    block_mask_ptr,
    out_ptr,
    lse_ptr,
    T: tl.constexpr,
    S: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    BH: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    RANGE_ROWS: tl.constexpr,
    POSITION_ROWS: tl.constexpr,
    scale: tl.constexpr,
    UNIT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr,
    LEAST: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SEGMENTS: tl.constexpr,
    LISTED: tl.constexpr,
    GLOBAL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """out `[B, T, N, H]` and lse `[B, T, N]` of a block of queries. Grid (query blocks, N, B)."""
    blocks: tl.constexpr = (T + BQ - 1) // BQ
    # Late blocks see most keys: they start first.
    i = blocks - 1 - tl.program_id(0)
    n, b = tl.program_id(1), tl.program_id(2)
    n_k = n // (N // K)
    b64 = b.to(tl.int64)
    rows, h = i * BQ + tl.arange(0, BQ), tl.arange(0, BH)
    rows64 = rows.to(tl.int64)
    inside = rows < T
    q = _load(q_ptr + (b64 * T * N + n) * H, rows64, h, N * H, T, H, BH, False)
    at = positions_ptr + (b64 * T if POSITION_ROWS > 1 else 0)
    p = tl.load(at + rows, mask=inside, other=0)
    p_segment = rows
    if SEGMENTS:
        p_segment = tl.load(segments_ptr + b64 * T + rows, mask=inside, other=0)
    p_global = rows
    if GLOBAL:
        p_global = tl.load(globals_ptr + b64 * T + rows, mask=inside, other=0)
    slope = tl.load(slopes_ptr + n) * LOG2E if ALIBI else 0.0
    origin = tl.load(at + i * BQ) if ALIBI else 0
    p_near = (p - origin).to(tl.float32)
    key0, key1 = 0, 0
    if DROPOUT > 0.0:
        key0, key1 = tl.load(keys_ptr + (b * N + n) * 2), tl.load(keys_ptr + (b * N + n) * 2 + 1)
    around = ranges_ptr + ((b64 * blocks if RANGE_ROWS > 1 else 0) + i) * 4
    first, whole = tl.load(around), tl.load(around + 1)
    part, last = tl.load(around + 2), tl.load(around + 3)
    gap = part - whole
    tiles = tiles_ptr + ((b64 * blocks if RANGE_ROWS > 1 else 0) + i).to(tl.int64) * LISTED
    k_base = k_ptr + (b64 * S * K + n_k) * H
    v_base = v_ptr + (b64 * S * K + n_k) * H
    k_positions = k_positions_ptr + (b64 * S if POSITION_ROWS > 1 else 0)
    k_segments = k_segments_ptr + b64 * S
    k_globals = k_globals_ptr + b64 * S
    acc = tl.zeros([BQ, BH], tl.float32)
    top = tl.full([BQ], float("-inf"), tl.float32)
    total = tl.zeros([BQ], tl.float32)
    # The whole ones first: a row that they serve has seen something when the mask comes.
    acc, top, total = _forward_range(
        acc, top, total, q, whole, part, 0, 0, k_base, v_base, p, p_near, p_segment,
        inside, k_positions, k_segments, slope, origin, key0, key1, tiles, p_global, k_globals,
        block_mask_ptr, S, K, H, BH, BK, scale, UNIT, SOFTCAP, FAST, ALIBI, DROPOUT, LEAST, CAUSAL,
        WINDOW, SEGMENTS, LISTED, GLOBAL, BLOCK_SIZE, BLOCK_ROWS, BLOCK_COLUMNS, True,
    )  # fmt: skip
    acc, top, total = _forward_range(
        acc, top, total, q, first, last - gap, whole, gap, k_base, v_base, p, p_near, p_segment,
        inside, k_positions, k_segments, slope, origin, key0, key1, tiles, p_global, k_globals,
        block_mask_ptr, S, K, H, BH, BK, scale, UNIT, SOFTCAP, FAST, ALIBI, DROPOUT, LEAST, CAUSAL,
        WINDOW, SEGMENTS, LISTED, GLOBAL, BLOCK_SIZE, BLOCK_ROWS, BLOCK_COLUMNS, False,
    )  # fmt: skip
    some = total > 0.0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    if ALIBI and CAUSAL:
        top -= p_near * slope
    lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) / LOG2E, float("-inf"))
    out = out_ptr + (b64 * T * N + n) * H + rows64[:, None] * (N * H) + h[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (h[None, :] < H))
    tl.store(lse_ptr + b64 * T * N + rows64 * N + n, lse, mask=inside)


@triton.jit
def _dq_range(
    dq,
    q,
    dout,
    lse,
    delta,
    first,
    last,
    gap_at,
    gap,
    k_base,
    v_base,
    p,
    p_near,
    p_segment,
    rows_inside,
    k_positions,
    k_segments,
    slope,
    origin,
    key0,
    key1,
    tiles,
    p_global,
    k_globals,
    block_mask,
    S: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    scale: tl.constexpr,
    UNIT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr,
    LEAST: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SEGMENTS: tl.constexpr,
    LISTED: tl.constexpr,
    GLOBAL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Adds the share of key blocks [first, last), as in `_forward_range`, not yet times `scale`."""
    h = tl.arange(0, BH)
    for x in range(first, last):
        number = x if WHOLE else x + tl.where(x >= gap_at, gap, 0)
        j = tl.load(tiles + number) if LISTED else number
        here, columns = tl.arange(0, BK), j * BK + tl.arange(0, BK)
        # A row's offset may need 64 bits: T · N · H passes 2³¹.
        at = tl.cast(j, tl.int64) * (BK * K * H)
        k = _load_turned(k_base + at, here, h, K * H, S - j * BK, H, BH, WHOLE)
        v = _load_turned(v_base + at, here, h, K * H, S - j * BK, H, BH, WHOLE)
        raw = tl.dot(q, k, input_precision="ieee")
        s = columns
        if ALIBI or DROPOUT > 0.0 or not WHOLE:
            s = tl.load(k_positions + columns, mask=columns < S, other=0)
        capped, bend = _cap(raw, scale, SOFTCAP, FAST)
        s_near = (s - origin).to(tl.float32)
        logits = _biased(capped * UNIT, p_near[:, None], s_near[None, :], slope, ALIBI, CAUSAL)
        weights = tl.exp2(logits - lse[:, None])
        if not WHOLE:
            s_segment = columns
            if SEGMENTS:
                s_segment = tl.load(k_segments + columns, mask=columns < S, other=0)
            s_global = columns
            if GLOBAL:
                s_global = tl.load(k_globals + columns, mask=columns < S, other=0)
            seen = _seen(
                p[:, None],
                s[None, :],
                p_segment[:, None],
                s_segment[None, :],
                rows_inside[:, None] & (columns[None, :] < S),
                p_global[:, None],
                s_global[None, :],
                block_mask,
                CAUSAL,
                WINDOW,
                SEGMENTS,
                GLOBAL,
                BLOCK_SIZE,
                BLOCK_ROWS,
                BLOCK_COLUMNS,
            )
            weights = tl.where(seen, weights, 0.0)
        dweights = tl.dot(dout, v, input_precision="ieee")
        if DROPOUT > 0.0:
            dweights *= _kept(key0, key1, p[:, None], s[None, :], DROPOUT, LEAST)
        dlogits = weights * (dweights - delta[:, None])
        if SOFTCAP is not None:
            dlogits *= bend
        dq = tl.dot(dlogits.to(k.dtype), tl.trans(k), dq, input_precision="ieee")
    return dq


@triton.jit
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    ranges_ptr,
    positions_ptr,
    k_positions_ptr,
    segments_ptr,
    k_segments_ptr,
    slopes_ptr,
    keys_ptr,
    tiles_ptr,
    globals_ptr,
    k_globals_ptr,
    block_mask_ptr,
    dq_ptr,
    T: tl.constexpr,
    S: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    BH: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    RANGE_ROWS: tl.constexpr,
    POSITION_ROWS: tl.constexpr,
    scale: tl.constexpr,
    UNIT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr,
    LEAST: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SEGMENTS: tl.constexpr,
    LISTED: tl.constexpr,
    GLOBAL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """dq `[B, T, N, H]` of a block of queries. Grid (query blocks, N, B). lse and delta `[B, N,
    T]`, lse over log 2 and +inf where nothing is seen."""
    blocks: tl.constexpr = (T + BQ - 1) // BQ
    i = blocks - 1 - tl.program_id(0)
    n, b = tl.program_id(1), tl.program_id(2)
    n_k = n // (N // K)
    b64 = b.to(tl.int64)
    rows, h = i * BQ + tl.arange(0, BQ), tl.arange(0, BH)
    rows64 = rows.to(tl.int64)
    inside = rows < T
    q = _load(q_ptr + (b64 * T * N + n) * H, rows64, h, N * H, T, H, BH, False)
    dout = _load(dout_ptr + (b64 * T * N + n) * H, rows64, h, N * H, T, H, BH, False)
    at = (b64 * N + n) * T + rows
    lse = tl.load(lse_ptr + at, mask=inside, other=float("inf"))
    delta = tl.load(delta_ptr + at, mask=inside, other=0.0)
    at = positions_ptr + (b64 * T if POSITION_ROWS > 1 else 0)
    p = tl.load(at + rows, mask=inside, other=0)
    p_segment = rows
    if SEGMENTS:
        p_segment = tl.load(segments_ptr + b64 * T + rows, mask=inside, other=0)
    p_global = rows
    if GLOBAL:
        p_global = tl.load(globals_ptr + b64 * T + rows, mask=inside, other=0)
    slope = tl.load(slopes_ptr + n) * LOG2E if ALIBI else 0.0
    origin = tl.load(at + i * BQ) if ALIBI else 0
    p_near = (p - origin).to(tl.float32)
    key0, key1 = 0, 0
    if DROPOUT > 0.0:
        key0, key1 = tl.load(keys_ptr + (b * N + n) * 2), tl.load(keys_ptr + (b * N + n) * 2 + 1)
    around = ranges_ptr + ((b64 * blocks if RANGE_ROWS > 1 else 0) + i) * 4
    first, whole = tl.load(around), tl.load(around + 1)
    part, last = tl.load(around + 2), tl.load(around + 3)
    gap = part - whole
    tiles = tiles_ptr + ((b64 * blocks if RANGE_ROWS > 1 else 0) + i).to(tl.int64) * LISTED
    k_base = k_ptr + (b64 * S * K + n_k) * H
    v_base = v_ptr + (b64 * S * K + n_k) * H
    k_positions = k_positions_ptr + (b64 * S if POSITION_ROWS > 1 else 0)
    k_segments = k_segments_ptr + b64 * S
    k_globals = k_globals_ptr + b64 * S
    if ALIBI and CAUSAL:
        lse += p_near * slope
    dq = tl.zeros([BQ, BH], tl.float32)
    dq = _dq_range(
        dq, q, dout, lse, delta, whole, part, 0, 0, k_base, v_base, p, p_near, p_segment,
        inside, k_positions, k_segments, slope, origin, key0, key1, tiles, p_global, k_globals,
        block_mask_ptr, S, K, H, BH, BK, scale, UNIT, SOFTCAP, FAST, ALIBI, DROPOUT, LEAST, CAUSAL,
        WINDOW, SEGMENTS, LISTED, GLOBAL, BLOCK_SIZE, BLOCK_ROWS, BLOCK_COLUMNS, True,
    )  # fmt: skip
    dq = _dq_range(
        dq, q, dout, lse, delta, first, last - gap, whole, gap, k_base, v_base, p, p_near,
        p_segment, inside, k_positions, k_segments, slope, origin, key0, key1, tiles, p_global,
        k_globals, block_mask_ptr, S, K, H, BH, BK, scale, UNIT, SOFTCAP, FAST, ALIBI, DROPOUT,
        LEAST, CAUSAL, WINDOW, SEGMENTS, LISTED, GLOBAL, BLOCK_SIZE, BLOCK_ROWS, BLOCK_COLUMNS,
        False,
    )  # fmt: skip
    out = dq_ptr + (b64 * T * N + n) * H + rows64[:, None] * (N * H) + h[None, :]
    dq = (dq * scale).to(dq_ptr.dtype.element_ty)
    tl.store(out, dq, mask=inside[:, None] & (h[None, :] < H))


@triton.jit
def _dkv_range(
    dk,
    dv,
    k,
    v,
    first,
    last,
    gap_at,
    gap,
    q_base,
    dout_base,
    lse_base,
    delta_base,
    s,
    s_near,
    s_segment,
    columns_inside,
    positions,
    segments,
    slope,
    origin,
    key0,
    key1,
    tiles,
    s_global,
    q_globals,
    block_mask,
    T: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    BH: tl.constexpr,
    BQ: tl.constexpr,
    scale: tl.constexpr,
    UNIT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr,
    LEAST: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SEGMENTS: tl.constexpr,
    LISTED: tl.constexpr,
    GLOBAL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Adds the share of query blocks [first, last), as in `_forward_range`; dk not yet times
    `scale`. Tiles are [keys, queries]."""
    h = tl.arange(0, BH)
    for x in range(first, last):
        number = x if WHOLE else x + tl.where(x >= gap_at, gap, 0)
        i = tl.load(tiles + number) if LISTED else number
        here, rows = tl.arange(0, BQ), i * BQ + tl.arange(0, BQ)
        at = tl.cast(i, tl.int64) * (BQ * N * H)
        q = _load(q_base + at, here, h, N * H, T - i * BQ, H, BH, WHOLE)
        dout = _load(dout_base + at, here, h, N * H, T - i * BQ, H, BH, WHOLE)
        if WHOLE:
            lse = tl.load(lse_base + rows)
            delta = tl.load(delta_base + rows)
        else:
            lse = tl.load(lse_base + rows, mask=rows < T, other=float("inf"))
            delta = tl.load(delta_base + rows, mask=rows < T, other=0.0)
        raw = tl.dot(k, tl.trans(q), input_precision="ieee")
        p = rows
        if ALIBI or DROPOUT > 0.0 or not WHOLE:
            p = tl.load(positions + rows, mask=rows < T, other=0)
        capped, bend = _cap(raw, scale, SOFTCAP, FAST)
        p_near = (p - origin).to(tl.float32)
        logits = _biased(capped * UNIT, p_near[None, :], s_near[:, None], slope, ALIBI, CAUSAL)
        if ALIBI and CAUSAL:
            lse += p_near * slope
        weights = tl.exp2(logits - lse[None, :])
        if not WHOLE:
            p_segment = rows
            if SEGMENTS:
                p_segment = tl.load(segments + rows, mask=rows < T, other=0)
            p_global = rows
            if GLOBAL:
                p_global = tl.load(q_globals + rows, mask=rows < T, other=0)
            seen = _seen(
                p[None, :],
                s[:, None],
                p_segment[None, :],
                s_segment[:, None],
                (rows[None, :] < T) & columns_inside[:, None],
                p_global[None, :],
                s_global[:, None],
                block_mask,
                CAUSAL,
                WINDOW,
                SEGMENTS,
                GLOBAL,
                BLOCK_SIZE,
                BLOCK_ROWS,
                BLOCK_COLUMNS,
            )
            weights = tl.where(seen, weights, 0.0)
        dweights = tl.dot(v, tl.trans(dout), input_precision="ieee")
        used = weights
        if DROPOUT > 0.0:
            kept = _kept(key0, key1, p[None, :], s[:, None], DROPOUT, LEAST)
            used = weights * kept
            dweights *= kept
        dv = tl.dot(used.to(dout.dtype), dout, dv, input_precision="ieee")
        dlogits = weights * (dweights - delta[None, :])
        if SOFTCAP is not None:
            dlogits *= bend
        dk = tl.dot(dlogits.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def dkv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    ranges_ptr,
    positions_ptr,
    k_positions_ptr,
    segments_ptr,
    k_segments_ptr,
    slopes_ptr,
    keys_ptr,
    tiles_ptr,
    globals_ptr,
    k_globals_ptr,
    block_mask_ptr,
    dk_ptr,
    dv_ptr,
    T: tl.constexpr,
    S: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    BH: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    RANGE_ROWS: tl.constexpr,
    POSITION_ROWS: tl.constexpr,
    scale: tl.constexpr,
    UNIT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr,
    LEAST: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SEGMENTS: tl.constexpr,
    LISTED: tl.constexpr,
    GLOBAL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """dk and dv `[B, S, K, H]` of a block of keys. Grid (key blocks, K, B)."""
    blocks: tl.constexpr = (S + BK - 1) // BK
    # Early blocks are seen by most queries: they start first.
    j, n_k, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b64 = b.to(tl.int64)
    columns, h = j * BK + tl.arange(0, BK), tl.arange(0, BH)
    columns64 = columns.to(tl.int64)
    inside = columns < S
    k = _load(k_ptr + (b64 * S * K + n_k) * H, columns64, h, K * H, S, H, BH, False)
    v = _load(v_ptr + (b64 * S * K + n_k) * H, columns64, h, K * H, S, H, BH, False)
    at = k_positions_ptr + (b64 * S if POSITION_ROWS > 1 else 0)
    s = tl.load(at + columns, mask=inside, other=0)
    origin = tl.load(at + j * BK) if ALIBI else 0
    s_near = (s - origin).to(tl.float32)
    s_segment = columns
    if SEGMENTS:
        s_segment = tl.load(k_segments_ptr + b64 * S + columns, mask=inside, other=0)
    s_global = columns
    if GLOBAL:
        s_global = tl.load(k_globals_ptr + b64 * S + columns, mask=inside, other=0)
    around = ranges_ptr + ((b64 * blocks if RANGE_ROWS > 1 else 0) + j) * 4
    first, whole = tl.load(around), tl.load(around + 1)
    part, last = tl.load(around + 2), tl.load(around + 3)
    gap = part - whole
    tiles = tiles_ptr + ((b64 * blocks if RANGE_ROWS > 1 else 0) + j).to(tl.int64) * LISTED
    positions = positions_ptr + (b64 * T if POSITION_ROWS > 1 else 0)
    segments = segments_ptr + b64 * T
    q_globals = globals_ptr + b64 * T
    dk = tl.zeros([BK, BH], tl.float32)
    dv = tl.zeros([BK, BH], tl.float32)
    for g in range(N // K):
        n = n_k * (N // K) + g
        q_base = q_ptr + (b64 * T * N + n) * H
        dout_base = dout_ptr + (b64 * T * N + n) * H
        lse_base = lse_ptr + (b64 * N + n) * T
        delta_base = delta_ptr + (b64 * N + n) * T
        slope = tl.load(slopes_ptr + n) * LOG2E if ALIBI else 0.0
        key0, key1 = 0, 0
        if DROPOUT > 0.0:
            key0 = tl.load(keys_ptr + (b * N + n) * 2)
            key1 = tl.load(keys_ptr + (b * N + n) * 2 + 1)
        dk, dv = _dkv_range(
            dk, dv, k, v, whole, part, 0, 0, q_base, dout_base, lse_base, delta_base, s,
            s_near, s_segment, inside, positions, segments, slope, origin, key0, key1, tiles,
            s_global, q_globals, block_mask_ptr, T, N, H, BH, BQ, scale, UNIT, SOFTCAP, FAST,
            ALIBI, DROPOUT, LEAST, CAUSAL, WINDOW, SEGMENTS, LISTED, GLOBAL, BLOCK_SIZE,
            BLOCK_ROWS, BLOCK_COLUMNS, True,
        )  # fmt: skip
        dk, dv = _dkv_range(
            dk, dv, k, v, first, last - gap, whole, gap, q_base, dout_base, lse_base, delta_base, s,
            s_near, s_segment, inside, positions, segments, slope, origin, key0, key1, tiles,
            s_global, q_globals, block_mask_ptr, T, N, H, BH, BQ, scale, UNIT, SOFTCAP, FAST,
            ALIBI, DROPOUT, LEAST, CAUSAL, WINDOW, SEGMENTS, LISTED, GLOBAL, BLOCK_SIZE,
            BLOCK_ROWS, BLOCK_COLUMNS, False,
        )  # fmt: skip
    at = (b64 * S * K + n_k) * H + columns64[:, None] * (K * H) + h[None, :]
    shown = inside[:, None] & (h[None, :] < H)
    tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=shown)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=shown)
