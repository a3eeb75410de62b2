"""Ring attention: keys and values go round the devices, each of which attends to them a block at a
time and merges the parts. Liu, Zaharia & Abbeel 2023, arXiv 2310.01889.

No device ever holds more than two blocks of keys. Blocks that the mask kills are passed on unread:
where causal attention would leave half of the devices idle, `zigzag` order gives all the same.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bptjax.ops.attention.tile import Score
from bptjax.ops.mask import Tiles
from bptjax.ops.softmax import Partial, merge

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
    kernel: Any, q: Array, k: Array, v: Array, score: Score, axis: str, stride: int = 1, **chunks
) -> Partial:
    """Attention of this device's queries to the keys of all devices along `axis`, or of every
    `stride`-th."""
    whole = Partial(jnp.zeros_like(q, jnp.float32), jnp.full_like(q[..., 0], -jnp.inf, jnp.float32))
    block = k, v, {name: getattr(score.mask, name) for name in KEYS}
    devices = jax.lax.axis_size(axis) // stride
    for step in range(devices):
        # On its way while this block is computed.
        onward = _pass_on(block, axis, stride) if step + 1 < devices else block
        here = replace(score, mask=replace(score.mask, **block[2]))

        def take(whole, k, v, here=here):
            return merge(whole, kernel.forward(q, k, v, here, **chunks))

        whole = jax.lax.cond(
            _live(here, q, k), take, lambda whole, k, v: whole, whole, block[0], block[1]
        )
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
    stride: int = 1,
    **chunks,
) -> tuple[Array, Array, Array]:
    """Gradients of this device's queries, keys and values; those of keys and values go round with
    them, and come home."""
    dq, dk, dv = (jnp.zeros_like(x, jnp.float32) for x in (q, k, v))
    block = k, v, {name: getattr(score.mask, name) for name in KEYS}
    devices = jax.lax.axis_size(axis) // stride
    for step in range(devices):
        onward = _pass_on(block, axis, stride) if step + 1 < devices else block
        here = replace(score, mask=replace(score.mask, **block[2]))

        def add(sums, k, v, here=here):
            new = kernel.backward(q, k, v, out, lse, dout, here, **chunks)
            return tuple(s + x.astype(jnp.float32) for s, x in zip(sums, new, strict=True))

        dq, dk, dv = jax.lax.cond(
            _live(here, q, k), add, lambda sums, k, v: sums, (dq, dk, dv), block[0], block[1]
        )
        dk, dv = _pass_on((dk, dv), axis, stride)
        block = onward
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


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
