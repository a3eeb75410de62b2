"""Arrays rewritten in place: each device its own shard, a part at a time."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from bptjax.parallel.mesh import sharding

# Elements in a part; or one row of the last axis, where that is longer. Fewer would be held up by
# what it takes to start a part.
AT_ONCE = 2**24


def in_parts(
    f: Callable,
    kept: Any,
    read: Any,
    key: Array,
    *,
    axes: tuple[str | None, ...],
    when: Array,
) -> Any:
    """`f(kept, read, key)` where `when` is true, else `kept`.

    Donated, `kept` is overwritten. What of it is in host memory passes through the device. Every
    part, and each device's, has a key of its own.

    Args:
      f: of any number of rows; returns what replaces its `kept`.
      kept, read: pytrees of arrays whose axes agree in size, but for the last.
      axes: logical names of the last axes, as parameters have them.
      when: bool scalar.
    """
    shape = jax.tree.leaves(read)[0].shape
    mesh, cut, names, last = jax.sharding.get_abstract_mesh(), PartitionSpec(), set(), shape[-1]
    if not mesh.empty:
        where = sharding(mesh, axes, shape)
        # The last axis is left to the compiler: `f` may need more of it than a shard.
        cut, last = PartitionSpec(*where.spec[:-1]), where.shard_shape(shape)[-1]
        names = {n for part in cut for n in ((part,) if isinstance(part, str) else part or ())}

    def local(kept, read, key):
        for name in sorted(names):
            key = jax.random.fold_in(key, jax.lax.axis_index(name))
        return _loop(f, when, last, kept, read, key)

    if not names:
        return local(kept, read, key)
    specs = dict(in_specs=(cut, cut, PartitionSpec()), out_specs=cut)
    return jax.shard_map(local, **specs, axis_names=names, check_vma=False)(kept, read, key)


def _loop(f: Callable, when: Array, last: int, kept: Any, read: Any, key: Array) -> Any:
    """`in_parts` of what one device has; `last` is its size of the last axis."""
    *sizes, _ = jax.tree.leaves(read)[0].shape
    below = [math.prod((*sizes[axis + 1 :], last)) for axis in range(len(sizes))]
    turns = [_share(n, max(1, AT_ONCE // m)) for n, m in zip(sizes, below, strict=True)]
    rows = [_share(n, t) for n, t in zip(sizes, turns, strict=True)]
    ragged = [axis for axis, (n, r) in enumerate(zip(sizes, rows, strict=True)) if n % r]

    def part(i, kept):
        first = [t * r for t, r in zip(jnp.unravel_index(i, turns), rows, strict=True)]
        # The last part ends with the axis, and may begin with what the one before has done.
        start = [jnp.minimum(f, n - r) for f, n, r in zip(first, sizes, rows, strict=True)]

        def cut(x):
            x = jax.lax.dynamic_slice(x, (*start, 0), (*rows, x.shape[-1]))
            return _moved(x, jax.memory.Space.Device)

        def write(x, y):
            y = _moved(y, jax.typeof(x).memory_space)
            return jax.lax.dynamic_update_slice(x, y, (*start, 0))

        old, here = jax.tree.map(cut, (kept, read))
        # A condition around `f`, not a choice after it. Without one XLA runs `f` again for each
        # array that it writes, and copies all of those that the later runs read.
        new = jax.lax.cond(
            when, f, lambda old, here, key: old, old, here, jax.random.fold_in(key, i)
        )
        for axis in ragged:
            due = start[axis] + jax.lax.broadcasted_iota(jnp.int32, (*rows, 1), axis) >= first[axis]
            new = jax.tree.map(lambda x, y, due=due: jnp.where(due, y, x), old, new)
        return jax.tree.map(write, kept, new)

    many = math.prod(turns)
    return part(0, kept) if many == 1 else jax.lax.fori_loop(0, many, part, kept)


def _share(n: int, parts: int) -> int:
    """n / parts, rounded up."""
    return -(-n // parts)


def _moved(x: Array, space: jax.memory.Space) -> Array:
    return x if jax.typeof(x).memory_space == space else jax.device_put(x, space)
