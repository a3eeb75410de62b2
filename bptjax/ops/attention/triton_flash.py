"""Attention by Triton kernels through jax-triton: every feature, on NVIDIA GPUs.

O(T) memory. A program visits the key blocks that its query block may attend to (`visits`), and
applies the mask only to partial blocks. With block masks, global tokens and trees, the non-empty
tiles do not form a range, so the kernels read lists of tiles.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from bptjax.ops.attention.contract import QKV, AttentionSpec, AttentionState
from bptjax.ops.attention.scores import dropout_keys
from bptjax.ops.attention.visits import block_lists, block_ranges
from bptjax.ops.dropout import PAIR
from bptjax.ops.mask import Mask
from bptjax.ops.target import HOPPER, SMALL_MEMORY, capability, like, platform
from bptjax.ops.triton_call import compiler_shards_arrays, triton_call, unusable

# (query block, key block, warps, stages) by kernel and padded head size. The values for 64 and 128
# were the fastest of three to five candidates on one H200: causal, 32 / 8 heads, bfloat16,
# T = 32,768 (scripts/results/blocks_h200.json). The values for 512 were the fastest of two to five
# candidates that fit in the memory of an A100 (blocks_512_h200.json).
BLOCKS: dict[str, dict[int, tuple[int, int, int, int]]] = {
    "forward": {
        32: (128, 64, 4, 3),
        64: (128, 64, 8, 3),
        128: (256, 64, 8, 3),
        256: (64, 32, 4, 2),
        512: (64, 32, 8, 2),
    },
    "dq": {
        32: (128, 64, 8, 3),
        64: (128, 64, 8, 3),
        128: (128, 64, 8, 4),
        256: (64, 32, 8, 1),
        512: (32, 32, 8, 2),
    },
    "dkv": {
        32: (64, 64, 4, 3),
        64: (64, 64, 4, 3),
        128: (64, 128, 8, 3),
        256: (32, 64, 8, 1),
        512: (32, 32, 8, 2),
    },
}
LARGEST = 512

# Overrides with dropout, which takes registers.
DROPOUT_BLOCKS: dict[str, dict[int, tuple[int, int, int, int]]] = {
    "forward": {128: (128, 64, 8, 3)},
    "dq": {},
    "dkv": {},
}
# Overrides for windows of up to NARROW_WINDOW tokens, which small tiles fit best: the fastest of
# six to eight candidates with a window of 128 (scripts/results/windows_h200.json). With such
# windows, forward plus backward is faster than in cuDNN and FlashAttention-4.
NARROW_WINDOW = 256
NARROW_BLOCKS: dict[str, dict[int, tuple[int, int, int, int]]] = {
    "forward": {64: (64, 32, 4, 3), 128: (64, 32, 4, 3)},
    "dq": {64: (64, 64, 4, 2), 128: (64, 64, 4, 2)},
    "dkv": {64: (32, 64, 4, 2), 128: (32, 64, 4, 2)},
}
# Overrides for GPUs with less shared memory. Compiled for them, never timed.
SMALL_BLOCKS: dict[str, dict[int, tuple[int, int, int, int]]] = {
    "forward": {128: (128, 64, 8, 2), 512: (32, 32, 8, 1)},
    "dq": {128: (64, 64, 4, 2), 512: (16, 16, 8, 1)},
    "dkv": {128: (64, 64, 4, 2), 256: (32, 32, 4, 1), 512: (16, 16, 8, 1)},
}
# Overrides for Hopper GPUs: a tile of 64 queries fills their matrix units, and does not fit in
# smaller memory (blocks_512_h200.json).
HOPPER_BLOCKS: dict[str, dict[int, tuple[int, int, int, int]]] = {
    "forward": {},
    "dq": {512: (64, 32, 8, 1)},
    "dkv": {},
}
# Maximum heads per program, a power of two, when outputs hold another kernel's results; minimum
# number of programs, about two per multiprocessor of a large GPU.
HEADS, PROGRAMS = 8, 256
# Number of outputs that may hold another kernel's results.
DONE = {"forward": 2, "dq": 1, "dkv": 2}
LOG2E = np.float32(np.log2(np.e))


@dataclass(frozen=True)
class Constants:
    """Compile-time constants of a kernel, its one `tl.constexpr` argument.

    Attributes:
      BH: head size, padded for matrix products.
      BQ, BK: tokens per block of queries and of keys.
      heads: heads, or groups of heads, that a program handles one after another.
      group: query heads that share tiles in the forward pass; each key tile is read once for all.
      stacked: the keys and values of the first sequence are not the first ones in their arrays.
      over: the first outputs hold another kernel's results, which stay where ranges are -1.
      range_batch, position_batch: 1 if all sequences share their ranges, or positions; else B.
      list_length: length of the lists of tiles; 0 if the ranges are block indices.
      unit: factor from a product q·k, or its capped form, to a logit in base 2.
      fast_tanh: compute the soft cap with the GPU's tanh, to 11 bits.
      paired: a tile has both keys of each pair whose random bits come from one block.
      dropout_threshold: a weight is kept if its 32 random bits are at least this number.
      ends: `segments` hold the positions of the queries and the ends of the keys.
      depths: `global_tokens` hold depths.
    """

    T: int
    S: int
    N: int
    K: int
    H: int
    BH: int
    BQ: int
    BK: int
    heads: int
    group: int
    sinks: bool
    stacked: bool
    over: bool
    range_batch: int
    position_batch: int
    list_length: int
    scale: float
    unit: float
    softcap: float | None
    fast_tanh: bool
    alibi: bool
    dropout: float
    paired: bool
    dropout_threshold: int
    causal: bool
    window: int | None
    segments: bool
    ends: bool
    depths: bool
    global_tokens: bool
    block_size: int | None
    block_rows: int
    block_columns: int


def unsupported(x: QKV, spec: AttentionSpec) -> str | None:
    """Returns why the kernels cannot honor these arguments, or None if they can."""
    if platform() != "gpu":
        return "needs an NVIDIA GPU"
    if compiler_shards_arrays():
        return "runs on one device, and the mesh has more"
    H, wide = x.q.shape[-1], x.q.dtype.itemsize > 2
    if H > LARGEST:
        return f"takes head sizes up to {LARGEST}, not {H}"
    if H > 256 and wide and capability() in SMALL_MEMORY:
        return f"needs more shared memory than this GPU has, in float32 with heads of {H}"
    return unusable()


def is_narrow(x: QKV, spec: AttentionSpec) -> bool:
    """Returns whether the window is narrow and the head size has tiles for narrow windows."""
    window = spec.mask.window
    narrow = window is not None and window <= NARROW_WINDOW
    return narrow and _padded(x.q.shape[-1]) in NARROW_BLOCKS["forward"]


def _tiles(name: str, x: QKV, spec: AttentionSpec) -> tuple[int, int, int, int, int]:
    """Returns a kernel's query block, key block, warps, stages, and number of query heads that
    share tiles in the forward pass: all heads of a key head, if they do not fill a tile. Each key
    is then read once for all of them. With a narrow window, small tiles waste few keys, so heads
    share tiles of any size."""
    table = BLOCKS[name] | DROPOUT_BLOCKS[name] if spec.dropout else BLOCKS[name]
    # Not |=, which would modify the tables.
    table = table | (NARROW_BLOCKS[name] if is_narrow(x, spec) else {})
    table = table | (SMALL_BLOCKS[name] if capability() in SMALL_MEMORY else {})
    table = table | (HOPPER_BLOCKS[name] if capability() == HOPPER else {})
    bq, bk, warps, stages = table[max(_padded(x.q.shape[-1]), 32)]
    if x.q.dtype.itemsize > 2:
        # 4-byte elements must still fit in shared memory.
        most = 16 if x.q.shape[-1] > 256 else 32
        bq, bk, warps, stages = min(bq, most), min(bk, most), 4, 1
    mask, shared = spec.mask, x.q.shape[2] // x.k.shape[2]
    one_head = spec.alibi is not None or spec.dropout
    listed = _is_listed(mask)
    rows = x.q.shape[1] * shared
    if name != "forward" or one_head or listed or shared > bq:
        return bq, bk, warps, stages, 1
    if rows <= bq:
        return max(16, 1 << (rows - 1).bit_length()), bk, 4, stages, shared
    return bq, bk, warps, stages, shared if is_narrow(x, spec) else 1


def _is_listed(mask: Mask) -> bool:
    """Returns whether the non-empty tiles of a block may not form a range."""
    return any(x is not None for x in (mask.global_tokens, mask.block_mask, mask.ends))


def _padded(head_size: int) -> int:
    """Returns the kernel's head size, a power of two."""
    return max(16, 1 << (head_size - 1).bit_length())


def forward(
    x: QKV,
    spec: AttentionSpec,
    done: tuple[Bool[Array, ""], AttentionState] | None = None,
    first: Int[Array, ""] | None = None,
) -> AttentionState:
    """Runs Algorithm 1 of Dao 2023, arXiv 2307.08691, with the kernel's block sizes, not the
    chunks.

    Args:
      done: a condition and another kernel's results, undefined in padding. If the condition holds,
        the results stay, and padding gets an output of 0 and an lse of -inf; otherwise they are
        overwritten. Unlike a branch, this does not wait for the condition.
      first: `x.k` and `x.v` have more sequences than `x.q`, and this is the index of the first one
        to read. A slice of them would be copied.
    """
    return AttentionState(*_forward(x, spec, None, *(done or (None, ())), first))


def forward_with_sinks(x: QKV, spec: AttentionSpec, sinks: Float[Array, "N"]) -> AttentionState:
    """Attends to the keys as `forward` does, and to the sinks."""
    return AttentionState(*_forward(x, spec, sinks, None, ()))


def _forward(
    x: QKV,
    spec: AttentionSpec,
    sinks: Float[Array, "N"] | None,
    keep: Bool[Array, ""] | None,
    done: tuple,
    first: Int[Array, ""] | None = None,
) -> tuple[Array, ...]:
    B, T, N, _ = x.q.shape
    shapes = like(x.q), jax.ShapeDtypeStruct((B, T, N), jnp.float32)
    start = jnp.zeros(1, jnp.int32) if first is None else first[None].astype(jnp.int32)
    more = jnp.zeros(1) if sinks is None else sinks, start
    flags = dict(sinks=sinks is not None, stacked=first is not None)
    return _launch("forward", x, more, spec, shapes, keep, done, **flags)


def backward(
    x: QKV,
    state: AttentionState,
    dout: Float[Array, "B T N H"],
    spec: AttentionSpec,
    done: tuple[Bool[Array, ""], QKV] | None = None,
) -> QKV:
    """Returns these keys' share of the gradients. Dao 2023, arXiv 2307.08691, Algorithm 2, in two
    kernels, so that no program adds to another's output.

    Args:
      done: as in `forward`; the gradients of padding are 0.
    """
    B, T, N, _ = x.q.shape
    keep, (dq, *dkv) = done or (None, (None, None, None))
    lse = jnp.where(state.lse == -jnp.inf, jnp.inf, state.lse * LOG2E).swapaxes(1, 2)
    shapes = like(x.q), jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    dq, delta = _launch("dq", x, (dout, lse, state.out), spec, shapes, keep, (dq,))
    shapes = like(x.k), like(x.v)
    dk, dv = _launch("dkv", x, (dout, lse, delta), spec, shapes, keep, tuple(dkv))
    return QKV(dq, dk, dv)


def _launch(
    name: str,
    x: QKV,
    more: tuple[Array, ...],
    spec: AttentionSpec,
    shapes: tuple,
    keep: Bool[Array, ""] | None,
    done: tuple,
    *,
    sinks: bool = False,
    stacked: bool = False,
) -> tuple[Array, ...]:
    """Runs a kernel over its grid. `more` are the operands after q, k and v, including sinks if
    `sinks`, and the first sequence to read if `stacked`. If `keep` is given, `done` are the initial
    outputs, which stay if `keep` holds."""
    (B, T, N, H), (_, S, K, _) = x.q.shape, x.k.shape
    mask = spec.mask.resolve(T, S)
    bq, bk, warps, stages, group = _tiles(name, x, spec)
    if mask.block_size:
        # Tiles no larger than the mask's blocks, so that each masked block is skipped.
        bq, bk = (min(b, max(16, 1 << mask.block_size.bit_length() - 1)) for b in (bq, bk))
    by_key_block = name == "dkv"
    none = jnp.zeros((1,), jnp.int32)
    listed = _is_listed(mask)
    if listed:
        ranges, tiles = block_lists(mask, T, S, bq, bk, by_key_block=by_key_block)
    else:
        ranges, tiles = block_ranges(mask, T, S, bq // group, bk, by_key_block=by_key_block), none
    if keep is not None:
        ranges = jnp.where(keep, -1, ranges)
    positions, k_positions = (
        jnp.atleast_2d(jnp.asarray(y)) for y in (mask.positions, mask.k_positions)
    )
    if positions.shape[0] != k_positions.shape[0]:
        positions, k_positions = (
            jnp.broadcast_to(y, (B, y.shape[1])) for y in (positions, k_positions)
        )
    labels = mask.segments, mask.k_segments
    numbers = mask.global_tokens, mask.k_global_tokens
    if mask.ends is not None:
        labels = jnp.broadcast_to(positions, (B, T)), mask.ends
        numbers = mask.depths, mask.k_depths
    inputs = (
        *x,
        *more,
        ranges,
        positions,
        k_positions,
        *(none if y is None else jnp.asarray(y) for y in labels),
        none if spec.alibi is None else jnp.asarray(spec.alibi),
        dropout_keys(spec, B, N) if spec.dropout else none,
        tiles,
        *(
            none if y is None else jnp.broadcast_to(jnp.asarray(y, jnp.int32), (B, y.shape[-1]))
            for y in numbers
        ),
        none if mask.block_mask is None else jnp.asarray(mask.block_mask.astype(bool), jnp.int8),
    )
    aliases = {len(inputs) + i: i for i in range(len(done))}
    if keep is None:
        # dq may reuse the memory of `out`, the last operand: a program reads only its own part.
        aliases = {2 + len(more): 0} if name == "dq" and like(more[-1]) == shapes[0] else {}
        done = DONE[name] * (none,)
    inputs += done
    tokens, all_heads = (-(-S // bk), K) if by_key_block else (-(-T // (bq // group)), N // group)
    # Few programs: most batches give them nothing to do.
    heads = 1 if keep is None else math.gcd(all_heads, HEADS)
    while heads > 1 and tokens * all_heads // heads * B < PROGRAMS:
        heads //= 2
    grid = tokens, all_heads // heads, B
    constants = Constants(
        T=T,
        S=S,
        N=N,
        K=K,
        H=H,
        BH=_padded(H),
        BQ=bq,
        BK=bk,
        heads=heads,
        group=group,
        sinks=sinks,
        stacked=stacked,
        over=keep is not None,
        range_batch=ranges.shape[0],
        position_batch=positions.shape[0],
        list_length=tiles.shape[-1] if listed else 0,
        scale=float(spec.scale),
        unit=float(LOG2E * (spec.scale if spec.softcap is None else spec.softcap)),
        softcap=spec.softcap,
        fast_tanh=x.q.dtype == jnp.bfloat16,
        alibi=spec.alibi is not None,
        dropout=float(spec.dropout),
        paired=spec.dropout > 0 and bk % (2 * PAIR) == 0 and _paired(mask.k_positions),
        dropout_threshold=round(spec.dropout * 2**32),
        causal=mask.causal,
        window=mask.window,
        segments=mask.segments is not None,
        ends=mask.ends is not None,
        depths=mask.depths is not None,
        global_tokens=mask.global_tokens is not None,
        block_size=mask.block_size,
        block_rows=0 if mask.block_mask is None else mask.block_mask.shape[0],
        block_columns=0 if mask.block_mask is None else mask.block_mask.shape[1],
    )
    return CALL(name, inputs, shapes, grid, warps, stages, constants, aliases)


def _paired(k_positions: Any) -> bool:
    """Returns whether keys are statically runs of 2 · PAIR positions from multiples of 2 · PAIR."""
    if not isinstance(k_positions, np.ndarray):
        return False
    run = 2 * PAIR
    rest = np.atleast_2d(k_positions) - np.arange(k_positions.shape[-1])
    first = np.repeat(rest[:, ::run], run, axis=1)[:, : rest.shape[1]]
    return bool((rest == first).all() and (rest % run == 0).all())


# Launches a kernel. Tests replace it to run kernels in Triton's interpreter.
CALL: Callable[..., tuple[Array, ...]] = partial(triton_call, "bptjax.ops.attention.triton_kernels")
