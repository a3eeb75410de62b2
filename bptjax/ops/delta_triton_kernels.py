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
def matrix(x, at, rows, width, C: tl.constexpr):
    """Loads a tile of rows of a contiguous matrix."""
    return tl.load(x + at + rows[:, None] * width + tl.arange(0, C)[None, :])


@triton.jit
def systems_kernel(q, k, g, beta, documents, inverses, scores, starts, ends, C: tl.constexpr):
    """(1 + A)⁻¹, scale · d_ij q_i·k_j, c and the decays d to the end of the chunk, for the value
    heads of one key head."""
    head, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at, size = tl.arange(0, C.C), tl.arange(0, C.H)
    i, j = at[:, None], at[None, :]
    tokens = batch * C.T + chunk * C.C + at
    rows = (tokens[:, None] * C.K + head) * C.H + size[None, :]
    keys = tl.load(k + rows)
    kk = tl.dot(keys, tl.trans(keys), input_precision="ieee")
    qk = tl.dot(tl.load(q + rows), tl.trans(keys), input_precision="ieee") * C.scale
    own = tl.load(documents + tokens)
    before = tl.load(documents + batch * C.T + chunk * C.C - 1, mask=chunk > 0, other=0)
    for n in range(head * (C.N // C.K), (head + 1) * (C.N // C.K)):
        vector = (batch * C.N + n) * C.T + chunk * C.C + at
        decay = tl.load(g + vector)
        start = tl.where(own == before, tl.exp(tl.cumsum(decay, 0)), 0.0)
        d = decays(decay, own, C.C)
        tl.store(starts + vector, start)
        tl.store(ends + vector, tl.sum(tl.where(i == C.C - 1, d, 0.0), 0))
        square = ((batch * (C.T // C.C) + chunk) * C.N + n) * (C.C * C.C) + i * C.C + j
        tl.store(scores + square, (qk * d).to(scores.dtype.element_ty))
        a = tl.where(i > j, tl.load(beta + vector)[:, None] * d * kk, 0.0)
        # Of the blocks (x 0; b y) the inverse is (x⁻¹ 0; -y⁻¹ b x⁻¹ y⁻¹): from the inverses of the
        # blocks of one size on the diagonal to those of the next.
        inverse = tl.where(i == j, 1.0, 0.0) - tl.where((i >> 1) == (j >> 1), a, 0.0)
        levels: tl.constexpr = C.levels
        for level in tl.static_range(1, levels):
            pair = (i >> (level + 1)) == (j >> (level + 1))
            corner = tl.where(pair & ((i >> level) != (j >> level)), a, 0.0)
            corner = tl.dot(corner, inverse, input_precision=C.precision)
            inverse -= tl.dot(inverse, corner, input_precision=C.precision)
        tl.store(inverses + square, inverse.to(inverses.dtype.element_ty))


@triton.jit
def solve(state, k, v, inverse, beta, start):
    """The writes u of a chunk [BW, C], whose values are v [C, BW], for the state [BW, H] before
    it."""
    held = tl.dot(state.to(k.dtype), tl.trans(k), input_precision="ieee")
    right = beta[None, :] * (tl.trans(v).to(tl.float32) - start[None, :] * held)
    return tl.dot(right.to(k.dtype), tl.trans(inverse), input_precision="ieee")


@triton.jit
def forward_kernel(
    q, k, v, beta, inverses, scores, starts, ends, initial, out, states, last, C: tl.constexpr
):
    """Outputs of a tile of value columns, the states before groups of chunks, and the last."""
    n, batch = tl.program_id(0) // (C.W // C.BW), tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) % (C.W // C.BW) * C.BW + tl.arange(0, C.BW)
    at, size = tl.arange(0, C.C), tl.arange(0, C.H)
    chunks: tl.constexpr = C.T // C.C
    groups: tl.constexpr = (chunks + C.group - 1) // C.group
    edge = ((batch * C.N + n) * C.H + size[None, :]) * C.W + columns[:, None]
    state = tl.load(initial + edge)
    for chunk in range(0, chunks):
        group = (batch * groups + chunk // C.group) * C.N + n
        rows = (group * C.W + columns[:, None]) * C.H + size[None, :]
        tl.store(states + rows, state, mask=chunk % C.group == 0)
        tokens = batch * C.T + chunk * C.C + at
        rows = (tokens[:, None] * C.K + n // (C.N // C.K)) * C.H + size[None, :]
        keys, queries = tl.load(k + rows), tl.load(q + rows)
        values = (tokens[:, None] * C.N + n) * C.W + columns[None, :]
        square = ((batch * chunks + chunk) * C.N + n) * (C.C * C.C)
        inverse, score = (
            matrix(inverses, square, at, C.C, C.C),
            matrix(scores, square, at, C.C, C.C),
        )
        vector = (batch * C.N + n) * C.T + chunk * C.C
        start, end = tl.load(starts + vector + at), tl.load(ends + vector + at)
        kept = tl.load(starts + vector + C.C - 1)
        writes = solve(
            state, keys, tl.load(v + values), inverse, tl.load(beta + vector + at), start
        )
        read = tl.dot(state.to(keys.dtype), tl.trans(queries), input_precision="ieee")
        read *= C.scale * start[None, :]
        read = tl.dot(writes.to(keys.dtype), tl.trans(score), read, input_precision="ieee")
        tl.store(out + values, tl.trans(read).to(out.dtype.element_ty))
        writes = (writes * end[None, :]).to(keys.dtype)
        state = tl.dot(writes, keys, kept * state, input_precision="ieee")
    tl.store(last + edge, state)


@triton.jit
def again_kernel(
    k, v, beta, inverses, starts, ends, states, chunk_states, writes, C: tl.constexpr
):
    """The state before each chunk of a group, and its writes, from the state before the group."""
    n, batch = tl.program_id(0) // (C.W // C.BW), tl.program_id(2).to(tl.int64)
    columns = tl.program_id(0) % (C.W // C.BW) * C.BW + tl.arange(0, C.BW)
    at, size = tl.arange(0, C.C), tl.arange(0, C.H)
    chunks: tl.constexpr = C.T // C.C
    groups: tl.constexpr = (chunks + C.group - 1) // C.group
    group = tl.program_id(1)
    rows = (((batch * groups + group) * C.N + n) * C.W + columns[:, None]) * C.H + size[None, :]
    state = tl.load(states + rows)
    for chunk in range(group * C.group, min((group + 1) * C.group, chunks)):
        of_chunk = (batch * chunks + chunk) * C.N + n
        rows = (of_chunk * C.W + columns[:, None]) * C.H + size[None, :]
        tl.store(chunk_states + rows, state.to(chunk_states.dtype.element_ty))
        tokens = batch * C.T + chunk * C.C + at
        rows = (tokens[:, None] * C.K + n // (C.N // C.K)) * C.H + size[None, :]
        keys = tl.load(k + rows)
        values = (tokens[:, None] * C.N + n) * C.W + columns[None, :]
        inverse = matrix(inverses, of_chunk * (C.C * C.C), at, C.C, C.C)
        vector = (batch * C.N + n) * C.T + chunk * C.C
        start, end = tl.load(starts + vector + at), tl.load(ends + vector + at)
        kept = tl.load(starts + vector + C.C - 1)
        u = solve(state, keys, tl.load(v + values), inverse, tl.load(beta + vector + at), start)
        tl.store(writes + values, tl.trans(u).to(writes.dtype.element_ty))
        u = (u * end[None, :]).to(keys.dtype)
        state = tl.dot(u, keys, kept * state, input_precision="ieee")


@triton.jit
def backward_kernel(
    q, k, dout, beta, inverses, scores, starts, ends, dlast, dright, dstates, dinitial,
    C: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of value columns: of r, of the state after each chunk, and of the first
    state."""
    n, batch = tl.program_id(0) // (C.W // C.BW), tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) % (C.W // C.BW) * C.BW + tl.arange(0, C.BW)
    at, size = tl.arange(0, C.C), tl.arange(0, C.H)
    chunks: tl.constexpr = C.T // C.C
    edge = ((batch * C.N + n) * C.H + size[None, :]) * C.W + columns[:, None]
    dstate = tl.load(dlast + edge)
    for step in range(0, chunks):
        chunk = chunks - 1 - step
        of_chunk = (batch * chunks + chunk) * C.N + n
        rows = (of_chunk * C.W + columns[:, None]) * C.H + size[None, :]
        tl.store(dstates + rows, dstate.to(dstates.dtype.element_ty))
        tokens = batch * C.T + chunk * C.C + at
        rows = (tokens[:, None] * C.K + n // (C.N // C.K)) * C.H + size[None, :]
        keys, queries = tl.load(k + rows), tl.load(q + rows)
        values = (tokens[:, None] * C.N + n) * C.W + columns[None, :]
        douts = tl.trans(tl.load(dout + values)).to(keys.dtype)
        square = of_chunk * (C.C * C.C)
        inverse, score = (
            matrix(inverses, square, at, C.C, C.C),
            matrix(scores, square, at, C.C, C.C),
        )
        vector = (batch * C.N + n) * C.T + chunk * C.C
        start, end = tl.load(starts + vector + at), tl.load(ends + vector + at)
        kept = tl.load(starts + vector + C.C - 1)
        du = tl.dot(dstate.to(keys.dtype), tl.trans(keys), input_precision="ieee") * end[None, :]
        du = tl.dot(douts, score, du, input_precision="ieee")
        dr = tl.dot(du.to(keys.dtype), inverse, input_precision="ieee")
        tl.store(dright + values, tl.trans(dr).to(dright.dtype.element_ty))
        read = (douts.to(tl.float32) * (C.scale * start[None, :])).to(keys.dtype)
        dstate = tl.dot(read, queries, kept * dstate, input_precision="ieee")
        dr = (dr * (-tl.load(beta + vector + at) * start)[None, :]).to(keys.dtype)
        dstate = tl.dot(dr, keys, dstate, input_precision="ieee")
    tl.store(dinitial + edge, dstate)


@triton.jit
def gradient_kernel(
    q, k, v, g, beta, documents, starts, ends, states, writes, dout, dright, dstates,
    dq, dk, dv, dg, dbeta, C: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk of tokens, of one key head and its value heads."""
    head, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at, size, wide = tl.arange(0, C.C), tl.arange(0, C.H), tl.arange(0, C.BW)
    i, j = at[:, None], at[None, :]
    tokens = batch * C.T + chunk * C.C + at
    rows = (tokens[:, None] * C.K + head) * C.H + size[None, :]
    queries, keys = tl.load(q + rows), tl.load(k + rows)
    own = tl.load(documents + tokens)
    W: tl.constexpr = C.W
    BW: tl.constexpr = C.BW
    dqueries = tl.full([C.C, C.H], 0.0, tl.float32)
    dkeys = tl.full([C.C, C.H], 0.0, tl.float32)
    for n in range(head * (C.N // C.K), (head + 1) * (C.N // C.K)):
        vector = (batch * C.N + n) * C.T + chunk * C.C
        start, end = tl.load(starts + vector + at), tl.load(ends + vector + at)
        kept, write = tl.load(starts + vector + C.C - 1), tl.load(beta + vector + at)
        d = decays(tl.load(g + vector + at), own, C.C)
        values = (tokens[:, None] * C.N + n) * C.W + wide[None, :]
        of_chunk = (batch * (C.T // C.C) + chunk) * C.N + n
        square = (of_chunk * C.W + wide[:, None]) * C.H + size[None, :]

        # Of scale · (c qᵀS + d (q·k) u).
        part = tl.full([C.C, C.H], 0.0, tl.float32)
        dscore = tl.full([C.C, C.C], 0.0, tl.float32)
        for w in tl.static_range(0, W, BW):
            y = tl.load(dout + values + w).to(keys.dtype)
            part = tl.dot(y, tl.load(states + square + w * C.H), part, input_precision="ieee")
            u = tl.load(writes + values + w)
            dscore = tl.dot(y, tl.trans(u), dscore, input_precision="ieee")
        part *= C.scale * start[:, None]
        dqueries += part
        # Gradients of log c, and of log d below.
        dstart = tl.sum(queries.to(tl.float32) * part, 1)
        dscore *= C.scale * d
        dd = dscore * tl.dot(queries, tl.trans(keys), input_precision="ieee")
        product = dscore.to(keys.dtype)
        dqueries = tl.dot(product, keys, dqueries, input_precision="ieee")
        dkeys = tl.dot(tl.trans(product), queries, dkeys, input_precision="ieee")

        # Of the system and its right side.
        part = tl.full([C.C, C.H], 0.0, tl.float32)
        da = tl.full([C.C, C.C], 0.0, tl.float32)
        dwrite = tl.full([C.C], 0.0, tl.float32)
        for w in tl.static_range(0, W, BW):
            y = tl.load(dright + values + w)
            part = tl.dot(y, tl.load(states + square + w * C.H), part, input_precision="ieee")
            u = tl.load(writes + values + w)
            da = tl.dot(y, tl.trans(u), da, input_precision="ieee")
            y = y.to(tl.float32)
            dwrite += tl.sum(y * tl.load(v + values + w).to(tl.float32), 1)
            tl.store(dv + values + w, (write[:, None] * y).to(dv.dtype.element_ty))
        part *= start[:, None]
        held = tl.sum(keys.to(tl.float32) * part, 1)
        dkeys -= write[:, None] * part
        dwrite -= held
        dstart -= write * held
        da = tl.where(i > j, -da * d, 0.0)
        kk = tl.dot(keys, tl.trans(keys), input_precision="ieee")
        dwrite += tl.sum(da * kk, 1)
        da *= write[:, None]
        dd += da * kk
        product = da.to(keys.dtype)
        dkeys = tl.dot(product, keys, dkeys, input_precision="ieee")
        dkeys = tl.dot(tl.trans(product), keys, dkeys, input_precision="ieee")

        # Of the state after the chunk.
        part = tl.full([C.C, C.H], 0.0, tl.float32)
        dkept = 0.0
        for w in tl.static_range(0, W, BW):
            y = tl.load(dstates + square + w * C.H)
            u = tl.load(writes + values + w)
            part = tl.dot(u, y, part, input_precision="ieee")
            s = tl.load(states + square + w * C.H)
            dkept += tl.sum(s.to(tl.float32) * y.to(tl.float32))
        part *= end[:, None]
        dkeys += part
        dend = tl.sum(keys.to(tl.float32) * part, 1)

        # Log decays: of token t is a part of d_ij for j < t ≤ i. As with d, differences of sums
        # would mix documents.
        through = tl.where(i > j, sums(tl.where(i <= j, 1.0, 0.0), dd), 0.0)
        through += tl.where(i <= j, dstart[None, :], 0.0) + tl.where(i > j, dend[None, :], 0.0)
        tl.store(dg + vector + at, tl.sum(through, 1) + kept * dkept)
        tl.store(dbeta + vector + at, dwrite)
    tl.store(dq + rows, dqueries.to(dq.dtype.element_ty))
    tl.store(dk + rows, dkeys.to(dk.dtype.element_ty))
