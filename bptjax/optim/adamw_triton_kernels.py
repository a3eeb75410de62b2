"""AdamW as Triton kernels: the work of one program. `adamw_triton` launches them.

C is an `adamw_triton.Constants`. Offsets have 64 bits: stacked parameters have more than 2³¹
elements.
"""

import triton
import triton.language as tl

# Factor of the codebooks' values: `_value` returns multiples of it.
UNIT = tl.constexpr(0.5e-7)


@triton.jit
def adamw_kernel(g, numbers, words, old_p, old_mu, old_nu, p, mu, nu, C: tl.constexpr):
    """Updates C.rows elements of one entry of a parameter and its two slots; other arguments as
    those of `adamw_int8_kernel`, with blocks of one element."""
    if tl.load(words + 2) == 0:
        return
    total = tl.load(words + 4).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * C.rows + tl.arange(0, C.rows)
    elements = tl.load(words + 3).to(tl.int64) * total + at
    inside = at < total

    grad = tl.load(g + at, mask=inside, other=0.0).to(tl.float32) * tl.load(numbers)
    m = tl.load(old_mu + elements, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(old_nu + elements, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(old_p + elements, mask=inside, other=0.0).to(tl.float32)
    m, v, x = _update(m, v, x, grad, numbers, C)

    first, second = _words(at.to(tl.uint32), words)
    _store(p + elements, x, second & 0xFFFF, inside)
    _store(mu + elements, m, first >> 16, inside)
    _store(nu + elements, v, first & 0xFFFF, inside)


@triton.jit
def adamw_int8_kernel(
    g,
    numbers,
    words,
    old_p,
    old_mu_absmax,
    old_mu,
    old_nu_absmax,
    old_nu,
    p,
    mu_absmax,
    mu,
    nu_absmax,
    nu,
    C: tl.constexpr,
):
    """Updates C.rows blocks of one entry of a parameter and its two slots.

    numbers: factor on the gradient, learning rate, weight decay, and the bias corrections of both
    moments. words: key of the rounding (two), whether to update, the entry, and its number of
    blocks.
    """
    if tl.load(words + 2) == 0:
        return
    total = tl.load(words + 4).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * C.rows + tl.arange(0, C.rows)
    at = row[:, None] * C.block + tl.arange(0, C.block)[None, :]
    index = at.to(tl.uint32)
    entry = tl.load(words + 3).to(tl.int64)
    blocks = entry * total + row
    elements = entry * total * C.block + at
    is_row = row < total
    inside = tl.broadcast_to(is_row[:, None], [C.rows, C.block])

    grad = tl.load(g + at, mask=inside, other=0.0).to(tl.float32) * tl.load(numbers)
    codes = tl.load(old_mu + elements, mask=inside, other=0).to(tl.float32) - 127
    unit = tl.load(old_mu_absmax + blocks, mask=is_row, other=0.0)[:, None] * UNIT
    m = _value(tl.abs(codes), 0) * unit
    m = tl.where(codes < 0, -m, m)
    codes = tl.load(old_nu + elements, mask=inside, other=0).to(tl.float32) + 1
    unit = tl.load(old_nu_absmax + blocks, mask=is_row, other=0.0)[:, None] * UNIT
    root = _value(codes, 1) * unit
    x = tl.load(old_p + elements, mask=inside, other=0.0).to(tl.float32)
    m, v, x = _update(m, root * root, x, grad, numbers, C)

    first, second = _words(index, words)
    _store(p + elements, x, second & 0xFFFF, inside)

    absmax = tl.max(tl.abs(m), 1)
    tl.store(mu_absmax + blocks, absmax, mask=is_row)
    index = _round(tl.abs(m), absmax, first >> 16, m < 0, 0)
    codes = tl.where(m < 0, 127 - tl.minimum(index, 127), 127 + index)
    tl.store(mu + elements, codes.to(tl.uint8), mask=inside)

    root = tl.sqrt(v)
    absmax = tl.max(root, 1)
    tl.store(nu_absmax + blocks, absmax, mask=is_row)
    index = _round(root, absmax, first & 0xFFFF, root < 0, 1)
    # Never the code of zero, for the reason in `optimizer._store`.
    tl.store(nu + elements, tl.maximum(index - 1, 1).to(tl.uint8), mask=inside)


@triton.jit
def _update(m, v, x, grad, numbers, C: tl.constexpr):
    """Returns both moments and the parameter after a step."""
    m = C.beta1 * m + (1 - C.beta1) * grad
    v = C.beta2 * v + (1 - C.beta2) * (grad * grad)
    m_hat, v_hat = m * tl.load(numbers + 3), v * tl.load(numbers + 4)
    direction = m_hat / (tl.sqrt(v_hat) + C.epsilon)
    return m, v, x - tl.load(numbers + 1) * (direction + tl.load(numbers + 2) * x)


@triton.jit
def _words(index, words):
    """Returns the two random words of each element, as `quantize.random_bits`."""
    first = _mix(_mix(index ^ tl.load(words)) + tl.load(words + 1))
    return first, _mix(first + 0x9E3779B9)


@triton.jit
def _store(to, x, noise, inside):
    """Stores float32 x, in bfloat16 rounded stochastically by 16 random bits."""
    if to.dtype.element_ty == tl.bfloat16:
        bits = (x.to(tl.uint32, bitcast=True) + noise) >> 16
        tl.store(to, bits.to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=inside)
    else:
        tl.store(to, x, mask=inside)


# Below, `first` is the exponent of the first decade: 0 of signed codes, 1 of unsigned ones.


@triton.jit
def _round(x, absmax, noise, negative, first: tl.constexpr):
    """Returns the index of one of the two values next to the magnitude x / absmax."""
    x = x * (1 / (tl.where(absmax > 0, absmax, 1.0) * UNIT))[:, None]
    index = _line(x, 0, first)
    for decade in tl.static_range(1, 7):
        index = tl.minimum(index, _line(x, decade, first))
    index = tl.minimum(tl.floor(tl.maximum(index, first)), (128 << first) - 1)
    low, high = _value(index, first), _value(index + 1, first)
    threshold = (noise.to(tl.float32) + 0.5) / 65536
    # Noise rounds negative values the other way.
    threshold = tl.where(negative, 1 - threshold, threshold)
    return tl.where(x - low > threshold * (high - low), index + 1, index)


@triton.jit
def _line(x, decade: tl.constexpr, first: tl.constexpr):
    """Returns the inverse of the line of a decade."""
    n: tl.constexpr = 2.0 ** (decade + first)
    return x * (2 * n * UNIT * 10.0 ** (7 - decade) / 18) + (16 * n - 9) / 18


@triton.jit
def _value(index, first: tl.constexpr):
    """Returns magnitudes of `quantize.DynamicCodebook` as multiples of UNIT. Indices count from the
    codebook's origin. The line of the decade with n = 2ᵉ indices has the factor 5ᵉ / 10ᶠ, where f
    is `first`."""
    bits = index.to(tl.int32, bitcast=True)
    n = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    factor = tl.exp2(((bits >> 23) - 127).to(tl.float32) * 2.321928094887362)
    value = (18 * index + 9 - 16 * n) * factor
    if first == 1:
        value = tl.where(index < 2, 0.0, value * 0.1)
    return tl.minimum(value, 1 / UNIT)


@triton.jit
def _mix(x):
    """Murmur3's finalizer, as in `quantize.random_bits`."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
