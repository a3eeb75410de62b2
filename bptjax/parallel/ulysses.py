"""Ulysses: from some tokens of all heads to all tokens of some heads and back, by all-to-all;
between them attention over whole rows. Jacobs et al. 2023, arXiv 2309.14509.

Four exchanges a pass, each 1 / devices of a row; as many devices as query heads at most. Key heads
that are fewer than the devices are repeated.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bptjax.ops.attention.tile import Score
from bptjax.ops.softmax import Partial

ROWS = ("segments", "positions", "global_tokens", "k_segments", "k_positions", "k_global_tokens")


def unsupported(heads: int, devices: int) -> str | None:
    """Why rows of so many query heads cannot be cut so; None where they can."""
    if heads % devices:
        return f"{heads} query heads do not divide among sp={devices} devices"
    return None


def forward(
    kernel: Any,
    q: Array,
    k: Array,
    v: Array,
    score: Score,
    axis: str,
    places: tuple[Any, Any],
    **chunks,
) -> Partial:
    """Attention of this device's queries to the keys of all devices along `axis`; of `places`, the
    positions of whole rows, the mask has what it needs."""
    score = _some_heads(score, q.shape[2], axis)
    q, k, v = _to_heads(q, axis), *(_to_heads(_repeat(x, q, axis), axis) for x in (k, v))
    out, lse = kernel.forward(q, k, v, score, **chunks)
    return Partial(_to_tokens(out, axis), _to_tokens(lse, axis))


def backward(
    kernel: Any,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    score: Score,
    axis: str,
    places: tuple[Any, Any],
    **chunks,
) -> tuple[Array, Array, Array]:
    """Gradients of this device's queries, keys and values."""
    score, (B, S, K, H) = _some_heads(score, q.shape[2], axis), k.shape
    k, v = (_to_heads(_repeat(x, q, axis), axis) for x in (k, v))
    q, out, lse, dout = (_to_heads(x, axis) for x in (q, out, lse, dout))
    gradients = kernel.backward(q, k, v, out, lse, dout, score, **chunks)
    dq, dk, dv = (_to_tokens(x, axis) for x in gradients)
    dk, dv = (
        x.reshape(B, S, K, -1, H).astype(jnp.float32).sum(3).astype(x.dtype) for x in (dk, dv)
    )
    return dq, dk, dv


def _to_heads(x: Array, axis: str) -> Array:
    """`[B, T / n, N, ...]` to `[B, T, N / n, ...]`."""
    return jax.lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True)


def _to_tokens(x: Array, axis: str) -> Array:
    """`[B, T, N / n, ...]` to `[B, T / n, N, ...]`."""
    return jax.lax.all_to_all(x, axis, split_axis=1, concat_axis=2, tiled=True)


def _repeat(x: Array, q: Array, axis: str) -> Array:
    """Key heads in the least number that the devices divide and the query heads allow."""
    K, N, n = x.shape[2], q.shape[2], jax.lax.axis_size(axis)
    heads = math.lcm(K, n)
    return jnp.repeat(x, (heads if N % heads == 0 else N) // K, axis=2)


def _some_heads(score: Score, heads: int, axis: str) -> Score:
    """The score of this device's heads over whole rows; what is NumPy in it is whole already."""
    n = heads // jax.lax.axis_size(axis)
    first = jax.lax.axis_index(axis) * n
    fields = {
        name: jax.lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)
        for name in ROWS
        if (x := getattr(score.mask, name)) is not None and not isinstance(x, np.ndarray)
    }
    alibi = score.alibi
    return replace(
        score,
        mask=replace(score.mask, **fields),
        alibi=None if alibi is None else jax.lax.dynamic_slice_in_dim(alibi, first, n),
        first_head=(0 if score.first_head is None else score.first_head) + first,
    )
