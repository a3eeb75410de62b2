"""Quantized kernels: 4- or 8-bit weights of a model's linear layers, as QLoRA stores them."""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from bptjax.models.experts import ExpertLinear
from bptjax.models.linear import AdapterDropout, Linear, apply_kernel
from bptjax.models.params import is_variable, param_path, put_param
from bptjax.ops.grouped_matmul import grouped_matmul
from bptjax.ops.per_device import SHARDED, per_device
from bptjax.ops.quantize import QuantizedMatrix, dequantize_matrix, quantize_matrix
from bptjax.parallel.mesh import RULES, sharding


class KernelAxes(NamedTuple):
    """Numbers of axes of a stacked kernel `[*stacked, *inputs, *outputs]`.

    Attributes:
      stacked: 1 for layers; 2 for layers and experts.
      inputs: number of axes that a call contracts.
    """

    stacked: int
    inputs: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedKernel:
    """A quantized kernel. It may be a stack of layers, but only the kernel of one layer can be
    called.

    Attributes:
      matrix: codes and scales, with the inputs flattened into one axis.
      codebook: name of the codebook.
      inputs: shape of the input axes, which a call contracts.
      of_experts: whether a layer has one kernel per expert, along a first axis.
    """

    matrix: QuantizedMatrix
    codebook: str = field(metadata={"static": True})
    inputs: tuple[int, ...] = field(metadata={"static": True})
    of_experts: bool = field(metadata={"static": True}, default=False)

    @property
    def axes(self) -> tuple[str | None, ...]:
        """Logical axes of `dense`. The flattened input axis keeps the first input's name."""
        codes: Any = self.matrix.codes
        end = 1 + int(self.of_experts)
        return codes.axes[:end] + (None,) * (len(self.inputs) - 1) + codes.axes[end:]

    def dense(self, dtype: DTypeLike) -> Array:
        """Returns the dequantized kernel `[*inputs, *outputs]`, or one per expert."""
        matrix = jax.tree.map(lambda v: v[...], self.matrix, is_leaf=is_variable)

        def dense_matrix(matrix):
            w = dequantize_matrix(matrix, self.codebook, math.prod(self.inputs)).astype(dtype)
            return w.reshape(*self.inputs, *w.shape[1:])

        return jax.vmap(dense_matrix)(matrix) if self.of_experts else dense_matrix(matrix)

    def dequantized(self, dtype: DTypeLike) -> Any:
        """Returns a kernel whose products need no dequantization."""
        return nnx.Param(self.dense(dtype), axes=self.axes)

    def __call__(self, x: Array, in_ndim: int, seeds: AdapterDropout | None = None) -> Array:
        # The backward pass saves the kernel in quantized form.
        @jax.checkpoint
        def dot(kernel, x):
            return apply_kernel(kernel.dequantized(x.dtype), x, in_ndim)

        return dot(self, x)

    def grouped(self, x: Array, experts: Array, seeds: AdapterDropout | None = None) -> Array:
        """Multiplies each token by the kernel of its expert, as in `grouped_matmul`."""

        @jax.checkpoint
        def multiply(kernel, x):
            return grouped_matmul(x, kernel.dense(x.dtype), experts)

        return multiply(self, x)


def is_kernel(x: Any) -> bool:
    return isinstance(x, nnx.Variable | QuantizedKernel)


def linear_kernels(model: Any) -> dict[str, KernelAxes]:
    """Returns the axes of each linear layer's kernel in the model's layers, by path."""
    kinds = Linear, ExpertLinear
    leaves, _ = jax.tree.flatten_with_path(model, is_leaf=lambda x: isinstance(x, kinds))
    return {
        f"{param_path(at)}.kernel": KernelAxes(1, linear.in_ndim)
        if isinstance(linear, Linear)
        else KernelAxes(2, 1)
        for at, linear in leaves
        if isinstance(linear, kinds) and param_path(at).startswith("layers.")
    }


def quantize_kernels(
    kernels: nnx.Variable, kernel_axes: KernelAxes, codebook: str, double: bool
) -> QuantizedKernel:
    """Quantizes stacked kernels `[*stacked, *inputs, *outputs]`, one at a time.

    Args:
      codebook, double: as in `quantize_matrix`.
    """
    (stacked, n), value = kernel_axes, kernels.get_value()
    inputs = value.shape[stacked : stacked + n]
    # Names of the axes of one layer.
    experts, axes = kernels.axes[: stacked - 1], kernels.axes[stacked - 1 :]

    def quantize_one(w):
        w = w.reshape(math.prod(inputs), *w.shape[n:])
        return quantize_matrix(w, codebook, double)

    def each(w, axes=()):
        return jax.lax.map(quantize_one, w)

    if stacked > 1:
        # A loop over all experts would gather them.
        each = partial(jax.lax.map, per_device(each, RULES["experts"], SHARDED, SHARDED))
    quantized = each(value)
    outer = (*experts, axes[0], *axes[n:])
    parts = zip(quantized, (outer, outer, (*experts, None), experts), strict=True)
    variables: list[Any] = [None if x is None else nnx.Param(x, axes=a) for x, a in parts]
    return QuantizedKernel(QuantizedMatrix(*variables), codebook, inputs, stacked > 1)


def quantize_model(model: Any, codebook: str, double: bool) -> Any:
    """Quantizes the linear layers in the model's layers."""
    kernels = linear_kernels(model)

    def quantized(at, leaf):
        path = param_path(at)
        if path not in kernels:
            return leaf
        return quantize_kernels(leaf, kernels[path], codebook, double)

    return jax.tree.map_with_path(quantized, model, is_leaf=is_variable)


def quantizer(
    model: Any,
    codebook: str,
    double: bool,
    replicated: tuple[str, ...] = (),
    options: Mapping[str, bool | str] = MappingProxyType({}),
) -> Callable[[str, Any, np.ndarray], Any]:
    """Returns a replacement for `put_param` that quantizes the kernels of linear layers on the
    devices, from their dtype on disk. The devices hold one layer's unquantized kernel at a time,
    because the kernels of all experts in all layers may exceed the memory.

    Args:
      model: abstract model with shardings.
      replicated: logical axes that are not sharded.
      options: XLA options.
    """
    kernels = linear_kernels(model)

    def put_one(path, leaf, array):
        if path not in kernels:
            return put_param(leaf, array)
        wanted = leaf.get_value()
        pack = partial(
            quantize_kernels, kernel_axes=kernels[path], codebook=codebook, double=double
        )
        like = jax.eval_shape(pack, leaf)
        shardings, on_mesh = wanted.sharding, nullcontext
        if isinstance(shardings, NamedSharding):
            mesh = shardings.mesh
            assert isinstance(mesh, Mesh)
            on_mesh = partial(jax.set_mesh, mesh)
            shardings = jax.tree.map(
                lambda v: v.replace(sharding(mesh, v.axes, v.get_value().shape, replicated)),
                like,
                is_leaf=is_variable,
            )

        @partial(jax.jit, out_shardings=shardings)
        def empty():
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

        @partial(jax.jit, out_shardings=shardings, donate_argnums=0, compiler_options=dict(options))
        def store(stack, kernel, layer):
            start = partial(jax.lax.dynamic_update_slice_in_dim, start_index=layer, axis=0)
            return jax.tree.map(start, stack, pack(kernel))

        stack = empty()
        single = jax.ShapeDtypeStruct(
            (1, *wanted.shape[1:]), wanted.dtype, sharding=wanted.sharding
        )
        for layer in range(len(array)):
            kernel = put_param(leaf.replace(single), array[layer : layer + 1], array.dtype)
            # Otherwise the next kernels reach the devices before this one is quantized.
            with on_mesh():
                stack = jax.block_until_ready(store(stack, kernel, layer))
        return stack

    return put_one
