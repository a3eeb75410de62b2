"""Linear maps: modules that hold parameters; their calls are pure."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Int, UInt32


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
    if isinstance(kernel, nnx.Variable):
        return jnp.tensordot(x, kernel[...].astype(x.dtype), axes=in_ndim)
    return kernel(x, in_ndim, seeds)


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
