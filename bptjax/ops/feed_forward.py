"""Position-wise work, one chunk of tokens at a time, recomputed in the backward pass."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero

from bptjax.ops.arguments import check_chunk, check_tokens
from bptjax.ops.rows import ROWS, WHOLE, each_device

PyTree = Any


def feed_forward(
    f: Callable[[PyTree, PyTree], PyTree],
    params: PyTree,
    x: PyTree,
    *,
    chunk: int,
    axes: tuple[str, ...] = (),
) -> PyTree:
    """`f(params, x)` for a position-wise `f`, in the memory of one chunk.

    One chunk that holds all is `f(params, x)` itself, which a remat policy sees into.

    The backward pass keeps `params` and `x` alone, runs `f` again chunk by chunk, and accumulates
    in float32 the gradients of those `params` that are differentiated. Put norm and residual inside
    `f`: then nothing wider than `x` exists at full length.

    Args:
      f: takes `params` and a chunk of `x`, gives a pytree of `[B, chunk, ...]`. It must not close
        over traced values; what it needs goes into `params` (shared by all chunks) or `x`. Integer
        leaves are allowed in both and in the result.
      params: pytree of arrays.
      x: pytree of `[B, T, ...]` arrays.
      chunk: tokens; T need not be a multiple. Where it is not, `f` runs on copies of the last token
        too, whose results are dropped.
      axes: mesh axes over which the rows are cut: each device adds gradients of `params` up by
        itself, where there is more than one chunk.

    Returns:
      pytree of `[B, T, ...]` arrays.

    Raises:
      ValueError: a chunk below 1; arrays of `x` that are empty or differ in batch or tokens.

    Liu & Abbeel 2023, https://arxiv.org/abs/2305.19370, Section 3.
    """
    check_chunk(chunk=chunk)
    check_tokens(jax.tree.leaves(x))
    if chunk >= jax.tree.leaves(x)[0].shape[1]:
        return f(params, x)
    return _feed_forward(f, chunk, axes, *jax.tree.map(jnp.asarray, (params, x)))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _feed_forward(f, chunk, axes, params, x):
    def local(params, x, axes):
        T = jax.tree.leaves(x)[0].shape[1]
        _, y = jax.lax.scan(lambda _, x: (None, f(params, x)), None, _cut(x, chunk))
        return _join(y, T)

    return each_device(local, axes, (WHOLE, ROWS), ROWS)(params, x)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Wanted:
    """Of each leaf of `params`, whether it is differentiated."""

    leaves: tuple[bool, ...]


def _forward(f, chunk, axes, params, x):
    wanted = _Wanted(tuple(p.perturbed for p in jax.tree.leaves(params)))
    params, x = jax.tree.map(lambda p: p.value, (params, x))
    return _feed_forward(f, chunk, axes, params, x), (params, x, wanted)


def _backward(f, chunk, axes, saved, dy):
    params, x, wanted = saved

    def local(params, x, dy, axes):
        traced, whole = _split(params, wanted.leaves)
        sums = [jnp.zeros_like(p, jnp.float32) for p in traced]

        def one(sums, chunks):
            x, dy = chunks
            moving, rest = _split(x)
            _, pull = jax.vjp(lambda p, m: _split(f(whole(p), rest(m)))[0], traced, moving)
            dparams, dx = pull(dy)
            return [s + d.astype(jnp.float32) for s, d in zip(sums, dparams, strict=True)], dx

        T = jax.tree.leaves(x)[0].shape[1]
        # Tokens past the end get a zero cotangent.
        sums, dx = jax.lax.scan(one, sums, (_cut(x, chunk), _cut(dy, chunk, "constant")))
        return jax.lax.psum(sums, axes), _join(dx, T)

    dy = [_whole(d) for d in jax.tree.leaves(dy) if d.dtype != jax.dtypes.float0]
    sums, dx = each_device(local, axes, (WHOLE, ROWS, ROWS), (WHOLE, ROWS))(params, x, dy)
    (traced, whole), (_, rest) = _split(params, wanted.leaves), _split(x)
    dparams = [s.astype(p.dtype) for s, p in zip(sums, traced, strict=True)]
    return whole(dparams, cotangent=True), rest(dx, cotangent=True)


_feed_forward.defvjp(_forward, _backward, symbolic_zeros=True)


def _whole(cotangent: Any) -> Array:
    zero = isinstance(cotangent, SymbolicZero)
    return jnp.zeros(cotangent.shape, str(cotangent.dtype)) if zero else cotangent


def _is_float(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _split(
    tree: PyTree, wanted: tuple[bool, ...] | None = None
) -> tuple[list[Array], Callable[..., PyTree]]:
    """The leaves that take gradients, floats that are `wanted`, and the function that puts such a
    list back among the others; as a `cotangent`, None, which is zero, stands for them."""
    leaves, structure = jax.tree.flatten(tree)
    takes = [_is_float(x) for x in leaves]
    if wanted is not None:
        takes = [t and w for t, w in zip(takes, wanted, strict=True)]

    def whole(moving, cotangent=False):
        moving = iter(moving)
        each = zip(leaves, takes, strict=True)
        return structure.unflatten(
            [next(moving) if t else None if cotangent else x for x, t in each]
        )

    return [x for x, t in zip(leaves, takes, strict=True) if t], whole


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
