"""Sequence parallelism by gathering: each device attends with its own queries to all keys.

Context parallelism as in Llama 3 (arXiv 2407.21783, Section 3.3.2): the simplest, and with few key
heads the cheapest for short rows; keys and values of the whole row are on every device.
"""

from dataclasses import replace
from typing import Any

import jax
from jax import Array

from bptjax.ops.attention.tile import Score
from bptjax.ops.softmax import Partial


def unsupported(heads: int, devices: int) -> str | None:
    """Why rows of so many query heads cannot be cut so; None where they can."""
    return None


def forward(
    kernel: Any, q: Array, k: Array, v: Array, score: Score, axis: str, **chunks
) -> Partial:
    """Attention of this device's queries to the keys of all devices along `axis`."""
    k, v = (_gather(x, axis) for x in (k, v))
    return kernel.forward(q, k, v, _whole_keys(score, axis), **chunks)


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
    **chunks,
) -> tuple[Array, Array, Array]:
    """Gradients of this device's queries, keys and values."""
    k, v = (_gather(x, axis) for x in (k, v))
    score = _whole_keys(score, axis)
    dq, dk, dv = kernel.backward(q, k, v, out, lse, dout, score, **chunks)
    dk, dv = (jax.lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True) for x in (dk, dv))
    return dq, dk, dv


def _gather(x: Array, axis: str) -> Array:
    return jax.lax.all_gather(x, axis, axis=1, tiled=True)


def _whole_keys(score: Score, axis: str) -> Score:
    """The score with what the mask says of the keys, at full length."""
    fields = {
        name: jax.lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)
        for name in ("k_segments", "k_positions", "k_global_tokens")
        if (x := getattr(score.mask, name)) is not None
    }
    return replace(score, mask=replace(score.mask, **fields))
