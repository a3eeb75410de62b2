"""What a device's queries see of a block of keys, where that is known while tracing and simple: a
rectangle without a mask, or causal in its own order. A kernel then needs no positions, and the
fastest can be taken.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bptjax.ops.attention.tile import Score
from bptjax.ops.mask import Mask
from bptjax.ops.softmax import Partial, merge


class Part(NamedTuple):
    """Of a block, these queries see these keys (start and end): all of them, or causally."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool


@dataclass(frozen=True)
class Plan:
    """`seen[i][j]`: what device i's queries see of device j's keys; None where nothing."""

    seen: tuple[tuple[Part | None, ...], ...]

    def run(
        self,
        f: Callable[..., Any],
        blocks: Sequence[int],
        device: Array,
        sums: Any,
        *operands: Any,
        general: tuple[Array, Callable[..., Any]] | None = None,
    ) -> Any:
        """`f(part, sums, *operands)` on the device of this number, device i having block
        `blocks[i]`; `sums` where nothing is seen of it. `general` is used instead where its first
        is true.
        """
        each = [self.seen[i][j] for i, j in enumerate(blocks)]
        parts = list(dict.fromkeys(each))

        def branch(part):
            return lambda sums, *rest: sums if part is None else f(part, sums, *rest)

        branches = [branch(part) for part in parts]
        which = jnp.asarray([parts.index(part) for part in each])[device]
        if general is not None:
            needed, instead = general
            alive = jnp.asarray([part is not None for part in each])[device]
            which = jnp.where(needed & alive, len(branches), which)
            branches.append(instead)
        if len(branches) == 1:
            return branches[0](sums, *operands)
        return jax.lax.switch(which, branches, sums, *operands)


def make_plan(score: Score, places: tuple[Any, Any], devices: int) -> Plan | None:
    """The plan for queries and keys at these positions `[T]` and `[S]`, device i having the i-th of
    `devices` equal pieces of each; None where some block has more than one part, or where what is
    computed of a pair depends on where it stands. Documents are left to the caller.
    """
    mask = score.mask
    special = (mask.window, mask.windows, mask.global_tokens, mask.block_mask)
    if any(x is not None for x in (*special, score.alibi)) or score.dropout:
        return None
    if not all(isinstance(x, np.ndarray) and x.ndim == 1 for x in places):
        return None
    queries, keys = (x.reshape(devices, -1) for x in places)
    if not mask.causal:
        everything = Part((0, queries.shape[1]), (0, keys.shape[1]), False)
        return Plan(((everything,) * devices,) * devices)
    try:
        return Plan(tuple(tuple(_part(p, s) for s in keys) for p in queries))
    except ValueError:
        return None


def _part(p: np.ndarray, s: np.ndarray) -> Part | None:
    """Raises ValueError where there is more than one."""
    half = [(0, len(x) // 2, len(x)) for x in (p, s)]
    ends = [list(zip(h[:-1], h[1:], strict=True)) for h in half]
    ends = [[(a, b) for a, b in each if a < b] for each in ends]
    live = np.array([[s[c:d].min() <= p[a:b].max() for c, d in ends[1]] for a, b in ends[0]])
    if not live.any():
        return None
    rows, columns = np.flatnonzero(live.any(1)), np.flatnonzero(live.any(0))
    a, b = ends[0][rows[0]][0], ends[0][rows[-1]][1]
    c, d = ends[1][columns[0]][0], ends[1][columns[-1]][1]
    if s[c:d].max() <= p[a:b].min():
        return Part((a, b), (c, d), False)
    if (a, b) == (c, d) and np.array_equal(p[a:b], s[c:d]) and (np.diff(p[a:b]) > 0).all():
        return Part((a, b), (c, d), True)
    raise ValueError("more than one rectangle")


def several_documents(score: Score) -> Array | None:
    """Whether not all of these queries and keys are of one document; None where there are none."""
    mask = score.mask
    if mask.segments is None:
        return None
    first = mask.segments[:, :1]
    k_segments = mask.segments if mask.k_segments is None else mask.k_segments
    same = (mask.segments == first).all() & (k_segments == first).all()
    return ~(same & (first != 0).all())


def add_forward(
    kernel: Any, part: Part, whole: Partial, q: Array, k: Array, v: Array, score: Score, **chunks
) -> Partial:
    """`whole` with attention to this part merged into it."""
    rows, keys = slice(*part.queries), slice(*part.keys)
    score = replace(score, mask=Mask(causal=part.causal))
    new = kernel.forward(q[:, rows], k[:, keys], v[:, keys], score, **chunks)
    merged = merge(Partial(*(x[:, rows] for x in whole)), new)
    return Partial(*(x.at[:, rows].set(y) for x, y in zip(whole, merged, strict=True)))


def add_backward(
    kernel: Any,
    part: Part,
    sums: tuple[Array, Array, Array],
    of_queries: tuple[Array, ...],
    k: Array,
    v: Array,
    score: Score,
    **chunks,
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) in float32 with this part's added; `of_queries` are q, out, lse, dout."""
    rows, keys = slice(*part.queries), slice(*part.keys)
    score = replace(score, mask=Mask(causal=part.causal))
    q, out, lse, dout = (x[:, rows] for x in of_queries)
    new = kernel.backward(q, k[:, keys], v[:, keys], out, lse, dout, score, **chunks)
    dq, dk, dv = (
        s.at[:, at].add(x.astype(jnp.float32))
        for s, x, at in zip(sums, new, (rows, keys, keys), strict=True)
    )
    return dq, dk, dv
