"""Mixture of experts without dropped tokens: groups tokens by expert, and multiplies each group by
its expert's matrix.

The rows of an expert fill blocks of a fixed size, so each block has one expert. At most one block
per expert is not full: memory depends on the number of tokens, not on their distribution over the
experts.

Gale et al. 2022, MegaBlocks, https://arxiv.org/abs/2211.15841, Section 5.
"""

from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from bptjax.ops import grouped_hopper, grouped_triton

# Bounds on the number of rows per block.
MOST_ROWS, FEWEST_ROWS = 128, 16


class Groups(NamedTuple):
    """Rows sorted by expert. A row holds a choice, i.e. a pair of a token and one of its k experts,
    or is empty.

    Attributes:
      experts: expert of each block of rows; the number of experts for blocks past the last
        expert's.
      choices: index of the choice that a row holds, token · k + its index among the token's
        experts; T · k if the row is empty.
      rows: row of each choice; M for a choice without an expert.
    """

    experts: Int[Array, "n"]
    choices: Int[Array, "M"]
    rows: Int[Array, "T k"]


def block_rows(choices: int, experts: int) -> int:
    """Returns the number of rows per block, a power of two. On average, empty rows are at most
    about a quarter of the choices, unless an expert has fewer than 2 · FEWEST_ROWS choices.
    """
    share = choices // (2 * experts)
    return max(FEWEST_ROWS, min(MOST_ROWS, 1 << max(share, 1).bit_length() - 1))


def group(chosen: Int[Array, "T k"], experts: int, block: int | None = None) -> Groups:
    """Groups the choices by expert, in order of the tokens.

    Args:
      chosen: each token's distinct experts, from 0; `experts` for a choice whose expert is not
        here, which gets no row.
      experts: number of experts.
      block: rows per block; `block_rows` if left out.
    """
    (T, k), size = chosen.shape, chosen.size
    block = block_rows(size, experts) if block is None else block
    # Maximum number of choices with an expert. Each expert with a choice has at most block - 1
    # empty rows.
    most = T * min(k, experts)
    n = (most + min(experts, most) * (block - 1)) // block
    flat = chosen.reshape(-1).astype(jnp.int32)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = jnp.zeros(experts, jnp.int32).at[flat].add(1)
    ends = jnp.cumsum(-(-counts // block))
    # Offset of an expert's first row from its first choice in this order.
    shifts = (ends - -(-counts // block)) * block - (jnp.cumsum(counts) - counts)
    rows = jnp.arange(size, dtype=jnp.int32) + jnp.take(shifts, flat[order], mode="clip")
    rows = jnp.where(flat[order] < experts, rows, n * block)
    # Blocks past the last expert's are empty.
    owners = jnp.searchsorted(ends, jnp.arange(n, dtype=jnp.int32), side="right")
    return Groups(
        owners.astype(jnp.int32),
        jnp.full(n * block, size, jnp.int32).at[rows].set(order),
        jnp.zeros(size, jnp.int32).at[order].set(rows).reshape(chosen.shape),
    )


@jax.custom_vjp
def dispatch(x: Float[Array, "T D"], groups: Groups) -> Float[Array, "M D"]:
    """Copies each token to the rows of its choices. Empty rows are 0."""
    k = groups.rows.shape[1]
    return jnp.take(x, groups.choices // k, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def collect(rows: Float[Array, "M D"], groups: Groups) -> Float[Array, "T D"]:
    """Sums the rows of each token's choices, in float32; the transpose of `dispatch`."""
    each = jnp.take(rows, groups.rows, axis=0, mode="fill", fill_value=0)
    return each.sum(1, dtype=jnp.float32).astype(rows.dtype)


# Autodiff would scatter, rounding each partial sum to the dtype of the tokens.
dispatch.defvjp(
    lambda x, groups: (dispatch(x, groups), groups), lambda groups, dy: (collect(dy, groups), None)
)
collect.defvjp(
    lambda rows, groups: (collect(rows, groups), groups),
    lambda groups, dy: (dispatch(dy, groups), None),
)


@jax.custom_vjp
def grouped_matmul(
    x: Float[Array, "M I"], w: Float[Array, "X I O"], experts: Int[Array, "n"]
) -> Float[Array, "M O"]:
    """Multiplies each of n blocks of M / n rows by the matrix of its expert, in x's dtype.

    Products and the gradient of each matrix accumulate in float32. The backward pass saves only the
    operands. Runs as kernels on GPUs (Pallas's where `grouped_hopper` suits, else Triton's), unless
    a mesh axis is left to the compiler; otherwise as a loop over the blocks.

    Args:
      experts: expert of each block, in ascending order; X for blocks whose rows nothing reads.
    """
    return _multiply(x, w, experts, transposed=False)


def _kernels(x: Array, w: Array, experts: Array) -> ModuleType | None:
    """Returns the kernels for these operands, or None for the loop over the blocks."""
    if not grouped_triton.available():
        return None
    return grouped_hopper if grouped_hopper.suits(x, w, len(experts)) else grouped_triton


def _multiply(x: Array, w: Array, experts: Array, transposed: bool) -> Array:
    """Multiplies each block by its expert's matrix, transposed if `transposed`."""
    if kernels := _kernels(x, w, experts):
        return kernels.multiply(x, w, experts, transposed)
    contracted = ((1,), (1 if transposed else 0,)), ((), ())

    def block_product(_, block):
        rows, expert = block
        matrix = jax.lax.dynamic_index_in_dim(w, expert, keepdims=False).astype(rows.dtype)
        y = jax.lax.dot_general(rows, matrix, contracted, preferred_element_type=jnp.float32)
        return None, y.astype(rows.dtype)

    _, y = jax.lax.scan(block_product, None, (x.reshape(len(experts), -1, x.shape[1]), experts))
    return y.reshape(len(x), -1)


def _matrix_gradients(x: Array, dy: Array, w: Array, experts: Array) -> Array:
    """Sums xᵀ · dy over the blocks of each expert."""
    if kernels := _kernels(x, w, experts):
        return kernels.matrix_gradients(x, dy, w, experts)

    def add(sums, block):
        rows, drows, expert = block
        product = jnp.dot(rows.T, drows, preferred_element_type=jnp.float32)
        old = jax.lax.dynamic_index_in_dim(sums, expert, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(sums, old + product, expert, 0), None

    blocks = (a.reshape(len(experts), -1, a.shape[1]) for a in (x, dy))
    sums, _ = jax.lax.scan(add, jnp.zeros_like(w, jnp.float32), (*blocks, experts))
    return sums.astype(w.dtype)


def _forward(x, w, experts):
    return grouped_matmul(x, w, experts), (x, w, experts)


def _backward(operands, dy):
    # Two separate loops, so that XLA drops a gradient that nothing reads.
    x, w, experts = operands
    dx = _multiply(dy, w, experts, transposed=True)
    return dx, _matrix_gradients(x, dy, w, experts), None


grouped_matmul.defvjp(_forward, _backward)
