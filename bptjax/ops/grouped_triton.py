"""The grouped matrix product by Triton kernels through jax-triton, on NVIDIA GPUs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from bptjax.ops.target import SMALL_MEMORY, capability, platform
from bptjax.ops.triton_call import compiler_shards_arrays, triton_call, unusable

# (outputs, inputs, warps, stages) of a tile, by kernel and bytes per element.
TILES: dict[str, dict[int, tuple[int, int, int, int]]] = {
    "multiply": {2: (128, 64, 4, 4), 4: (64, 32, 4, 2)},
    "gradient": {2: (128, 128, 8, 3), 4: (64, 64, 4, 1)},
}
# Compute capabilities of GPUs with 227 KB of shared memory, and their tiles for 2-byte elements,
# the fastest of a dozen on one H200 (128 experts, 2048 x 768, bfloat16).
LARGE = (9, 0), (10, 0)
LARGE_TILES = {"multiply": (256, 64, 8, 3), "gradient": (256, 128, 8, 3)}
# Maximum rows per step of the gradient.
GRADIENT_ROWS: int = 64
# Launches a kernel. Tests replace it to run kernels in Triton's interpreter.
CALL: Callable[..., tuple[Array, ...]] = partial(triton_call, "bptjax.ops.grouped_triton_kernels")


@dataclass(frozen=True)
class Constants:
    """Compile-time constants of a kernel, its one `tl.constexpr` argument.

    Attributes:
      X: number of experts.
      K, N: contracted size and outputs of the product; inputs and outputs of the gradient.
      BM, BN, BK: rows, outputs and inputs per tile.
      stride_k, stride_n: distances in a matrix between inputs and between outputs.
    """

    X: int
    K: int
    N: int
    BM: int
    BN: int
    BK: int
    stride_k: int
    stride_n: int


def available() -> bool:
    """Returns whether the kernels can run here.

    Raises:
      NotImplementedError: on a GPU with jax-triton missing or too new, because the loop would be
        slow without notice.
    """
    if platform() != "gpu" or compiler_shards_arrays():
        return False
    if reason := unusable():
        raise NotImplementedError(f"a mixture of experts needs Triton kernels on a GPU: {reason}")
    return True


def multiply(
    x: Float[Array, "M I"], w: Float[Array, "X _ _"], experts: Int[Array, "n"], transposed: bool
) -> Float[Array, "M O"]:
    """Multiplies each block by its expert's matrix, transposed if `transposed`. Blocks without an
    expert give 0."""
    (M, K), N = x.shape, w.shape[1 if transposed else 2]
    bn, bk, warps, stages = _tile("multiply", x, w)
    strides = (1, K) if transposed else (N, 1)
    constants = Constants(len(w), K, N, M // len(experts), bn, bk, *strides)
    grid = (len(experts) * -(-N // bn),)
    shapes = (jax.ShapeDtypeStruct((M, N), x.dtype),)
    inputs = x, w, experts
    return CALL("multiply", inputs, shapes, grid, warps, stages, constants)[0]


def matrix_gradients(
    x: Float[Array, "M I"], dy: Float[Array, "M O"], w: Float[Array, "X I O"], experts: Array
) -> Float[Array, "X I O"]:
    """Sums xᵀ · dy over each expert's blocks, which are contiguous."""
    (X, K, N), M = w.shape, len(x)
    bn, bk, warps, stages = _tile("gradient", x, dy)
    block = M // len(experts)
    step = min(block, GRADIENT_ROWS)
    constants = Constants(X, K, N, step, bn, bk, N, 1)
    if capability() in SMALL_MEMORY:
        stages = 1
    grid = -(-N // bn), -(-K // bk), X
    shapes = (jax.ShapeDtypeStruct(w.shape, w.dtype),)
    inputs = x, dy, block_ranges(experts, X) * (block // step)
    return CALL("gradient", inputs, shapes, grid, warps, stages, constants)[0]


def block_ranges(experts: Int[Array, "n"], X: int) -> Int[Array, "X 2"]:
    """Returns the first block of each expert and the block after its last, int32."""
    each = jnp.arange(X, dtype=experts.dtype)
    ends = [jnp.searchsorted(experts, each, side=side) for side in ("left", "right")]
    return jnp.stack(ends, 1).astype(jnp.int32)


def _tile(kernel: str, x: Array, other: Array) -> tuple[int, int, int, int]:
    """Returns the tile of a kernel for these operands."""
    if x.dtype.itemsize == 2 and capability() in LARGE:
        return LARGE_TILES[kernel]
    return TILES[kernel][max(x.dtype.itemsize, other.dtype.itemsize)]
