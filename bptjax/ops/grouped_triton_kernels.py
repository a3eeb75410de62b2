"""The grouped matrix product and its gradients as Triton kernels: the work of one program.
`grouped_triton` launches them.

C is a `grouped_triton.Constants`. Offsets have 64 bits: the matrices of many experts have more than
2³¹ elements.
"""

import triton
import triton.language as tl


@triton.jit
def multiply_kernel(x, w, experts, y, C: tl.constexpr):
    """Stores a tile [BM, BN] of y = x · w. Its rows are one block, which has one expert or none."""
    # Programs that read the same rows follow each other, so that the cache holds the rows.
    tiles: tl.constexpr = (C.N + C.BN - 1) // C.BN
    block = tl.program_id(0) // tiles
    rows = block.to(tl.int64) * C.BM + tl.arange(0, C.BM)
    columns = tl.program_id(0) % tiles * C.BN + tl.arange(0, C.BN)
    at = rows[:, None] * C.N + columns[None, :]
    expert = tl.load(experts + block)
    if expert >= C.X:
        tl.store(y + at, 0.0, mask=columns[None, :] < C.N)
        return
    w += expert.to(tl.int64) * (C.K * C.N)
    acc = tl.full([C.BM, C.BN], 0.0, tl.float32)
    for start in range(0, C.K, C.BK):
        inner = start + tl.arange(0, C.BK)
        a = tl.load(x + rows[:, None] * C.K + inner[None, :], mask=inner[None, :] < C.K, other=0.0)
        matrix = inner[:, None] * C.stride_k + columns[None, :] * C.stride_n
        inside = (inner[:, None] < C.K) & (columns[None, :] < C.N)
        b = tl.load(w + matrix, mask=inside, other=0.0)
        acc = tl.dot(a, b.to(a.dtype), acc, input_precision="ieee")
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=columns[None, :] < C.N)


@triton.jit
def gradient_kernel(x, dy, ranges, dw, C: tl.constexpr):
    """Stores a tile [BK, BN] of one expert's dw = xᵀ · dy, summed over its rows from
    BM · ranges[e, 0] to BM · ranges[e, 1]."""
    expert = tl.program_id(2)
    inner = tl.program_id(1) * C.BK + tl.arange(0, C.BK)
    columns = tl.program_id(0) * C.BN + tl.arange(0, C.BN)
    first, end = tl.load(ranges + 2 * expert), tl.load(ranges + 2 * expert + 1)
    acc = tl.full([C.BK, C.BN], 0.0, tl.float32)
    for step in range(first, end):
        rows = (step * C.BM + tl.arange(0, C.BM)).to(tl.int64)
        a = tl.load(x + rows[None, :] * C.K + inner[:, None], mask=inner[:, None] < C.K, other=0.0)
        inside = columns[None, :] < C.N
        b = tl.load(dy + rows[:, None] * C.N + columns[None, :], mask=inside, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    at = inner[:, None] * C.N + columns[None, :]
    inside = (inner[:, None] < C.K) & (columns[None, :] < C.N)
    dw += expert.to(tl.int64) * (C.K * C.N)
    tl.store(dw + at, acc.to(dw.dtype.element_ty), mask=inside)
