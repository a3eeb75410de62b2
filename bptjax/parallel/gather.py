"""Sequence parallelism by gathering: each shard attends from its own queries to all keys.

Context parallelism as in Llama 3 (arXiv 2407.21783, Section 3.3.2): the simplest strategy, and the
cheapest for short sequences with few key heads. Every device holds the keys and values of the
complete sequence.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Shaped

from bptjax.ops.attention.contract import (
    QKV,
    AttentionSpec,
    AttentionState,
    Kernel,
    Shards,
)
from bptjax.ops.mask import KEY_FIELDS
from bptjax.parallel.full_tiles import (
    Attend,
    Sums,
    backward_pass,
    forward_pass,
    hides_keys,
    make_schedule,
    put_piece,
    take_piece,
)
from bptjax.parallel.ring import split, unsupported

__all__ = ["backward", "forward", "split", "unsupported"]


def forward(kernel: Kernel, x: QKV, spec: AttentionSpec, shards: Shards) -> AttentionState:
    """Attends from this shard's queries to the keys of all shards."""
    (out, lse), _ = _traverse(*forward_pass(kernel, x), x, spec, shards)
    return AttentionState(out.astype(x.q.dtype), lse)


def backward(
    kernel: Kernel,
    x: QKV,
    state: AttentionState,
    dout: Float[Array, "B T N H"],
    spec: AttentionSpec,
    shards: Shards,
) -> QKV:
    """Returns the gradients of this shard's queries, keys and values. Gradients of keys and values
    are summed over the shards in float32."""
    dq, of_keys = _traverse(*backward_pass(kernel, x, state, dout), x, spec, shards)
    dk, dv = (
        jax.lax.psum_scatter(y, shards.axis, scatter_dimension=1, tiled=True) for y in of_keys
    )
    return QKV(dq.astype(x.q.dtype), dk.astype(x.k.dtype), dv.astype(x.v.dtype))


def _traverse(attend: Attend, queries: Any, x: QKV, spec: AttentionSpec, shards: Shards) -> Sums:
    """Attends to the gathered keys and values. The keys' sums have full length."""
    n, index = shards.size, shards.index
    gathered = _gather(x.k, shards.axis, 1), _gather(x.v, shards.axis, 1)
    fields: dict[str, Any] = {
        name: _gather(field, shards.axis, field.ndim - 1)
        for name in KEY_FIELDS
        if (field := getattr(spec.mask, name)) is not None
    }
    spec = replace(spec, mask=replace(spec.mask, **fields))
    schedule = make_schedule(spec, shards.positions, n)

    def masked(queries, k, v, gathered):
        k, v = gathered
        return attend(queries, None, k, v, spec)

    def full_tiles(queries, k, v, gathered):
        assert schedule is not None

        def visit(step, sums):
            other = (index - step) % n
            part = Sums(sums.queries, take_piece(sums.keys, other, n))
            k, v = take_piece(gathered, other, n)
            part = schedule.attend_other(attend, queries, part, k, v, spec, index, other)
            return Sums(part.queries, put_piece(sums.keys, part.keys, other))

        local = schedule.attend_local(attend, queries, k, v, spec)
        zeros = jax.tree.map(lambda y: jnp.concatenate([jnp.zeros_like(y)] * n, 1), local.keys)
        of_keys = put_piece(zeros, local.keys, index)
        return jax.lax.fori_loop(1, n, visit, Sums(local.queries, of_keys))

    operands = queries, x.k, x.v, gathered
    if schedule is None:
        return masked(*operands)
    hides = hides_keys(spec)
    if hides is None:
        return full_tiles(*operands)
    return jax.lax.cond(hides, masked, full_tiles, *operands)


def _gather(x: Shaped[Array, "..."], axis: str, dimension: int) -> Shaped[Array, "..."]:
    return jax.lax.all_gather(x, axis, axis=dimension, tiled=True)
