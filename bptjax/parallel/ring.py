"""Ring attention: keys and values go round the devices, each of which attends to them a block at a
time and merges the parts. Liu, Zaharia & Abbeel 2023, arXiv 2310.01889.

No device ever holds more than two blocks of keys. Blocks that the mask kills are passed on unread:
where causal attention would leave half of the devices idle, `zigzag` order gives all the same.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bptjax.ops.attention.tile import Score
from bptjax.ops.mask import Tiles
from bptjax.ops.softmax import Partial, merge
from bptjax.parallel.plan import (
    Plan,
    add_backward,
    add_forward,
    make_plan,
    nothing_yet,
    own_backward,
    own_forward,
    several_documents,
)

KEYS = ("k_segments", "k_positions", "k_global_tokens")


def unsupported(heads: int, devices: int) -> str | None:
    """Why rows of so many query heads cannot be cut so; None where they can."""
    return None


def zigzag(T: int, devices: int) -> np.ndarray:
    """The order in which T tokens are cut: device i of n has the i-th and the (2n - 1 - i)-th of 2n
    pieces, so that all see as many keys. int `[T]`, T a multiple of 2 · devices.
    """
    pieces = np.arange(T).reshape(2 * devices, -1)
    pairs = [(i, 2 * devices - 1 - i) for i in range(devices)]
    return pieces[np.asarray(pairs).reshape(-1)].reshape(-1)


def forward(
    kernel: Any,
    q: Array,
    k: Array,
    v: Array,
    score: Score,
    axis: str,
    places: tuple[Any, Any],
    stride: int = 1,
    **chunks,
) -> Partial:
    """Attention of this device's queries to the keys of all devices along `axis`, or of every
    `stride`-th; `places` are the positions of the whole rows' queries and keys."""
    n, device = jax.lax.axis_size(axis) // stride, jax.lax.axis_index(axis) // stride
    plan = make_plan(score, places, n)
    block, whole = (k, v, {name: getattr(score.mask, name) for name in KEYS}), nothing_yet(q)
    for step in range(n):
        # On its way while this block is computed.
        onward = _pass_on(block, axis, stride) if step + 1 < n else block
        here = replace(score, mask=replace(score.mask, **block[2]))

        def by_mask(whole, k, v, here=here):
            return merge(whole, kernel.forward(q, k, v, here, **chunks))

        def by_plan(plan, whole, k, v, step=step):
            if step == 0:
                return own_forward(kernel, plan, q, k, v, score, **chunks)

            def add(pair, whole):
                return add_forward(kernel, plan, pair, whole, q, k, v, score, **chunks)

            return plan.add_up(add, whole, device, (device - step) % n)

        whole = _step(plan, by_plan, by_mask, here, whole, q, *block[:2])
        block = onward
    return Partial(whole.out.astype(q.dtype), whole.lse)


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
    stride: int = 1,
    **chunks,
) -> tuple[Array, Array, Array]:
    """Gradients of this device's queries, keys and values; those of keys and values go round with
    them, and come home."""
    n, device = jax.lax.axis_size(axis) // stride, jax.lax.axis_index(axis) // stride
    plan, of_queries = make_plan(score, places, n), (q, out, lse, dout)
    dq, dk, dv = (jnp.zeros_like(x, jnp.float32) for x in (q, k, v))
    block = k, v, {name: getattr(score.mask, name) for name in KEYS}
    for step in range(n):
        onward = _pass_on(block, axis, stride) if step + 1 < n else block
        here = replace(score, mask=replace(score.mask, **block[2]))

        def by_mask(sums, k, v, here=here):
            new = kernel.backward(q, k, v, out, lse, dout, here, **chunks)
            return tuple(s + x.astype(jnp.float32) for s, x in zip(sums, new, strict=True))

        def by_plan(plan, sums, k, v, step=step):
            if step == 0:
                return own_backward(kernel, plan, of_queries, k, v, score, **chunks)

            def add(pair, sums):
                return add_backward(kernel, plan, pair, sums, of_queries, k, v, score, **chunks)

            return plan.add_up(add, sums, device, (device - step) % n)

        # Sums on their way here are waited for when this block's are ready to be added.
        fresh = dq, jnp.zeros_like(dk), jnp.zeros_like(dv)
        dq, *new = _step(plan, by_plan, by_mask, here, fresh, q, *block[:2])
        dk, dv = _pass_on((dk + new[0], dv + new[1]), axis, stride)
        block = onward
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _step(
    plan: Plan | None,
    by_plan: Callable,
    by_mask: Callable,
    here: Score,
    sums: Any,
    q: Array,
    k: Array,
    v: Array,
) -> Any:
    """`sums` with the block that has come in this step: by the mask where there is no plan, or as
    it runs there is more than one document."""
    if plan is None:
        return jax.lax.cond(_live(here, q, k), by_mask, lambda sums, k, v: sums, sums, k, v)
    several = several_documents(here)
    if several is None:
        return by_plan(plan, sums, k, v)
    return jax.lax.cond(several, by_mask, partial(by_plan, plan), sums, k, v)


def _pass_on(block: Any, axis: str, stride: int) -> Any:
    """To the next device of the ring."""
    n = jax.lax.axis_size(axis)
    return jax.lax.ppermute(block, axis, [(i, (i + stride) % n) for i in range(n)])


def _live(score: Score, q: Array, k: Array) -> Array:
    """Whether the mask may let some query of this device see some key of the block."""
    live = False
    for mask in score.mask.each_window():
        # In few tiles: a zigzag block has two ends.
        count = Tiles(mask, q.shape[1], k.shape[1], -(-q.shape[1] // 4), -(-k.shape[1] // 4))
        live |= count.live()[1] > 0
    return jnp.asarray(live)
