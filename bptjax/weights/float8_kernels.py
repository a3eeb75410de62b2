"""8-bit kernels of linear layers, for the products of a training step."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from bptjax.models.linear import AdapterDropout, Linear
from bptjax.models.params import is_variable, param_path
from bptjax.ops.float8 import VALUES, Float8, encode, linear, quantize, scale_of
from bptjax.ops.quantize import largest_magnitude
from bptjax.weights.quantized_kernels import QuantizedKernel, is_kernel


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Float8Kernel:
    """A kernel whose products have 8-bit operands.

    Attributes:
      kernel: receives the gradient; its values are not read. None if the kernel is frozen.
      weight: the kernel `[*outputs, *inputs]`.
    """

    kernel: nnx.Variable | None
    weight: Float8

    def __call__(self, x: Array, in_ndim: int, seeds: AdapterDropout | None = None) -> Array:
        codes, scale = (y[...] for y in self.weight)
        outputs = codes.shape[:-in_ndim]
        codes = codes.reshape(math.prod(outputs), -1)
        x, kernel = x.reshape(*x.shape[:-in_ndim], -1), None
        if self.kernel is not None:
            kernel = self.kernel[...].astype(x.dtype).reshape(codes.shape[::-1])
        y = linear(x, codes, scale, kernel)
        return y.reshape(*y.shape[:-1], *outputs)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedFloat8Kernel(QuantizedKernel):
    """A quantized kernel that is dequantized to 8-bit floats, for products with 8-bit operands.

    Attributes:
      scale: scale of the 8-bit floats.
    """

    scale: Any = None

    def dequantized(self, dtype: DTypeLike) -> Float8Kernel:
        n, scale = len(self.inputs), self.scale[...]
        codes = encode(_outputs_first(self.dense(jnp.float32), n), scale, VALUES)
        axes = *self.axes[n:], *self.axes[:n]
        return Float8Kernel(None, Float8(nnx.Param(codes, axes=axes), self.scale))


def float8_kernels(model: Any) -> dict[str, int]:
    """Returns the number of input axes of each kernel that can have 8-bit products, by path: linear
    layers in the model's layers with several outputs, except experts."""
    leaves = jax.tree.leaves_with_path(model, is_leaf=lambda x: isinstance(x, Linear))
    return {
        f"{param_path(at)}.kernel": linear.in_ndim
        for at, linear in leaves
        if isinstance(linear, Linear)
        and linear.outputs > 1
        and param_path(at).startswith("layers.")
    }


def quantize_kernels(model: Any) -> dict[str, Float8]:
    """Rounds the kernels of `float8_kernels` to 8 bits, with one scale per layer. Returns codes
    `[L, *outputs, *inputs]` and scales `[L]` as variables, by path; for kernels that are quantized
    already, scales only."""
    in_ndims = float8_kernels(model)

    def scale(matrix):
        return scale_of(largest_magnitude(matrix), VALUES)

    def new(v, in_ndim):
        if isinstance(v, QuantizedKernel):
            matrix = jax.tree.map(lambda x: x[...], v.matrix, is_leaf=is_variable)
            return Float8(None, nnx.Param(jax.vmap(scale)(matrix), axes=()))
        rounded = jax.vmap(lambda w: quantize(_outputs_first(w, in_ndim), VALUES))(v[...])
        axes = *v.axes[in_ndim:], *v.axes[:in_ndim]
        return Float8(nnx.Param(rounded.codes, axes=axes), nnx.Param(rounded.scale, axes=()))

    kernels = {_path(at): v for at, v in jax.tree.leaves_with_path(model, is_leaf=is_kernel)}
    return {path: new(kernels[path], in_ndim) for path, in_ndim in in_ndims.items()}


def with_float8(model: Any, weights: Mapping[str, Float8], trained: bool) -> Any:
    """Returns the model with these weights, from `quantize_kernels`, in its products. Gradients go
    to the model's own kernels if they are `trained`."""

    def replaced(at, v):
        if (path := _path(at)) not in weights:
            return v
        if isinstance(v, QuantizedKernel):
            return QuantizedFloat8Kernel(**vars(v), scale=weights[path].scale)
        return Float8Kernel(v if trained else None, weights[path])

    return jax.tree.map_with_path(replaced, model, is_leaf=is_kernel)


def _outputs_first(w: Array, in_ndim: int) -> Array:
    return w.transpose(*range(in_ndim, w.ndim), *range(in_ndim))


def _path(at: tuple) -> str:
    """Returns a parameter's path, or the path of the kernel that it is the frozen base of."""
    return param_path(at).removesuffix(".base")
