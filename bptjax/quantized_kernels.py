"""Quantized kernels: weights of a model's linear layers in 4 or 8 bits, as QLoRA stores them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from bptjax.models.linear import AdapterDropout, Linear
from bptjax.models.params import param_path, put_param
from bptjax.ops.quantize import QuantizedMatrix, dequantize_matrix, quantize_matrix
from bptjax.parallel.mesh import sharding


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedKernel:
    """A quantized kernel. It may be a stack of layers, but only the kernel of one layer can be
    called.

    Attributes:
      matrix: codes and scales, with `inputs` as one axis.
      codebook: name of the codebook.
      inputs: shape of the input axes, which a call contracts.
    """

    matrix: QuantizedMatrix
    codebook: str = field(metadata={"static": True})
    inputs: tuple[int, ...] = field(metadata={"static": True})

    def dense(self, dtype: DTypeLike) -> Array:
        """Returns the dequantized kernel `[*inputs, *outputs]`."""
        matrix = jax.tree.map(lambda v: v[...], self.matrix, is_leaf=_is_variable)
        w = dequantize_matrix(matrix, self.codebook, math.prod(self.inputs)).astype(dtype)
        return w.reshape(*self.inputs, *w.shape[1:])

    def __call__(self, x: Array, in_ndim: int, seeds: AdapterDropout | None = None) -> Array:
        # The backward pass saves the kernel as it is stored.
        @jax.checkpoint
        def dot(kernel, x):
            return jnp.tensordot(x, kernel.dense(x.dtype), axes=in_ndim)

        return dot(self, x)


def linear_kernels(model: Any) -> dict[str, int]:
    """Returns the number of input axes of each kernel of a linear layer in the model's layers, by
    path."""
    found, _ = jax.tree.flatten_with_path(model, is_leaf=lambda x: isinstance(x, Linear))
    return {
        f"{param_path(at)}.kernel": linear.in_ndim
        for at, linear in found
        if isinstance(linear, Linear) and param_path(at).startswith("layers.")
    }


def quantize_kernels(
    kernels: nnx.Variable, in_ndim: int, codebook: str, double: bool
) -> QuantizedKernel:
    """Quantizes stacked kernels `[L, *inputs, *outputs]` with `in_ndim` input axes, one at a time.

    Args:
      codebook, double: as in `quantize_matrix`.
    """
    value, axes = kernels.get_value(), kernels.axes
    inputs = value.shape[1 : 1 + in_ndim]

    def one(w):
        w = w.reshape(math.prod(inputs), *w.shape[in_ndim:])
        return quantize_matrix(w, codebook, double)

    outer = (axes[0], *axes[in_ndim:])
    parts = zip(jax.lax.map(one, value), (outer, outer, (None,), ()), strict=True)
    variables: list[Any] = [None if x is None else nnx.Param(x, axes=a) for x, a in parts]
    return QuantizedKernel(QuantizedMatrix(*variables), codebook, inputs)


def quantize_model(model: Any, codebook: str, double: bool) -> Any:
    """Returns the model with the linear layers in its layers quantized."""
    in_ndims = linear_kernels(model)

    def one(at, leaf):
        path = param_path(at)
        if path not in in_ndims:
            return leaf
        return quantize_kernels(leaf, in_ndims[path], codebook, double)

    return jax.tree.map_with_path(one, model, is_leaf=_is_variable)


def quantizer(model: Any, codebook: str, double: bool) -> Callable[[str, Any, np.ndarray], Any]:
    """Returns a function that replaces `put_param` and quantizes the kernels of linear layers on
    the devices, one stack at a time, from their dtype on disk.

    Args:
      model: abstract model with shardings.
    """
    in_ndims = linear_kernels(model)

    def put_one(path, leaf, array):
        if path not in in_ndims:
            return put_param(path, leaf, array)
        kernel, where = put_param(path, leaf, array, array.dtype), leaf.get_value().sharding
        pack = partial(quantize_kernels, in_ndim=in_ndims[path], codebook=codebook, double=double)
        if isinstance(where, NamedSharding):
            like = jax.eval_shape(pack, kernel)
            shardings = jax.tree.map(
                lambda v: v.replace(sharding(where.mesh, v.axes, v.get_value().shape)),
                like,
                is_leaf=_is_variable,
            )
            return jax.jit(pack, out_shardings=shardings)(kernel)
        return jax.jit(pack)(kernel)

    return put_one


def dequantize_layer(layer: Any, dtype: DTypeLike) -> Any:
    """Returns a layer with its quantized kernels dequantized to `dtype`."""

    def one(kernel):
        return nnx.Param(kernel.dense(dtype)) if isinstance(kernel, QuantizedKernel) else kernel

    return jax.tree.map(one, layer, is_leaf=lambda x: isinstance(x, QuantizedKernel))


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)
