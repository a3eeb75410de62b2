"""Attention by Triton kernels through jax-triton: every feature, on NVIDIA GPUs.

O(T) memory. XLA computes the key blocks that a query block may attend to from the ranges of
positions and segments, or at trace time where they are static. A program visits those blocks, and
applies the mask only to partial ones. With block masks and global tokens, the non-empty tiles are
not a range, so the kernels get lists of them.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from bptjax.ops.attention.contract import QKV, AttentionSpec, AttentionState
from bptjax.ops.attention.scores import dropout_keys
from bptjax.ops.mask import Mask, blocks
from bptjax.ops.target import is_absent, like, platform
from bptjax.ops.triton_call import compiler_shards_arrays, triton_call

# (query block, key block, warps, stages) by kernel and padded head size. The values for 64 and 128
# were the fastest of three to five candidates on one H200: causal, 32 / 8 heads, bfloat16,
# T = 32,768 (scripts/results/blocks_h200.json).
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

LOG2E = np.float32(np.log2(np.e))


@dataclass(frozen=True)
class Constants:
    """Compile-time constants of a kernel, its one `tl.constexpr` argument.

    Attributes:
      BH: head size, padded for matrix products.
      BQ, BK: tokens in a block of queries and of keys.
      range_batch, position_batch: 1 if all sequences share their ranges, or positions; else B.
      list_length: length of the lists of tiles; 0 if the ranges number the blocks themselves.
      unit: factor from a product q·k, or its capped form, to a logit in base 2.
      fast_tanh: compute the soft cap by the GPU's own tanh, to 11 bits.
      dropout_threshold: a weight is kept if its 32 random bits are at least this number.
    """

    T: int
    S: int
    N: int
    K: int
    H: int
    BH: int
    BQ: int
    BK: int
    range_batch: int
    position_batch: int
    list_length: int
    scale: float
    unit: float
    softcap: float | None
    fast_tanh: bool
    alibi: bool
    dropout: float
    dropout_threshold: int
    causal: bool
    window: int | None
    segments: bool
    global_tokens: bool
    block_size: int | None
    block_rows: int
    block_columns: int


def unsupported(x: QKV, spec: AttentionSpec) -> str | None:
    """Returns why the kernels cannot honor these arguments, or None."""
    if platform() != "gpu":
        return "needs an NVIDIA GPU"
    if compiler_shards_arrays():
        return "runs on one device, and the mesh has more"
    if not is_absent() and importlib.util.find_spec("jax_triton") is None:
        return 'jax-triton is not installed; pip install -e ".[gpu]" brings it'
    return None


def forward(x: QKV, spec: AttentionSpec) -> AttentionState:
    """Dao 2023, arXiv 2307.08691, Algorithm 1. Uses the kernel's own block sizes, not the
    chunks."""
    B, T, N, _ = x.q.shape
    shapes = (
        jax.ShapeDtypeStruct(x.q.shape, x.q.dtype),
        jax.ShapeDtypeStruct((B, T, N), jnp.float32),
    )
    return AttentionState(*_launch("forward", x, (), spec, shapes))


def backward(
    x: QKV, state: AttentionState, dout: Float[Array, "B T N H"], spec: AttentionSpec
) -> QKV:
    """Returns these keys' share of the gradients. Dao 2023, arXiv 2307.08691, Algorithm 2, in two
    kernels, so that no program adds to another's output.
    """
    delta = (state.out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1)
    lse = jnp.where(state.lse == -jnp.inf, jnp.inf, state.lse * LOG2E)
    more = dout, lse.swapaxes(1, 2), delta.swapaxes(1, 2)
    dq, dk, dv = (like(y) for y in x)
    return QKV(*_launch("dq", x, more, spec, (dq,)), *_launch("dkv", x, more, spec, (dk, dv)))


def _launch(
    name: str, x: QKV, more: tuple[Array, ...], spec: AttentionSpec, shapes: tuple
) -> tuple[Array, ...]:
    """Runs a kernel over its grid; `more` are its operands after q, k and v."""
    (B, T, N, H), (_, S, K, _) = x.q.shape, x.k.shape
    mask = spec.mask.resolve(T, S)
    padded = max(16, 1 << (H - 1).bit_length())
    bq, bk, warps, stages = BLOCKS[name][max(padded, 32)]
    if x.q.dtype.itemsize > 2:
        # Twice the bytes must still fit in shared memory.
        bq, bk, warps, stages = min(bq, 32), min(bk, 32), 4, 1
    if mask.block_size:
        # Use tiles no larger than the mask's blocks, so that each masked block is skipped.
        bq, bk = (min(b, max(16, 1 << mask.block_size.bit_length() - 1)) for b in (bq, bk))
    of_keys = name == "dkv"
    none = jnp.zeros((1,), jnp.int32)
    listed = mask.global_tokens is not None or mask.block_mask is not None
    if listed:
        ranges, tiles = block_lists(mask, T, S, bq, bk, of_keys=of_keys)
    else:
        ranges, tiles = block_ranges(mask, T, S, bq, bk, of_keys=of_keys), none
    positions, k_positions = (
        jnp.atleast_2d(jnp.asarray(y)) for y in (mask.positions, mask.k_positions)
    )
    if positions.shape[0] != k_positions.shape[0]:
        positions, k_positions = (
            jnp.broadcast_to(y, (B, y.shape[1])) for y in (positions, k_positions)
        )
    segmented = mask.segments is not None
    inputs = (
        *x,
        *more,
        ranges,
        positions,
        k_positions,
        jnp.asarray(mask.segments) if segmented else none,
        jnp.asarray(mask.k_segments) if segmented else none,
        none if spec.alibi is None else spec.alibi,
        dropout_keys(spec, B, N) if spec.dropout else none,
        tiles,
        *(
            none if y is None else jnp.broadcast_to(jnp.asarray(y, jnp.int32), (B, y.shape[-1]))
            for y in (mask.global_tokens, mask.k_global_tokens)
        ),
        none if mask.block_mask is None else jnp.asarray(mask.block_mask.astype(bool), jnp.int8),
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
        range_batch=ranges.shape[0],
        position_batch=positions.shape[0],
        list_length=tiles.shape[-1] if listed else 0,
        scale=float(spec.scale),
        unit=float(LOG2E * (spec.scale if spec.softcap is None else spec.softcap)),
        softcap=spec.softcap,
        fast_tanh=x.q.dtype == jnp.bfloat16,
        alibi=spec.alibi is not None,
        dropout=float(spec.dropout),
        dropout_threshold=round(spec.dropout * 2**32),
        causal=mask.causal,
        window=mask.window,
        segments=segmented,
        global_tokens=mask.global_tokens is not None,
        block_size=mask.block_size,
        block_rows=0 if mask.block_mask is None else mask.block_mask.shape[0],
        block_columns=0 if mask.block_mask is None else mask.block_mask.shape[1],
    )
    return CALL(name, inputs, shapes, grid, warps, stages, constants)


# Launches a kernel. Tests replace it, to run kernels in Triton's interpreter.
CALL: Callable[..., tuple[Array, ...]] = partial(triton_call, "bptjax.ops.attention.triton_kernels")


def block_ranges(mask: Mask, T: int, S: int, q_block: int, k_block: int, *, of_keys: bool) -> Array:
    """Returns, for each query block, the range of key blocks that it may attend to, and inside it
    the range of full tiles: int32 `[B or 1, blocks, 4]` of first, first full, end of full, end.
    With `of_keys`, the query blocks for each key block. `mask` is resolved.
    """
    xp, nonempty, full = _classify(mask, T, S, q_block, k_block, of_keys)
    (first, last), (begin, end) = _ends(xp, nonempty), _ends(xp, full)
    # Full tiles that are not contiguous are treated as partial ones.
    contiguous = full.sum(-1) == end - begin
    begin, end = xp.where(contiguous, begin, first), xp.where(contiguous, end, first)
    # If there are no full tiles, their range is empty and at the start.
    empty = end <= begin
    begin, end = xp.where(empty, first, begin), xp.where(empty, first, end)
    return jnp.asarray(xp.stack([first, begin, end, last], -1), jnp.int32)


def block_lists(
    mask: Mask, T: int, S: int, q_block: int, k_block: int, *, of_keys: bool
) -> tuple[Array, Array]:
    """Returns ranges like those of `block_ranges`, but into a list: int32 `[B or 1, blocks, n]` of
    the non-empty tiles, full ones first. n is the length of the longest list if the mask is static,
    else the number of tiles.
    """
    xp, nonempty, full = _classify(mask, T, S, q_block, k_block, of_keys)
    lists = xp.argsort(xp.where(full, 0, xp.where(nonempty, 1, 2)), axis=-1, stable=True)
    end_full, end = full.sum(-1), nonempty.sum(-1)
    if xp is np:
        lists = lists[..., : max(1, end.max(initial=0))]
    ranges = xp.stack([xp.zeros_like(end_full), xp.zeros_like(end_full), end_full, end], -1)
    return jnp.asarray(ranges, jnp.int32), jnp.asarray(lists, jnp.int32)


def _classify(
    mask: Mask, T: int, S: int, q_block: int, k_block: int, of_keys: bool
) -> tuple[Any, Any, Any]:
    """Returns `(xp, nonempty, full)`: which tiles may hold an allowed pair, and which hold only
    allowed pairs, bool `[B or 1, query blocks, key blocks]`, transposed with `of_keys`; xp is NumPy
    where the mask is static."""
    arrays = (
        *(mask.positions, mask.k_positions, mask.block_mask),
        *(mask.global_tokens, mask.k_global_tokens),
    )
    static = all(x is None or isinstance(x, np.ndarray) for x in arrays)
    xp = np if static and mask.segments is None else jnp
    p_low, p_high = (x[:, :, None] for x in _bounds(xp, mask.positions, q_block))
    s_low, s_high = (x[:, None] for x in _bounds(xp, mask.k_positions, k_block))
    nonempty = xp.ones((1, -(-T // q_block), -(-S // k_block)), bool)
    full = xp.ones_like(nonempty)
    if mask.window is not None:
        nonempty = nonempty & (p_low - s_high < mask.window)
        full = full & (p_high - s_low < mask.window)
        if not mask.causal:
            nonempty = nonempty & (s_low - p_high < mask.window)
            full = full & (s_high - p_low < mask.window)
    if mask.block_mask is not None:
        count, size = mask.count_blocks((p_low, p_high), (s_low, s_high))
        nonempty, full = nonempty & (count > 0), full & (count == size)
    if mask.global_tokens is not None:
        p_global, s_global = (
            xp.asarray(x, bool) for x in (mask.global_tokens, mask.k_global_tokens)
        )
        p_all, p_some = (x[:, :, None] for x in _bounds(xp, p_global, q_block))
        s_all, s_some = (x[:, None] for x in _bounds(xp, s_global, k_block))
        nonempty, full = nonempty | p_some | s_some, full | p_all | s_all
    if T % q_block:
        full = full & (xp.arange(nonempty.shape[1]) < T // q_block)[None, :, None]
    if S % k_block:
        full = full & (xp.arange(nonempty.shape[2]) < S // k_block)[None, None, :]
    if mask.causal:
        nonempty, full = nonempty & (s_low <= p_high), full & (s_high <= p_low)
    if mask.segments is not None:
        p_low, p_high, p_real = (x[:, :, None] for x in _segment_bounds(mask.segments, q_block))
        s_low, s_high, s_real = (x[:, None] for x in _segment_bounds(mask.k_segments, k_block))
        nonempty = nonempty & (s_low <= p_high) & (p_low <= s_high)
        same = (p_low == p_high) & (s_low == s_high) & (p_low == s_low)
        full = full & same & p_real & s_real
    full = full & nonempty
    if of_keys:
        nonempty, full = nonempty.swapaxes(1, 2), full.swapaxes(1, 2)
    return xp, nonempty, full


def _ends(xp: Any, flags: Any) -> tuple[Any, Any]:
    """Returns the first set flag of the last axis and one past the last; (0, 0) where none is
    set."""
    index = xp.arange(flags.shape[-1]).reshape((1,) * (flags.ndim - 1) + (-1,))
    last = xp.where(flags, index + 1, 0).max(-1)
    # Plain reductions: XLA fuses them with their operands.
    return xp.minimum(xp.where(flags, index, flags.shape[-1]).min(-1), last), last


def _bounds(xp: Any, x: Any, block: int) -> tuple[Any, Any]:
    """Returns the least and the greatest value of each block, `[B or 1, n]`."""
    # NumPy reduces static positions even if segments are not static: XLA takes seconds to fold each
    # reduction of 512K constants.
    x = blocks(x if isinstance(x, np.ndarray) else jnp.asarray(x), block, "edge")
    return xp.asarray(x.min(-1).T), xp.asarray(x.max(-1).T)


def _segment_bounds(x: Any, block: int) -> tuple[Array, Array, Array]:
    """Returns the least and the greatest segment of each block without padding, and whether the
    block has no padding."""
    x = blocks(jnp.asarray(x), block, "constant")
    top = np.iinfo(np.int32).max
    return jnp.where(x == 0, top, x).min(-1).T, x.max(-1).T, (x != 0).all(-1).T
