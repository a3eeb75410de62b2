"""Position-wise work, one chunk of tokens at a time, recomputed in the backward pass."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

PyTree = Any


def feed_forward(
    f: Callable[[PyTree, PyTree], PyTree], params: PyTree, x: PyTree, *, chunk: int
) -> PyTree:
    """`f(params, x)` for a position-wise `f`, in the memory of one chunk.

    One chunk that holds all is `f(params, x)` itself, which a remat policy sees into.

    The backward pass keeps `params` and `x` alone, runs `f` again chunk by chunk, and accumulates
    the gradient of `params` in float32. Put norm and residual inside `f`: then nothing wider than
    `x` exists at full length.

    Args:
      f: takes `params` and a chunk of `x`, gives a pytree of `[B, chunk, ...]`. It must not close
        over traced values; what it needs goes into `params` (shared by all chunks) or `x`. Integer
        leaves are allowed in both and in the result.
      params: pytree of arrays.
      x: pytree of `[B, T, ...]` arrays.
      chunk: tokens; T need not be a multiple. Where it is not, `f` runs on copies of the last token
        too, whose results are dropped.

    Returns:
      pytree of `[B, T, ...]` arrays.

    Liu & Abbeel 2023, https://arxiv.org/abs/2305.19370, Section 3.
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk}; a chunk is at least 1 token")
    if chunk >= jax.tree.leaves(x)[0].shape[1]:
        return f(params, x)
    return _feed_forward(f, chunk, *jax.tree.map(jnp.asarray, (params, x)))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _feed_forward(f, chunk, params, x):
    T = jax.tree.leaves(x)[0].shape[1]
    _, y = jax.lax.scan(lambda _, x: (None, f(params, x)), None, _cut(x, chunk))
    return _join(y, T)


def _forward(f, chunk, params, x):
    return _feed_forward(f, chunk, params, x), (params, x)


def _backward(f, chunk, saved, dy):
    params, x = saved
    T = jax.tree.leaves(x)[0].shape[1]
    traced, whole = _split(params)
    sums = [jnp.zeros_like(p, jnp.float32) for p in traced]

    def one(sums, chunks):
        x, dy = chunks
        moving, rest = _split(x)
        _, pull = jax.vjp(lambda p, m: _split(f(whole(p), rest(m)))[0], traced, moving)
        dparams, dx = pull(dy)
        return [s + d.astype(jnp.float32) for s, d in zip(sums, dparams, strict=True)], dx

    dy = [d for d in jax.tree.leaves(dy) if d.dtype != jax.dtypes.float0]
    # Tokens past the end get a zero cotangent.
    sums, dx = jax.lax.scan(one, sums, (_cut(x, chunk), _cut(dy, chunk, "constant")))
    dparams = [s.astype(p.dtype) for s, p in zip(sums, traced, strict=True)]
    _, rest = _split(x)
    return _cotangent(params, whole, dparams), _cotangent(x, rest, _join(dx, T))


_feed_forward.defvjp(_forward, _backward)


def _is_float(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _split(tree: PyTree) -> tuple[list[Array], Callable[[list[Array]], PyTree]]:
    """The leaves that take gradients, and the function that puts such a list back among the
    others."""
    leaves, structure = jax.tree.flatten(tree)

    def whole(moving):
        moving = iter(moving)
        return structure.unflatten([next(moving) if _is_float(x) else x for x in leaves])

    return [x for x in leaves if _is_float(x)], whole


def _cotangent(tree: PyTree, whole: Callable, moving: list[Array]) -> PyTree:
    """A cotangent for `tree`: None, which is zero, for the leaves that take no gradient."""
    return jax.tree.map(lambda x, d: d if _is_float(x) else None, tree, whole(moving))


def _cut(tree: PyTree, chunk: int, mode: str = "edge") -> PyTree:
    """`[B, T, ...]` to `[n, B, chunk, ...]`."""

    def cut(x):
        size = min(chunk, x.shape[1])
        x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2), mode=mode)
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    return jax.tree.map(cut, tree)


def _join(tree: PyTree, T: int) -> PyTree:
    """`[n, B, chunk, ...]` to `[B, T, ...]`."""

    def join(x):
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :T]

    return jax.tree.map(join, tree)
