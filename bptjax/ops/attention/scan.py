"""Attention as one `lax.scan` over the live tiles, row by row: the Blockwise Parallel Transformer's
attention, on any device.

O(T) memory. Tiles that the mask kills are not visited: where the mask is known while tracing the
scan has as many steps as there are live tiles; where it is not (segments, positions of a shard) the
number of steps is counted on the device.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import dynamic_index_in_dim, dynamic_update_index_in_dim
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


def _live(tile: Tile, q: Array) -> tuple[Array, Array | int]:
    """Block pairs and how many of them to visit. There is at least one pair, which a loop of no
    steps can be traced with.

    Tied to the queries: where a gradient is taken, JAX would else compute what follows from the
    pairs alone, the mask of every tile, beforehand and keep it: [T, S] memory.
    """
    pairs, count = tile.tiles.live()
    pairs = jnp.asarray(pairs) if len(pairs) else jnp.zeros((1, 2), jnp.int32)
    return jax.lax.optimization_barrier((pairs, q))[0], count


def _at(blocks: Array, i: Array) -> Array:
    return dynamic_index_in_dim(blocks, i, 0, keepdims=False)


def _set(blocks: Array, x: Array, i: Array) -> Array:
    return dynamic_update_index_in_dim(blocks, x.astype(blocks.dtype), i, 0)


def forward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    score: Score,
    *,
    q_chunk: int,
    k_chunk: int,
    make: Callable[..., Tile] = Tile,
) -> Partial:
    """Liu & Abbeel 2023, arXiv 2305.19370, Algorithm 1, lines 4 to 9. `make` gives the tiles'
    arithmetic."""
    tile = make(score, q, k, q_chunk, k_chunk)
    qs = query_blocks(q, tile.K, tile.q_chunk)
    ks, vs = key_blocks(k, tile.k_chunk), key_blocks(v, tile.k_chunk)
    pairs, count = _live(tile, q)

    def visit(n, carry):
        out, lse, running = carry
        i, j = pairs[n, 0], pairs[n, 1]
        # A new row starts from nothing; the row is written after each of its tiles, the last write
        # being the whole.
        new_row = (n == 0) | (i != pairs[jnp.maximum(n - 1, 0), 0])
        running = jax.tree.map(lambda fresh, x: jnp.where(new_row, fresh, x), start, running)
        running = tile.forward(running, _at(qs, i), _at(ks, j), _at(vs, j), i, j)
        row_out, row_lse = running.finish()
        return _set(out, row_out, i), _set(lse, row_lse, i), running

    start = Running.start(qs[0])
    out = jnp.zeros_like(qs)
    lse = jnp.full_like(qs[..., 0], -jnp.inf, jnp.float32)
    out, lse, _ = jax.lax.fori_loop(0, count, visit, (out, lse, start))
    return Partial(from_query_blocks(out, tile.T), from_query_blocks(lse, tile.T))


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
    make: Callable[..., Tile] = Tile,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """Gradients through these keys in one pass over the live tiles, each recomputed from the global
    `out` and `lse`; float32 accumulators."""
    tile = make(score, q, k, q_chunk, k_chunk)
    qs, ks, vs, lses, douts, deltas = tile.backward_blocks(q, k, v, out, lse, dout)
    pairs, count = _live(tile, q)

    def visit(n, carry):
        dq, dk, dv = carry
        i, j = pairs[n, 0], pairs[n, 1]
        row_dq, column_dk, column_dv = tile.backward(
            _at(qs, i), _at(ks, j), _at(vs, j), _at(lses, i), _at(douts, i), _at(deltas, i), i, j
        )
        return (
            _set(dq, _at(dq, i) + row_dq, i),
            _set(dk, _at(dk, j) + column_dk, j),
            _set(dv, _at(dv, j) + column_dv, j),
        )

    zeros = tuple(jnp.zeros_like(x, jnp.float32) for x in (qs, ks, vs))
    dq, dk, dv = jax.lax.fori_loop(0, count, visit, zeros)
    return (
        from_query_blocks(dq.astype(q.dtype), tile.T),
        from_key_blocks(dk.astype(k.dtype), tile.S),
        from_key_blocks(dv.astype(v.dtype), tile.S),
    )
