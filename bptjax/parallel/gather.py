"""Sequence parallelism by gathering: each device attends with its own queries to all keys.

Context parallelism as in Llama 3 (arXiv 2407.21783, Section 3.3.2): the simplest, and with few key
heads the cheapest for short rows; keys and values of the whole row are on every device.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bptjax.ops.attention.tile import Score
from bptjax.ops.softmax import Partial
from bptjax.parallel.plan import (
    Plan,
    add_backward,
    add_forward,
    make_plan,
    own_backward,
    own_forward,
    several_documents,
)


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
    n, device = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    every = _gather(k, axis), _gather(v, axis)
    score, plan = _whole_keys(score, axis), make_plan(score, places, n)

    def by_plan(plan, q, k, v, every):
        def of_another(step, whole):
            other = (device - step) % n
            k, v = (_part_of(x, other, n) for x in every)

            def add(pair, whole):
                return add_forward(kernel, plan, pair, whole, q, k, v, score, **chunks)

            return plan.add_up(add, whole, device, other)

        whole = own_forward(kernel, plan, q, k, v, score, **chunks)
        whole = jax.lax.fori_loop(1, n, of_another, whole)
        return Partial(whole.out.astype(q.dtype), whole.lse)

    def by_mask(q, k, v, every):
        return kernel.forward(q, *every, score, **chunks)

    return _either(plan, by_plan, by_mask, score, q, k, v, every)


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
    """Gradients of this device's queries, keys and values, those of keys and values summed over the
    devices in float32."""
    n, device = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    every = _gather(k, axis), _gather(v, axis)
    score, plan = _whole_keys(score, axis), make_plan(score, places, n)

    def by_plan(plan, q, k, v, every, *rest):
        of_queries = q, *rest

        def of_another(step, sums):
            dq, dks, dvs = sums
            other = (device - step) % n
            k, v, dk, dv = (_part_of(x, other, n) for x in (*every, dks, dvs))

            def add(pair, sums):
                return add_backward(kernel, plan, pair, sums, of_queries, k, v, score, **chunks)

            dq, dk, dv = plan.add_up(add, (dq, dk, dv), device, other)
            return dq, _put(dks, dk, other), _put(dvs, dv, other)

        dq, dk, dv = own_backward(kernel, plan, of_queries, k, v, score, **chunks)
        dks, dvs = (jnp.zeros_like(x, jnp.float32) for x in every)
        sums = dq, _put(dks, dk, device), _put(dvs, dv, device)
        dq, dks, dvs = jax.lax.fori_loop(1, n, of_another, sums)
        return dq.astype(q.dtype), dks, dvs

    def by_mask(q, k, v, every, *rest):
        dq, *of_keys = kernel.backward(q, *every, *rest, score, **chunks)
        return dq, *(x.astype(jnp.float32) for x in of_keys)

    dq, *of_keys = _either(plan, by_plan, by_mask, score, q, k, v, every, out, lse, dout)
    dk, dv = (jax.lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True) for x in of_keys)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype)


def _either(
    plan: Plan | None, by_plan: Callable, by_mask: Callable, score: Score, *operands: Any
) -> Any:
    """By the mask where there is no plan, or as it runs there is more than one document."""
    if plan is None:
        return by_mask(*operands)
    several = several_documents(score)
    if several is None:
        return by_plan(plan, *operands)
    return jax.lax.cond(several, by_mask, partial(by_plan, plan), *operands)


def _put(x: Array, part: Array, device: Array) -> Array:
    """A gathered array with that device's part replaced."""
    return jax.lax.dynamic_update_slice_in_dim(x, part, device * part.shape[1], axis=1)


def _part_of(x: Array, device: Array, n: int) -> Array:
    """That device's part of a gathered array."""
    size = x.shape[1] // n
    return jax.lax.dynamic_slice_in_dim(x, device * size, size, axis=1)


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
