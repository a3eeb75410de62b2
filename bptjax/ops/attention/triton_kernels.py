"""Attention as Triton kernels: the work of one program. `triton_flash` launches them.

In the forward pass and for dq, a program owns a block of queries of one head and visits the key
blocks that they may attend to. For dk and dv, a program owns a block of keys of one key head and
visits, for each query head that reads it, the query blocks that may attend to them. `ranges`
`[B or 1, blocks, 4]` holds (first, first full, end of full, end) per owned block: tiles from first
full to end of full are full, other tiles in the range are partial and need the mask, and empty
tiles outside the range are skipped. If C.list_length > 0, the ranges index the list `tiles`
`[B or 1, blocks, C.list_length]`; otherwise they are block indices.

C is a `triton_flash.Constants`. Logits are in base 2, for exp2: C.unit converts a product q·k, or
its capped form. ALiBi counts positions, or depths, from the first token of the owned block. In
causal attention it is linear in both positions; the queries' term is the same for all keys, so it
is left out of the logits and added to lse. Tokens past the end are loaded as 0 and never stored.

A mask with trees has neither segments nor global tokens. If C.ends, `segments` hold the positions
of the queries and the ends of the keys; if C.depths, `global_tokens` hold the depths.

If C.over, the first outputs already hold another kernel's results. Where ranges are -1, those
results stay, and the program only stores padding, which the other kernel left undefined.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from bptjax.ops import dropout

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
MULTIPLIER: tl.constexpr = tl.constexpr(dropout.MULTIPLIER)
KEY_STEP: tl.constexpr = tl.constexpr(dropout.KEY_STEP)
ROUNDS: tl.constexpr = tl.constexpr(dropout.ROUNDS)
PAIR: tl.constexpr = tl.constexpr(dropout.PAIR)


class MaskPointers(NamedTuple):
    """Pointers to the mask's fields for the queries, or for the keys, of one sequence."""

    positions: Any
    segments: Any
    global_tokens: Any


class Tokens(NamedTuple):
    """The mask's fields for the owned block of queries, or of keys, each `[block]`.

    `origin` is the position, or depth, of the block's first token, `relative` the float32 positions
    or depths minus `origin`, and `in_bounds` is False past the end of the sequence.
    """

    positions: Any
    origin: Any
    relative: Any
    segments: Any
    global_tokens: Any
    in_bounds: Any


class Head(NamedTuple):
    """A head's ALiBi slope and dropout key."""

    slope: Any
    key0: Any
    key1: Any


class Visits(NamedTuple):
    """The tiles that a program visits: `full_blocks` full ones in [first_full, end_full), and
    partial ones in the rest of [first, end). Block indices, or indices into the list `tiles`.
    """

    first: Any
    first_full: Any
    end_full: Any
    end: Any
    full_blocks: Any
    tiles: Any


@triton.jit
def _load(base, rows, columns, stride, limit, C: tl.constexpr, IN_BOUNDS: tl.constexpr):
    """Loads tile [rows, columns]. IN_BOUNDS: every row is in bounds."""
    at = base + rows[:, None] * stride + columns[None, :]
    if IN_BOUNDS and C.H == C.BH:
        return tl.load(at)
    if IN_BOUNDS:
        return tl.load(at, mask=columns[None, :] < C.H, other=0.0)
    return tl.load(at, mask=(rows[:, None] < limit) & (columns[None, :] < C.H), other=0.0)


@triton.jit
def _load_transposed(base, rows, columns, stride, limit, C: tl.constexpr, IN_BOUNDS: tl.constexpr):
    """Loads the tile of `_load` transposed, [columns, rows]."""
    at = base + rows[None, :] * stride + columns[:, None]
    if IN_BOUNDS and C.H == C.BH:
        return tl.load(at)
    if IN_BOUNDS:
        return tl.load(at, mask=columns[:, None] < C.H, other=0.0)
    return tl.load(at, mask=(rows[None, :] < limit) & (columns[:, None] < C.H), other=0.0)


@triton.jit
def _philox(key0, key1, rows, columns):
    """Computes `ops.dropout.philox`; all words are uint32."""
    x, y = columns ^ key1, rows
    for step in tl.static_range(ROUNDS):
        product = x.to(tl.uint64) * MULTIPLIER
        x = (product >> 32).to(tl.uint32) ^ (key0 + (step * KEY_STEP) % 4294967296) ^ y
        y = product.to(tl.uint32)
    return x, y


@triton.jit
def _cap(raw, C: tl.constexpr):
    """Returns the products q·k, or with a soft cap tanh(scale · raw / softcap), and the soft cap's
    derivative."""
    if C.softcap is None:
        capped, derivative = raw, 1.0
    else:
        if C.fast_tanh:
            capped = tl.inline_asm_elementwise(
                "tanh.approx.f32 $0, $1;",
                "=f,f",
                [raw * (C.scale / C.softcap)],
                dtype=tl.float32,
                is_pure=True,
                pack=1,
            )
        else:
            # tanh(x) = 1 - 2 / (exp(2x) + 1)
            capped = 1.0 - 2.0 / (tl.exp2(raw * (2.0 * C.scale / C.softcap * LOG2E)) + 1.0)
        derivative = 1.0 - capped * capped
    return capped, derivative


@triton.jit
def _add_alibi(logits, p, s, slope, C: tl.constexpr):
    """Adds ALiBi from broadcastable positions; causal attention leaves out the queries' term."""
    if C.alibi:
        if C.causal:
            logits += s * slope
        else:
            logits -= tl.abs(p - s) * slope
    return logits


@triton.jit
def _load_labels(pointers, at, in_bounds, C: tl.constexpr):
    """Loads the segments and global tokens of the tokens `at`, if the mask has them."""
    segment = at
    if C.segments or C.ends:
        segment = tl.load(pointers.segments + at, mask=in_bounds, other=0)
    is_global = at
    if C.global_tokens or C.depths:
        is_global = tl.load(pointers.global_tokens + at, mask=in_bounds, other=0)
    return segment, is_global


@triton.jit
def _load_counted(pointers, at, positions, in_bounds, C: tl.constexpr):
    """Returns what ALiBi counts: the depths of the tokens `at`, or else their positions."""
    counted = positions
    if C.depths:
        counted = tl.load(pointers.global_tokens + at, mask=in_bounds, other=0)
    return counted


@triton.jit
def _allowed(
    p, s, p_segment, s_segment, in_bounds, p_global, s_global, block_mask, C: tl.constexpr
):
    """Returns whether the query at position p may attend to the key at position s, for pairs
    `in_bounds`. All arguments broadcast."""
    allowed = in_bounds
    if C.causal:
        allowed &= s <= p
    # Global tokens ignore the window and the blocks.
    allowed_globally = allowed
    if C.ends:
        allowed &= p_segment < s_segment
    if C.window is not None:
        if C.depths:
            allowed &= p_global - s_global < C.window
            if not C.causal:
                allowed &= s_global - p_global < C.window
        else:
            allowed &= p - s < C.window
            if not C.causal:
                allowed &= s - p < C.window
    if C.block_size is not None:
        row, column = p // C.block_size, s // C.block_size
        read = allowed & (p >= 0) & (row < C.block_rows) & (s >= 0) & (column < C.block_columns)
        allowed = tl.load(block_mask + row * C.block_columns + column, mask=read, other=0) != 0
    if C.global_tokens:
        allowed |= allowed_globally & ((p_global != 0) | (s_global != 0))
    if C.segments:
        allowed &= (p_segment == s_segment) & (p_segment != 0)
    return allowed


@triton.jit
def _load_counters(positions, first, C: tl.constexpr):
    """Loads the positions that number the random blocks of the BK keys from `first`: all positions,
    or if C.paired, the first of each pair."""
    if C.paired:
        i = tl.arange(0, C.BK // 2)
        at = first + i + i // PAIR * PAIR
    else:
        at = first + tl.arange(0, C.BK)
    return tl.load(positions + at, mask=at < C.S, other=0)


@triton.jit
def _dropout_factors(head, p, s, C: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Returns each weight's factor, 0 or 1 / (1 - dropout), [queries, keys] or [keys, queries],
    from positions of queries and `_load_counters` of keys."""
    if KEYS_FIRST:
        row, column = p[None, :].to(tl.uint32), s[:, None].to(tl.uint32)
    else:
        row, column = p[:, None].to(tl.uint32), s[None, :].to(tl.uint32)
    zero = row * 0 + column * 0
    key0, key1 = head.key0.to(tl.uint32), head.key1.to(tl.uint32)
    x, y = _philox(key0, key1, row + zero, column - (column & PAIR) + zero)
    if C.paired:
        x = tl.where(x >= C.dropout_threshold, 1.0 / (1.0 - C.dropout), 0.0)
        y = tl.where(y >= C.dropout_threshold, 1.0 / (1.0 - C.dropout), 0.0)
        # Each thread has both keys of a pair, so this moves no data between threads.
        if KEYS_FIRST:
            pairs = tl.reshape(tl.join(x, y), (C.BK // (2 * PAIR), PAIR, C.BQ, 2))
            factors = tl.reshape(tl.permute(pairs, (0, 3, 1, 2)), (C.BK, C.BQ))
        else:
            pairs = tl.reshape(tl.join(x, y), (C.BQ, C.BK // (2 * PAIR), PAIR, 2))
            factors = tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (C.BQ, C.BK))
    else:
        bits = tl.where((column + zero) & PAIR != 0, y, x)
        factors = tl.where(bits >= C.dropout_threshold, 1.0 / (1.0 - C.dropout), 0.0)
    return factors


@triton.jit
def _load_visits(ranges, tiles, i, b64, blocks: tl.constexpr, C: tl.constexpr):
    """Loads the visits of owned block i out of `blocks`."""
    row = (b64 * blocks if C.range_batch > 1 else 0) + i
    at = ranges + row * 4
    first, first_full = tl.load(at), tl.load(at + 1)
    end_full, end = tl.load(at + 2), tl.load(at + 3)
    tiles += row.to(tl.int64) * C.list_length
    return Visits(first, first_full, end_full, end, end_full - first_full, tiles)


@triton.jit
def _mask_pointers(positions, segments, global_tokens, b64, length, C: tl.constexpr):
    """Returns the pointers for sequence b of `length` tokens."""
    positions += b64 * length if C.position_batch > 1 else 0
    return MaskPointers(positions, segments + b64 * length, global_tokens + b64 * length)


@triton.jit
def _load_tokens(pointers, first, at, in_bounds, C: tl.constexpr):
    """Loads the tokens `at` of a sequence; the block's first token is `first`."""
    positions = tl.load(pointers.positions + at, mask=in_bounds, other=0)
    counted = _load_counted(pointers, at, positions, in_bounds, C)
    origin = 0
    if C.alibi:
        origin = _load_counted(pointers, first, tl.load(pointers.positions + first), True, C)
    relative = (counted - origin).to(tl.float32)
    segments, global_tokens = _load_labels(pointers, at, in_bounds, C)
    return Tokens(positions, origin, relative, segments, global_tokens, in_bounds)


@triton.jit
def _load_padding(pointers, at, in_bounds):
    """Loads which of the tokens `at` are padding."""
    return in_bounds & (tl.load(pointers.segments + at, mask=in_bounds, other=0) == 0)


@triton.jit
def _load_head(slopes, keys, b, n, C: tl.constexpr):
    slope = tl.load(slopes + n) * LOG2E if C.alibi else 0.0
    key0, key1 = 0, 0
    if C.dropout > 0.0:
        key0, key1 = tl.load(keys + (b * C.N + n) * 2), tl.load(keys + (b * C.N + n) * 2 + 1)
    return Head(slope, key0, key1)


@triton.jit
def _forward_range(
    acc,
    row_max,
    row_sum,
    q,
    k_base,
    v_base,
    own,
    keys,
    block_mask,
    head,
    visits,
    C: tl.constexpr,
    FULL: tl.constexpr,
):
    """Adds the full key blocks, if FULL, or else the partial ones, to the online softmax."""
    h = tl.arange(0, C.BH)
    if FULL:
        start, end = visits.first_full, visits.end_full
    else:
        start, end = visits.first, visits.end - visits.full_blocks
    # No pipelining with a block mask: its tile takes the shared memory of further stages.
    for step in tl.range(start, end, num_stages=None if FULL or C.block_size is None else 1):
        entry = step if FULL else step + tl.where(step >= visits.first_full, visits.full_blocks, 0)
        j = tl.load(visits.tiles + entry) if C.list_length else entry
        local, columns = tl.arange(0, C.BK), j * C.BK + tl.arange(0, C.BK)
        # Offsets may need 64 bits: T · N · H can exceed 2³¹.
        at = tl.cast(j, tl.int64) * (C.BK * C.K * C.H)
        k = _load_transposed(k_base + at, local, h, C.K * C.H, C.S - j * C.BK, C, FULL)
        raw = tl.dot(q, k, input_precision="ieee")
        s = columns
        if C.alibi or not FULL:
            s = tl.load(keys.positions + columns, mask=columns < C.S, other=0)
        capped, _ = _cap(raw, C)
        s_relative = s
        if C.alibi:
            s_relative = _load_counted(keys, columns, s, columns < C.S, C)
        s_relative = (s_relative - own.origin).to(tl.float32)
        logits = _add_alibi(
            capped * C.unit, own.relative[:, None], s_relative[None, :], head.slope, C
        )
        if not FULL:
            segments, global_tokens = _load_labels(keys, columns, columns < C.S, C)
            allowed = _allowed(
                own.positions[:, None],
                s[None, :],
                own.segments[:, None],
                segments[None, :],
                own.in_bounds[:, None] & (columns[None, :] < C.S),
                own.global_tokens[:, None],
                global_tokens[None, :],
                block_mask,
                C,
            )
            logits = tl.where(allowed, logits, float("-inf"))
        if FULL and not C.alibi and C.unit > 0.0:
            # The compiler fuses this into one multiply-add per weight.
            new_max = tl.maximum(row_max, tl.max(capped, 1) * C.unit)
            shift = new_max
            weights = tl.exp2(capped * C.unit - shift[:, None])
        else:
            new_max = tl.maximum(row_max, tl.max(logits, 1))
            # If a query has attended to no key yet, exponents must stay finite.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max) if not FULL else new_max
            weights = tl.exp2(logits - shift[:, None])
        alpha = tl.exp2(row_max - shift)
        row_sum = row_sum * alpha + tl.sum(weights, 1)
        if C.dropout > 0.0:
            counters = _load_counters(keys.positions, j * C.BK, C)
            weights *= _dropout_factors(head, own.positions, counters, C, False)
        acc = acc * alpha[:, None]
        v = _load(v_base + at, local, h, C.K * C.H, C.S - j * C.BK, C, FULL)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    first_ptr,
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
    done_out_ptr,
    done_lse_ptr,
    out_ptr,
    lse_ptr,
    C: tl.constexpr,
):
    """Stores out `[B, T, N, H]` and lse `[B, T, N]` of a block of queries. Grid (query blocks,
    N / (C.group · C.heads), B).

    With C.group > 1, a row is a query of one of C.group heads that read the same keys; rows are
    ordered by token, then head.
    """
    tokens: tl.constexpr = C.BQ // C.group
    blocks: tl.constexpr = (C.T + tokens - 1) // tokens
    # Late query blocks attend to the most keys, so they start first.
    i = blocks - 1 - tl.program_id(0)
    first_head, b = tl.program_id(1) * (C.heads * C.group), tl.program_id(2)
    b64 = b.to(tl.int64)
    row, h = tl.arange(0, C.BQ), tl.arange(0, C.BH)
    member, token = row % C.group, i * tokens + row // C.group
    # The last rows hold no query if C.group does not divide C.BQ.
    in_bounds = (token < C.T) & (row < tokens * C.group)
    stored = in_bounds[:, None] & (h[None, :] < C.H)
    # Offsets of rows of `[T · N, H]` from the program's first head.
    heads = token.to(tl.int64) * C.N + member
    out_at = b64 * (C.T * C.N * C.H) + heads[:, None] * C.H + h[None, :]
    lse_at = b64 * (C.T * C.N) + heads
    queries = _mask_pointers(positions_ptr, segments_ptr, globals_ptr, b64, C.T, C)
    visits = _load_visits(ranges_ptr, tiles_ptr, i, b64, blocks, C)
    if C.over:
        if visits.first < 0:
            padding = _load_padding(queries, token, in_bounds)
            for number in range(C.heads):
                n = first_head + number * C.group
                tl.store(out_ptr + n * C.H + out_at, 0.0, mask=stored & padding[:, None])
                tl.store(lse_ptr + n + lse_at, float("-inf"), mask=padding)
            return
    own = _load_tokens(queries, i * tokens, token, in_bounds, C)
    keys = _mask_pointers(k_positions_ptr, k_segments_ptr, k_globals_ptr, b64, C.S, C)
    b_k = b64
    if C.stacked:
        b_k += tl.load(first_ptr)
    for number in range(C.heads):
        n = first_head + number * C.group
        n_k = n // (C.N // C.K)
        q_at = (b64 * C.T * C.N + n) * C.H
        q = _load(q_ptr + q_at, heads, h, C.H, C.T * C.N, C, False)
        head = _load_head(slopes_ptr, keys_ptr, b, n, C)
        k_base = k_ptr + (b_k * C.S * C.K + n_k) * C.H
        v_base = v_ptr + (b_k * C.S * C.K + n_k) * C.H
        acc = tl.full([C.BQ, C.BH], 0.0, tl.float32)
        row_max = tl.full([C.BQ], float("-inf"), tl.float32)
        row_sum = tl.full([C.BQ], 0.0, tl.float32)
        if C.sinks:
            # The sink is the first key, with value 0.
            row_max = tl.load(sinks_ptr + n + member) * LOG2E
            row_sum += 1.0
            if C.alibi and C.causal:
                row_max += own.relative * head.slope
        # Full blocks first: a query with full blocks then starts the masked loop with a finite max.
        acc, row_max, row_sum = _forward_range(
            acc, row_max, row_sum, q, k_base, v_base, own, keys, block_mask_ptr, head, visits, C,
            True,
        )  # fmt: skip
        acc, row_max, row_sum = _forward_range(
            acc, row_max, row_sum, q, k_base, v_base, own, keys, block_mask_ptr, head, visits, C,
            False,
        )  # fmt: skip
        attends = row_sum > 0.0
        acc = acc / tl.where(attends, row_sum, 1.0)[:, None]
        if C.alibi and C.causal:
            row_max -= own.relative * head.slope
        lse = tl.where(
            attends, (row_max + tl.log2(tl.where(attends, row_sum, 1.0))) / LOG2E, float("-inf")
        )
        tl.store(out_ptr + n * C.H + out_at, acc.to(out_ptr.dtype.element_ty), mask=stored)
        tl.store(lse_ptr + n + lse_at, lse, mask=in_bounds)


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
    FULL: tl.constexpr,
):
    """Adds the share of the full key blocks, if FULL, else of the partial ones, to dq / `scale`."""
    h = tl.arange(0, C.BH)
    if FULL:
        start, end = visits.first_full, visits.end_full
    else:
        start, end = visits.first, visits.end - visits.full_blocks
    for step in range(start, end):
        entry = step if FULL else step + tl.where(step >= visits.first_full, visits.full_blocks, 0)
        j = tl.load(visits.tiles + entry) if C.list_length else entry
        local, columns = tl.arange(0, C.BK), j * C.BK + tl.arange(0, C.BK)
        # Offsets may need 64 bits: T · N · H can exceed 2³¹.
        at = tl.cast(j, tl.int64) * (C.BK * C.K * C.H)
        k = _load_transposed(k_base + at, local, h, C.K * C.H, C.S - j * C.BK, C, FULL)
        v = _load_transposed(v_base + at, local, h, C.K * C.H, C.S - j * C.BK, C, FULL)
        raw = tl.dot(q, k, input_precision="ieee")
        s = columns
        if C.alibi or not FULL:
            s = tl.load(keys.positions + columns, mask=columns < C.S, other=0)
        capped, derivative = _cap(raw, C)
        s_relative = s
        if C.alibi:
            s_relative = _load_counted(keys, columns, s, columns < C.S, C)
        s_relative = (s_relative - own.origin).to(tl.float32)
        logits = _add_alibi(
            capped * C.unit, own.relative[:, None], s_relative[None, :], head.slope, C
        )
        weights = tl.exp2(logits - lse[:, None])
        if not FULL:
            segments, global_tokens = _load_labels(keys, columns, columns < C.S, C)
            allowed = _allowed(
                own.positions[:, None],
                s[None, :],
                own.segments[:, None],
                segments[None, :],
                own.in_bounds[:, None] & (columns[None, :] < C.S),
                own.global_tokens[:, None],
                global_tokens[None, :],
                block_mask,
                C,
            )
            weights = tl.where(allowed, weights, 0.0)
        dweights = tl.dot(dout, v, input_precision="ieee")
        if C.dropout > 0.0:
            counters = _load_counters(keys.positions, j * C.BK, C)
            dweights *= _dropout_factors(head, own.positions, counters, C, False)
        dlogits = weights * (dweights - delta[:, None])
        if C.softcap is not None:
            dlogits *= derivative
        dq = tl.dot(dlogits.to(k.dtype), tl.trans(k), dq, input_precision="ieee")
    return dq


@triton.jit
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    out_ptr,
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
    done_dq_ptr,
    dq_ptr,
    delta_ptr,
    C: tl.constexpr,
):
    """Stores dq `[B, T, N, H]` of a block of queries, and delta, the sums of out · dout. Grid
    (query blocks, N / C.heads, B). lse and delta are `[B, N, T]`; lse is in base 2, and +inf where
    a query attends to no key."""
    blocks: tl.constexpr = (C.T + C.BQ - 1) // C.BQ
    i = blocks - 1 - tl.program_id(0)
    first_head, b = tl.program_id(1) * C.heads, tl.program_id(2)
    b64 = b.to(tl.int64)
    rows, h = i * C.BQ + tl.arange(0, C.BQ), tl.arange(0, C.BH)
    rows64 = rows.to(tl.int64)
    in_bounds = rows < C.T
    stored = in_bounds[:, None] & (h[None, :] < C.H)
    dq_at = b64 * (C.T * C.N * C.H) + rows64[:, None] * (C.N * C.H) + h[None, :]
    queries = _mask_pointers(positions_ptr, segments_ptr, globals_ptr, b64, C.T, C)
    visits = _load_visits(ranges_ptr, tiles_ptr, i, b64, blocks, C)
    if C.over:
        if visits.first < 0:
            padding = _load_padding(queries, rows, in_bounds)
            for number in range(C.heads):
                n = first_head + number
                tl.store(dq_ptr + n * C.H + dq_at, 0.0, mask=stored & padding[:, None])
            return
    own = _load_tokens(queries, i * C.BQ, rows, in_bounds, C)
    keys = _mask_pointers(k_positions_ptr, k_segments_ptr, k_globals_ptr, b64, C.S, C)
    for number in range(C.heads):
        n = first_head + number
        n_k = n // (C.N // C.K)
        q_at = (b64 * C.T * C.N + n) * C.H
        q = _load(q_ptr + q_at, rows64, h, C.N * C.H, C.T, C, False)
        dout = _load(dout_ptr + q_at, rows64, h, C.N * C.H, C.T, C, False)
        out = _load(out_ptr + q_at, rows64, h, C.N * C.H, C.T, C, False)
        delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
        at = (b64 * C.N + n) * C.T + rows
        tl.store(delta_ptr + at, delta, mask=in_bounds)
        lse = tl.load(lse_ptr + at, mask=in_bounds, other=float("inf"))
        head = _load_head(slopes_ptr, keys_ptr, b, n, C)
        k_base = k_ptr + (b64 * C.S * C.K + n_k) * C.H
        v_base = v_ptr + (b64 * C.S * C.K + n_k) * C.H
        if C.alibi and C.causal:
            lse += own.relative * head.slope
        dq = tl.full([C.BQ, C.BH], 0.0, tl.float32)
        dq = _dq_range(
            dq, q, dout, lse, delta, k_base, v_base, own, keys, block_mask_ptr, head, visits, C,
            True,
        )  # fmt: skip
        dq = _dq_range(
            dq, q, dout, lse, delta, k_base, v_base, own, keys, block_mask_ptr, head, visits, C,
            False,
        )  # fmt: skip
        dq = (dq * C.scale).to(dq_ptr.dtype.element_ty)
        tl.store(dq_ptr + n * C.H + dq_at, dq, mask=stored)


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
    keys,
    first,
    queries,
    block_mask,
    head,
    visits,
    C: tl.constexpr,
    FULL: tl.constexpr,
):
    """Adds the share of the full query blocks, if FULL, or else of the partial ones, to dk, without
    `scale`, and to dv. Tiles are [keys, queries]."""
    h = tl.arange(0, C.BH)
    if FULL:
        start, end = visits.first_full, visits.end_full
    else:
        start, end = visits.first, visits.end - visits.full_blocks
    for step in range(start, end):
        entry = step if FULL else step + tl.where(step >= visits.first_full, visits.full_blocks, 0)
        i = tl.load(visits.tiles + entry) if C.list_length else entry
        local, rows = tl.arange(0, C.BQ), i * C.BQ + tl.arange(0, C.BQ)
        at = tl.cast(i, tl.int64) * (C.BQ * C.N * C.H)
        q = _load(q_base + at, local, h, C.N * C.H, C.T - i * C.BQ, C, FULL)
        dout = _load(dout_base + at, local, h, C.N * C.H, C.T - i * C.BQ, C, FULL)
        if FULL:
            lse = tl.load(lse_base + rows)
            delta = tl.load(delta_base + rows)
        else:
            lse = tl.load(lse_base + rows, mask=rows < C.T, other=float("inf"))
            delta = tl.load(delta_base + rows, mask=rows < C.T, other=0.0)
        raw = tl.dot(k, tl.trans(q), input_precision="ieee")
        p = rows
        if C.alibi or C.dropout > 0.0 or not FULL:
            p = tl.load(queries.positions + rows, mask=rows < C.T, other=0)
        capped, derivative = _cap(raw, C)
        p_relative = p
        if C.alibi:
            p_relative = _load_counted(queries, rows, p, rows < C.T, C)
        p_relative = (p_relative - own.origin).to(tl.float32)
        logits = _add_alibi(
            capped * C.unit, p_relative[None, :], own.relative[:, None], head.slope, C
        )
        if C.alibi and C.causal:
            lse += p_relative * head.slope
        weights = tl.exp2(logits - lse[None, :])
        if not FULL:
            segments, global_tokens = _load_labels(queries, rows, rows < C.T, C)
            allowed = _allowed(
                p[None, :],
                own.positions[:, None],
                segments[None, :],
                own.segments[:, None],
                (rows[None, :] < C.T) & own.in_bounds[:, None],
                global_tokens[None, :],
                own.global_tokens[:, None],
                block_mask,
                C,
            )
            weights = tl.where(allowed, weights, 0.0)
        dweights = tl.dot(v, tl.trans(dout), input_precision="ieee")
        dropped = weights
        if C.dropout > 0.0:
            counters = _load_counters(keys.positions, first, C)
            factors = _dropout_factors(head, p, counters, C, True)
            dropped = weights * factors
            dweights *= factors
        dv = tl.dot(dropped.to(dout.dtype), dout, dv, input_precision="ieee")
        dlogits = weights * (dweights - delta[None, :])
        if C.softcap is not None:
            dlogits *= derivative
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
    done_dk_ptr,
    done_dv_ptr,
    dk_ptr,
    dv_ptr,
    C: tl.constexpr,
):
    """Stores dk and dv `[B, S, K, H]` of a block of keys. Grid (key blocks, K / C.heads, B)."""
    blocks: tl.constexpr = (C.S + C.BK - 1) // C.BK
    # The most queries read early key blocks, so these start first.
    j, b = tl.program_id(0), tl.program_id(2)
    first_head = tl.program_id(1) * C.heads
    b64 = b.to(tl.int64)
    columns, h = j * C.BK + tl.arange(0, C.BK), tl.arange(0, C.BH)
    columns64 = columns.to(tl.int64)
    in_bounds = columns < C.S
    stored = in_bounds[:, None] & (h[None, :] < C.H)
    at = b64 * (C.S * C.K * C.H) + columns64[:, None] * (C.K * C.H) + h[None, :]
    keys = _mask_pointers(k_positions_ptr, k_segments_ptr, k_globals_ptr, b64, C.S, C)
    visits = _load_visits(ranges_ptr, tiles_ptr, j, b64, blocks, C)
    if C.over:
        if visits.first < 0:
            padding = stored & _load_padding(keys, columns, in_bounds)[:, None]
            for number in range(C.heads):
                n_k = first_head + number
                tl.store(dk_ptr + n_k * C.H + at, 0.0, mask=padding)
                tl.store(dv_ptr + n_k * C.H + at, 0.0, mask=padding)
            return
    own = _load_tokens(keys, j * C.BK, columns, in_bounds, C)
    queries = _mask_pointers(positions_ptr, segments_ptr, globals_ptr, b64, C.T, C)
    for number in range(C.heads):
        n_k = first_head + number
        k_at = (b64 * C.S * C.K + n_k) * C.H
        k = _load(k_ptr + k_at, columns64, h, C.K * C.H, C.S, C, False)
        v = _load(v_ptr + k_at, columns64, h, C.K * C.H, C.S, C, False)
        dk = tl.full([C.BK, C.BH], 0.0, tl.float32)
        dv = tl.full([C.BK, C.BH], 0.0, tl.float32)
        for g in range(C.N // C.K):
            n = n_k * (C.N // C.K) + g
            q_base = q_ptr + (b64 * C.T * C.N + n) * C.H
            dout_base = dout_ptr + (b64 * C.T * C.N + n) * C.H
            lse_base = lse_ptr + (b64 * C.N + n) * C.T
            delta_base = delta_ptr + (b64 * C.N + n) * C.T
            head = _load_head(slopes_ptr, keys_ptr, b, n, C)
            dk, dv = _dkv_range(
                dk, dv, k, v, q_base, dout_base, lse_base, delta_base, own, keys, j * C.BK, queries,
                block_mask_ptr, head, visits, C, True,
            )  # fmt: skip
            dk, dv = _dkv_range(
                dk, dv, k, v, q_base, dout_base, lse_base, delta_base, own, keys, j * C.BK, queries,
                block_mask_ptr, head, visits, C, False,
            )  # fmt: skip
        tl.store(dk_ptr + n_k * C.H + at, (dk * C.scale).to(dk_ptr.dtype.element_ty), mask=stored)
        tl.store(dv_ptr + n_k * C.H + at, dv.to(dv_ptr.dtype.element_ty), mask=stored)
