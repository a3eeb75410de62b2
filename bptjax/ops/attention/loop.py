"""Blockwise attention as Python loops. Run eagerly, it is this project's slow baseline; traced, it
is `scan` unrolled."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from bptjax.ops.attention.contract import QKV, AttentionSpec, AttentionState
from bptjax.ops.attention.tile import Tile, from_key_blocks, from_query_blocks
from bptjax.ops.softmax import OnlineSoftmax


def unsupported(x: QKV, spec: AttentionSpec) -> str | None:
    """Returns None: the loops honor every argument."""
    return None


def forward(x: QKV, spec: AttentionSpec) -> AttentionState:
    """Runs lines 4 to 9 of Algorithm 1 of Liu & Abbeel 2023, one dispatch at a time."""
    tile = Tile(x, spec)
    qs, ks, vs = tile.forward_blocks(x)
    softmax = [OnlineSoftmax.start(block) for block in qs]
    for i, j in _pairs(tile):
        softmax[i] = tile.forward(softmax[i], qs[i], ks[j], vs[j], i, j)
    out, lse = zip(*(block.normalize() for block in softmax), strict=True)
    out = from_query_blocks(jnp.stack(out).astype(x.q.dtype), tile.T)
    return AttentionState(out, from_query_blocks(jnp.stack(lse), tile.T))


def backward(
    x: QKV, state: AttentionState, dout: Float[Array, "B T N H"], spec: AttentionSpec
) -> QKV:
    """Recomputes each tile from the global `state`."""
    tile = Tile(x, spec)
    qs, ks, vs, lses, douts, deltas = tile.backward_blocks(x, state, dout)
    dqs, dks, dvs = (
        [jnp.zeros(block.shape, jnp.float32) for block in blocks] for blocks in (qs, ks, vs)
    )
    for i, j in _pairs(tile):
        dq, dk, dv = tile.backward(qs[i], ks[j], vs[j], lses[i], douts[i], deltas[i], i, j)
        dqs[i], dks[j], dvs[j] = dqs[i] + dq, dks[j] + dk, dvs[j] + dv
    return QKV(
        from_query_blocks(jnp.stack(dqs).astype(x.q.dtype), tile.T),
        from_key_blocks(jnp.stack(dks).astype(x.k.dtype), tile.S),
        from_key_blocks(jnp.stack(dvs).astype(x.v.dtype), tile.S),
    )


def _pairs(tile: Tile) -> list[tuple[int, int]]:
    """Returns the block pairs to visit, by query block, including pairs a traced mask excludes."""
    pairs, count = tile.tiles.nonempty()
    if isinstance(count, int):
        return [(int(i), int(j)) for i, j in np.asarray(pairs)]
    return [(i, j) for i in range(tile.tiles.nq) for j in range(tile.tiles.nk)]
