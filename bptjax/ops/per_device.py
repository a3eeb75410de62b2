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
    """Sharded along one array axis over these mesh axes, and replicated over the others."""

    names: tuple[str, ...]
    axis: int = 0


Placement = str | ShardedOver


def free_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the axes that have more than one device and that no enclosing call divides."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return ()
    return tuple(name for name in axes if mesh.shape[name] > 1 and name not in mesh.manual_axes)


def divided_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the axes that have more than one device and that an enclosing call divides."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(n for n in axes if n in mesh.manual_axes and mesh.shape[n] > 1)


def sharding_axes(placement: Placement, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the axes that shard an array with this placement."""
    if isinstance(placement, ShardedOver):
        return tuple(name for name in axes if name in placement.names)
    return axes if placement == SHARDED else ()


def per_device(f: Callable, axes: tuple[str, ...], inputs: Any, results: Any) -> Callable:
    """Returns a function that runs `f(*arrays, axes)` on each device with its own sequences.

    If the compiler itself partitioned a loop over chunks of sequences, devices would exchange
    shards of the parameters in every step of the loop.

    Args:
      axes: mesh axes that shard the batch dimension. `f` gets the axes to sum over: the ones with
        more than one device, except axes of an enclosing call.
      inputs, results: prefixes of the trees that `f` takes and returns. `SHARDED` leaves are
        sharded along array axis 0, `REPLICATED` leaves are replicated over `axes`, and
        `ShardedOver` leaves are sharded along one array axis over some of `axes`; other mesh axes
        may shard any leaf.
    """
    axes = free_axes(axes)
    f = partial(f, axes=axes)
    if not axes:
        return f

    # Including one-device axes, nested calls divide all axes. If an axis is left to the compiler,
    # XLA of jax 0.11 aborts unless the calls divide the other axes in mesh order.
    mesh = jax.sharding.get_abstract_mesh()
    single = tuple(n for n in mesh.axis_names if mesh.shape[n] == 1 and n not in mesh.manual_axes)

    def spec(placement):
        names = sharding_axes(placement, axes)
        first = placement.axis if isinstance(placement, ShardedOver) else 0
        return PartitionSpec(*(None,) * first, (*names, *single)) if names else PartitionSpec()

    inputs, results = (jax.tree.map(spec, tree) for tree in (inputs, results))
    names = dict(axis_names={*axes, *single}, check_vma=False)
    return jax.shard_map(f, in_specs=inputs, out_specs=results, **names)
