"""Loops that each device of a mesh runs over its own sequences."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec

SHARDED, REPLICATED = "sharded", "replicated"


@dataclass(frozen=True)
class ShardedOver:
    """Sharded along one axis over these mesh axes alone, and replicated over the others."""

    names: tuple[str, ...]
    axis: int = 0


Placement = str | ShardedOver


def free_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns those of the mesh axes that have more than one device and that no enclosing call
    divides already."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return ()
    return tuple(name for name in axes if mesh.shape[name] > 1 and name not in mesh.manual_axes)


def divided_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns those of the mesh axes that have more than one device and that an enclosing call
    divides."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(n for n in axes if n in mesh.manual_axes and mesh.shape[n] > 1)


def sharding_axes(placement: Placement, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns those of the mesh axes that shard an array with this placement."""
    if isinstance(placement, ShardedOver):
        return tuple(name for name in axes if name in placement.names)
    return axes if placement == SHARDED else ()


def per_device(f: Callable, axes: tuple[str, ...], inputs: Any, results: Any) -> Callable:
    """Returns a function that runs `f(*arrays, axes)` on each device with its own sequences.

    If the compiler partitioned a loop over chunks of sequences itself, devices would exchange
    shards of the parameters in every step of the loop.

    Args:
      axes: mesh axes that shard the batch dimension. `f` gets the axes that have more than one
        device, to sum over, except the axes of an enclosing call.
      inputs, results: prefixes of the trees that `f` takes and returns. `SHARDED` leaves are
        sharded along axis 0, `REPLICATED` leaves are replicated over `axes`, and `ShardedOver`
        leaves are sharded along any one axis over some of them; other mesh axes may shard any.
    """
    axes = free_axes(axes)
    f = partial(f, axes=axes)
    if not axes:
        return f

    # With the axes of one device, nested calls divide all axes. If an axis is left to the compiler,
    # XLA of jax 0.11 aborts unless the calls divide the others in the order of the mesh.
    mesh = jax.sharding.get_abstract_mesh()
    single = tuple(n for n in mesh.axis_names if mesh.shape[n] == 1 and n not in mesh.manual_axes)

    def spec(placement):
        names = sharding_axes(placement, axes)
        first = placement.axis if isinstance(placement, ShardedOver) else 0
        return PartitionSpec(*(None,) * first, (*names, *single)) if names else PartitionSpec()

    inputs, results = (jax.tree.map(spec, tree) for tree in (inputs, results))
    names = dict(axis_names={*axes, *single}, check_vma=False)
    return jax.shard_map(f, in_specs=inputs, out_specs=results, **names)
