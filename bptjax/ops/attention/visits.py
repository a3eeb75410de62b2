"""The tiles of a mask that Triton's kernels visit, from the ranges of positions and segments: at
trace time where static, otherwise by XLA."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from bptjax.ops.mask import Mask, blocks


def block_ranges(
    mask: Mask, T: int, S: int, q_block: int, k_block: int, *, by_key_block: bool
) -> Array:
    """Returns each query block's range of key blocks that it may attend to, and the range of full
    tiles in it: int32 `[B or 1, blocks, 4]` of first, first full, end of full, end. `by_key_block`
    returns the ranges of query blocks for each key block instead. `mask` is resolved.
    """
    xp, nonempty, full = _classify(mask, T, S, q_block, k_block, by_key_block)
    (first, last), (begin, end) = _ends(xp, nonempty), _ends(xp, full)
    # Treat full tiles that are not contiguous as partial.
    contiguous = full.sum(-1) == end - begin
    begin, end = xp.where(contiguous, begin, first), xp.where(contiguous, end, first)
    # Without full tiles, their range is empty and at the start.
    empty = end <= begin
    begin, end = xp.where(empty, first, begin), xp.where(empty, first, end)
    return jnp.asarray(xp.stack([first, begin, end, last], -1), jnp.int32)


def block_lists(
    mask: Mask, T: int, S: int, q_block: int, k_block: int, *, by_key_block: bool
) -> tuple[Array, Array]:
    """Returns ranges as in `block_ranges`, but into a second result: lists int32 `[B or 1, blocks,
    n]` of the non-empty tiles, full ones first. n is the length of the longest list if the mask is
    static, otherwise the number of tiles.
    """
    xp, nonempty, full = _classify(mask, T, S, q_block, k_block, by_key_block)
    lists = xp.argsort(xp.where(full, 0, xp.where(nonempty, 1, 2)), axis=-1, stable=True)
    end_full, end = full.sum(-1), nonempty.sum(-1)
    if xp is np:
        lists = lists[..., : max(1, end.max(initial=0))]
    ranges = xp.stack([xp.zeros_like(end_full), xp.zeros_like(end_full), end_full, end], -1)
    return jnp.asarray(ranges, jnp.int32), jnp.asarray(lists, jnp.int32)


def _classify(
    mask: Mask, T: int, S: int, q_block: int, k_block: int, by_key_block: bool
) -> tuple[Any, Any, Any]:
    """Classifies the tiles of a mask.

    Returns:
      xp: NumPy if the mask is static, else jax.numpy.
      nonempty: whether a tile may hold an allowed pair, bool `[B or 1, query blocks, key blocks]`;
        `by_key_block` swaps the last two axes.
      full: whether a tile holds only allowed pairs, like `nonempty`.
    """
    arrays = (
        *(mask.positions, mask.k_positions, mask.block_mask),
        *(mask.global_tokens, mask.k_global_tokens, mask.depths, mask.k_depths),
    )
    static = all(x is None or isinstance(x, np.ndarray) for x in arrays)
    xp = np if static and mask.segments is None and mask.ends is None else jnp
    p_low, p_high = (x[:, :, None] for x in _bounds(xp, mask.positions, q_block))
    s_low, s_high = (x[:, None] for x in _bounds(xp, mask.k_positions, k_block))
    nonempty = xp.ones((1, -(-T // q_block), -(-S // k_block)), bool)
    full = xp.ones_like(nonempty)
    if mask.window is not None:
        (first, last), (s_first, s_last) = (p_low, p_high), (s_low, s_high)
        if mask.depths is not None:
            first, last = (x[:, :, None] for x in _bounds(xp, mask.depths, q_block))
            s_first, s_last = (x[:, None] for x in _bounds(xp, mask.k_depths, k_block))
        nonempty = nonempty & (first - s_last < mask.window)
        full = full & (last - s_first < mask.window)
        if not mask.causal:
            nonempty = nonempty & (s_first - last < mask.window)
            full = full & (s_last - first < mask.window)
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
    if mask.ends is not None:
        first_end, last_end = (x[:, None] for x in _bounds(xp, mask.ends, k_block))
        nonempty, full = nonempty & (p_low < last_end), full & (p_high < first_end)
    if mask.segments is not None:
        p_low, p_high, p_real = (x[:, :, None] for x in _segment_bounds(mask.segments, q_block))
        s_low, s_high, s_real = (x[:, None] for x in _segment_bounds(mask.k_segments, k_block))
        nonempty = nonempty & (s_low <= p_high) & (p_low <= s_high)
        same = (p_low == p_high) & (s_low == s_high) & (p_low == s_low)
        full = full & same & p_real & s_real
    full = full & nonempty
    if by_key_block:
        nonempty, full = nonempty.swapaxes(1, 2), full.swapaxes(1, 2)
    return xp, nonempty, full


def _ends(xp: Any, flags: Any) -> tuple[Any, Any]:
    """Returns the first set flag of the last axis and one past the last; (0, 0) if none is set."""
    index = xp.arange(flags.shape[-1]).reshape((1,) * (flags.ndim - 1) + (-1,))
    last = xp.where(flags, index + 1, 0).max(-1)
    # Plain reductions, which XLA fuses with their operands.
    return xp.minimum(xp.where(flags, index, flags.shape[-1]).min(-1), last), last


def _bounds(xp: Any, x: Any, block: int) -> tuple[Any, Any]:
    """Returns the minimum and maximum of each block, `[B or 1, n]`."""
    # NumPy reduces static positions even if segments are traced: XLA takes seconds to fold each
    # reduction of 512K constants.
    x = blocks(x if isinstance(x, np.ndarray) else jnp.asarray(x), "edge", block)
    return xp.asarray(x.min(-1).T), xp.asarray(x.max(-1).T)


def _segment_bounds(x: Any, block: int) -> tuple[Array, Array, Array]:
    """Returns the minimum and maximum segment of each block, ignoring padding, and whether the
    block has no padding."""
    x = blocks(jnp.asarray(x), "constant", block)
    top = np.iinfo(np.int32).max
    return jnp.where(x == 0, top, x).min(-1).T, x.max(-1).T, (x != 0).all(-1).T
