"""The gated delta rule by Triton kernels through jax-triton, on NVIDIA GPUs.

One kernel inverts the systems of all chunks at once. The next kernel's programs visit the chunks in
order, each with a tile of the value columns of one head's state in registers. The backward pass has
three parts: it recomputes the chunks' states from each group's saved state, for all groups at once;
visits the chunks in reverse for the gradients of the states; and computes all other gradients for
all chunks at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import Precision
from jaxtyping import Float, Int

from bptjax.ops.target import capability, like, platform
from bptjax.ops.triton_call import compiler_shards_arrays, triton_call, unusable

# Arrays of which only shapes and dtypes are read.
Shaped = Array | jax.ShapeDtypeStruct

# (value columns, warps, stages) of a program, by kernel: the fastest of one to four candidates on
# one H200 (16 key and 32 value heads of 128, 32,768 tokens). A product of four warps has 64 rows.
TILES: dict[str, tuple[int, int, int]] = {
    "systems": (64, 4, 1),
    "forward": (64, 4, 3),
    "recompute": (64, 4, 2),
    "backward": (64, 4, 3),
    "scores": (64, 4, 2),
    "queries": (64, 4, 3),
    "keys": (64, 4, 3),
}
# Kernels whose programs share the value columns of a head.
COLUMNS = "forward", "recompute", "backward"
HEAD_SIZES = 64, 128
# CUDA allows 65,535 programs along the second axis of a grid, which counts the chunks.
MOST_TOKENS = 64 * 65_535
# Compute capabilities of GPUs whose shared memory fits three stages.
LARGE = (9, 0), (10, 0)
# Launches a kernel. Tests replace it to run kernels in Triton's interpreter.
CALL: Callable[..., tuple[Array, ...]] = partial(triton_call, "bptjax.ops.delta_triton_kernels")


@dataclass(frozen=True)
class Constants:
    """Compile-time constants of a kernel, its one `tl.constexpr` argument.

    Attributes:
      C: tokens per chunk, which divides T; a power of two.
      BW: value columns per program.
      group: chunks between two saved states.
      levels: base-2 logarithm of C.
      halved: solve the systems by products of operands rounded to 16 bits instead of 24.
    """

    T: int
    K: int
    N: int
    H: int
    W: int
    C: int
    BW: int
    group: int
    levels: int
    scale: float
    halved: bool


def unsupported(q: Shaped, k: Shaped, v: Shaped) -> str | None:
    """Returns why the kernels cannot honor these arguments, or None if they can."""
    if platform() != "gpu":
        return "needs an NVIDIA GPU"
    if compiler_shards_arrays():
        return "runs on one device, and the mesh has more"
    if q.dtype != jnp.bfloat16 or k.dtype != jnp.bfloat16:
        return f"takes queries and keys in bfloat16, not {q.dtype} and {k.dtype}"
    (H, W), columns = (q.shape[-1], v.shape[-1]), TILES["forward"][0]
    if H not in HEAD_SIZES or W % columns:
        sizes = " or ".join(map(str, HEAD_SIZES))
        return f"takes keys of {sizes} and values of a multiple of {columns}, not {H} and {W}"
    if q.shape[1] > MOST_TOKENS:
        return f"takes at most {MOST_TOKENS} tokens per device, not {q.shape[1]}"
    return unusable()


def forward(
    q: Float[Array, "B T K H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T N W"],
    g: Float[Array, "B T N"],
    beta: Float[Array, "B T N"],
    documents: Int[Array, "B T"],
    start: Float[Array, "B N H W"],
    *,
    scale: float,
    chunk: int,
    group: int,
) -> tuple[Array, Array, Array, tuple[Array, ...]]:
    """Returns the output, the last state, the state before each group of chunks, and the chunks'
    systems. The backward pass needs states and systems. If a remat policy saves the states, their
    kernel does not run again; the kernel of the systems does.

    Args:
      documents: number of each token's document; 0 continues the document of `start`.
      chunk: tokens per chunk, which divides T.
      group: chunks per group.
    """
    constants = _constants(q, v, scale, chunk, group)
    (B, _, N, W), H, chunks = v.shape, q.shape[3], constants.T // chunk
    g, beta = g.swapaxes(1, 2), beta.swapaxes(1, 2)
    square = jax.ShapeDtypeStruct((B, chunks, N, chunk, chunk), q.dtype)
    shapes = square, square, square, like(g), like(g)
    inputs = q, k, g, beta, documents
    solutions, *systems = _launch("systems", inputs, shapes, constants, (N, chunks, B))
    states = jax.ShapeDtypeStruct((B, -(-chunks // group), N, W, H), jnp.float32)
    inputs, shapes = (q, k, v, solutions, *systems[1:], start), (like(v), states, like(start))
    out, states, end = _launch("forward", inputs, shapes, constants, (N, B))
    return out, end, states, tuple(systems)


def backward(
    q: Float[Array, "B T K H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T N W"],
    g: Float[Array, "B T N"],
    beta: Float[Array, "B T N"],
    documents: Int[Array, "B T"],
    states: Float[Array, "B n N W H"],
    systems: tuple[Array, ...],
    dout: Float[Array, "B T N W"],
    dend: Float[Array, "B N H W"],
    *,
    scale: float,
    chunk: int,
    group: int,
) -> tuple[tuple[Array, ...], Array]:
    """Returns the gradients of q, k, v, g and beta, and of the first state.

    Args:
      documents, chunk, group: as for `forward`.
      states, systems: states before the groups and systems of the chunks, from `forward`.
      dout, dend: gradients of the output and of the last state.
    """
    constants = _constants(q, v, scale, chunk, group)
    (B, _, N, W), (K, H), chunks = v.shape, q.shape[2:], constants.T // chunk
    g, beta = g.swapaxes(1, 2), beta.swapaxes(1, 2)
    inverses, scores, starts, ends = systems
    like_states = jax.ShapeDtypeStruct((B, chunks, N, W, H), q.dtype)
    like_values = jax.ShapeDtypeStruct(v.shape, q.dtype)
    inputs = q, k, dout, -beta * starts, inverses, scores, starts, ends, dend
    shapes = like_values, like_states, like(dend)
    dright, dstates, dstart = _launch("backward", inputs, shapes, constants, (N, B))
    inputs = k, v, beta, inverses, starts, ends, states, dstates
    tiles = W // min(W, TILES["recompute"][0])
    per_tile = jax.ShapeDtypeStruct((B, chunks, N, tiles), jnp.float32)
    shapes, grid = (like_states, like_values, per_tile), (N, states.shape[1], B)
    chunk_states, writes, ddecays = _launch("recompute", inputs, shapes, constants, grid)
    inputs = q, k, v, g, beta, documents, writes, dout, dright
    shapes = like(scores), like(scores), like(v), like(g), like(g)
    grid = N, chunks, B
    dscores, dsystems, dv, dlogs, dbeta = _launch("scores", inputs, shapes, constants, grid)
    inputs, grid = (q, k, starts, chunk_states, dout, dscores), (K, chunks, B)
    dq, dstarts = _launch("queries", inputs, (like(q), like(g)), constants, grid)
    inputs = q, k, beta, starts, ends, chunk_states, writes, dright, dstates, dscores, dsystems
    shapes = like(k), like(g), like(g)
    dk, dstarts_over_beta, dends = _launch("keys", inputs, shapes, constants, grid)
    through = dlogs + dstarts + beta * dstarts_over_beta
    dg = _decay_gradients(documents, through, dends, ddecays.sum(-1), chunk)
    dbeta += dstarts_over_beta
    return (dq, dk, dv, dg.swapaxes(1, 2), dbeta.swapaxes(1, 2)), dstart


def _decay_gradients(
    documents: Int[Array, "B T"],
    through: Float[Array, "B N T"],
    to_end: Float[Array, "B N T"],
    full_chunks: Float[Array, "B n N"],
    chunk: int,
) -> Float[Array, "B N T"]:
    """Returns the gradients of g. Within a document and chunk, a token's g is an addend of the sums
    up to each later token, and of the sums that start at an earlier token.

    Args:
      through: gradients of a document's sums up to each token.
      to_end: gradients of the sums from the token after each to the end.
      full_chunks: gradients of the sums over full chunks.
    """
    own = documents.reshape(len(documents), 1, -1, chunk)
    own = own[..., :, None] == own[..., None, :]
    later = np.tri(chunk, dtype=bool)[(None,) * 3]
    through, to_end = (x.reshape(*x.shape[:2], -1, 1, chunk) for x in (through, to_end))

    def add(x, tokens):
        return jnp.matmul(x, (own & tokens).astype(jnp.float32), precision=Precision.HIGHEST)

    dg = add(through, later) + add(to_end, ~later) + full_chunks.swapaxes(1, 2)[..., None, None]
    return dg.reshape(*dg.shape[:2], -1)


def _constants(q: Array, v: Array, scale: float, chunk: int, group: int) -> Constants:
    (_, T, K, H), (N, W) = q.shape, v.shape[2:]
    levels = chunk.bit_length() - 1
    sizes = dict(T=T, K=K, N=N, H=H, W=W, C=chunk, BW=0, group=group, levels=levels)
    return Constants(**sizes, scale=float(scale), halved=q.dtype.itemsize == 2)


def _launch(
    name: str, inputs: tuple, shapes: tuple, constants: Constants, grid: tuple[int, ...]
) -> tuple[Array, ...]:
    """Runs a kernel. If programs share the value columns, each head has one program per tile."""
    columns, warps, stages = TILES[name]
    columns = min(columns, constants.W)
    if capability() not in LARGE:
        stages = min(stages, 2)
    if name in COLUMNS:
        grid = constants.W // columns * grid[0], *grid[1:]
    return CALL(name, inputs, shapes, grid, warps, stages, replace(constants, BW=columns))
