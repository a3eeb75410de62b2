"""Blockwise attention as one device-side loop over the non-empty tiles, one query block after
another: the Blockwise Parallel Transformer's attention, on any device.

O(T) memory. Empty tiles are skipped. With a static mask the loop has one step per non-empty tile (a
`fori_loop` with a constant count is a `lax.scan`); with a traced mask (segments, positions of a
shard) the device counts the steps.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import dynamic_index_in_dim, dynamic_update_index_in_dim
from jaxtyping import Float

from bptjax.ops.attention.contract import QKV, AttentionSpec, AttentionState
from bptjax.ops.attention.landmark_tile import LandmarkTile
from bptjax.ops.attention.tile import Tile, from_key_blocks, from_query_blocks
from bptjax.ops.softmax import OnlineSoftmax


def unsupported(x: QKV, spec: AttentionSpec) -> str | None:
    """Returns None: the scan honors every argument."""
    return None


def forward(x: QKV, spec: AttentionSpec) -> AttentionState:
    """Runs lines 4 to 9 of Algorithm 1 of Liu & Abbeel 2023, arXiv 2305.19370."""
    tile = _make_tile(x, spec)
    qs, ks, vs = tile.forward_blocks(x)
    pairs, count = _nonempty(tile, x.q)

    def visit(n, carry):
        out, lse, softmax = carry
        i, j = pairs[n, 0], pairs[n, 1]
        # Each query block starts an empty softmax. Each tile writes the block's result; only the
        # last write is complete.
        new_block = (n == 0) | (i != pairs[jnp.maximum(n - 1, 0), 0])
        softmax = jax.tree.map(lambda fresh, y: jnp.where(new_block, fresh, y), start, softmax)
        softmax = tile.forward(softmax, _at(qs, i), _at(ks, j), _at(vs, j), i, j)
        block_out, block_lse = softmax.normalize()
        return _set(out, block_out, i), _set(lse, block_lse, i), softmax

    start = OnlineSoftmax.start(qs[0])
    out = jnp.zeros_like(qs)
    lse = jnp.full_like(qs[..., 0], -jnp.inf, jnp.float32)
    out, lse, _ = jax.lax.fori_loop(0, count, visit, (out, lse, start))
    return AttentionState(from_query_blocks(out, tile.T), from_query_blocks(lse, tile.T))


def backward(
    x: QKV,
    state: AttentionState,
    dout: Float[Array, "B T N H"],
    spec: AttentionSpec,
) -> QKV:
    """Recomputes each non-empty tile from the global `state`; accumulates in float32."""
    tile = _make_tile(x, spec)
    qs, ks, vs, lses, douts, deltas = tile.backward_blocks(x, state, dout)
    pairs, count = _nonempty(tile, x.q)

    def visit(n, carry):
        dq, dk, dv = carry
        i, j = pairs[n, 0], pairs[n, 1]
        tile_dq, tile_dk, tile_dv = tile.backward(
            _at(qs, i), _at(ks, j), _at(vs, j), _at(lses, i), _at(douts, i), _at(deltas, i), i, j
        )
        return (
            _set(dq, _at(dq, i) + tile_dq, i),
            _set(dk, _at(dk, j) + tile_dk, j),
            _set(dv, _at(dv, j) + tile_dv, j),
        )

    zeros = tuple(jnp.zeros_like(y, jnp.float32) for y in (qs, ks, vs))
    dq, dk, dv = jax.lax.fori_loop(0, count, visit, zeros)
    return QKV(
        from_query_blocks(dq.astype(x.q.dtype), tile.T),
        from_key_blocks(dk.astype(x.k.dtype), tile.S),
        from_key_blocks(dv.astype(x.v.dtype), tile.S),
    )


def _make_tile(x: QKV, spec: AttentionSpec) -> Tile:
    return (LandmarkTile if spec.landmark_block else Tile)(x, spec)


def _nonempty(tile: Tile, q: Array) -> tuple[Array, Array | int]:
    """Returns block pairs and how many of them to visit. There is at least one pair, because a loop
    cannot be traced over an empty array.

    The barrier ties the pairs to the queries. Without it, JAX would compute everything that depends
    only on the pairs, such as the mask of every tile, before the backward pass and save it: [T, S]
    memory.
    """
    pairs, count = tile.tiles.nonempty()
    pairs = jnp.asarray(pairs) if len(pairs) else jnp.zeros((1, 2), jnp.int32)
    return jax.lax.optimization_barrier((pairs, q))[0], count


def _at(blocks: Array, i: Array) -> Array:
    return dynamic_index_in_dim(blocks, i, 0, keepdims=False)


def _set(blocks: Array, x: Array, i: Array) -> Array:
    return dynamic_update_index_in_dim(blocks, x.astype(blocks.dtype), i, 0)
