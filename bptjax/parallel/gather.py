"""Sequence parallelism by gathering: each device attends with its own queries to all keys.

Context parallelism as in Llama 3 (arXiv 2407.21783, Section 3.3.2): the simplest, and with few key
heads the cheapest for short rows; keys and values of the whole row are on every device.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bptjax.ops.attention.tile import Score
from bptjax.ops.softmax import Partial
from bptjax.parallel.plan import Plan, add_backward, add_forward, make_plan, several_documents


def unsupported(heads: int, devices: int) -> str | None:
    """Why rows of so many query heads cannot be cut so; None where they can."""
    return None


def forward(
    kernel: Any,
    q: Array,
    k: Array,
    v: Array,
    score: Score,
    axis: str,
    places: tuple[Any, Any],
    **chunks,
) -> Partial:
    """Attention of this device's queries to the keys of all devices along `axis`; `places` are the
    positions of the whole rows' queries and keys."""
    plan = make_plan(score, places, jax.lax.axis_size(axis))
    k, v = (_gather(x, axis) for x in (k, v))
    score = _whole_keys(score, axis)

    def by_parts(plan, q, k, v):
        whole = Partial(
            jnp.zeros_like(q, jnp.float32), jnp.full_like(q[..., 0], -jnp.inf, jnp.float32)
        )

        def add(part, whole, k, v):
            return add_forward(kernel, part, whole, q, k, v, score, **chunks)

        for j, (block_k, block_v) in enumerate(_blocks((k, v), axis)):
            blocks = [j] * jax.lax.axis_size(axis)
            device = jax.lax.axis_index(axis)
            whole = plan.run(add, blocks, device, whole, block_k, block_v)
        return Partial(whole.out.astype(q.dtype), whole.lse)

    def by_mask(q, k, v):
        return kernel.forward(q, k, v, score, **chunks)

    return _either(plan, score, by_parts, by_mask, q, k, v)


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
    **chunks,
) -> tuple[Array, Array, Array]:
    """Gradients of this device's queries, keys and values."""
    plan = make_plan(score, places, jax.lax.axis_size(axis))
    k, v = (_gather(x, axis) for x in (k, v))
    score = _whole_keys(score, axis)

    def by_parts(plan, q, k, v, out, lse, dout):
        dq, parts = jnp.zeros_like(q, jnp.float32), []

        def add(part, sums, k, v):
            return add_backward(kernel, part, sums, (q, out, lse, dout), k, v, score, **chunks)

        for j, (block_k, block_v) in enumerate(_blocks((k, v), axis)):
            blocks = [j] * jax.lax.axis_size(axis)
            device = jax.lax.axis_index(axis)
            zeros = (jnp.zeros_like(x, jnp.float32) for x in (block_k, block_v))
            dq, dk, dv = plan.run(add, blocks, device, (dq, *zeros), block_k, block_v)
            parts.append((dk.astype(k.dtype), dv.astype(v.dtype)))
        return dq.astype(q.dtype), *(jnp.concatenate(x, 1) for x in zip(*parts, strict=True))

    def by_mask(q, k, v, out, lse, dout):
        return kernel.backward(q, k, v, out, lse, dout, score, **chunks)

    dq, dk, dv = _either(plan, score, by_parts, by_mask, q, k, v, out, lse, dout)
    dk, dv = (jax.lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True) for x in (dk, dv))
    return dq, dk, dv


def _either(
    plan: Plan | None, score: Score, by_parts: Callable, by_mask: Callable, *arrays: Array
) -> Any:
    """By the mask where there is no plan, or as it runs there is more than one document."""
    if plan is None:
        return by_mask(*arrays)
    several = several_documents(score)
    if several is None:
        return by_parts(plan, *arrays)
    return jax.lax.cond(several, by_mask, partial(by_parts, plan), *arrays)


def _blocks(arrays: tuple[Array, Array], axis: str) -> Iterator[list[Array]]:
    """Each device's part of gathered arrays."""
    n = jax.lax.axis_size(axis)
    for j in range(n):
        yield [
            jax.lax.slice_in_dim(x, j * x.shape[1] // n, (j + 1) * x.shape[1] // n, axis=1)
            for x in arrays
        ]


def _gather(x: Array, axis: str) -> Array:
    return jax.lax.all_gather(x, axis, axis=1, tiled=True)


def _whole_keys(score: Score, axis: str) -> Score:
    """The score with what the mask says of the keys, at full length."""
    fields = {
        name: jax.lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)
        for name in ("k_segments", "k_positions", "k_global_tokens")
        if (x := getattr(score.mask, name)) is not None
    }
    return replace(score, mask=replace(score.mask, **fields))
