import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import fast

from bptjax.ops.quantize import (
    CODEBOOKS,
    dequantize,
    dequantize_matrix,
    dynamic_codebook,
    quantize,
    quantize_matrix,
    random_bits,
    stochastic_round,
)

BOOKS = {"signed": dynamic_codebook(True), "unsigned": dynamic_codebook(False)}


def test_codebook_is_the_published_one():
    """That of bitsandbytes: its ends, the values next to zero, and how many a decade has."""
    for book in BOOKS.values():
        assert book.shape == (256,) and (np.diff(book) > 0).all() and book[-1] == 1.0
    signed, unsigned = BOOKS.values()
    ends = [signed[0], signed[128], signed[-2], unsigned[0], unsigned[1], unsigned[-2]]
    wanted = [-0.99296875, 5.5e-7, 0.99296875, 0.0, 3.25e-7, 0.996484375]
    np.testing.assert_allclose(ends, wanted, rtol=1e-6)
    np.testing.assert_array_equal(signed[:127], -signed[254:127:-1])
    counts, _ = np.histogram(unsigned[1:-1], 10.0 ** np.arange(-7, 1))
    np.testing.assert_array_equal(counts, 2 ** np.arange(1, 8))


def values(*shape):
    """Of magnitudes that spread over all decades of the code books."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) * 10 ** rng.uniform(-7, 2, shape)
    x[0], x[-1, 3] = 0.0, 0.0
    return x.astype(np.float32)


@pytest.mark.parametrize("size", fast([5, 256, 600], [5, 600]))
@pytest.mark.parametrize("book", BOOKS)
def test_nearest(book, size):
    """The last block is shorter; a row is zero; the greatest of each block comes back as it was."""
    book, x = BOOKS[book], values(3, size)
    x = x if book[0] < 0 else abs(x)
    codes, absmax = quantize(jnp.asarray(x), book)
    assert codes.shape == x.shape and absmax.shape == (3, -(-size // 256))
    blocks = [x[:, i : i + 256] for i in range(0, size, 256)]
    np.testing.assert_array_equal(absmax, np.stack([abs(b).max(-1) for b in blocks], -1))
    each = np.repeat(absmax, 256, -1)[:, :size]
    scaled = x / np.where(each > 0, each, 1)
    best = abs(scaled[..., None] - book).min(-1)
    back = np.asarray(dequantize(codes, absmax, book))
    np.testing.assert_allclose(abs(book[codes] - scaled), best, atol=1e-9)
    np.testing.assert_allclose(back, book[codes] * each, rtol=1e-6)
    assert (back[0] == 0).all()


def noise(*shape):
    return jax.random.bits(jax.random.key(1), shape, jnp.uint16)


@pytest.mark.parametrize("book", fast(BOOKS, [*BOOKS][:1]))
def test_stochastic_codes_are_right_in_the_mean(book):
    book, N = BOOKS[book], 1000
    x = abs(values(2, 300))
    many = jnp.broadcast_to(x, (N, *x.shape))
    codes, absmax = quantize(many, book, noise(*many.shape))
    scale = np.repeat(absmax[0], 256, -1)[:, :300] + 1e-30
    above = np.minimum(np.searchsorted(book, x / scale, "right"), 255)
    gap, back = book[above] - book[above - 1], dequantize(codes, absmax, book)
    error = abs(np.asarray(back, np.float64).mean(0) - x) / scale
    assert (error <= 2.5 * gap / N**0.5 + 1e-6 * book[above]).all()
    # A quarter of a gap above a code, a quarter of the time up.
    quarter = jnp.full((1, N), 0.75 * book[200] + 0.25 * book[201]).at[0, ::256].set(1.0)
    codes, _ = quantize(quarter, book, noise(1, N))
    assert abs((codes == 201).mean() - 0.25) < 0.06
    assert set(np.unique(codes)) == {200, 201, 255}


def test_stochastic_bfloat16():
    x = values(4, 64)[1:]
    many = jnp.broadcast_to(x, (1000, *x.shape))
    got = stochastic_round(many, noise(*many.shape))
    assert got.dtype == jnp.bfloat16
    back = np.asarray(got, np.float64)
    error = abs(back.mean(0) - x) / (back.std(0) / 1000**0.5 + 1e-6 * abs(x) + 1e-30)
    assert error.max() < 5
    assert (abs(back - x) <= 2**-7 * abs(x)).all()
    # What bfloat16 has is left as it is, infinities too.
    exact = jnp.asarray([0.0, -1.5, 2.0**-120, -jnp.inf, jnp.inf])
    up = jnp.full(5, 2**16 - 1, jnp.uint16)
    np.testing.assert_array_equal(stochastic_round(exact, up), exact)
    assert jnp.isnan(stochastic_round(jnp.full(5, jnp.nan), up)).all()


def test_random_bits_are_even_and_unlike():
    """Every bit of both words is set half of the time, whatever other bits, elements, keys are."""
    one, other = random_bits(jax.random.key(0), (64, 1024))
    next_key, _ = random_bits(jax.random.key(1), (64, 1024))
    words = np.stack([one, other, next_key, np.roll(one, 1, 1)]).reshape(4, -1)
    bits = np.concatenate([(words >> i) & 1 for i in range(32)]).astype(np.float64)
    together = (2 * bits - 1) @ (2 * bits - 1).T / bits.shape[1]
    # Five standard deviations of 65,536 throws, beside each one with itself.
    assert np.abs(together - np.eye(len(bits))).max() < 5 / 256
    assert np.abs(bits.mean(1) - 0.5).max() < 2.5 / 256


# bitsandbytes' tables: what codes of 4 bits stand for, of nf4 by code, of fp4 without sign.
NF4 = """-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635
-0.18477343022823334 -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725
0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941 0.7229568362236023
1.0"""
FP4 = "0 0.005208333333 0.16666667 0.25 0.33333333 0.5 0.66666667 1"


def test_code_books_of_weights():
    nf4, fp4 = (np.array(table.split(), np.float32) for table in (NF4, FP4))
    np.testing.assert_array_equal(CODEBOOKS["nf4"], nf4)
    np.testing.assert_allclose(CODEBOOKS["fp4"], [*-fp4[::-1], *fp4], rtol=1e-6)
    np.testing.assert_array_equal(CODEBOOKS["int8"] * np.float32(127), np.arange(-128, 128))


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        # 0.8614784 lies halfway between the last two of nf4.
        ("nf4", {1.0: 1.0, 0.86: 0.72295684, 0.863: 1.0, -0.05: -0.09105004, 0.03: 0.0}),
        # Of fp4 0.2916667, 0.4166667, 0.5833333 and 0.8333333 lie halfway.
        ("fp4", {1.0: 1.0, 0.29: 0.25, -0.584: -2 / 3, 0.75: 2 / 3, 0.375: 1 / 3, -0.375: -1 / 3}),
        ("int8", {1.0: 1.0, 0.499: 63 / 127, -0.7: -89 / 127, 0.0039: 0.0, 0.004: 1 / 127}),
    ],
)
def test_weights_by_hand(kind, wanted):
    """One output's block of inputs, whose greatest is 2."""
    x = 2 * np.array(list(wanted), np.float32)
    matrix = quantize_matrix(jnp.asarray(x)[:, None], kind, double=False)
    got = dequantize_matrix(matrix, kind, len(x))[:, 0]
    np.testing.assert_allclose(got, 2 * np.array(list(wanted.values())), rtol=1e-6)


@pytest.mark.parametrize(
    "shape",
    fast([((128, 24),), ((70, 2, 3),), ((33, 5),)], lambda shape: shape == (70, 2, 3)),
    ids=str,
)
@pytest.mark.parametrize("kind", CODEBOOKS)
@pytest.mark.parametrize("double", [False, True])
def test_weights(shape, kind, double):
    """Blocks run along the inputs; each value comes back as the nearest that the block has."""
    w = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    matrix = quantize_matrix(jnp.asarray(w), kind, double)
    got = np.asarray(dequantize_matrix(matrix, kind, shape[0]))
    blocks = -(-shape[0] // 64)
    assert matrix.absmax.shape == (blocks, *shape[1:])
    absmax = np.stack([abs(w[64 * i : 64 * i + 64]).max(0) for i in range(blocks)])
    each = np.repeat(absmax, 64, 0)[: shape[0]]
    book = CODEBOOKS[kind]
    nearest = book[abs((w / each)[..., None] - book).argmin(-1)] * each
    if not double:
        np.testing.assert_allclose(got, nearest, rtol=1e-6, atol=1e-6)
        return
    # The constants, less their mean, in 8 bits: off by no more than half of the widest gap.
    off = absmax - absmax.mean()
    error = 0.5 * np.diff(dynamic_codebook(True)).max() * abs(off).max()
    assert (abs(got - nearest) <= abs(nearest / each) * error + 1e-6).all()
    assert matrix.absmax.dtype == jnp.uint8 and matrix.second.shape == (-(-absmax.size // 256),)


def test_bytes_of_weights():
    pack = jax.jit(lambda w: quantize_matrix(w, "nf4", double=True))
    compiled = pack.lower(jnp.ones((1024, 512))).compile()
    held = compiled.memory_analysis().output_size_in_bytes
    assert held / (1024 * 512) <= 0.5 + 1 / 64 + 4 / (64 * 256) + 1e-4
