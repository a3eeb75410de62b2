"""Ring attention: keys and values go round the devices, each of which attends to them a block at a
time and merges the parts. Liu, Zaharia & Abbeel 2023, arXiv 2310.01889.

No device ever holds more than two blocks of keys. Blocks that the mask kills are passed on unread:
where causal attention would leave half of the devices idle, `zigzag` order gives all the same.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bptjax.ops.attention.tile import Score
from bptjax.ops.mask import Tiles
from bptjax.ops.softmax import Partial, merge
from bptjax.parallel.plan import Plan, add_backward, add_forward, make_plan, several_documents

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
    n = jax.lax.axis_size(axis) // stride
    plan = make_plan(score, places, n)
    whole = Partial(jnp.zeros_like(q, jnp.float32), jnp.full_like(q[..., 0], -jnp.inf, jnp.float32))
    block = k, v, {name: getattr(score.mask, name) for name in KEYS}
    for step in range(n):
        # On its way while this block is computed.
        onward = _pass_on(block, axis, stride) if step + 1 < n else block
        here = replace(score, mask=replace(score.mask, **block[2]))

        def take(whole, k, v, here=here):
            return merge(whole, kernel.forward(q, k, v, here, **chunks))

        def add(part, whole, k, v):
            return add_forward(kernel, part, whole, q, k, v, score, **chunks)

        device = jax.lax.axis_index(axis) // stride
        whole = _step(plan, step, device, here, add, take, whole, q, *block[:2])
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
    n = jax.lax.axis_size(axis) // stride
    plan = make_plan(score, places, n)
    dq, dk, dv = (jnp.zeros_like(x, jnp.float32) for x in (q, k, v))
    block = k, v, {name: getattr(score.mask, name) for name in KEYS}
    for step in range(n):
        onward = _pass_on(block, axis, stride) if step + 1 < n else block
        here = replace(score, mask=replace(score.mask, **block[2]))

        def take(sums, k, v, here=here):
            new = kernel.backward(q, k, v, out, lse, dout, here, **chunks)
            return tuple(s + x.astype(jnp.float32) for s, x in zip(sums, new, strict=True))

        def add(part, sums, k, v):
            return add_backward(kernel, part, sums, (q, out, lse, dout), k, v, score, **chunks)

        device = jax.lax.axis_index(axis) // stride
        dq, dk, dv = _step(plan, step, device, here, add, take, (dq, dk, dv), q, *block[:2])
        dk, dv = _pass_on((dk, dv), axis, stride)
        block = onward
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _step(
    plan: Plan | None,
    step: int,
    device: Array,
    here: Score,
    add: Callable,
    take: Callable,
    sums: Any,
    q: Array,
    k: Array,
    v: Array,
) -> Any:
    """`sums` with the block that has come in this step: by the part of it that is seen (`add`), or
    by its mask (`take`)."""
    if plan is None:
        return jax.lax.cond(_live(here, q, k), take, lambda sums, k, v: sums, sums, k, v)
    n, several = len(plan.seen), several_documents(here)
    blocks = [(i - step) % n for i in range(n)]
    general = None if several is None else (several, take)
    return plan.run(add, blocks, device, sums, k, v, general=general)


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
