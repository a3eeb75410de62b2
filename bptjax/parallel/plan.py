"""What a device's queries see of the other devices' keys, where that is known while tracing and the
same amount everywhere: pieces seen whole. A kernel then needs no mask and no positions, so that the
fastest can be taken, and no device waits for another.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bptjax.ops.attention.tile import Score
from bptjax.ops.mask import Mask
from bptjax.ops.softmax import Partial, merge


@dataclass(frozen=True)
class Plan:
    """Each device's queries and keys are cut into `pieces` equal ones.

    Attributes:
      causal: whether a device's queries see its own keys causally, or all of them.
      seen: int `[devices, devices, m, 2]`: of device i's queries the piece `seen[i, j, :, 0]` sees
        the whole piece `seen[i, j, :, 1]` of device j's keys, and no others do; j ≠ i.
    """

    pieces: int
    causal: bool
    seen: np.ndarray

    def add_up(
        self, add: Callable[[Array, Any], Any], sums: Any, device: Array, other: Array
    ) -> Any:
        """`sums` with what `device` sees of `other`'s keys added, by `add` of each (piece of
        queries, piece of keys) and the sums before it. A loop: side by side, what the pieces give
        would all be kept at once."""
        pairs = jnp.asarray(self.seen)[device, other]
        return jax.lax.fori_loop(0, len(pairs), lambda i, sums: add(pairs[i], sums), sums)


def make_plan(score: Score, places: tuple[Any, Any], devices: int) -> Plan | None:
    """The plan for queries and keys at these positions `[T]` and `[S]`, device i having the i-th of
    `devices` equal parts of each; None where devices see unequal amounts, or pieces in part, or
    where what is computed of a pair depends on where it stands. Documents are left to the caller.
    """
    mask = score.mask
    special = (mask.window, mask.windows, mask.global_tokens, mask.block_mask)
    if any(x is not None for x in (*special, score.alibi)) or score.dropout:
        return None
    if not all(isinstance(x, np.ndarray) and x.ndim == 1 for x in places):
        return None
    if not mask.causal:
        return Plan(1, False, np.zeros((devices, devices, 1, 2), np.int32))
    p, s = places
    if len(p) % (2 * devices) or not np.array_equal(p, s):
        return None
    cut = p.reshape(devices, 2, -1)
    if (np.diff(cut.reshape(devices, -1)) <= 0).any():
        return None
    queries, keys = cut[:, None, :, None], cut[None, :, None, :]
    live = keys.min(-1) <= queries.max(-1)
    whole = keys.max(-1) <= queries.min(-1)
    others = ~np.eye(devices, dtype=bool)
    amount = live.sum((2, 3))[others]
    if (live != whole)[others].any() or (amount != amount[:1]).any():
        return None
    seen = np.zeros((devices, devices, amount.max(initial=0), 2), np.int32)
    for i, j in np.argwhere(others):
        seen[i, j] = np.argwhere(live[i, j])
    return Plan(2, True, seen)


def several_documents(score: Score) -> Array | None:
    """Whether not all of these queries and keys are of one document; None where there are none."""
    mask = score.mask
    if mask.segments is None:
        return None
    first = mask.segments[:, :1]
    k_segments = mask.segments if mask.k_segments is None else mask.k_segments
    same = (mask.segments == first).all() & (k_segments == first).all()
    return ~(same & (first != 0).all())


def nothing_yet(q: Array) -> Partial:
    """Attention to no key, in float32."""
    lse = jnp.full_like(q[..., 0], -jnp.inf, jnp.float32)
    return Partial(jnp.zeros_like(q, jnp.float32), lse)


def own_forward(
    kernel: Any, plan: Plan, q: Array, k: Array, v: Array, score: Score, **chunks
) -> Partial:
    """Attention to the device's own keys; float32."""
    score = replace(score, mask=Mask(causal=plan.causal))
    out, lse = kernel.forward(q, k, v, score, **chunks)
    return Partial(out.astype(jnp.float32), lse)


def own_backward(
    kernel: Any, plan: Plan, of_queries: tuple, k: Array, v: Array, score: Score, **chunks
) -> tuple[Array, Array, Array]:
    """Its (dq, dk, dv) in float32; `of_queries` are q, out, lse, dout."""
    score = replace(score, mask=Mask(causal=plan.causal))
    q, *rest = of_queries
    dq, dk, dv = kernel.backward(q, k, v, *rest, score, **chunks)
    return dq.astype(jnp.float32), dk.astype(jnp.float32), dv.astype(jnp.float32)


def add_forward(
    kernel: Any,
    plan: Plan,
    pair: Array,
    whole: Partial,
    q: Array,
    k: Array,
    v: Array,
    score: Score,
    **chunks,
) -> Partial:
    """`whole` with attention of a piece of queries to a piece of keys merged into it."""
    rows, keys = _place(pair[0], q, plan), _place(pair[1], k, plan)
    operands = _take(q, rows), _take(k, keys), _take(v, keys)
    new = kernel.forward(*operands, replace(score, mask=Mask()), **chunks)
    merged = merge(Partial(*(_take(x, rows) for x in whole)), new)
    return Partial(*(_put(x, y, rows) for x, y in zip(whole, merged, strict=True)))


def add_backward(
    kernel: Any,
    plan: Plan,
    pair: Array,
    sums: tuple[Array, Array, Array],
    of_queries: tuple[Array, ...],
    k: Array,
    v: Array,
    score: Score,
    **chunks,
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) in float32 with those of a piece of queries and a piece of keys added;
    `of_queries` are q, out, lse, dout."""
    rows, keys = _place(pair[0], of_queries[0], plan), _place(pair[1], k, plan)
    q, *rest = (_take(x, rows) for x in of_queries)
    score = replace(score, mask=Mask())
    new = kernel.backward(q, _take(k, keys), _take(v, keys), *rest, score, **chunks)
    dq, dk, dv = (
        _put(s, _take(s, at) + x.astype(jnp.float32), at)
        for s, x, at in zip(sums, new, (rows, keys, keys), strict=True)
    )
    return dq, dk, dv


def _place(piece: Array, x: Array, plan: Plan) -> tuple[Array, int]:
    """Where it starts and how many tokens it has."""
    size = x.shape[1] // plan.pieces
    return piece * size, size


def _take(x: Array, place: tuple[Array, int]) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, *place, axis=1)


def _put(x: Array, piece: Array, place: tuple[Array, int]) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, piece, place[0], axis=1)
