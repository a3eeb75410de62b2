"""The gated delta rule and its gradients as Triton kernels: the work of one program.
`delta_triton` launches them; `delta_rule` has the equations and their letters.

Here a chunk has the system (1 + A) u = r with r_i = β_i (v_i - c_i Sᵀ k_i) and A_ij = β_i d_ij k_i·k_j
for j < i. States are transposed, `[W, H]`, as are the tiles [BW, C] of u and r in registers: each
product of a chain over chunks takes its left operand from the registers that hold the one before.

C is a `delta_triton.Constants`. Offsets have 64 bits: long sequences have more than 2³¹ elements.
"""

import triton
import triton.language as tl


@triton.jit
def sums(ones, x):
    """ones · x, for a matrix of ones and zeros, to the 24 bits of float32 that three bfloat16
    hold."""
    ones = ones.to(tl.bfloat16)
    high = x.to(tl.bfloat16)
    x -= high.to(tl.float32)
    middle = x.to(tl.bfloat16)
    low = (x - middle.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(ones, high, tl.dot(ones, middle, tl.dot(ones, low)))


@triton.jit
def decays(g, documents, C: tl.constexpr):
    """d_ij, and 0 for j > i. Differences of running sums would lose the small decays that follow a
    strong one, and make a document's decays depend on the documents before it."""
    i, t = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    logs = sums(tl.where(i >= t, 1.0, 0.0), tl.where(i > t, g[:, None], 0.0))
    return tl.where((i >= t) & (documents[:, None] == documents[None, :]), tl.exp(logs), 0.0)


@triton.jit
def tile(rows, stride, columns):
    """Offsets of a tile, whose columns are contiguous, from its first element."""
    return rows[:, None] * stride + columns[None, :]


@triton.jit
def transposed(rows, stride, columns):
    """The same of the transposed tile."""
    return rows[None, :] * stride + columns[:, None]


@triton.jit
def double(a, x, level: tl.constexpr, size: tl.constexpr, precision: tl.constexpr):
    """From the inverses x of the blocks of 2^level on the diagonal of 1 + a, those of the blocks of
    twice the size. Of (y 0; b z) the inverse is (y⁻¹ 0; -z⁻¹ b y⁻¹ z⁻¹)."""
    i, j = tl.arange(0, size)[:, None], tl.arange(0, size)[None, :]
    pair = (i >> (level + 1)) == (j >> (level + 1))
    corner = tl.where(pair & ((i >> level) != (j >> level)), a, 0.0)
    corner = tl.dot(corner, x, input_precision=precision)
    return x - tl.dot(x, corner, input_precision=precision)


@triton.jit
def invert(a, levels: tl.constexpr, small: tl.constexpr, precision: tl.constexpr):
    """(1 + a)⁻¹ for a strictly lower triangular a of 2^levels rows: first of the blocks of 2^small
    on the diagonal. As stable as substitution, and consists of matrix products."""
    size: tl.constexpr = 2**levels
    block: tl.constexpr = 2**small
    blocks: tl.constexpr = size // block
    own = tl.arange(0, blocks)[:, None, None, None] == tl.arange(0, blocks)[None, None, :, None]
    on_diagonal = tl.sum(tl.where(own, tl.reshape(a, [blocks, block, blocks, block]), 0.0), 2)
    i, j = tl.arange(0, block)[None, :, None], tl.arange(0, block)[None, None, :]
    x = tl.where(i == j, 1.0, 0.0) - tl.where((i >> 1) == (j >> 1), on_diagonal, 0.0)
    for level in tl.static_range(1, small):
        x = double(on_diagonal, x, level, block, precision)
    x = tl.reshape(tl.where(own, x[:, :, None, :], 0.0), [size, size])
    for level in tl.static_range(small, levels):
        x = double(a, x, level, size, precision)
    return x


@triton.jit
def systems_kernel(q, k, g, beta, documents, inverses, scores, starts, ends, C: tl.constexpr):
    """(1 + A)⁻¹, if `scaled` times β_j, scale · d_ij q_i·k_j, c and the decays d to the end of a
    chunk, for a value head."""
    n, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = tl.arange(0, C.C)
    i, j = at[:, None], at[None, :]
    chunks: tl.constexpr = C.T // C.C
    precision: tl.constexpr = C.precision
    first = batch * C.T + chunk * C.C
    vector = (batch * C.N + n) * C.T + chunk * C.C
    square = ((batch * chunks + chunk) * C.N + n) * (C.C * C.C)
    own = tl.load(documents + first + at)
    before = tl.load(documents + first - 1, mask=chunk > 0, other=0)
    decay = tl.load(g + vector + at)
    start = tl.where(own == before, tl.exp(tl.cumsum(decay, 0)), 0.0)
    tl.store(starts + vector + at, start)
    d = decays(decay, own, C.C)
    tl.store(ends + vector + at, tl.sum(tl.where(i == C.C - 1, d, 0.0), 0))
    row = (first * C.K + n // (C.N // C.K)) * C.H
    rows = tile(at, C.K * C.H, tl.arange(0, C.H))
    keys = tl.load(k + row + rows)
    qk = tl.dot(tl.load(q + row + rows), tl.trans(keys), input_precision="ieee")
    tl.store(scores + square + tile(at, C.C, at), (C.scale * d * qk).to(scores.dtype.element_ty))
    kk = tl.dot(keys, tl.trans(keys), input_precision="ieee")
    a = tl.where(i > j, tl.load(beta + vector + at)[:, None] * d * kk, 0.0)
    x = invert(a, C.levels, C.small, precision)
    if C.scaled:
        x *= tl.load(beta + vector + at)[None, :]
    tl.store(inverses + square + tile(at, C.C, at), x.to(inverses.dtype.element_ty))


@triton.jit
def forward_kernel(
    q, k, v, inverses, scores, starts, ends, initial, out, states, last, C: tl.constexpr
):
    """Outputs of a tile of value columns, the states before groups of chunks, and the last. The
    inverses are scaled."""
    n, batch = tl.program_id(0) // (C.W // C.BW), tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) % (C.W // C.BW) * C.BW
    at, size, wide = tl.arange(0, C.C), tl.arange(0, C.H), tl.arange(0, C.BW)
    chunks: tl.constexpr = C.T // C.C
    groups: tl.constexpr = (chunks + C.group - 1) // C.group
    edge, edges = (batch * C.N + n) * C.H * C.W + column, transposed(size, C.W, wide)
    rows, values, squares = tile(at, C.K * C.H, size), tile(at, C.N * C.W, wide), tile(at, C.C, at)
    of_state = tile(wide, C.H, size)
    state = tl.load(initial + edge + edges)
    tl.store(states + ((batch * groups * C.N + n) * C.W + column) * C.H + of_state, state)
    # Scalars are not prefetched by the compiler.
    lasts = starts + (batch * C.N + n) * C.T + C.C - 1
    kept = tl.load(lasts)
    for chunk in range(0, chunks):
        first = batch * C.T + chunk * C.C
        row, value = (first * C.K + n // (C.N // C.K)) * C.H, (first * C.N + n) * C.W + column
        keys, queries = tl.load(k + row + rows), tl.load(q + row + rows)
        square = ((batch * chunks + chunk) * C.N + n) * (C.C * C.C)
        inverse = tl.load(inverses + square + squares)
        score = tl.load(scores + square + squares)
        vector = (batch * C.N + n) * C.T + chunk * C.C
        start, end = tl.load(starts + vector + at), tl.load(ends + vector + at)
        next_kept = tl.load(lasts + (chunk + 1) * C.C, mask=chunk + 1 < chunks, other=0.0)
        u = tl.trans(tl.load(v + value + values)).to(keys.dtype)
        u = tl.dot(u, tl.trans(inverse), input_precision="ieee")
        held = tl.dot(state.to(keys.dtype), tl.trans(keys), input_precision="ieee")
        held = (-start[None, :] * held).to(keys.dtype)
        u = tl.dot(held, tl.trans(inverse), u, input_precision="ieee")
        read = tl.dot(state.to(keys.dtype), tl.trans(queries), input_precision="ieee")
        read *= C.scale * start[None, :]
        read = tl.dot(u.to(keys.dtype), tl.trans(score), read, input_precision="ieee")
        tl.store(out + value + values, tl.trans(read).to(out.dtype.element_ty))
        u = (u * end[None, :]).to(keys.dtype)
        state = tl.dot(u, keys, kept * state, input_precision="ieee")
        kept = next_kept
        if (chunk + 1) % C.group == 0 and chunk + 1 < chunks:
            group = (batch * groups + (chunk + 1) // C.group) * C.N + n
            tl.store(states + (group * C.W + column) * C.H + of_state, state)
    tl.store(last + edge + edges, state)


@triton.jit
def again_kernel(
    k, v, beta, inverses, starts, ends, states, chunk_states, writes, C: tl.constexpr
):
    """The state before each chunk of a group, and its writes, from the state before the group."""
    n, batch = tl.program_id(0) // (C.W // C.BW), tl.program_id(2).to(tl.int64)
    column, group = tl.program_id(0) % (C.W // C.BW) * C.BW, tl.program_id(1)
    at, size, wide = tl.arange(0, C.C), tl.arange(0, C.H), tl.arange(0, C.BW)
    chunks: tl.constexpr = C.T // C.C
    groups: tl.constexpr = (chunks + C.group - 1) // C.group
    of_group = (batch * groups + group) * C.N + n
    rows, values, squares = tile(at, C.K * C.H, size), tile(at, C.N * C.W, wide), tile(at, C.C, at)
    of_state = tile(wide, C.H, size)
    state = tl.load(states + (of_group * C.W + column) * C.H + of_state)
    for chunk in range(group * C.group, min((group + 1) * C.group, chunks)):
        of_chunk = (batch * chunks + chunk) * C.N + n
        before = state.to(chunk_states.dtype.element_ty)
        tl.store(chunk_states + (of_chunk * C.W + column) * C.H + of_state, before)
        first = batch * C.T + chunk * C.C
        row, value = (first * C.K + n // (C.N // C.K)) * C.H, (first * C.N + n) * C.W + column
        keys = tl.load(k + row + rows)
        inverse = tl.load(inverses + of_chunk * (C.C * C.C) + squares)
        vector = (batch * C.N + n) * C.T + chunk * C.C
        start, end = tl.load(starts + vector + at), tl.load(ends + vector + at)
        kept, write = tl.load(starts + vector + C.C - 1), tl.load(beta + vector + at)
        held = tl.dot(state.to(keys.dtype), tl.trans(keys), input_precision="ieee")
        right = tl.load(v + value + transposed(at, C.N * C.W, wide)).to(tl.float32)
        right = (write[None, :] * (right - start[None, :] * held)).to(keys.dtype)
        u = tl.dot(right, tl.trans(inverse), input_precision="ieee")
        tl.store(writes + value + values, tl.trans(u).to(writes.dtype.element_ty))
        u = (u * end[None, :]).to(keys.dtype)
        state = tl.dot(u, keys, kept * state, input_precision="ieee")


@triton.jit
def backward_kernel(
    q, k, dout, fades, inverses, scores, starts, ends, dlast, dright, dstates, dinitial,
    C: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of value columns: of r, of the state after each chunk, and of the first
    state. `fades` are -β_i c_i."""
    n, batch = tl.program_id(0) // (C.W // C.BW), tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) % (C.W // C.BW) * C.BW
    at, size, wide = tl.arange(0, C.C), tl.arange(0, C.H), tl.arange(0, C.BW)
    chunks: tl.constexpr = C.T // C.C
    edge, edges = (batch * C.N + n) * C.H * C.W + column, transposed(size, C.W, wide)
    rows, values, squares = tile(at, C.K * C.H, size), tile(at, C.N * C.W, wide), tile(at, C.C, at)
    of_state = tile(wide, C.H, size)
    dstate = tl.load(dlast + edge + edges)
    lasts = starts + (batch * C.N + n) * C.T + C.C - 1
    kept = tl.load(lasts + (chunks - 1) * C.C)
    for step in range(0, chunks):
        chunk = chunks - 1 - step
        of_chunk = (batch * chunks + chunk) * C.N + n
        after = dstate.to(dstates.dtype.element_ty)
        tl.store(dstates + (of_chunk * C.W + column) * C.H + of_state, after)
        first = batch * C.T + chunk * C.C
        row, value = (first * C.K + n // (C.N // C.K)) * C.H, (first * C.N + n) * C.W + column
        keys, queries = tl.load(k + row + rows), tl.load(q + row + rows)
        douts = tl.load(dout + value + transposed(at, C.N * C.W, wide)).to(keys.dtype)
        square = of_chunk * (C.C * C.C)
        inverse = tl.load(inverses + square + squares)
        score = tl.load(scores + square + squares)
        vector = (batch * C.N + n) * C.T + chunk * C.C
        start, end = tl.load(starts + vector + at), tl.load(ends + vector + at)
        fade = tl.load(fades + vector + at)
        next_kept = tl.load(lasts + (chunk - 1) * C.C, mask=chunk > 0, other=0.0)
        du = tl.dot(dstate.to(keys.dtype), tl.trans(keys), input_precision="ieee") * end[None, :]
        du = tl.dot(douts, score, du, input_precision="ieee")
        dr = tl.dot(du.to(keys.dtype), inverse, input_precision="ieee")
        tl.store(dright + value + values, tl.trans(dr).to(dright.dtype.element_ty))
        read = (douts.to(tl.float32) * (C.scale * start[None, :])).to(keys.dtype)
        dstate = tl.dot(read, queries, kept * dstate, input_precision="ieee")
        dr = (dr * fade[None, :]).to(keys.dtype)
        dstate = tl.dot(dr, keys, dstate, input_precision="ieee")
        kept = next_kept
    tl.store(dinitial + edge + edges, dstate)


@triton.jit
def queries_kernel(
    q, k, g, documents, starts, states, writes, dout, dq, dscores, dstarts, C: tl.constexpr
):
    """Gradients of the queries of a chunk and a key head; for its value heads, of q_i·k_j times
    d_ij, and the part of the queries in that of log c."""
    head, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at, size, wide = tl.arange(0, C.C), tl.arange(0, C.H), tl.arange(0, C.BW)
    first = batch * C.T + chunk * C.C
    rows = tile(at, C.K * C.H, size)
    dqueries = tl.full([C.C, C.H], 0.0, tl.float32)
    for n in range(head * (C.N // C.K), (head + 1) * (C.N // C.K)):
        vector = (batch * C.N + n) * C.T + chunk * C.C + at
        of_chunk = (batch * (C.T // C.C) + chunk) * C.N + n
        # Loaded for each head: registers do not suffice to hold them.
        row = (first * C.K + n // (C.N // C.K)) * C.H
        keys = tl.load(k + row + rows)
        part = tl.full([C.C, C.H], 0.0, tl.float32)
        dscore = tl.full([C.C, C.C], 0.0, tl.float32)
        for w in range(0, C.W, C.BW):
            value = (first * C.N + n) * C.W + w
            y = tl.load(dout + value + tile(at, C.N * C.W, wide)).to(keys.dtype)
            u = tl.load(writes + value + tile(at, C.N * C.W, wide))
            state = tl.load(states + (of_chunk * C.W + w) * C.H + tile(wide, C.H, size))
            dscore = tl.dot(y, tl.trans(u), dscore, input_precision="ieee")
            part = tl.dot(y, state, part, input_precision="ieee")
        own = tl.load(documents + first + at)
        dscore *= C.scale * decays(tl.load(g + vector), own, C.C)
        product = dscore.to(keys.dtype)
        tl.store(dscores + of_chunk * (C.C * C.C) + tile(at, C.C, at), product)
        part *= C.scale * tl.load(starts + vector)[:, None]
        tl.store(dstarts + vector, tl.sum(tl.load(q + row + rows).to(tl.float32) * part, 1))
        dqueries += part
        dqueries = tl.dot(product, keys, dqueries, input_precision="ieee")
    tl.store(dq + (first * C.K + head) * C.H + rows, dqueries.to(dq.dtype.element_ty))


@triton.jit
def keys_kernel(
    q, k, v, g, beta, documents, starts, ends, states, writes, dright, dstates, dscores, dstarts,
    dk, dv, dg, dbeta, C: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys of a chunk and a key head; for its value heads, of v, g and beta."""
    head, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at, size, wide = tl.arange(0, C.C), tl.arange(0, C.H), tl.arange(0, C.BW)
    i, j = at[:, None], at[None, :]
    first = batch * C.T + chunk * C.C
    rows = tile(at, C.K * C.H, size)
    dkeys = tl.full([C.C, C.H], 0.0, tl.float32)
    for n in range(head * (C.N // C.K), (head + 1) * (C.N // C.K)):
        vector = (batch * C.N + n) * C.T + chunk * C.C
        of_chunk = (batch * (C.T // C.C) + chunk) * C.N + n
        row = (first * C.K + n // (C.N // C.K)) * C.H

        # Of the system, of the products q·k, and of the log decays in both.
        da = tl.full([C.C, C.C], 0.0, tl.float32)
        dwrite = tl.full([C.C], 0.0, tl.float32)
        write = tl.load(beta + vector + at)
        for w in range(0, C.W, C.BW):
            value = (first * C.N + n) * C.W + w
            y = tl.load(dright + value + tile(at, C.N * C.W, wide))
            u = tl.load(writes + value + tile(at, C.N * C.W, wide))
            da = tl.dot(y, tl.trans(u), da, input_precision="ieee")
            values = tl.load(v + value + tile(at, C.N * C.W, wide)).to(tl.float32)
            dwrite += tl.sum(y.to(tl.float32) * values, 1)
            y = (write[:, None] * y.to(tl.float32)).to(dv.dtype.element_ty)
            tl.store(dv + value + tile(at, C.N * C.W, wide), y)
        own = tl.load(documents + first + at)
        da = tl.where(i > j, -da * decays(tl.load(g + vector + at), own, C.C), 0.0)
        keys = tl.load(k + row + rows)
        dd = da * tl.dot(keys, tl.trans(keys), input_precision="ieee")
        dwrite += tl.sum(dd, 1)
        dd *= write[:, None]
        da = (da * write[:, None]).to(keys.dtype)
        dscore = tl.load(dscores + of_chunk * (C.C * C.C) + tile(at, C.C, at))
        queries = tl.load(q + row + rows)
        dd += dscore * tl.dot(queries, tl.trans(keys), input_precision="ieee")
        # A part of d_ij is of token t with j < t ≤ i. As with d, differences of sums would mix
        # documents.
        dlog = tl.sum(tl.where(i > j, sums(tl.where(i <= j, 1.0, 0.0), dd), 0.0), 1)
        dkeys = tl.dot(da, keys, dkeys, input_precision="ieee")
        dkeys = tl.dot(tl.trans(da), keys, dkeys, input_precision="ieee")
        dkeys = tl.dot(tl.trans(dscore), queries, dkeys, input_precision="ieee")

        # Of the state before the chunk.
        part = tl.full([C.C, C.H], 0.0, tl.float32)
        for w in range(0, C.W, C.BW):
            y = tl.load(dright + (first * C.N + n) * C.W + w + tile(at, C.N * C.W, wide))
            state = tl.load(states + (of_chunk * C.W + w) * C.H + tile(wide, C.H, size))
            part = tl.dot(y, state, part, input_precision="ieee")
        part *= tl.load(starts + vector + at)[:, None]
        held = tl.sum(tl.load(k + row + rows).to(tl.float32) * part, 1)
        write = tl.load(beta + vector + at)
        dkeys -= write[:, None] * part
        tl.store(dbeta + vector + at, dwrite - held)
        dlog += tl.cumsum(tl.load(dstarts + vector + at) - write * held, 0, reverse=True)

        # Of the state after the chunk.
        part = tl.full([C.C, C.H], 0.0, tl.float32)
        dkept = 0.0
        for w in range(0, C.W, C.BW):
            y = tl.load(dstates + (of_chunk * C.W + w) * C.H + tile(wide, C.H, size))
            u = tl.load(writes + (first * C.N + n) * C.W + w + tile(at, C.N * C.W, wide))
            part = tl.dot(u, y, part, input_precision="ieee")
            state = tl.load(states + (of_chunk * C.W + w) * C.H + tile(wide, C.H, size))
            dkept += tl.sum(state.to(tl.float32) * y.to(tl.float32))
        part *= tl.load(ends + vector + at)[:, None]
        dkeys += part
        dend = tl.sum(tl.load(k + row + rows).to(tl.float32) * part, 1)
        dlog += tl.cumsum(dend, 0) - dend
        dlog += tl.load(starts + vector + C.C - 1) * dkept
        tl.store(dg + vector + at, dlog)
    tl.store(dk + (first * C.K + head) * C.H + rows, dkeys.to(dk.dtype.element_ty))
