"""Schedules of attention between shards in full tiles only, for masks whose full tiles are static
and equally many on every device. A kernel then needs neither mask nor positions, so `auto` can
choose the fastest kernel, and no device waits for another.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from bptjax.ops.attention.contract import QKV, AttentionSpec, AttentionState, Kernel
from bptjax.ops.mask import Mask
from bptjax.ops.softmax import merge_states


class Sums(NamedTuple):
    """Float32 results of a pass over key blocks, for the queries and for the keys: an
    AttentionState and () in the forward pass, dq and (dk, dv) in the backward pass."""

    queries: Any
    keys: Any


Keys = Float[Array, "B S K H"]
# Adds attention from some queries (a pytree of `[B, T, ...]`) to some keys and values to the sums,
# or starts new sums if they are None.
Attend = Callable[[Any, Sums | None, Keys, Keys, AttentionSpec], Sums]


def forward_pass(kernel: Kernel, x: QKV) -> tuple[Attend, Float[Array, "B T N H"]]:
    """Returns the function that attends in the forward pass, and the queries."""

    def attend(q, sums, k, v, spec):
        state = kernel.forward(QKV(q, k, v), spec)
        if sums is None:
            return Sums(state._replace(out=state.out.astype(jnp.float32)), ())
        return Sums(merge_states(sums.queries, state), ())

    return attend, x.q


def backward_pass(
    kernel: Kernel, x: QKV, state: AttentionState, dout: Float[Array, "B T N H"]
) -> tuple[Attend, tuple[Float[Array, "B T N H"], AttentionState, Float[Array, "B T N H"]]]:
    """Returns the function that accumulates gradients, and queries with state and cotangent."""

    def attend(queries, sums, k, v, spec):
        q, state, dout = queries
        new = kernel.backward(QKV(q, k, v), state, dout, spec)
        new = jax.tree.map(lambda y: y.astype(jnp.float32), Sums(new.q, (new.k, new.v)))
        return new if sums is None else jax.tree.map(jnp.add, sums, new)

    return attend, (x.q, state, dout)


@dataclass(frozen=True)
class FullTileSchedule:
    """A static schedule of the tiles between shards.

    Attributes:
      pieces: number of equal pieces of each shard's queries and keys.
      causal: whether a shard's queries attend to its own keys causally, or to all of them.
      pairs: piece `pairs[i, j, :, 0]` of shard i's queries attends to all of piece
        `pairs[i, j, :, 1]` of shard j's keys, j ≠ i. No other pieces attend.
    """

    pieces: int
    causal: bool
    pairs: Int[np.ndarray, "shards shards m 2"]

    def attend_local(
        self, attend: Attend, queries: Any, k: Keys, v: Keys, spec: AttentionSpec
    ) -> Sums:
        """Attends from a shard's queries to its own keys."""
        return attend(queries, None, k, v, replace(spec, mask=Mask(causal=self.causal)))

    def attend_other(
        self,
        attend: Attend,
        queries: Any,
        sums: Sums,
        k: Keys,
        v: Keys,
        spec: AttentionSpec,
        shard: Int[Array, ""],
        other: Int[Array, ""],
    ) -> Sums:
        """Adds attention from `shard`'s queries to `other`'s keys. Loops over the full tiles, so
        that only one tile's results exist at a time."""
        pairs = jnp.asarray(self.pairs)[shard, other]
        spec, take = replace(spec, mask=Mask()), partial(take_piece, pieces=self.pieces)

        def tile(i, sums):
            of_queries, of_keys = pairs[i, 0], pairs[i, 1]
            part = Sums(take(sums.queries, of_queries), take(sums.keys, of_keys))
            k_, v_ = take((k, v), of_keys)
            part = attend(take(queries, of_queries), part, k_, v_, spec)
            return Sums(
                put_piece(sums.queries, part.queries, of_queries),
                put_piece(sums.keys, part.keys, of_keys),
            )

        return jax.lax.fori_loop(0, len(pairs), tile, sums)


def take_piece(tree: Any, piece: Int[Array, ""], pieces: int) -> Any:
    """Returns one of the equal pieces of each array `[B, T, ...]`."""

    def take(x):
        size = x.shape[1] // pieces
        return jax.lax.dynamic_slice_in_dim(x, piece * size, size, axis=1)

    return jax.tree.map(take, tree)


def put_piece(tree: Any, part: Any, piece: Int[Array, ""]) -> Any:
    """Replaces one of the equal pieces of each array `[B, T, ...]`."""

    def put(x, y):
        return jax.lax.dynamic_update_slice_in_dim(x, y, piece * y.shape[1], axis=1)

    return jax.tree.map(put, tree, part)


def make_schedule(
    spec: AttentionSpec, positions: tuple[Any, Any], shards: int
) -> FullTileSchedule | None:
    """Returns the schedule for queries and keys at these positions `[T]` and `[S]`, divided into
    `shards` equal parts. Returns None if shards have unequal numbers of tiles, a tile is partial,
    or attention weights depend on positions. Ignores documents and trees, which the caller must
    check.
    """
    mask = spec.mask
    special = mask.window, mask.global_tokens, mask.block_mask, spec.alibi, spec.landmark_block
    if any(x is not None for x in special) or spec.dropout:
        return None
    if not all(isinstance(x, np.ndarray) and x.ndim == 1 for x in positions):
        return None
    if not mask.causal:
        return FullTileSchedule(1, False, np.zeros((shards, shards, 1, 2), np.int32))
    p, s = positions
    if len(p) % (2 * shards) or not np.array_equal(p, s):
        return None
    pieces = p.reshape(shards, 2, -1)
    if (np.diff(pieces.reshape(shards, -1)) <= 0).any():
        return None
    queries, keys = pieces[:, None, :, None], pieces[None, :, None, :]
    nonempty = keys.min(-1) <= queries.max(-1)
    full = keys.max(-1) <= queries.min(-1)
    others = ~np.eye(shards, dtype=bool)
    tiles = nonempty.sum((2, 3))[others]
    if (nonempty != full)[others].any() or (tiles != tiles[:1]).any():
        return None
    pairs = np.zeros((shards, shards, tiles.max(initial=0), 2), np.int32)
    for i, j in np.argwhere(others):
        pairs[i, j] = np.argwhere(full[i, j])
    return FullTileSchedule(2, True, pairs)


def hides_keys(spec: AttentionSpec) -> Bool[Array, ""] | None:
    """Returns whether documents, or the branches of a tree, hide some of the keys; None if the mask
    has neither."""
    mask = spec.mask
    if mask.ends is not None:
        assert mask.positions is not None  # The mask is resolved.
        return jnp.max(mask.positions) >= jnp.min(mask.ends)
    if mask.segments is None:
        return None
    first = mask.segments[:, :1]
    k_segments = mask.segments if mask.k_segments is None else mask.k_segments
    same = (mask.segments == first).all() & (k_segments == first).all()
    return ~(same & (first != 0).all())
