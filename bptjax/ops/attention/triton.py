"""Attention by Triton kernels through jax-triton: every feature, on NVIDIA GPUs.

O(T) memory. Which key blocks a block of queries may see is worked out by XLA from the ranges of
positions and segments, or while tracing where they are known; a program visits those, and masks
only tiles that are not seen whole. Block masks and global tokens, whose live tiles are no range,
come with lists of them.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from bptjax.ops.attention.tile import Score
from bptjax.ops.mask import Mask, blocks
from bptjax.ops.softmax import Partial

# (block of queries, block of keys, warps, stages) by kernel and padded head size: for 64 and 128
# the fastest of three to five on one H200, causal, 32 / 8 heads, bfloat16, T = 32,768
# (scripts/results/blocks_h200.json).
BLOCKS: dict[str, dict[int, tuple[int, int, int, int]]] = {
    "forward": {
        32: (128, 64, 4, 3),
        64: (128, 64, 8, 3),
        128: (256, 64, 8, 3),
        256: (64, 32, 4, 2),
    },
    "dq": {32: (128, 64, 8, 3), 64: (128, 64, 8, 3), 128: (128, 64, 8, 4), 256: (64, 32, 8, 1)},
    "dkv": {32: (64, 64, 4, 3), 64: (64, 64, 4, 3), 128: (64, 128, 8, 3), 256: (32, 64, 8, 1)},
}

MANUAL = jax.sharding.AxisType.Manual
LOG2E = np.float32(np.log2(np.e))


@dataclass(frozen=True)
class Constants:
    """What a kernel is compiled for, its one `tl.constexpr` argument.

    Attributes:
      BH: head size filled up to what a matrix product takes.
      BQ, BK: blocks of queries and of keys.
      range_rows, position_rows: 1 where the rows of the batch have the same ranges, or positions.
      listed: longest list of tiles; 0 where ranges are of the blocks themselves.
      unit: what a product, or its capped form, is worth in units of log 2.
      fast_tanh: the soft cap by the GPU's own tanh, to 11 bits.
      least: random bits, 32 of them, of at least so much keep a weight.
    """

    T: int
    S: int
    N: int
    K: int
    H: int
    BH: int
    BQ: int
    BK: int
    range_rows: int
    position_rows: int
    listed: int
    scale: float
    unit: float
    softcap: float | None
    fast_tanh: bool
    alibi: bool
    dropout: float
    least: int
    causal: bool
    window: int | None
    segments: bool
    global_tokens: bool
    block_size: int | None
    block_rows: int
    block_columns: int


def unsupported(score: Score, q: Any, k: Any) -> str | None:
    """Why these arguments cannot be honoured; None where they can."""
    if jax.default_backend() != "gpu":
        return "needs an NVIDIA GPU"
    if several_devices():
        return "runs on one device, and the mesh has more"
    if importlib.util.find_spec("jax_triton") is None:
        return 'jax-triton is not installed; pip install -e ".[gpu]" brings it'
    return None


def several_devices() -> bool:
    """Whether the compiler is to cut arrays over a mesh by itself, which it cannot for kernels."""
    mesh = jax.sharding.get_abstract_mesh()
    free = [n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != MANUAL]
    return any(mesh.shape[name] > 1 for name in free)


def forward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    score: Score,
    *,
    q_chunk: int = 0,
    k_chunk: int = 0,
) -> Partial:
    """Dao 2023, arXiv 2307.08691, Algorithm 1. The kernel's own blocks are used, not the chunks."""
    B, T, N, _ = q.shape
    shapes = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((B, T, N), jnp.float32)
    return Partial(*_launch("forward", (q, k, v), score, q, k, shapes))


def backward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    out: Float[Array, "B T N H"],
    lse: Float[Array, "B T N"],
    dout: Float[Array, "B T N H"],
    score: Score,
    *,
    q_chunk: int = 0,
    k_chunk: int = 0,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """These keys' share of (dq, dk, dv), where `out` and `lse` may come from more keys than these.
    Dao 2023, arXiv 2307.08691, Algorithm 2, in two kernels: neither adds to what another writes.
    """
    delta = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1)
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E)
    arrays = q, k, v, dout, lse.swapaxes(1, 2), delta.swapaxes(1, 2)
    (dq,) = _launch("dq", arrays, score, q, k, (jax.ShapeDtypeStruct(q.shape, q.dtype),))
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v))
    dk, dv = _launch("dkv", arrays, score, q, k, shapes)
    return dq, dk, dv


def _launch(
    name: str, arrays: tuple[Array, ...], score: Score, q: Array, k: Array, shapes: tuple
) -> tuple[Array, ...]:
    """Runs a kernel over its grid."""
    (B, T, N, H), (_, S, K, _) = q.shape, k.shape
    mask = score.mask.resolve(T, S)
    padded = max(16, 1 << (H - 1).bit_length())
    bq, bk, warps, stages = BLOCKS[name][max(padded, 32)]
    if q.dtype.itemsize > 2:
        # What fits in shared memory at twice the bytes.
        bq, bk, warps, stages = min(bq, 32), min(bk, 32), 4, 1
    if mask.block_size:
        # Tiles no larger than the mask's blocks: of a larger one some part is dead, if any can be.
        bq, bk = (min(b, max(16, 1 << mask.block_size.bit_length() - 1)) for b in (bq, bk))
    of_keys = name == "dkv"
    none = jnp.zeros((1,), jnp.int32)
    listed = mask.global_tokens is not None or mask.block_mask is not None
    if listed:
        ranges, tiles = block_lists(mask, T, S, bq, bk, of_keys=of_keys)
    else:
        ranges, tiles = block_ranges(mask, T, S, bq, bk, of_keys=of_keys), none
    positions, k_positions = (
        jnp.atleast_2d(jnp.asarray(x)) for x in (mask.positions, mask.k_positions)
    )
    if positions.shape[0] != k_positions.shape[0]:
        positions, k_positions = (
            jnp.broadcast_to(x, (B, x.shape[1])) for x in (positions, k_positions)
        )
    segmented = mask.segments is not None
    inputs = (
        *arrays,
        ranges,
        positions,
        k_positions,
        jnp.asarray(mask.segments) if segmented else none,
        jnp.asarray(mask.k_segments) if segmented else none,
        none if score.alibi is None else score.alibi,
        score.head_keys(B, N) if score.dropout else none,
        tiles,
        *(
            none if x is None else jnp.broadcast_to(jnp.asarray(x, jnp.int32), (B, x.shape[-1]))
            for x in (mask.global_tokens, mask.k_global_tokens)
        ),
        none if mask.block_mask is None else jnp.asarray(mask.block_mask != 0, jnp.int8),
    )
    grid = (-(-S // bk), K, B) if of_keys else (-(-T // bq), N, B)
    constants = Constants(
        T=T,
        S=S,
        N=N,
        K=K,
        H=H,
        BH=padded,
        BQ=bq,
        BK=bk,
        range_rows=ranges.shape[0],
        position_rows=positions.shape[0],
        listed=tiles.shape[-1] if listed else 0,
        scale=float(score.scale),
        unit=float(LOG2E * (score.scale if score.softcap is None else score.softcap)),
        softcap=score.softcap,
        fast_tanh=q.dtype == jnp.bfloat16,
        alibi=score.alibi is not None,
        dropout=float(score.dropout),
        least=round(score.dropout * 2**32),
        causal=mask.causal,
        window=mask.window,
        segments=segmented,
        global_tokens=mask.global_tokens is not None,
        block_size=mask.block_size,
        block_rows=0 if mask.block_mask is None else mask.block_mask.shape[0],
        block_columns=0 if mask.block_mask is None else mask.block_mask.shape[1],
    )
    return CALL(name, inputs, shapes, grid, warps, stages, constants)


def _call(name, inputs, shapes, grid, warps, stages, constants: Constants) -> tuple[Array, ...]:
    # jax-triton refuses to be imported where there is no GPU.
    import jax_triton

    import bptjax.ops.attention.triton_kernels as kernels

    return jax_triton.triton_call(
        *inputs,
        kernel=getattr(kernels, f"{name}_kernel"),
        out_shape=shapes,
        grid=grid,
        num_warps=warps,
        num_stages=stages,
        C=constants,
    )


# How a kernel is run; the tests run it in Triton's interpreter.
CALL: Callable[..., tuple[Array, ...]] = _call


def block_ranges(mask: Mask, T: int, S: int, q_block: int, k_block: int, *, of_keys: bool) -> Array:
    """For each block of queries the range of key blocks that it may see, and inside it the range of
    those seen whole: int32 `[B or 1, blocks, 4]` of first, first whole, end of whole, end. With
    `of_keys`, for each block of keys the query blocks. `mask` is resolved.
    """
    xp, live, whole = _live(mask, T, S, q_block, k_block, of_keys)
    (first, last), (begin, end) = _ends(xp, live), _ends(xp, whole)
    # Tiles seen whole that are not next to one another are masked like the rest.
    together = whole.sum(-1) == end - begin
    begin, end = xp.where(together, begin, first), xp.where(together, end, first)
    # None seen whole: an empty range at the start.
    empty = end <= begin
    begin, end = xp.where(empty, first, begin), xp.where(empty, first, end)
    return jnp.asarray(xp.stack([first, begin, end, last], -1), jnp.int32)


def block_lists(
    mask: Mask, T: int, S: int, q_block: int, k_block: int, *, of_keys: bool
) -> tuple[Array, Array]:
    """Ranges as of `block_ranges`, but into a list: int32 `[B or 1, blocks, n]` of the live tiles,
    those seen whole first. n is the longest list where the mask is known while tracing, else every
    tile.
    """
    xp, live, whole = _live(mask, T, S, q_block, k_block, of_keys)
    lists = xp.argsort(xp.where(whole, 0, xp.where(live, 1, 2)), axis=-1, stable=True)
    part, last = whole.sum(-1), live.sum(-1)
    if xp is np:
        lists = lists[..., : max(1, last.max(initial=0))]
    ranges = xp.stack([xp.zeros_like(part), xp.zeros_like(part), part, last], -1)
    return jnp.asarray(ranges, jnp.int32), jnp.asarray(lists, jnp.int32)


def _live(
    mask: Mask, T: int, S: int, q_block: int, k_block: int, of_keys: bool
) -> tuple[Any, Any, Any]:
    """`(xp, live, whole)`: which tiles may hold a live pair, and which of them are seen whole, bool
    `[B or 1, query blocks, key blocks]` or with `of_keys` turned; xp is NumPy where all is known
    while tracing."""
    arrays = (
        *(mask.positions, mask.k_positions, mask.block_mask),
        *(mask.global_tokens, mask.k_global_tokens),
    )
    known = all(x is None or isinstance(x, np.ndarray) for x in arrays)
    xp = np if known and mask.segments is None else jnp
    p, s = (
        _bounds(xp, x, block)
        for x, block in ((mask.positions, q_block), (mask.k_positions, k_block))
    )
    (p_low, p_high), (s_low, s_high) = (
        (low[:, :, None], high[:, :, None]) if i == 0 else (low[:, None], high[:, None])
        for i, (low, high) in enumerate((p, s))
    )
    live = xp.ones((1, -(-T // q_block), -(-S // k_block)), bool)
    whole = xp.ones_like(live)
    if mask.window is not None:
        live = live & (p_low - s_high < mask.window)
        whole = whole & (p_high - s_low < mask.window)
        if not mask.causal:
            live = live & (s_low - p_high < mask.window)
            whole = whole & (s_high - p_low < mask.window)
    if mask.block_mask is not None:
        count, size = mask.count_blocks((p_low, p_high), (s_low, s_high))
        live, whole = live & (count > 0), whole & (count == size)
    if mask.global_tokens is not None:
        (p_all, p_some), (s_all, s_some) = (
            _bounds(xp, x != 0, block)
            for x, block in ((mask.global_tokens, q_block), (mask.k_global_tokens, k_block))
        )
        live = live | p_some[:, :, None] | s_some[:, None]
        whole = whole | p_all[:, :, None] | s_all[:, None]
    if T % q_block:
        whole = whole & (xp.arange(live.shape[1]) < T // q_block)[None, :, None]
    if S % k_block:
        whole = whole & (xp.arange(live.shape[2]) < S // k_block)[None, None, :]
    if mask.causal:
        live, whole = live & (s_low <= p_high), whole & (s_high <= p_low)
    if mask.segments is not None:
        (a_low, a_high, a_real), (b_low, b_high, b_real) = (
            _segment_bounds(x, block)
            for x, block in ((mask.segments, q_block), (mask.k_segments, k_block))
        )
        a_low, a_high, a_real = (x[:, :, None] for x in (a_low, a_high, a_real))
        b_low, b_high, b_real = (x[:, None] for x in (b_low, b_high, b_real))
        live = live & (b_low <= a_high) & (a_low <= b_high)
        one = (a_low == a_high) & (b_low == b_high) & (a_low == b_low)
        whole = whole & one & a_real & b_real
    whole = whole & live
    if of_keys:
        live, whole = live.swapaxes(1, 2), whole.swapaxes(1, 2)
    return xp, live, whole


def _ends(xp: Any, flags: Any) -> tuple[Any, Any]:
    """First set flag of the last axis, and one past the last; (0, 0) where none is set."""
    index = xp.arange(flags.shape[-1]).reshape((1,) * (flags.ndim - 1) + (-1,))
    last = xp.where(flags, index + 1, 0).max(-1)
    # Plain reductions, which XLA fuses with what they read.
    return xp.minimum(xp.where(flags, index, flags.shape[-1]).min(-1), last), last


def _bounds(xp: Any, x: Any, block: int) -> tuple[Any, Any]:
    """Least and greatest of each block, `[B or 1, n]`."""
    x = blocks(x if xp is np else jnp.asarray(x), block, "edge")
    return x.min(-1).T, x.max(-1).T


def _segment_bounds(x: Any, block: int) -> tuple[Array, Array, Array]:
    """Least and greatest real segment of each block, and whether all of it is real."""
    x = blocks(jnp.asarray(x), block, "constant")
    top = np.iinfo(np.int32).max
    return jnp.where(x == 0, top, x).min(-1).T, x.max(-1).T, (x != 0).all(-1).T
