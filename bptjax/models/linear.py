"""Linear maps: modules that hold parameters; their calls are pure."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int, UInt32

from bptjax.ops.target import platform
from bptjax.ops.triton_call import compiler_shards_arrays

# Most inputs that a block of threads sums in the product of one row.
SUMMED = 64


def new_param(
    key: Array,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    std: float,
    dtype: DTypeLike,
    **metadata: Any,
) -> nnx.Param:
    """Draws a normal parameter with this standard deviation, in float32.

    Args:
      metadata: `matrix`, the numbers of input and output axes of a linear layer's weight, which
        muon may update; `decayed`, set on other weights that weight decay applies to.
    """
    value = (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
    return nnx.Param(value, axes=axes, **metadata)


def spread(v: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Broadcasts a parameter to all tokens, in `dtype`. Its gradient is summed over tokens in
    float32: a 16-bit sum over thousands of tokens stops growing."""
    return jnp.broadcast_to(v.astype(jnp.float32), shape).astype(dtype)


class AdapterDropout(NamedTuple):
    """Seeds of the dropout of an adapter's input: key data, token ids, and the number to add to the
    index of each of the input's columns."""

    key: UInt32[Array, "2"]
    ids: Int[Array, "B T"]
    first: Int[Array, "*#F"] | int = 0


def apply_kernel(kernel: Any, x: Array, in_ndim: int, seeds: AdapterDropout | None = None) -> Array:
    """Computes x · kernel over the last `in_ndim` axes of x, in x's dtype. Kernels that are not
    plain parameters, such as those with an adapter, compute the product themselves."""
    if not isinstance(kernel, nnx.Variable):
        return kernel(x, in_ndim, seeds)
    w = kernel[...].astype(x.dtype)
    if math.prod(x.shape[:-in_ndim]) == 1 and platform() == "gpu" and not compiler_shards_arrays():
        y = _product_of_one_row(x.reshape(-1), w.reshape(x.size, -1))
        return y.reshape(*x.shape[:-in_ndim], *w.shape[in_ndim:])
    return jnp.tensordot(x, w, axes=in_ndim)


def _product_of_one_row(x: Float[Array, "I"], w: Float[Array, "I O"]) -> Float[Array, "O"]:
    """Computes x · w as a sum, which XLA fuses with reading a layer's weights from the stack of all
    layers; it would copy them for a matrix product. Sums parts of the inputs first, because one sum
    over all inputs takes too few blocks of threads to read the weights fast."""
    products = x.astype(jnp.float32)[:, None] * w.astype(jnp.float32)
    size = math.gcd(len(x), SUMMED)
    # The barrier keeps XLA from merging both sums.
    parts = jax.lax.optimization_barrier(products.reshape(-1, size, w.shape[1]).sum(1))
    return parts.sum(0).astype(x.dtype)


def dequantize(tree: Any, dtype: DTypeLike) -> Any:
    """Returns the modules with quantized kernels dequantized, to `dtype` or to 8-bit floats."""

    def quantized(kernel):
        return hasattr(kernel, "dequantized")

    def dequantized(kernel):
        return kernel.dequantized(dtype) if quantized(kernel) else kernel

    return jax.tree.map(dequantized, tree, is_leaf=quantized)


class Linear(nnx.Module):
    """x · kernel + bias over the last axes of x, in x's dtype."""

    def __init__(
        self,
        key: Array,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        axes: tuple[str | None, ...],
        *,
        std: float,
        bias: bool,
        dtype: DTypeLike,
    ):
        matrix = len(inputs), len(outputs)
        self.kernel = new_param(key, inputs + outputs, axes, std, dtype, matrix=matrix)
        self.bias = nnx.Param(jnp.zeros(outputs, dtype), axes=axes[len(inputs) :]) if bias else None
        self.in_ndim, self.outputs = len(inputs), math.prod(outputs)

    def __call__(self, x: Array, seeds: AdapterDropout | None = None) -> Array:
        y = apply_kernel(self.kernel, x, self.in_ndim, seeds)
        if self.bias is not None:
            y = y + spread(self.bias[...], y.shape, y.dtype)
        return y
