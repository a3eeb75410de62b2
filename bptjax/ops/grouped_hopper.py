"""The grouped matrix product by Pallas kernels on NVIDIA GPUs of the generation Hopper. A group of
warps copies operands with the GPU's copy engine while others multiply."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from bptjax.ops.grouped_triton import block_ranges
from bptjax.ops.target import HOPPER, capability, is_absent, stand_in

# Rows per block that the kernels take; inputs per step, which are 128 bytes; outputs per tile, the
# larger number if it divides the outputs.
ROWS, DEPTH = 128, 64
WIDTHS = 256, 128


def suits(x: Float[Array, "M I"], w: Float[Array, "X _ _"], blocks: int) -> bool:
    """Returns whether the kernels take these operands, and those of both gradients.

    Args:
      blocks: number of blocks of rows.
    """
    sizes = w.shape[1:]
    return (
        capability() == HOPPER
        and x.dtype == w.dtype
        and x.dtype in (jnp.bfloat16, jnp.float16)
        and len(x) == blocks * ROWS
        and all(size % WIDTHS[-1] == 0 for size in sizes)
    )


def multiply(
    x: Float[Array, "M I"], w: Float[Array, "X _ _"], experts: Int[Array, "n"], transposed: bool
) -> Float[Array, "M O"]:
    """Multiplies each block by its expert's matrix, transposed if `transposed`. Blocks without an
    expert give 0."""
    outputs = w.shape[1 if transposed else 2]
    shape = jax.ShapeDtypeStruct((len(x), outputs), x.dtype)
    return _call("multiply", (x, w), experts, shape, transposed=transposed)


def matrix_gradients(
    x: Float[Array, "M I"], dy: Float[Array, "M O"], w: Float[Array, "X I O"], experts: Array
) -> Float[Array, "X I O"]:
    """Sums xᵀ · dy over each expert's blocks, which are contiguous."""
    steps = block_ranges(experts, len(w)) * (ROWS // DEPTH)
    return _call("gradient", (x, dy), steps, jax.ShapeDtypeStruct(w.shape, w.dtype))


def _call(
    name: str,
    operands: tuple[Array, Array],
    table: Int[Array, "..."],
    shape: jax.ShapeDtypeStruct,
    **options: Any,
) -> Array:
    """Runs a kernel, or a stand-in for it on absent devices."""
    if is_absent():
        return stand_in((*operands, table), (shape,))[0]
    # Imported here because other devices do not need it.
    kernels = importlib.import_module("bptjax.ops.grouped_hopper_kernels")
    width = next(width for width in WIDTHS if shape.shape[-1] % width == 0)
    # A CPU, which has no such number, interprets the kernels in tests.
    cores = getattr(jax.local_devices()[0], "core_count", 1)
    return getattr(kernels, name)(*operands, table, shape, width=width, cores=cores, **options)
