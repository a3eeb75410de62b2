"""Attention as Triton kernels: what one program does. `triton` launches them.

A program of the forward pass and of dq owns a block of queries of one head and walks the key blocks
that it may see; one of dk and dv owns a block of keys of one key head and walks, for each query
head that reads it, the query blocks that may see it. `ranges` `[B or 1, blocks, 4]` says which:
tiles of [first, whole) and [part, last) need the mask, those of [whole, part) are seen whole, and
dead ones outside are not visited. Where C.listed they are ranges of the list `tiles` `[B or 1,
blocks, C.listed]`; else of the blocks themselves.

C is a `triton.Constants`. Logits are kept in units of log 2, for exp2: C.unit is what a product, or
its capped form, is worth in them. ALiBi is counted from the first position of the block that the
program owns; in causal attention it is linear in both positions, and the queries' part, the same
for all keys, is left out of the logits and put into lse. Rows past the end are loaded as 0 and
never stored.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


class Row(NamedTuple):
    """Pointers to what a mask knows of the queries, or of the keys, of one row of the batch."""

    positions: Any
    segments: Any
    global_tokens: Any


class Tokens(NamedTuple):
    """What a mask knows of the queries, or keys, of the block that a program owns, each `[block]`;
    `inside`: it is there; `near`: its position from `origin`, that of the first, in float32."""

    positions: Any
    origin: Any
    near: Any
    segments: Any
    global_tokens: Any
    inside: Any


class Head(NamedTuple):
    """ALiBi's slope, and dropout's key."""

    slope: Any
    key0: Any
    key1: Any


class Visits(NamedTuple):
    """The tiles that a program visits: those seen whole in [whole, part), which is `gap` long, and
    masked ones in the rest of [first, last); numbers of blocks, or indices into the list `tiles`.
    """

    first: Any
    whole: Any
    part: Any
    last: Any
    gap: Any
    tiles: Any


@triton.jit
def _load(base, rows, columns, stride, limit, C: tl.constexpr, ALL: tl.constexpr):
    """Tile [rows, columns]; ALL: every row is there."""
    at = base + rows[:, None] * stride + columns[None, :]
    if ALL and C.H == C.BH:
        return tl.load(at)
    if ALL:
        return tl.load(at, mask=columns[None, :] < C.H, other=0.0)
    return tl.load(at, mask=(rows[:, None] < limit) & (columns[None, :] < C.H), other=0.0)


@triton.jit
def _load_turned(base, rows, columns, stride, limit, C: tl.constexpr, ALL: tl.constexpr):
    """The same tile transposed, [columns, rows]."""
    at = base + rows[None, :] * stride + columns[:, None]
    if ALL and C.H == C.BH:
        return tl.load(at)
    if ALL:
        return tl.load(at, mask=columns[:, None] < C.H, other=0.0)
    return tl.load(at, mask=(rows[None, :] < limit) & (columns[:, None] < C.H), other=0.0)


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
def _cap(raw, C: tl.constexpr):
    """Raw products q·k, or under a soft cap tanh(scale · raw / softcap), and the cap's
    derivative."""
    if C.softcap is None:
        bent, slope = raw, 1.0
    else:
        if C.fast_tanh:
            bent = tl.inline_asm_elementwise(
                "tanh.approx.f32 $0, $1;",
                "=f,f",
                [raw * (C.scale / C.softcap)],
                dtype=tl.float32,
                is_pure=True,
                pack=1,
            )
        else:
            # tanh(x) = 1 - 2 / (exp(2x) + 1)
            bent = 1.0 - 2.0 / (tl.exp2(raw * (2.0 * C.scale / C.softcap * LOG2E)) + 1.0)
        slope = 1.0 - bent * bent
    return bent, slope


@triton.jit
def _biased(logits, p, s, slope, C: tl.constexpr):
    """With ALiBi from float positions that are shaped to broadcast; in causal attention without the
    queries' part."""
    if C.alibi:
        if C.causal:
            logits += s * slope
        else:
            logits -= tl.abs(p - s) * slope
    return logits


@triton.jit
def _labels(row, at, inside, C: tl.constexpr):
    """Segments and global tokens, where the mask has them, of the tokens `at`."""
    segment = at
    if C.segments:
        segment = tl.load(row.segments + at, mask=inside, other=0)
    is_global = at
    if C.global_tokens:
        is_global = tl.load(row.global_tokens + at, mask=inside, other=0)
    return segment, is_global


@triton.jit
def _seen(p, s, p_segment, s_segment, inside, p_global, s_global, block_mask, C: tl.constexpr):
    """Which pairs are seen; `inside`: both are there. All are shaped to broadcast."""
    seen = inside
    if C.causal:
        seen &= s <= p
    before = seen
    if C.window is not None:
        seen &= p - s < C.window
        if not C.causal:
            seen &= s - p < C.window
    if C.block_size is not None:
        row, column = p // C.block_size, s // C.block_size
        known = seen & (p >= 0) & (row < C.block_rows) & (s >= 0) & (column < C.block_columns)
        seen = tl.load(block_mask + row * C.block_columns + column, mask=known, other=0) != 0
    if C.global_tokens:
        seen |= before & ((p_global != 0) | (s_global != 0))
    if C.segments:
        seen &= (p_segment == s_segment) & (p_segment != 0)
    return seen


@triton.jit
def _kept(head, p, s, C: tl.constexpr):
    """Dropout's factors: 0, or 1 / (1 - rate) where the random bits are at least `least`."""
    zero = p * 0 + s * 0
    bits = _threefry(head.key0, head.key1, (p + zero).to(tl.uint32), (s + zero).to(tl.uint32))
    return tl.where(bits >= C.least, 1.0 / (1.0 - C.dropout), 0.0)


@triton.jit
def _visits(ranges, tiles, i, b64, blocks: tl.constexpr, C: tl.constexpr):
    """Those of block i of `blocks`."""
    row = (b64 * blocks if C.range_rows > 1 else 0) + i
    at = ranges + row * 4
    first, whole = tl.load(at), tl.load(at + 1)
    part, last = tl.load(at + 2), tl.load(at + 3)
    gap = part - whole
    return Visits(first, whole, part, last, gap, tiles + row.to(tl.int64) * C.listed)


@triton.jit
def _row(positions, segments, global_tokens, b64, length, C: tl.constexpr):
    """Row b of the batch, `length` tokens."""
    positions += b64 * length if C.position_rows > 1 else 0
    return Row(positions, segments + b64 * length, global_tokens + b64 * length)


@triton.jit
def _tokens(row, first, at, inside, C: tl.constexpr):
    """The tokens `at` of a row, the first of them `first`."""
    positions = tl.load(row.positions + at, mask=inside, other=0)
    origin = tl.load(row.positions + first) if C.alibi else 0
    near = (positions - origin).to(tl.float32)
    segments, global_tokens = _labels(row, at, inside, C)
    return Tokens(positions, origin, near, segments, global_tokens, inside)


@triton.jit
def _head(slopes, keys, b, n, C: tl.constexpr):
    slope = tl.load(slopes + n) * LOG2E if C.alibi else 0.0
    key0, key1 = 0, 0
    if C.dropout > 0.0:
        key0, key1 = tl.load(keys + (b * C.N + n) * 2), tl.load(keys + (b * C.N + n) * 2 + 1)
    return Head(slope, key0, key1)


@triton.jit
def _forward_range(
    acc,
    top,
    total,
    q,
    k_base,
    v_base,
    own,
    keys,
    block_mask,
    head,
    visits,
    C: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Takes the key blocks seen whole, or the others, into the running softmax."""
    h = tl.arange(0, C.BH)
    if WHOLE:
        first, last = visits.whole, visits.part
    else:
        first, last = visits.first, visits.last - visits.gap
    # A tile of the block mask needs the shared memory of a pipeline.
    for x in tl.range(first, last, num_stages=None if WHOLE or C.block_size is None else 1):
        number = x if WHOLE else x + tl.where(x >= visits.whole, visits.gap, 0)
        j = tl.load(visits.tiles + number) if C.listed else number
        here, columns = tl.arange(0, C.BK), j * C.BK + tl.arange(0, C.BK)
        # A row's offset may need 64 bits: T · N · H passes 2³¹.
        at = tl.cast(j, tl.int64) * (C.BK * C.K * C.H)
        k = _load_turned(k_base + at, here, h, C.K * C.H, C.S - j * C.BK, C, WHOLE)
        raw = tl.dot(q, k, input_precision="ieee")
        s = columns
        if C.alibi or C.dropout > 0.0 or not WHOLE:
            s = tl.load(keys.positions + columns, mask=columns < C.S, other=0)
        capped, _ = _cap(raw, C)
        s_near = (s - own.origin).to(tl.float32)
        logits = _biased(capped * C.unit, own.near[:, None], s_near[None, :], head.slope, C)
        if not WHOLE:
            segments, global_tokens = _labels(keys, columns, columns < C.S, C)
            seen = _seen(
                own.positions[:, None],
                s[None, :],
                own.segments[:, None],
                segments[None, :],
                own.inside[:, None] & (columns[None, :] < C.S),
                own.global_tokens[:, None],
                global_tokens[None, :],
                block_mask,
                C,
            )
            logits = tl.where(seen, logits, float("-inf"))
        if WHOLE and not C.alibi and C.unit > 0.0:
            # One multiply-add a weight.
            highest = tl.maximum(top, tl.max(capped, 1) * C.unit)
            anchor = highest
            weights = tl.exp2(capped * C.unit - anchor[:, None])
        else:
            highest = tl.maximum(top, tl.max(logits, 1))
            # A row that has seen nothing yet keeps its exponents finite.
            anchor = tl.where(highest == float("-inf"), 0.0, highest) if not WHOLE else highest
            weights = tl.exp2(logits - anchor[:, None])
        fade = tl.exp2(top - anchor)
        total = total * fade + tl.sum(weights, 1)
        if C.dropout > 0.0:
            weights *= _kept(head, own.positions[:, None], s[None, :], C)
        acc = acc * fade[:, None]
        v = _load(v_base + at, here, h, C.K * C.H, C.S - j * C.BK, C, WHOLE)
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
    C: tl.constexpr,
):
    """out `[B, T, N, H]` and lse `[B, T, N]` of a block of queries. Grid (query blocks, N, B)."""
    blocks: tl.constexpr = (C.T + C.BQ - 1) // C.BQ
    # Late blocks see most keys: they start first.
    i = blocks - 1 - tl.program_id(0)
    n, b = tl.program_id(1), tl.program_id(2)
    n_k = n // (C.N // C.K)
    b64 = b.to(tl.int64)
    rows, h = i * C.BQ + tl.arange(0, C.BQ), tl.arange(0, C.BH)
    rows64 = rows.to(tl.int64)
    inside = rows < C.T
    q = _load(q_ptr + (b64 * C.T * C.N + n) * C.H, rows64, h, C.N * C.H, C.T, C, False)
    queries = _row(positions_ptr, segments_ptr, globals_ptr, b64, C.T, C)
    own = _tokens(queries, i * C.BQ, rows, inside, C)
    head = _head(slopes_ptr, keys_ptr, b, n, C)
    visits = _visits(ranges_ptr, tiles_ptr, i, b64, blocks, C)
    k_base = k_ptr + (b64 * C.S * C.K + n_k) * C.H
    v_base = v_ptr + (b64 * C.S * C.K + n_k) * C.H
    keys = _row(k_positions_ptr, k_segments_ptr, k_globals_ptr, b64, C.S, C)
    acc = tl.full([C.BQ, C.BH], 0.0, tl.float32)
    top = tl.full([C.BQ], float("-inf"), tl.float32)
    total = tl.full([C.BQ], 0.0, tl.float32)
    # The whole ones first: a row that they serve has seen something when the mask comes.
    acc, top, total = _forward_range(
        acc, top, total, q, k_base, v_base, own, keys, block_mask_ptr, head, visits, C, True
    )
    acc, top, total = _forward_range(
        acc, top, total, q, k_base, v_base, own, keys, block_mask_ptr, head, visits, C, False
    )
    some = total > 0.0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    if C.alibi and C.causal:
        top -= own.near * head.slope
    lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) / LOG2E, float("-inf"))
    out = out_ptr + (b64 * C.T * C.N + n) * C.H + rows64[:, None] * (C.N * C.H) + h[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (h[None, :] < C.H))
    tl.store(lse_ptr + b64 * C.T * C.N + rows64 * C.N + n, lse, mask=inside)


@triton.jit
def _dq_range(
    dq,
    q,
    dout,
    lse,
    delta,
    k_base,
    v_base,
    own,
    keys,
    block_mask,
    head,
    visits,
    C: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Adds the share of the key blocks seen whole, or of the others, not yet times `scale`."""
    h = tl.arange(0, C.BH)
    if WHOLE:
        first, last = visits.whole, visits.part
    else:
        first, last = visits.first, visits.last - visits.gap
    for x in range(first, last):
        number = x if WHOLE else x + tl.where(x >= visits.whole, visits.gap, 0)
        j = tl.load(visits.tiles + number) if C.listed else number
        here, columns = tl.arange(0, C.BK), j * C.BK + tl.arange(0, C.BK)
        # A row's offset may need 64 bits: T · N · H passes 2³¹.
        at = tl.cast(j, tl.int64) * (C.BK * C.K * C.H)
        k = _load_turned(k_base + at, here, h, C.K * C.H, C.S - j * C.BK, C, WHOLE)
        v = _load_turned(v_base + at, here, h, C.K * C.H, C.S - j * C.BK, C, WHOLE)
        raw = tl.dot(q, k, input_precision="ieee")
        s = columns
        if C.alibi or C.dropout > 0.0 or not WHOLE:
            s = tl.load(keys.positions + columns, mask=columns < C.S, other=0)
        capped, bend = _cap(raw, C)
        s_near = (s - own.origin).to(tl.float32)
        logits = _biased(capped * C.unit, own.near[:, None], s_near[None, :], head.slope, C)
        weights = tl.exp2(logits - lse[:, None])
        if not WHOLE:
            segments, global_tokens = _labels(keys, columns, columns < C.S, C)
            seen = _seen(
                own.positions[:, None],
                s[None, :],
                own.segments[:, None],
                segments[None, :],
                own.inside[:, None] & (columns[None, :] < C.S),
                own.global_tokens[:, None],
                global_tokens[None, :],
                block_mask,
                C,
            )
            weights = tl.where(seen, weights, 0.0)
        dweights = tl.dot(dout, v, input_precision="ieee")
        if C.dropout > 0.0:
            dweights *= _kept(head, own.positions[:, None], s[None, :], C)
        dlogits = weights * (dweights - delta[:, None])
        if C.softcap is not None:
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
    C: tl.constexpr,
):
    """dq `[B, T, N, H]` of a block of queries. Grid (query blocks, N, B). lse and delta `[B, N,
    T]`, lse over log 2 and +inf where nothing is seen."""
    blocks: tl.constexpr = (C.T + C.BQ - 1) // C.BQ
    i = blocks - 1 - tl.program_id(0)
    n, b = tl.program_id(1), tl.program_id(2)
    n_k = n // (C.N // C.K)
    b64 = b.to(tl.int64)
    rows, h = i * C.BQ + tl.arange(0, C.BQ), tl.arange(0, C.BH)
    rows64 = rows.to(tl.int64)
    inside = rows < C.T
    q_at = (b64 * C.T * C.N + n) * C.H
    q = _load(q_ptr + q_at, rows64, h, C.N * C.H, C.T, C, False)
    dout = _load(dout_ptr + q_at, rows64, h, C.N * C.H, C.T, C, False)
    at = (b64 * C.N + n) * C.T + rows
    lse = tl.load(lse_ptr + at, mask=inside, other=float("inf"))
    delta = tl.load(delta_ptr + at, mask=inside, other=0.0)
    queries = _row(positions_ptr, segments_ptr, globals_ptr, b64, C.T, C)
    own = _tokens(queries, i * C.BQ, rows, inside, C)
    head = _head(slopes_ptr, keys_ptr, b, n, C)
    visits = _visits(ranges_ptr, tiles_ptr, i, b64, blocks, C)
    k_base = k_ptr + (b64 * C.S * C.K + n_k) * C.H
    v_base = v_ptr + (b64 * C.S * C.K + n_k) * C.H
    keys = _row(k_positions_ptr, k_segments_ptr, k_globals_ptr, b64, C.S, C)
    if C.alibi and C.causal:
        lse += own.near * head.slope
    dq = tl.full([C.BQ, C.BH], 0.0, tl.float32)
    dq = _dq_range(
        dq, q, dout, lse, delta, k_base, v_base, own, keys, block_mask_ptr, head, visits, C, True
    )
    dq = _dq_range(
        dq, q, dout, lse, delta, k_base, v_base, own, keys, block_mask_ptr, head, visits, C, False
    )
    out = dq_ptr + (b64 * C.T * C.N + n) * C.H + rows64[:, None] * (C.N * C.H) + h[None, :]
    dq = (dq * C.scale).to(dq_ptr.dtype.element_ty)
    tl.store(out, dq, mask=inside[:, None] & (h[None, :] < C.H))


@triton.jit
def _dkv_range(
    dk,
    dv,
    k,
    v,
    q_base,
    dout_base,
    lse_base,
    delta_base,
    own,
    queries,
    block_mask,
    head,
    visits,
    C: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Adds the share of the query blocks that see these keys whole, or of the others; dk not yet
    times `scale`. Tiles are [keys, queries]."""
    h = tl.arange(0, C.BH)
    if WHOLE:
        first, last = visits.whole, visits.part
    else:
        first, last = visits.first, visits.last - visits.gap
    for x in range(first, last):
        number = x if WHOLE else x + tl.where(x >= visits.whole, visits.gap, 0)
        i = tl.load(visits.tiles + number) if C.listed else number
        here, rows = tl.arange(0, C.BQ), i * C.BQ + tl.arange(0, C.BQ)
        at = tl.cast(i, tl.int64) * (C.BQ * C.N * C.H)
        q = _load(q_base + at, here, h, C.N * C.H, C.T - i * C.BQ, C, WHOLE)
        dout = _load(dout_base + at, here, h, C.N * C.H, C.T - i * C.BQ, C, WHOLE)
        if WHOLE:
            lse = tl.load(lse_base + rows)
            delta = tl.load(delta_base + rows)
        else:
            lse = tl.load(lse_base + rows, mask=rows < C.T, other=float("inf"))
            delta = tl.load(delta_base + rows, mask=rows < C.T, other=0.0)
        raw = tl.dot(k, tl.trans(q), input_precision="ieee")
        p = rows
        if C.alibi or C.dropout > 0.0 or not WHOLE:
            p = tl.load(queries.positions + rows, mask=rows < C.T, other=0)
        capped, bend = _cap(raw, C)
        p_near = (p - own.origin).to(tl.float32)
        logits = _biased(capped * C.unit, p_near[None, :], own.near[:, None], head.slope, C)
        if C.alibi and C.causal:
            lse += p_near * head.slope
        weights = tl.exp2(logits - lse[None, :])
        if not WHOLE:
            segments, global_tokens = _labels(queries, rows, rows < C.T, C)
            seen = _seen(
                p[None, :],
                own.positions[:, None],
                segments[None, :],
                own.segments[:, None],
                (rows[None, :] < C.T) & own.inside[:, None],
                global_tokens[None, :],
                own.global_tokens[:, None],
                block_mask,
                C,
            )
            weights = tl.where(seen, weights, 0.0)
        dweights = tl.dot(v, tl.trans(dout), input_precision="ieee")
        used = weights
        if C.dropout > 0.0:
            kept = _kept(head, p[None, :], own.positions[:, None], C)
            used = weights * kept
            dweights *= kept
        dv = tl.dot(used.to(dout.dtype), dout, dv, input_precision="ieee")
        dlogits = weights * (dweights - delta[None, :])
        if C.softcap is not None:
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
    C: tl.constexpr,
):
    """dk and dv `[B, S, K, H]` of a block of keys. Grid (key blocks, K, B)."""
    blocks: tl.constexpr = (C.S + C.BK - 1) // C.BK
    # Early blocks are seen by most queries: they start first.
    j, n_k, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b64 = b.to(tl.int64)
    columns, h = j * C.BK + tl.arange(0, C.BK), tl.arange(0, C.BH)
    columns64 = columns.to(tl.int64)
    inside = columns < C.S
    k = _load(k_ptr + (b64 * C.S * C.K + n_k) * C.H, columns64, h, C.K * C.H, C.S, C, False)
    v = _load(v_ptr + (b64 * C.S * C.K + n_k) * C.H, columns64, h, C.K * C.H, C.S, C, False)
    keys = _row(k_positions_ptr, k_segments_ptr, k_globals_ptr, b64, C.S, C)
    own = _tokens(keys, j * C.BK, columns, inside, C)
    visits = _visits(ranges_ptr, tiles_ptr, j, b64, blocks, C)
    queries = _row(positions_ptr, segments_ptr, globals_ptr, b64, C.T, C)
    dk = tl.full([C.BK, C.BH], 0.0, tl.float32)
    dv = tl.full([C.BK, C.BH], 0.0, tl.float32)
    for g in range(C.N // C.K):
        n = n_k * (C.N // C.K) + g
        q_base = q_ptr + (b64 * C.T * C.N + n) * C.H
        dout_base = dout_ptr + (b64 * C.T * C.N + n) * C.H
        lse_base = lse_ptr + (b64 * C.N + n) * C.T
        delta_base = delta_ptr + (b64 * C.N + n) * C.T
        head = _head(slopes_ptr, keys_ptr, b, n, C)
        dk, dv = _dkv_range(
            dk, dv, k, v, q_base, dout_base, lse_base, delta_base, own, queries, block_mask_ptr,
            head, visits, C, True,
        )  # fmt: skip
        dk, dv = _dkv_range(
            dk, dv, k, v, q_base, dout_base, lse_base, delta_base, own, queries, block_mask_ptr,
            head, visits, C, False,
        )  # fmt: skip
    at = (b64 * C.S * C.K + n_k) * C.H + columns64[:, None] * (C.K * C.H) + h[None, :]
    shown = inside[:, None] & (h[None, :] < C.H)
    tl.store(dk_ptr + at, (dk * C.scale).to(dk_ptr.dtype.element_ty), mask=shown)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=shown)
