"""Products of 8-bit floats against NumPy's, and operands at the ends of their range."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from bptjax.ops.float8 import GRADIENTS, VALUES, linear, quantize
from ops.comparing import close, normal

KINDS = {VALUES: ml_dtypes.float8_e4m3fn, GRADIENTS: ml_dtypes.float8_e5m2}


def rounded(x, kind):
    """`x` in float32, as its 8-bit floats and their scale give it."""
    x, dtype = np.asarray(x, np.float32), KINDS[kind]
    ratio = np.abs(x).max() / np.float32(ml_dtypes.finfo(dtype).max)
    scale = np.float32(2.0 ** (np.floor(np.log2(ratio)) + 1))
    return jnp.asarray((x / scale).astype(dtype).astype(np.float32) * scale)


def weight(w):
    """Codes `[O, I]` and scale of `w` `[I, O]`."""
    return quantize(w.T, VALUES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_products_are_those_of_rounded_operands(dtype):
    x, w, dy = 2**7 * normal(0, 2, 5, 32), 2**-9 * normal(1, 32, 48), 2**-4 * normal(2, 2, 5, 48)
    # The greatest codes, which need all of the range.
    x, w, dy = x.at[0, 0, 0].set(440 * 2), w.at[1, 1].set(440 / 2**15), dy.at[0, 1, 2].set(0.875)
    x, w, dy = (each.astype(dtype) for each in (x, w, dy))
    y, pull = jax.jit(lambda x, w: jax.vjp(lambda *a: linear(a[0], *weight(w), a[1]), x, w))(x, w)
    dx, dw = jax.jit(lambda pull, dy: pull(dy))(pull, dy)
    assert {each.dtype for each in (y, dx, dw)} == {jnp.dtype(dtype)}
    x, w, dy = rounded(x, VALUES), rounded(w, VALUES), rounded(dy, GRADIENTS)
    wanted = x @ w, dy @ w.T, jnp.einsum("bti,bto->io", x, dy)
    close((y, dx, dw), wanted, dtype)


def test_a_frozen_weight_has_no_gradient_and_saves_no_activation():
    x, w = normal(0, 5, 32), normal(1, 32, 16)
    _, pull = jax.vjp(lambda x: linear(x, *weight(w), None), x)
    _, pull_both = jax.vjp(lambda x, w: linear(x, *weight(w), w), x, w)
    saved, saved_with_x = ([y for y in jax.tree.leaves(p) if y.ndim] for p in (pull, pull_both))
    assert [y.shape for y in saved] == [(16, 32)]
    assert sorted(y.shape for y in saved_with_x) == [(5, 32), (16, 32)]
    assert {y.dtype for y in saved_with_x} == {jnp.dtype("uint8")}
    dy = normal(2, 5, 16)
    close(pull(dy)[0], pull_both(dy)[0])


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-38, 1e-3, 447.9, 448.0, 448.1, 57344.0, 3.4e38])
def test_scales(largest, dtype):
    """No element overflows, and less than a power of two of the range is lost."""
    x = jnp.asarray([-largest, largest / 3, 0.0], jnp.float32)
    codes, scale = quantize(x, dtype)
    floats = np.asarray(codes).view(KINDS[dtype]).astype(np.float64)
    most = float(ml_dtypes.finfo(KINDS[dtype]).max)
    assert np.log2(float(scale)) % 1 == 0 and np.isfinite(floats).all()
    assert floats[0] >= -most and floats[2] == 0.0
    if largest > 1e-30:
        assert floats[0] <= -most / 2 * 0.99
        np.testing.assert_allclose(floats * float(scale), x, rtol=2.0**-3)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_value_that_is_not_finite_makes_every_result_not_finite(bad):
    x, w, dy = normal(0, 3, 16), normal(1, 16, 16), normal(2, 3, 16)

    @jax.jit
    def results(x, w, dy):
        y, pull = jax.vjp(lambda *a: linear(a[0], *weight(w), a[1]), x, w)
        return y, *pull(dy)

    for found in (results(x.at[1, 2].set(bad), w, dy), results(x, w.at[3, 4].set(bad), dy)):
        assert not np.isfinite(found[0]).any()
    _, dx, dw = results(x, w, dy.at[2, 1].set(bad))
    assert not np.isfinite(dx).any() and not np.isfinite(dw).any()
