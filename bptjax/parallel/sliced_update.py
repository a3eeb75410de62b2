"""Updates large arrays in place: each device updates its own shard, slice by slice."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import UInt32

from bptjax.ops.quantize import fold_in
from bptjax.ops.stacked import move
from bptjax.parallel.mesh import sharding

# Smaller slices would spend most of their time on kernel launches.
SLICE_ELEMENTS = 2**24


def update_in_slices(
    f: Callable,
    state: Any,
    inputs: Any,
    key: UInt32[Array, "2"],
    *,
    axes: tuple[str | None, ...],
    when: Array,
    index: Array | None = None,
    unsliced_axes: int = 1,
    slice_elements: int = SLICE_ELEMENTS,
) -> Any:
    """Returns `f(state, inputs, key)` if `when` is true, else `state`.

    Overwrites a donated `state`. Arrays in host memory pass through the device. Each slice on each
    device gets a different key.

    Args:
      f: takes slices along all axes except the last `unsliced_axes`, and returns the new slice of
        `state`.
      state, inputs: pytrees of arrays whose axes agree in size, except for the last axis.
      axes: logical names of the last axes, as in `nnx.Variable.axes` of a parameter.
      when: bool scalar.
      index: the arrays of `state` have an additional first axis, of which only this entry changes.
      unsliced_axes: 1, or the number of axes of a matrix that `f` needs unsharded.
      slice_elements: number of elements per slice; more if the unsliced axes are larger.
    """
    shape = jax.tree.leaves(inputs)[0].shape
    sliced_axes = len(shape) - unsliced_axes
    mesh, spec, names = jax.sharding.get_abstract_mesh(), PartitionSpec(), set()
    unsliced = math.prod(shape[sliced_axes:])
    if not mesh.empty:
        placed = sharding(mesh, axes, shape)
        # Leave the unsliced axes to the compiler, because `f` may need several shards of them.
        spec = PartitionSpec(*placed.spec[:sliced_axes])
        if unsliced_axes == 1:
            unsliced = placed.shard_shape(shape)[-1]
        names = {n for axis in spec for n in ((axis,) if isinstance(axis, str) else axis or ())}

    def local(state, inputs, key, index, devices):
        for device in devices:
            key = fold_in(key, device[0])
        return _loop(f, when, index, sliced_axes, unsliced, slice_elements, state, inputs, key)

    if not names:
        return local(state, inputs, key, index, ())
    # Pass each device its index: XLA cannot always partition `axis_index` if the compiler shards
    # over other mesh axes.
    devices = tuple(jnp.arange(mesh.shape[name]) for name in sorted(names))
    ids = tuple(PartitionSpec(name) for name in sorted(names))
    whole = spec if index is None else PartitionSpec(None, *spec)
    replicated = PartitionSpec()
    specs = dict(in_specs=(whole, spec, replicated, replicated, ids), out_specs=whole)
    mapped = jax.shard_map(local, **specs, axis_names=names, check_vma=False)
    return mapped(state, inputs, key, index, devices)


def _loop(
    f: Callable,
    when: Array,
    index: Array | None,
    sliced_axes: int,
    unsliced: int,
    slice_elements: int,
    state: Any,
    inputs: Any,
    key: UInt32[Array, "2"],
) -> Any:
    """Runs `update_in_slices` on one device. The unsliced axes have `unsliced` elements."""
    shape, entry = jax.tree.leaves(inputs)[0].shape, () if index is None else (index,)
    sizes, ones = shape[:sliced_axes], (1,) * (len(shape) - sliced_axes)
    below = [math.prod((*sizes[axis + 1 :], unsliced)) for axis in range(len(sizes))]
    counts = [_ceil_div(n, max(1, slice_elements // m)) for n, m in zip(sizes, below, strict=True)]
    lengths = [_ceil_div(n, count) for n, count in zip(sizes, counts, strict=True)]
    ragged = [axis for axis, (n, r) in enumerate(zip(sizes, lengths, strict=True)) if n % r]

    def update_slice(i, state):
        first = [t * r for t, r in zip(jnp.unravel_index(i, counts), lengths, strict=True)]
        # The last slice ends with the axis, so it may overlap the previous slice.
        start = [jnp.minimum(f, n - r) for f, n, r in zip(first, sizes, lengths, strict=True)]

        def at(x, entry):
            """Returns the start and the shape of the slice of `x`."""
            rest = x.shape[len(entry) + sliced_axes :]
            ones, zeros = (1 for _ in entry), (0 for _ in rest)
            return (*entry, *start, *zeros), (*ones, *lengths, *rest)

        def read(x, entry=()):
            x = move(jax.lax.dynamic_slice(x, *at(x, entry)), jax.memory.Space.Device)
            return x.reshape(x.shape[len(entry) :])

        def write(x, y):
            where, sizes = at(x, entry)
            y = move(y.reshape(sizes), jax.typeof(x).memory_space)
            return jax.lax.dynamic_update_slice(x, y, where)

        old = jax.tree.map(partial(read, entry=entry), state)
        local_inputs = jax.tree.map(read, inputs)
        # `cond` around `f`, not `where` after it: with `where`, XLA would rerun `f` for each array
        # that it writes, and copy every array that later runs of `f` read.
        new = jax.lax.cond(
            when,
            f,
            lambda old, local_inputs, key: old,
            old,
            local_inputs,
            fold_in(key, i),
        )
        for axis in ragged:
            step = jax.lax.broadcasted_iota(jnp.int32, (*lengths, *ones), axis)
            due = start[axis] + step >= first[axis]
            new = jax.tree.map(lambda x, y, due=due: jnp.where(due, y, x), old, new)
        return jax.tree.map(write, state, new)

    if math.prod(counts) == 1:
        return update_slice(0, state)
    return jax.lax.fori_loop(0, math.prod(counts), update_slice, state)


def _ceil_div(n: int, d: int) -> int:
    return -(-n // d)
