import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import fast

from bptjax.ops.quantize import (
    CODEBOOKS,
    DynamicCodebook,
    TableCodebook,
    dequantize,
    dequantize_matrix,
    fold_in,
    quantize,
    quantize_matrix,
    random_bits,
    rounding_key,
    stochastic_round,
)
from ops.comparing import quick


def published(signed):
    """The table of Dettmers et al. 2021: means of the edges of intervals, in each decade."""
    table = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        means = 10.0 ** (decade - 6) * (edges[1:] + edges[:-1]) / 2
        table += [*means, *(-means if signed else ())]
    return np.sort(np.asarray(table, np.float32))


BOOKS = {"signed": True, "unsigned": False}
TABLES = {name: published(signed) for name, signed in BOOKS.items()}


def test_published_table():
    """The values of bitsandbytes: the ends, next to zero, and their number in each decade."""
    for table in TABLES.values():
        assert table.shape == (256,) and (np.diff(table) > 0).all() and table[-1] == 1.0
    signed, unsigned = TABLES.values()
    ends = [signed[0], signed[128], signed[-2], unsigned[0], unsigned[1], unsigned[-2]]
    wanted = [-0.99296875, 5.5e-7, 0.99296875, 0.0, 3.25e-7, 0.996484375]
    np.testing.assert_allclose(ends, wanted, rtol=1e-6)
    np.testing.assert_array_equal(signed[:127], -signed[254:127:-1])
    counts, _ = np.histogram(unsigned[1:-1], 10.0 ** np.arange(-7, 1))
    np.testing.assert_array_equal(counts, 2 ** np.arange(1, 8))


@pytest.mark.parametrize("book", BOOKS)
def test_dynamic_codes_are_those_of_the_table(book):
    """Values differ by up to an ulp, so codes may differ only next to the border between two
    codes: of 16 million numbers up to 25 did."""
    codebook, table = DynamicCodebook(BOOKS[book]), TABLES[book]
    decoded = np.asarray(codebook.decode(jnp.arange(256, dtype=jnp.uint8)))
    assert (abs(decoded - table) <= np.spacing(abs(table))).all()
    assert set(decoded) >= {0.0, 1.0}
    rng = np.random.default_rng(0)
    near = table[rng.integers(0, 256, (256, 256))]
    near = near + rng.integers(-4, 5, near.shape) * np.spacing(near)
    spread = 10 ** rng.uniform(-10, 0, (256, 256)) * rng.choice([-1, 1], (256, 256))
    x = np.concatenate([near, spread, rng.uniform(-1, 1, (256, 256))]).astype(np.float32)
    x = x.clip(-1, 1) if BOOKS[book] else abs(x).clip(0, 1)
    x[:, 0] = 1.0
    for bits in (None, noise(*x.shape)):
        codes, wanted = (
            np.asarray(quick(lambda x, bits, each=each: quantize(x, each, bits)[0])(x, bits))
            for each in (codebook, TableCodebook(table))
        )
        differ = codes != wanted
        low = np.minimum(codes, wanted)[differ].astype(int)
        low, high = table[low].astype(np.float64), table[low + 1]
        share = 0.5 if bits is None else (np.asarray(bits)[differ] + 0.5) / 2**16
        ulp = np.spacing(np.maximum(abs(low), high).astype(np.float32))
        assert (abs(x[differ] - (low + share * (high - low))) <= 2 * ulp).all()
        assert differ.mean() < 1e-4


@pytest.mark.parametrize("bits", [None, 0, 2**16 - 1])
@pytest.mark.parametrize("book", BOOKS)
def test_dynamic_codes_of_values_and_extremes(book, bits):
    """A value of the table keeps its code, however it is rounded; so do zeros of both signs.
    Numbers that are not finite have the codes of the table."""
    codebook, table = DynamicCodebook(BOOKS[book]), TABLES[book]

    def codes(x, codebook=codebook):
        up = None if bits is None else jnp.full(x.shape, bits, jnp.uint16)
        return np.asarray(quantize(jnp.asarray(x), codebook, up)[0])

    np.testing.assert_array_equal(codes(table), np.arange(256))
    own = codebook.decode(jnp.arange(256, dtype=jnp.uint8))
    np.testing.assert_array_equal(codes(own), np.arange(256))
    zero = int(np.flatnonzero(table == 0)[0])
    for zeros in ([0.0, -0.0], [0.0, -0.0, 1.0]):
        assert (codes(np.asarray(zeros, np.float32))[:2] == zero).all()
    rows = (
        [1e-40, -1e-40, 1e-45, 0.0],
        [1e-40, -1e-40, 1e-45, 1.0],
        [-1.0, -0.995, -0.5, 0.999],
        [np.nan, 7.0, -7.0, 0.5],
        [np.inf, 1.0, -1.0, 0.0],
        [-np.inf, np.inf, np.nan, 1.0],
    )
    for row in rows:
        row = np.asarray(row, np.float32)
        np.testing.assert_array_equal(codes(row), codes(row, TableCodebook(table)), str(row))


def test_dynamic_codes_need_no_gathers():
    """A table takes ten gathers per number."""
    book = DynamicCodebook(signed=True)
    back = jax.jit(lambda x: dequantize(*quantize(x, book), book))
    assert "gather" not in back.lower(jnp.ones((2, 512))).as_text()


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
    codebook, table, x = DynamicCodebook(BOOKS[book]), TABLES[book], values(3, size)
    x = x if BOOKS[book] else abs(x)
    codes, absmax = quantize(jnp.asarray(x), codebook)
    assert codes.shape == x.shape and absmax.shape == (3, -(-size // 256))
    blocks = [x[:, i : i + 256] for i in range(0, size, 256)]
    np.testing.assert_array_equal(absmax, np.stack([abs(b).max(-1) for b in blocks], -1))
    each = np.repeat(absmax, 256, -1)[:, :size]
    scaled = x / np.where(each > 0, each, 1)
    best = abs(scaled[..., None] - table).min(-1)
    back = np.asarray(dequantize(codes, absmax, codebook))
    np.testing.assert_allclose(abs(table[codes] - scaled), best, atol=1e-9)
    np.testing.assert_allclose(back, table[codes] * each, rtol=1e-6)
    assert (back[0] == 0).all()


def noise(*shape):
    return jax.random.bits(jax.random.key(1), shape, jnp.uint16)


@pytest.mark.parametrize("book", fast(BOOKS, [*BOOKS][:1]))
def test_stochastic_codes_are_right_in_the_mean(book):
    codebook, table, N = DynamicCodebook(BOOKS[book]), TABLES[book], 1000
    x = abs(values(2, 300))
    many = jnp.broadcast_to(x, (N, *x.shape))
    codes, absmax = quantize(many, codebook, noise(*many.shape))
    scale = np.repeat(absmax[0], 256, -1)[:, :300] + 1e-30
    above = np.minimum(np.searchsorted(table, x / scale, "right"), 255)
    gap, back = table[above] - table[above - 1], dequantize(codes, absmax, codebook)
    error = abs(np.asarray(back, np.float64).mean(0) - x) / scale
    assert (error <= 2.5 * gap / N**0.5 + 1e-6 * table[above]).all()
    # A quarter of a gap above a code, a quarter of the time up.
    quarter = jnp.full((1, N), 0.75 * table[200] + 0.25 * table[201]).at[0, ::256].set(1.0)
    codes, _ = quantize(quarter, codebook, noise(1, N))
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
    keys = [rounding_key(jax.random.key(n)) for n in range(2)]
    keys += [fold_in(keys[0], n) for n in range(2)] + [fold_in(fold_in(keys[0], 0), 0)]
    (one, other), *others = (random_bits(key, (64, 1024)) for key in keys)
    words = [one, other, np.roll(one, 1, 1), *(word for word, _ in others)]
    words = np.stack([np.asarray(word).reshape(-1) for word in words])
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
    error = 0.5 * np.diff(TABLES["signed"]).max() * abs(off).max()
    assert (abs(got - nearest) <= abs(nearest / each) * error + 1e-6).all()
    assert matrix.absmax.dtype == jnp.uint8 and matrix.second.shape == (-(-absmax.size // 256),)


def test_bytes_of_weights():
    pack = jax.jit(lambda w: quantize_matrix(w, "nf4", double=True))
    compiled = pack.lower(jnp.ones((1024, 512))).compile()
    held = compiled.memory_analysis().output_size_in_bytes
    assert held / (1024 * 512) <= 0.5 + 1 / 64 + 4 / (64 * 256) + 1e-4
