"""What each device of a mesh does with its own rows."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec

ROWS, WHOLE = "rows", "whole"


def each_device(f: Callable, axes: tuple[str, ...], inputs: Any, results: Any) -> Callable:
    """`f(*arrays, axes)` of each device's rows.

    Left to the compiler, a loop over chunks of rows exchanges parts of parameters for each chunk.

    Args:
      axes: mesh axes over which rows are cut; `f` gets those of more than one device, to sum over.
      inputs, results: prefixes of the trees that `f` takes and gives. `ROWS`: cut along axis 0;
        `WHOLE`: the same on every device, but for what other mesh axes cut.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = () if mesh.empty else tuple(name for name in axes if mesh.shape[name] > 1)
    f = partial(f, axes=axes)
    if not axes:
        return f
    places = {ROWS: PartitionSpec(axes), WHOLE: PartitionSpec()}
    inputs, results = (jax.tree.map(places.get, tree) for tree in (inputs, results))
    names = dict(axis_names=set(axes), check_vma=False)
    return jax.shard_map(f, in_specs=inputs, out_specs=results, **names)
