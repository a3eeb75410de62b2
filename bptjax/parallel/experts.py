"""Experts on several devices: each device runs its experts, or its slices of experts, on the tokens
of all devices that share them."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from bptjax.ops.blockwise import blockwise
from bptjax.ops.per_device import REPLICATED, SHARDED, divided_axes, free_axes, per_device
from bptjax.parallel.mesh import RULES


def expert_axes() -> tuple[str, ...]:
    """Returns the mesh axes over which an enclosing `per_device` divides the experts."""
    return divided_axes(RULES["experts"])


def own_experts(chosen: Int[Array, "T k"], experts: int) -> tuple[Int[Array, "T k"], int]:
    """Renumbers the choices to this device's experts, and returns the number of its experts, which
    also stands for experts of other devices.

    Args:
      experts: total number of experts, which the mesh divides.
    """
    axes = expert_axes()
    if not axes:
        return chosen, experts
    own = experts // jax.lax.axis_size(axes)
    chosen = chosen - jax.lax.axis_index(axes) * own
    return jnp.where((chosen >= 0) & (chosen < own), chosen, own), own


def slice_axes(width: int) -> tuple[str, ...]:
    """Returns the mesh axes that shard expert matrices along this width, and that no enclosing
    `per_device` divides."""
    mesh, axes = jax.sharding.get_abstract_mesh(), free_axes(RULES["mlp"])
    return () if width % math.prod(mesh.shape[name] for name in axes) else axes


def slice_index() -> Array | int:
    """Returns this device's index among the devices that an enclosing `sum_over_slices` gives
    slices of the same matrices."""
    axes = divided_axes(RULES["mlp"])
    return jax.lax.axis_index(axes) if axes else 0


def sum_over_slices(
    f: Callable[[Any, Any], Array],
    params: Any,
    tokens: Any,
    *,
    placement: Any,
    axes: tuple[str, ...],
) -> Float[Array, "1 T D"]:
    """Sums `f(params, tokens)` over the devices along `axes`, which have slices of the same
    matrices. Sums over devices are float32.

    Args:
      placement: prefix of the tree `params`. `ShardedOver` leaves are a device's slices;
        `REPLICATED` leaves, and `tokens`, are the same on all devices.
      axes: from `slice_axes`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    devices = math.prod(mesh.shape[name] for name in axes)
    placement = jax.tree.broadcast((placement, REPLICATED), (params, tokens))

    # With copies, autodiff sums gradients once, in float32. With replicated inputs it would sum in
    # their dtype, and sum the result's gradient over devices that already hold equal values.
    def copies(x, place):
        if place != REPLICATED:
            return x
        wide = jnp.float32 if jnp.issubdtype(x.dtype, jnp.inexact) else x.dtype
        return jnp.broadcast_to(x.astype(wide)[None], (devices, *x.shape)).astype(x.dtype)

    def run(given, axes):
        own = jax.tree.map(lambda x, place: x[0] if place == REPLICATED else x, given, placement)
        return f(*own)[None]

    inputs = jax.tree.map(lambda place: SHARDED if place == REPLICATED else place, placement)
    given = jax.tree.map(copies, (params, tokens), placement)
    y = per_device(run, axes, (inputs,), SHARDED)(given)
    return y.sum(0, dtype=jnp.float32).astype(y.dtype)


def sum_over_devices(
    f: Callable[[Any, Any], Array], params: Any, tokens: Any, *, dtype: DTypeLike, sharded: bool
) -> Float[Array, "1 T D"]:
    """Sums `f(params, tokens)` over the devices that share the experts, and rounds to `dtype`.

    All-gathers the tokens, and runs `f` on the tokens of one device at a time. So its memory does
    not grow with the number of devices, even if all tokens choose experts of one device. The
    backward pass saves only `params` and this device's tokens. Sums over devices are float32.

    Args:
      f: position-wise, as in `blockwise`, takes this device's `params`; returns float32 if several
        devices share the experts.
      tokens: pytree of `[1, T, ...]`.
      sharded: whether each device has different tokens; otherwise all have the same.
    """
    axes = expert_axes()
    if not axes:
        return f(params, tokens).astype(dtype)
    if not sharded:
        return jax.lax.psum(f(params, tokens), axes).astype(dtype)
    T = jax.tree.leaves(tokens)[0].shape[1]

    @jax.checkpoint
    def run(params, tokens):
        every = jax.tree.map(partial(_gather, axes=axes), tokens)
        return _scatter(blockwise(f, params, every, chunk=T), dtype, axes)

    return run(params, tokens)


def _all_gather(x, axes):
    return jax.lax.all_gather(x, axes, axis=1, tiled=True)


def _gather(x: Array, axes: tuple[str, ...]) -> Array:
    """All-gathers along axis 1. Sums gradients in float32, unlike autodiff."""
    return (_gather_floats if jnp.issubdtype(x.dtype, jnp.inexact) else _all_gather)(x, axes)


_gather_floats = jax.custom_vjp(_all_gather, nondiff_argnums=(1,))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _scatter(y: Float[Array, "1 S D"], dtype: DTypeLike, axes: tuple[str, ...]) -> Array:
    """Reduce-scatters along axis 1 and rounds to `dtype`, in which gradients travel."""
    return jax.lax.psum_scatter(y, axes, scatter_dimension=1, tiled=True).astype(dtype)


_gather_floats.defvjp(
    lambda x, axes: (_all_gather(x, axes), None),
    lambda axes, _, dy: (_scatter(dy.astype(jnp.float32), dy.dtype, axes),),
)
_scatter.defvjp(
    lambda y, dtype, axes: (_scatter(y, dtype, axes), None),
    lambda dtype, axes, _, dy: (_all_gather(dy, axes).astype(jnp.float32),),
)
