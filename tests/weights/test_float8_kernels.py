"""Quantized kernels that are dequantized to 8-bit floats: values, gradients and scales against
NumPy's, of kernels with several axes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from ops.comparing import close, normal
from tiers import fast

from bptjax.models.linear import Linear
from bptjax.weights.float8_kernels import quantize_kernels, with_float8
from bptjax.weights.quantized_kernels import quantize_model

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
INPUTS, OUTPUTS = (6, 16), (4, 8)


def rounded(x, dtype, scale=None):
    """`x` in float32, as its 8-bit floats and their scale give it."""
    x = np.asarray(x, np.float32)
    scale = scale_of(np.abs(x).max(), dtype) if scale is None else scale
    return (x / scale).astype(dtype).astype(np.float32) * scale


def scale_of(largest, dtype):
    ratio = np.float32(largest) / np.float32(ml_dtypes.finfo(dtype).max)
    return np.float32(2.0 ** (np.floor(np.log2(ratio)) + 1))


def stacked(quantization, double):
    """Two layers' kernels: values over many magnitudes, so that small ones are subnormal in 8 bits
    and a scale twice too large rounds them otherwise; the second layer's 2¹¹ times the first's."""
    linear = Linear(
        jax.random.key(0), INPUTS, OUTPUTS, ("embed", None, None, None), std=1.0, bias=False,
        dtype=jnp.float32,
    )  # fmt: skip
    magnitudes = jnp.exp2(-18 * jax.random.uniform(jax.random.key(1), (1, 1, *OUTPUTS)))
    w = magnitudes * normal(0, *INPUTS, *OUTPUTS)
    linear.kernel = nnx.Param(jnp.stack([w, 2.0**11 * w]), axes=linear.kernel.axes)
    tree = Layers(linear)
    return quantize_model(tree, quantization, double)


class Layers(nnx.Module):
    def __init__(self, linear):
        self.layers = nnx.Dict(linear=linear)


@pytest.mark.parametrize(
    "quantization, double",
    fast(
        [("nf4", True), ("nf4", False), ("fp4", True), ("int8", False)],
        [("nf4", True), ("nf4", False)],
    ),
)
@pytest.mark.parametrize("layer", [0, 1])
def test_products_are_those_of_the_rounded_dequantized_weight(quantization, double, layer):
    model = stacked(quantization, double)
    x, dy = normal(2, 2, 5, *INPUTS), normal(3, 2, 5, *OUTPUTS)

    @jax.jit
    def run(model, x, dy):
        in_float8 = with_float8(model, quantize_kernels(model), trained=False)
        own = jax.tree.map(lambda v: v[layer], in_float8)
        y, pull = jax.vjp(own.layers["linear"], x)
        return y, *pull(dy), own.layers["linear"].kernel.scale[...]

    y, dx, scale = run(model, x, dy)
    plain = jax.tree.map(lambda v: v[layer], model).layers["linear"].kernel
    w = np.asarray(plain.dense(jnp.float32))
    maxima = plain.matrix.absmax[...]
    if double:
        # The largest maximum of a block is a code of 1, or less than twice the mean.
        maxima = plain.matrix.second[...] + plain.matrix.mean[...]
    assert scale == scale_of(float(maxima.max()), E4M3)
    assert np.abs(w).max() < 448 * scale <= 4 * np.abs(w).max()
    w8 = rounded(w, E4M3, scale)
    assert not np.array_equal(w8, w) and not np.array_equal(w8, rounded(w, E4M3, 2 * scale))
    wanted = (
        np.einsum("btij,ijkl->btkl", rounded(x, E4M3), w8),
        np.einsum("btkl,ijkl->btij", rounded(dy, E5M2), w8),
    )
    close((y, dx), wanted)
