"""Attention as Python loops over blocks: eager it is the slow way that this project replaces,
traced it is `scan` unrolled."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from bptjax.ops.attention.tile import (
    Score,
    Tile,
    from_key_blocks,
    from_query_blocks,
    key_blocks,
    query_blocks,
)
from bptjax.ops.softmax import Partial, Running


def unsupported(score: Score, q: Any, k: Any) -> str | None:
    """Why these arguments cannot be honoured; None where they can."""
    return None


def _pairs(tile: Tile) -> list[tuple[int, int]]:
    """Block pairs in row order; those that only a traced mask would kill are kept."""
    pairs, count = tile.tiles.live()
    if isinstance(count, int):
        return [(int(i), int(j)) for i, j in np.asarray(pairs)]
    return [(i, j) for i in range(tile.tiles.nq) for j in range(tile.tiles.nk)]


def forward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    score: Score,
    *,
    q_chunk: int,
    k_chunk: int,
) -> Partial:
    """Liu & Abbeel 2023, Algorithm 1, lines 4 to 9, one dispatch at a time."""
    tile = Tile(score, q, k, q_chunk, k_chunk)
    qs = query_blocks(q, tile.K, tile.q_chunk)
    ks, vs = key_blocks(k, tile.k_chunk), key_blocks(v, tile.k_chunk)
    rows = [Running.start(block) for block in qs]
    for i, j in _pairs(tile):
        rows[i] = tile.forward(rows[i], qs[i], ks[j], vs[j], i, j)
    out, lse = zip(*(row.finish() for row in rows), strict=True)
    out = from_query_blocks(jnp.stack(out).astype(q.dtype), tile.T)
    return Partial(out, from_query_blocks(jnp.stack(lse), tile.T))


def backward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    out: Float[Array, "B T N H"],
    lse: Float[Array, "B T N"],
    dout: Float[Array, "B T N H"],
    score: Score,
    *,
    q_chunk: int,
    k_chunk: int,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """Gradients through these keys, tiles recomputed from the global `out` and `lse`."""
    tile = Tile(score, q, k, q_chunk, k_chunk)
    qs, ks, vs, lses, douts, deltas = tile.backward_blocks(q, k, v, out, lse, dout)
    dqs = [jnp.zeros(block.shape, jnp.float32) for block in qs]
    dks = [jnp.zeros(block.shape, jnp.float32) for block in ks]
    dvs = [jnp.zeros(block.shape, jnp.float32) for block in vs]
    for i, j in _pairs(tile):
        dq, dk, dv = tile.backward(qs[i], ks[j], vs[j], lses[i], douts[i], deltas[i], i, j)
        dqs[i], dks[j], dvs[j] = dqs[i] + dq, dks[j] + dk, dvs[j] + dv
    return (
        from_query_blocks(jnp.stack(dqs).astype(q.dtype), tile.T),
        from_key_blocks(jnp.stack(dks).astype(k.dtype), tile.S),
        from_key_blocks(jnp.stack(dvs).astype(v.dtype), tile.S),
    )
