"""Computes weights from q·k: arithmetic that the tiled implementations and the oracle share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, UInt32

from bptjax.ops.attention.contract import AttentionSpec
from bptjax.ops.dropout import keep


def alibi_bias(
    slopes: Float[Array | np.ndarray, "N"], p: Array, s: Array
) -> Float[Array, "b N t s"]:
    """Returns -slope · |p - s| from positions `[b, t]` and `[b, s]`, where b is 1 or the batch.
    Press et al. 2021, arXiv 2108.12409."""
    distance = jnp.abs(p[:, None, :, None] - s[:, None, None, :]).astype(jnp.float32)
    return -jnp.asarray(slopes)[None, :, None, None] * distance


def dropout_keys(spec: AttentionSpec, batch: int, heads: int) -> UInt32[Array, "B N 2"]:
    """Returns the dropout key of each sequence and head."""
    fold = jax.vmap(jax.vmap(_fold, (None, None, 0)), (None, 0, None))
    sequences, heads_ = (
        jnp.arange(n) if first is None else first + jnp.arange(n)
        for n, first in ((batch, spec.first_sequence), (heads, spec.first_head))
    )
    key: Any = spec.dropout_key
    return fold(key, sequences, heads_)


def dropout_factors(
    spec: AttentionSpec, batch: int, heads: int, p: Array, s: Array
) -> Float[Array, "B N t s"]:
    """Returns each weight's factor, 0 or 1 / (1 - dropout). Depends on the pair of positions, not
    on its tile."""
    keys = dropout_keys(spec, batch, heads)
    p, s = (jnp.broadcast_to(x[:, None, :], (batch, heads, x.shape[-1])) for x in (p, s))
    keeps = keep(keys, spec.dropout, p, s).astype(jnp.float32)
    return keeps / jnp.float32(1.0 - spec.dropout)


def _fold(key: UInt32[Array, "2"], sequence: Array, head: Array) -> UInt32[Array, "2"]:
    key = jax.random.wrap_key_data(key, impl="threefry2x32")
    return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, sequence), head))
