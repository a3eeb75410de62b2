"""Entries of stacked arrays, read one at a time, whose gradients are written into one stack.

A single loop is a `jax.lax.scan` over the values: XLA then copies entries while other kernels run.
Several loops would each scan a slice, which XLA copies, so they read the full stack by index. All
loops pass on a gradient buffer that they write in place; `jax.lax.scan` would make one per loop,
and XLA might materialize it early.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

PyTree = Any


def split_gradient(stack: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the values of a stack of arrays `[L, ...]`, without a gradient, and slots that
    receive its gradient; slots are never read, so never materialized."""
    return jax.lax.stop_gradient(stack), jax.tree.map(_slots, stack)


def read_entry(values: PyTree, index: Callable[[tuple], Array | None]) -> PyTree:
    """Returns one entry of each array.

    Args:
      index: maps an array's key path to the index to read, or None to skip the array. A skipped
        array becomes None.
    """

    def read(path, x):
        i = index(path)
        return None if i is None else jax.lax.dynamic_index_in_dim(x, i, keepdims=False)

    return jax.tree.map_with_path(read, values)


def with_gradient(
    entry: PyTree, slots: PyTree, index: Callable[[tuple], Array | None]
) -> tuple[PyTree, PyTree]:
    """Returns an entry that has a gradient, and the slots for the next call.

    The gradient replaces the contents of the entry's slots: call it once for each entry.

    Args:
      entry, index: as for `read_entry`.
    """
    leaves, structure = jax.tree.flatten_with_path(slots)
    pairs = [
        (None, s) if x is None else _with_gradient(x, s, index(path))
        for (path, s), x in zip(leaves, structure.flatten_up_to(entry), strict=True)
    ]
    return tuple(structure.unflatten(part) for part in zip(*pairs, strict=True))


def get_entry(stack: PyTree, index: Array) -> PyTree:
    """Returns one entry of each array, on the device. Has no gradient."""

    def get(x):
        return move(jax.lax.dynamic_index_in_dim(x, index, keepdims=False), jax.memory.Space.Device)

    return jax.tree.map(get, stack)


def put_entry(stack: PyTree, entry: PyTree, index: Array) -> PyTree:
    """Writes one entry of each array, in the memory that holds the array."""

    def put(x, y):
        y = move(y[None], jax.typeof(x).memory_space)
        return jax.lax.dynamic_update_index_in_dim(x, y, index, axis=0)

    return jax.tree.map(put, stack, entry)


def move(x: Array, space: jax.memory.Space) -> Array:
    """Moves an array to a memory space."""
    return x if jax.typeof(x).memory_space == space else jax.device_put(x, space)


@jax.custom_vjp
def close_slots(x: Array, slots: PyTree) -> Array:
    """Returns `x`, a result of the last loop. With this call, XLA materializes the slots' zeros
    after the gradient of `x`; without it, possibly earlier."""
    return x


def save_all_but_slices(primitive: Any, *_: Any, **__: Any) -> bool:
    """Remat policy that saves everything except slices and the results of `with_gradient`, so that
    entries are read again."""
    return primitive.name not in ("dynamic_slice", "squeeze", "custom_vjp_call")


@jax.custom_vjp
def _slots(stack):
    return jnp.zeros_like(stack)


_slots.defvjp(lambda stack: (jnp.zeros_like(stack), None), lambda _, cotangent: (cotangent,))


@jax.custom_vjp
def _with_gradient(entry, slots, index):
    return entry, slots


def _backward(index, cotangents):
    entry, slots = cotangents
    return None, jax.lax.dynamic_update_index_in_dim(slots, entry, index, 0), None


def _close_backward(slots, cotangent):
    cotangent, zero = jax.lax.optimization_barrier((cotangent, jnp.zeros(())))

    def zeros(x):
        inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        return jnp.full(x.shape, zero.astype(x.dtype)) if inexact else None

    return cotangent, jax.tree.map(zeros, slots)


close_slots.defvjp(lambda x, slots: (x, slots), _close_backward)

_with_gradient.defvjp(lambda entry, slots, index: ((entry, slots), index), _backward)
