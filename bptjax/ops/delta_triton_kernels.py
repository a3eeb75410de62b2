"""The gated delta rule and its gradients as Triton kernels: the work of one program.
`delta_triton` launches them; `delta_rule` has the equations and their notation.

A chunk has the system (1 + A) u = r with r_i = β_i (v_i - c_i Sᵀ k_i), and for j < i
A_ij = β_i d_ij k_i·k_j. States are transposed, `[W, H]`, and so are the tiles [BW, C] of u and r in
registers: each product in a chain over chunks then takes its left operand from the registers of the
previous product.

C is a `delta_triton.Constants`. Offsets have 64 bits: long sequences have more than 2³¹ elements.
"""

import triton
import triton.language as tl


@triton.jit
def add_segments(x, x_document, y, y_document):
    """Combines two adjacent sums over tokens, each restricted to the document of its last token."""
    return tl.where(x_document == y_document, x, 0.0) + y, y_document


@triton.jit
def log_decays(g, documents):
    """Returns the sum of g within a token's document up to each token, as two float32 numbers: with
    one, differences would lose small decays after a strong one. No bit depends on another
    document."""
    total, _ = tl.associative_scan((g.to(tl.float64), documents), 0, add_segments)
    high = total.to(tl.float32)
    return high, (total - high.to(tl.float64)).to(tl.float32)


@triton.jit
def decays(high, low, documents, C: tl.constexpr):
    """Returns d_ij, and 0 for j > i."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    past = (i >= j) & (documents[:, None] == documents[None, :])
    logs = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return tl.where(past, tl.exp(logs), 0.0)


@triton.jit
def tile(rows, stride, columns):
    """Returns the offsets of a tile with contiguous columns, from its first element. With 64 bits,
    the compiler keeps one offset in a register instead of all."""
    return rows[:, None].to(tl.int64) * stride + columns[None, :]


@triton.jit
def transposed(rows, stride, columns):
    """Returns the offsets of the transposed tile."""
    return rows[None, :].to(tl.int64) * stride + columns[:, None]


@triton.jit
def halves(x):
    """Splits x into the sum of two bfloat16 matrices, which hold 16 of its bits: the first is the
    upper half of the bits of x."""
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def multiply(x_high, x_low, y_high, y_low, z):
    """Computes x · y + z, for x and y as returned by `halves`."""
    return tl.dot(x_high, y_high, tl.dot(x_high, y_low, tl.dot(x_low, y_high, z)))


@triton.jit
def invert(a, levels: tl.constexpr, halved: tl.constexpr):
    """Computes (1 + a)⁻¹ for a strictly lower triangular a of 2^levels rows: diagonal blocks of one
    size give the diagonal blocks of twice the size. The inverse of (x 0; b y) is
    (x⁻¹ 0; -y⁻¹ b x⁻¹ y⁻¹). Matrix products only, and as stable as substitution."""
    size: tl.constexpr = 2**levels
    i, j = tl.arange(0, size)[:, None], tl.arange(0, size)[None, :]
    x = tl.where(i == j, 1.0, tl.where((i >> 1) == (j >> 1), -a, 0.0))
    for level in tl.static_range(1, levels):
        corner = ((i >> (level + 1)) == (j >> (level + 1))) & ((i >> level) != (j >> level))
        y = tl.where(corner, -a, 0.0)
        if halved:
            x_high, x_low = halves(x)
            y_high, y_low = halves(y)
            y = tl.full([size, size], 0.0, tl.float32)
            y_high, y_low = halves(multiply(y_high, y_low, x_high, x_low, y))
            x = multiply(x_high, x_low, y_high, y_low, x)
        else:
            x = tl.dot(x, tl.dot(y, x, input_precision="ieee"), x, input_precision="ieee")
    return x


@triton.jit
def systems_kernel(
    q, k, g, beta, documents, solutions, inverses, scores, starts, ends, C: tl.constexpr
):
    """Stores (1 + A)⁻¹ and its product with diag(β), d_ij q_i·k_j, c and the decays d to the end of
    a chunk, for one value head."""
    n, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = tl.arange(0, C.C)
    i, j = at[:, None], at[None, :]
    chunks: tl.constexpr = C.T // C.C
    first = batch * C.T + chunk * C.C
    vector = (batch * C.N + n) * C.T + chunk * C.C
    square = ((batch * chunks + chunk) * C.N + n) * (C.C * C.C)
    own, g = tl.load(documents + first + at), tl.load(g + vector + at)
    before = tl.load(documents + first - 1, mask=chunk > 0, other=0)
    last, write = tl.load(documents + first + C.C - 1), tl.load(beta + vector + at)
    row = (first * C.K + n // (C.N // C.K)) * C.H
    rows = tile(at, C.K * C.H, tl.arange(0, C.H))
    keys, queries = tl.load(k + row + rows), tl.load(q + row + rows)
    kk = tl.dot(keys, tl.trans(keys), input_precision="ieee")
    qk = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    high, low = log_decays(g, own)
    tl.store(starts + vector + at, tl.where(own == before, tl.exp(high + low), 0.0))
    to_end = tl.sum(tl.where(at == C.C - 1, high, 0.0)) - high
    to_end += tl.sum(tl.where(at == C.C - 1, low, 0.0)) - low
    tl.store(ends + vector + at, tl.where(own == last, tl.exp(to_end), 0.0))
    d = decays(high, low, own, C.C)
    tl.store(scores + square + tile(at, C.C, at), (d * qk).to(scores.dtype.element_ty))
    a = tl.where(i > j, write[:, None] * d * kk, 0.0)
    x = invert(a, C.levels, C.halved)
    tl.store(inverses + square + tile(at, C.C, at), x.to(inverses.dtype.element_ty))
    x *= tl.load(beta + vector + at)[None, :]
    tl.store(solutions + square + tile(at, C.C, at), x.to(solutions.dtype.element_ty))


@triton.jit
def forward_kernel(
    q, k, v, solutions, scores, starts, ends, initial, out, states, last, C: tl.constexpr
):
    """Stores a tile of output columns, the states before groups of chunks, and the last state."""
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
    # The compiler does not prefetch scalars.
    lasts = starts + (batch * C.N + n) * C.T + C.C - 1
    state_decay = tl.load(lasts)
    for chunk in range(0, chunks):
        first = batch * C.T + chunk * C.C
        row, value = (first * C.K + n // (C.N // C.K)) * C.H, (first * C.N + n) * C.W + column
        keys, queries = tl.load(k + row + rows), tl.load(q + row + rows)
        square = ((batch * chunks + chunk) * C.N + n) * (C.C * C.C)
        solution = tl.load(solutions + square + squares)
        score = tl.load(scores + square + squares)
        vector = (batch * C.N + n) * C.T + chunk * C.C
        start, end = tl.load(starts + vector + at), tl.load(ends + vector + at)
        next_decay = tl.load(lasts + (chunk + 1) * C.C, mask=chunk + 1 < chunks, other=0.0)
        held = tl.dot(state.to(keys.dtype), tl.trans(keys), input_precision="ieee")
        u = tl.trans(tl.load(v + value + values)).to(keys.dtype)
        u = tl.dot(u, tl.trans(solution), input_precision="ieee")
        held = (-start[None, :] * held).to(keys.dtype)
        u = tl.dot(held, tl.trans(solution), u, input_precision="ieee")
        read = tl.dot(state.to(keys.dtype), tl.trans(queries), input_precision="ieee")
        read *= start[None, :]
        read = tl.dot(u.to(keys.dtype), tl.trans(score), read, input_precision="ieee")
        tl.store(out + value + values, tl.trans(C.scale * read).to(out.dtype.element_ty))
        u = (u * end[None, :]).to(keys.dtype)
        state = tl.dot(u, keys, state_decay * state, input_precision="ieee")
        state_decay = next_decay
        if (chunk + 1) % C.group == 0 and chunk + 1 < chunks:
            group = (batch * groups + (chunk + 1) // C.group) * C.N + n
            tl.store(states + (group * C.W + column) * C.H + of_state, state)
    tl.store(last + edge + edges, state)


@triton.jit
def recompute_kernel(
    k, v, beta, inverses, starts, ends, states, dstates, chunk_states, writes, ddecays,
    C: tl.constexpr,
):  # fmt: skip
    """Stores the state before each chunk of a group, and the chunk's writes, from the state before
    the group; and the gradient of the log of the state's decay in the chunk."""
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
        state_decay = tl.load(starts + (batch * C.N + n) * C.T + chunk * C.C + C.C - 1)
        before, square = state.to(chunk_states.dtype.element_ty), (of_chunk * C.W + column) * C.H
        tl.store(chunk_states + square + of_state, before)
        dlog = before.to(tl.float32) * tl.load(dstates + square + of_state).to(tl.float32)
        tl.store(ddecays + (of_chunk * C.W + column) // C.BW, state_decay * tl.sum(dlog))
        first = batch * C.T + chunk * C.C
        row, value = (first * C.K + n // (C.N // C.K)) * C.H, (first * C.N + n) * C.W + column
        keys = tl.load(k + row + rows)
        inverse = tl.load(inverses + of_chunk * (C.C * C.C) + squares)
        vector = (batch * C.N + n) * C.T + chunk * C.C
        start, end = tl.load(starts + vector + at), tl.load(ends + vector + at)
        write = tl.load(beta + vector + at)
        held = tl.dot(state.to(keys.dtype), tl.trans(keys), input_precision="ieee")
        right = tl.load(v + value + transposed(at, C.N * C.W, wide)).to(tl.float32)
        right = (write[None, :] * (right - start[None, :] * held)).to(keys.dtype)
        u = tl.dot(right, tl.trans(inverse), input_precision="ieee")
        tl.store(writes + value + values, tl.trans(u).to(writes.dtype.element_ty))
        u = (u * end[None, :]).to(keys.dtype)
        state = tl.dot(u, keys, state_decay * state, input_precision="ieee")


@triton.jit
def backward_kernel(
    q, k, dout, fades, inverses, scores, starts, ends, dlast, dright, dstates, dinitial,
    C: tl.constexpr,
):  # fmt: skip
    """Stores gradients of a tile of value columns: of r, of the state after each chunk, and of the
    first state. `fades` are -β_i c_i."""
    n, batch = tl.program_id(0) // (C.W // C.BW), tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) % (C.W // C.BW) * C.BW
    at, size, wide = tl.arange(0, C.C), tl.arange(0, C.H), tl.arange(0, C.BW)
    chunks: tl.constexpr = C.T // C.C
    edge, edges = (batch * C.N + n) * C.H * C.W + column, transposed(size, C.W, wide)
    rows, values, squares = tile(at, C.K * C.H, size), tile(at, C.N * C.W, wide), tile(at, C.C, at)
    of_state = tile(wide, C.H, size)
    dstate = tl.load(dlast + edge + edges)
    lasts = starts + (batch * C.N + n) * C.T + C.C - 1
    state_decay = tl.load(lasts + (chunks - 1) * C.C)
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
        next_decay = tl.load(lasts + (chunk - 1) * C.C, mask=chunk > 0, other=0.0)
        du = tl.dot(dstate.to(keys.dtype), tl.trans(keys), input_precision="ieee") * end[None, :]
        # The factor keeps the compiler from adding the two sums within the product, where it would
        # not prefetch `end`.
        du += C.scale * tl.dot(douts, score, input_precision="ieee")
        dr = tl.dot(du.to(keys.dtype), inverse, input_precision="ieee")
        tl.store(dright + value + values, tl.trans(dr).to(dright.dtype.element_ty))
        read = (douts.to(tl.float32) * (C.scale * start[None, :])).to(keys.dtype)
        dstate = tl.dot(read, queries, state_decay * dstate, input_precision="ieee")
        dr = (dr * fade[None, :]).to(keys.dtype)
        dstate = tl.dot(dr, keys, dstate, input_precision="ieee")
        state_decay = next_decay
    tl.store(dinitial + edge + edges, dstate)


@triton.jit
def scores_kernel(
    q, k, v, g, beta, documents, writes, dout, dright, dscores, dsystems, dv, dlogs, dbeta,
    C: tl.constexpr,
):  # fmt: skip
    """Stores for a chunk and a value head the gradients of v, and of q_i·k_j and k_i·k_j in the
    outputs and in the system; part of the gradient of beta; and the sums over j of the gradients of
    log d_ij minus the gradients of log d_ji."""
    n, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at, size, wide = tl.arange(0, C.C), tl.arange(0, C.H), tl.arange(0, C.BW)
    i, j = at[:, None], at[None, :]
    first = batch * C.T + chunk * C.C
    vector = (batch * C.N + n) * C.T + chunk * C.C
    write, own = tl.load(beta + vector + at), tl.load(documents + first + at)
    high, low = log_decays(tl.load(g + vector + at), own)
    dscore = tl.full([C.C, C.C], 0.0, tl.float32)
    da = tl.full([C.C, C.C], 0.0, tl.float32)
    dwrite = tl.full([C.C], 0.0, tl.float32)
    for w in range(0, C.W, C.BW):
        value = (first * C.N + n) * C.W + w
        y = tl.load(dright + value + tile(at, C.N * C.W, wide))
        u = tl.load(writes + value + tile(at, C.N * C.W, wide))
        douts = tl.load(dout + value + tile(at, C.N * C.W, wide)).to(u.dtype)
        da = tl.dot(y, tl.trans(u), da, input_precision="ieee")
        dscore = tl.dot(douts, tl.trans(u), dscore, input_precision="ieee")
        values = tl.load(v + value + tile(at, C.N * C.W, wide)).to(tl.float32)
        dwrite += tl.sum(y.to(tl.float32) * values, 1)
        y = (write[:, None] * y.to(tl.float32)).to(dv.dtype.element_ty)
        tl.store(dv + value + tile(at, C.N * C.W, wide), y)
    d = decays(high, low, own, C.C)
    da = tl.where(i > j, -da * d, 0.0)
    dscore *= C.scale * d
    row = (first * C.K + n // (C.N // C.K)) * C.H
    keys = tl.load(k + row + tile(at, C.K * C.H, size))
    dd = da * tl.dot(keys, tl.trans(keys), input_precision="ieee")
    tl.store(dbeta + vector + at, dwrite + tl.sum(dd, 1))
    queries = tl.load(q + row + tile(at, C.K * C.H, size))
    dd = write[:, None] * dd + dscore * tl.dot(queries, tl.trans(keys), input_precision="ieee")
    square = ((batch * (C.T // C.C) + chunk) * C.N + n) * (C.C * C.C)
    tl.store(dscores + square + tile(at, C.C, at), dscore.to(dscores.dtype.element_ty))
    da = (da * write[:, None]).to(dsystems.dtype.element_ty)
    tl.store(dsystems + square + tile(at, C.C, at), da)
    tl.store(dlogs + vector + at, tl.sum(dd, 1) - tl.sum(dd, 0))


@triton.jit
def queries_kernel(q, k, starts, states, dout, dscores, dq, dstarts, C: tl.constexpr):
    """Stores the gradients of the queries of a chunk and a key head, and the part of the gradients
    of log c that comes through these queries."""
    head, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at, size, wide = tl.arange(0, C.C), tl.arange(0, C.H), tl.arange(0, C.BW)
    first = batch * C.T + chunk * C.C
    row = (first * C.K + head) * C.H
    dqueries = tl.full([C.C, C.H], 0.0, tl.float32)
    for n in range(head * (C.N // C.K), (head + 1) * (C.N // C.K)):
        of_chunk = (batch * (C.T // C.C) + chunk) * C.N + n
        vector = (batch * C.N + n) * C.T + chunk * C.C
        start = C.scale * tl.load(starts + vector + at)
        part = tl.full([C.C, C.H], 0.0, tl.float32)
        for w in range(0, C.W, C.BW):
            y = tl.load(dout + (first * C.N + n) * C.W + w + tile(at, C.N * C.W, wide))
            state = tl.load(states + (of_chunk * C.W + w) * C.H + tile(wide, C.H, size))
            part = tl.dot(y.to(state.dtype), state, part, input_precision="ieee")
        part *= start[:, None]
        dqueries += part
        part *= tl.load(q + row + tile(at, C.K * C.H, size)).to(tl.float32)
        tl.store(dstarts + vector + at, tl.sum(part, 1))
        dscore = tl.load(dscores + of_chunk * (C.C * C.C) + tile(at, C.C, at))
        keys = tl.load(k + row + tile(at, C.K * C.H, size))
        dqueries = tl.dot(dscore, keys, dqueries, input_precision="ieee")
    tl.store(dq + row + tile(at, C.K * C.H, size), dqueries.to(dq.dtype.element_ty))


@triton.jit
def keys_kernel(
    q, k, beta, starts, ends, states, writes, dright, dstates, dscores, dsystems,
    dk, dstarts, dends, C: tl.constexpr,
):  # fmt: skip
    """Stores gradients of the keys of a chunk and a key head, and their parts of d log c / beta and
    of the gradient of the log decays to the end of the chunk."""
    head, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at, size, wide = tl.arange(0, C.C), tl.arange(0, C.H), tl.arange(0, C.BW)
    first = batch * C.T + chunk * C.C
    row = (first * C.K + head) * C.H
    dkeys = tl.full([C.C, C.H], 0.0, tl.float32)
    for n in range(head * (C.N // C.K), (head + 1) * (C.N // C.K)):
        of_chunk = (batch * (C.T // C.C) + chunk) * C.N + n
        vector = (batch * C.N + n) * C.T + chunk * C.C

        # Part through the products with queries and keys.
        dscore = tl.load(dscores + of_chunk * (C.C * C.C) + tile(at, C.C, at))
        queries = tl.load(q + row + tile(at, C.K * C.H, size))
        dkeys = tl.dot(tl.trans(dscore), queries, dkeys, input_precision="ieee")
        da = tl.load(dsystems + of_chunk * (C.C * C.C) + tile(at, C.C, at))
        keys = tl.load(k + row + tile(at, C.K * C.H, size))
        dkeys = tl.dot(da, keys, dkeys, input_precision="ieee")
        dkeys = tl.dot(tl.trans(da), keys, dkeys, input_precision="ieee")

        # Part through the state before the chunk.
        start, end = -tl.load(starts + vector + at), tl.load(ends + vector + at)
        write = tl.load(beta + vector + at)
        part = tl.full([C.C, C.H], 0.0, tl.float32)
        for w in range(0, C.W, C.BW):
            y = tl.load(dright + (first * C.N + n) * C.W + w + tile(at, C.N * C.W, wide))
            state = tl.load(states + (of_chunk * C.W + w) * C.H + tile(wide, C.H, size))
            part = tl.dot(y, state, part, input_precision="ieee")
        part *= start[:, None]
        dkeys += write[:, None] * part
        part *= tl.load(k + row + tile(at, C.K * C.H, size)).to(tl.float32)
        tl.store(dstarts + vector + at, tl.sum(part, 1))

        # Part through the state after the chunk.
        part = tl.full([C.C, C.H], 0.0, tl.float32)
        for w in range(0, C.W, C.BW):
            u = tl.load(writes + (first * C.N + n) * C.W + w + tile(at, C.N * C.W, wide))
            y = tl.load(dstates + (of_chunk * C.W + w) * C.H + tile(wide, C.H, size))
            part = tl.dot(u, y, part, input_precision="ieee")
        part *= end[:, None]
        dkeys += part
        part *= tl.load(k + row + tile(at, C.K * C.H, size)).to(tl.float32)
        tl.store(dends + vector + at, tl.sum(part, 1))
    tl.store(dk + row + tile(at, C.K * C.H, size), dkeys.to(dk.dtype.element_ty))
