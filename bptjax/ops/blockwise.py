"""Algorithm 1 of the Blockwise Parallel Transformer, and position-wise functions in chunks of
tokens.

    for each block of queries:                    blockwise_transformer -> blockwise
        q <- query projection of the block        query(params, x)
        out <- attention(q, all keys, all values) attention: loops over the key blocks
        x <- feed-forward(x + projection(out))    finish(params, x, out)

Liu & Abbeel 2023, https://arxiv.org/abs/2305.19370.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Float

from bptjax.ops.arguments import check_chunk, check_tokens
from bptjax.ops.attention import attention
from bptjax.ops.chunks import join_chunks, split_chunks
from bptjax.ops.mask import Mask
from bptjax.ops.per_device import REPLICATED, SHARDED, Placement, per_device, sharding_axes

PyTree = Any


def blockwise_transformer(
    query: Callable[[PyTree, PyTree], Array],
    finish: Callable[..., PyTree],
    params: PyTree,
    x: PyTree,
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    mask: Mask = Mask(causal=True),  # noqa: B008 (frozen)
    alibi: Float[Array | np.ndarray, "N"] | None = None,
    sinks: Float[Array | np.ndarray, "N"] | None = None,
    dropout_key: Array | None = None,
    q_chunk: int = 512,
    has_aux: bool = False,
    **options,
) -> PyTree:
    """Computes `finish(params, x, attention(query(params, x), k, v))` one query block at a time.

    Only keys and values exist at full length; queries, attention output and the activations of the
    feed-forward exist for one block. The backward pass recomputes each block; gradients of
    `params`, `k`, `v` and `sinks` accumulate in float32.

    Args:
      query: position-wise, maps (params, chunk of x) to `[B, chunk, N, H]`.
      finish: position-wise, maps (params, chunk of x, attention output `[B, chunk, N, H]`) to a
        pytree of `[B, chunk, ...]`: output projection, residual, norm, feed-forward. Neither
        function may close over traced values.
      params: pytree shared by all chunks.
      x: pytree of `[B, T, ...]`.
      mask, alibi, sinks, dropout_key, options: as in `attention`.
      has_aux: `finish` takes one more argument and returns a pair, like `f` of `blockwise`.

    Returns:
      pytree of `[B, T, ...]`; with `has_aux`, also the sums, as in `blockwise`.

    Raises:
      ValueError, NotImplementedError: as in `attention` and `blockwise`.

    Liu & Abbeel 2023, https://arxiv.org/abs/2305.19370, Algorithm 1.
    """
    check_chunk(q_chunk=q_chunk)
    check_tokens(jax.tree.leaves(x))
    B, T, S = k.shape[0], _tokens(x), k.shape[1]
    mask.check(B, T, S)
    resolved = mask.resolve(T, S)
    of_queries = {
        "positions": _per_sequence(resolved.positions, B),
        "segments": _per_sequence(resolved.segments, B),
        "global_tokens": _per_sequence(resolved.global_tokens, B),
        "depths": _per_sequence(resolved.depths, B),
    }
    of_keys = {
        "k_positions": jnp.asarray(resolved.k_positions),
        "k_segments": resolved.k_segments,
        "k_global_tokens": resolved.k_global_tokens,
        "k_depths": resolved.k_depths,
        "ends": resolved.ends,
        "block_mask": resolved.block_mask,
    }

    def block(shared, chunk, *inside):
        params, k, v, of_keys, alibi, sinks, key = shared
        x, of_queries = chunk
        out = attention(
            query(params, x),
            k,
            v,
            mask=replace(mask, **of_queries, **of_keys),
            alibi=alibi,
            sinks=sinks,
            dropout_key=key,
            q_chunk=q_chunk,
            **options,
        )
        return finish(params, x, out, *inside)

    shared = (params, k, v, of_keys, alibi, sinks, dropout_key)
    return blockwise(block, shared, (x, of_queries), chunk=q_chunk, has_aux=has_aux)


def _per_sequence(x: Any, batch: int) -> Array | None:
    """Broadcasts `[T]` or `[B, T]` to `[B, T]`."""
    return None if x is None else jnp.broadcast_to(jnp.asarray(x), (batch, x.shape[-1]))


def blockwise(
    f: Callable[..., PyTree],
    params: PyTree,
    x: PyTree,
    *,
    chunk: int,
    axes: tuple[str, ...] = (),
    placement: PyTree = REPLICATED,
    has_aux: bool = False,
) -> PyTree:
    """Computes `f(params, x)` for a position-wise `f`, in the memory of one chunk.

    A single chunk is computed as plain `f(params, x)`, and remat policies see its activations.

    The residuals of the backward pass are only `params` and `x`. The backward pass reruns `f` chunk
    by chunk, and accumulates the gradients of differentiated `params` in float32. Gradients of `x`
    overwrite cotangents of their shape, and equal ones are one array. Put norm and residual inside
    `f`: then nothing wider than `x` exists at full length.

    Args:
      f: takes `params` and a chunk of `x`, returns a pytree of `[B, chunk, ...]`. It must not close
        over traced values; pass them in `params` (shared by all chunks) or `x`. Both and the result
        may have integer leaves.
      params: pytree of arrays.
      x: pytree of `[B, T, ...]` arrays.
      chunk: tokens; T need not be a multiple. If it is not, `f` also runs on copies of the last
        token, whose results are dropped.
      axes: mesh axes that shard the batch dimension: with more than one chunk, each device sums the
        gradients of `params` over its own sequences.
      placement: of each array of `params` on these mesh axes, as a tree prefix; see `per_device`.
      has_aux: `f` takes a third argument, `[chunk]`, which is false for copies of the last token,
        and returns a pair: the result, and a pytree of float32 sums `[B, ...]` over the other
        tokens, for example for an auxiliary loss.

    Returns:
      pytree of `[B, T, ...]` arrays; with `has_aux`, also the sums over all chunks.

    Raises:
      ValueError: a chunk below 1; arrays of `x` that are empty or differ in batch or tokens.

    Liu & Abbeel 2023, https://arxiv.org/abs/2305.19370, Section 3.
    """
    check_chunk(chunk=chunk)
    check_tokens(jax.tree.leaves(x))
    with_aux = f if has_aux else lambda params, x, _: (f(params, x), ())
    if chunk >= _tokens(x):
        y, sums = with_aux(params, x, jnp.ones(_tokens(x), bool))
    else:
        params, x = jax.tree.map(jnp.asarray, (params, x))
        placements = tuple(jax.tree.leaves(jax.tree.broadcast(placement, params)))
        y, sums = _blockwise(with_aux, chunk, axes, placements, params, x)
    return (y, sums) if has_aux else y


def _inside(chunk: int, T: int) -> Array:
    """Returns which tokens of each chunk are among the T tokens; the others are padding."""
    return (jnp.arange(-(-T // chunk) * chunk) < T).reshape(-1, chunk)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _blockwise(f, chunk, axes, placements, params, x):
    T = _tokens(x)

    def local(params, x, axes):
        chunks = _split_tree(x, chunk), _inside(chunk, T)
        _, (y, sums) = jax.lax.scan(lambda _, chunk: (None, f(params, *chunk)), None, chunks)
        return _join_tree(y, T), jax.tree.map(lambda s: s.sum(0), sums)

    placement = jax.tree.unflatten(jax.tree.structure(params), placements)
    return per_device(local, axes, (placement, SHARDED), SHARDED)(params, x)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Differentiated:
    """A flag per leaf of `params`: true if it is differentiated."""

    leaves: tuple[bool, ...]


def _forward(f, chunk, axes, placements, params, x):
    differentiated = _Differentiated(tuple(p.perturbed for p in jax.tree.leaves(params)))
    params, x = jax.tree.map(lambda p: p.value, (params, x))
    return _blockwise(f, chunk, axes, placements, params, x), (params, x, differentiated)


def _backward(f, chunk, axes, placements, residuals, cotangents):
    params, x, differentiated = residuals
    T = _tokens(x)
    placement = jax.tree.unflatten(jax.tree.structure(params), placements)
    pairs = zip(jax.tree.leaves(params), placements, differentiated.leaves, strict=True)
    of_sums = [place for p, place, d in pairs if d and jnp.issubdtype(p.dtype, jnp.inexact)]

    def local(params, x, dy, dsums, axes):
        floats, with_params = _partition(params, differentiated.leaves)
        sums = [jnp.zeros_like(p, jnp.float32) for p in floats]
        places: list[int] = []  # Of the gradients of x; known once `scan` has traced `add`.

        def add(carry, chunks):
            (sums, dy), (i, x, inside) = carry, chunks
            x_floats, with_x = _partition(x)
            own: list[Array] = [jax.lax.dynamic_index_in_dim(d, i, keepdims=False) for d in dy]

            def run(p, y):
                y, aux = f(with_params(p), with_x(y), inside)
                return _partition(y)[0], jax.tree.leaves(aux)

            _, pull = jax.vjp(run, floats, x_floats)
            dparams, dx = pull((own, dsums))
            sums = [s + d.astype(jnp.float32) for s, d in zip(sums, dparams, strict=True)]
            places[:], unique = _unique(dx, own)
            dy = [d if y is None else d.at[i].set(y) for d, y in zip(dy, unique, strict=False)]
            return (sums, dy), unique[len(dy) :]

        # Padded tokens get a zero cotangent.
        dy = _split_tree(dy, chunk, mode="constant")
        inside = _inside(chunk, T)
        chunks = jnp.arange(len(inside)), _split_tree(x, chunk), inside
        (sums, dy), others = jax.lax.scan(add, (sums, dy), chunks)
        sums = [_add_up(s, place, axes) for s, place in zip(sums, of_sums, strict=True)]
        dx = _join_tree([*dy, *others], T)
        return sums, [dx[place] for place in places]

    dy, dsums = ([_dense(d) for d in jax.tree.leaves(tree) if _is_float(d)] for tree in cotangents)
    inputs, results = (placement, SHARDED, SHARDED, SHARDED), (of_sums, SHARDED)
    sums, dx = per_device(local, axes, inputs, results)(params, x, dy, dsums)
    (floats, with_params), (_, with_x) = _partition(params, differentiated.leaves), _partition(x)
    dparams = [s.astype(p.dtype) for s, p in zip(sums, floats, strict=True)]
    return with_params(dparams, cotangent=True), with_x(dx, cotangent=True)


def _add_up(x: Array, placement: Placement, axes: tuple[str, ...]) -> Array:
    """Sums over the mesh axes that do not shard an array with this placement."""
    own = sharding_axes(placement, axes)
    return jax.lax.psum(x, tuple(name for name in axes if name not in own))


_blockwise.defvjp(_forward, _backward, symbolic_zeros=True)


def _unique(dx: list[Array], dy: list[Array]) -> tuple[list[int], list[Array | None]]:
    """Returns the arrays of `dx` without repetitions, and the place of each array of `dx` among
    them. The first places belong to the arrays of `dy`: each has an array of its shape and dtype,
    which may overwrite it, or None."""
    unique: list[Array | None] = [None] * len(dy)
    for x in dx:
        if not any(x is y for y in unique):
            same = (
                i
                for i, (y, d) in enumerate(zip(unique, dy, strict=False))
                if y is None and (d.shape, d.dtype) == (x.shape, x.dtype)
            )
            if (place := next(same, None)) is None:
                unique.append(x)
            else:
                unique[place] = x
    return [next(i for i, y in enumerate(unique) if y is x) for x in dx], unique


def _is_float(cotangent: Any) -> bool:
    return cotangent.dtype != jax.dtypes.float0


def _dense(cotangent: Any) -> Array:
    zero = isinstance(cotangent, SymbolicZero)
    return jnp.zeros(cotangent.shape, str(cotangent.dtype)) if zero else cotangent


def _partition(
    tree: PyTree, differentiated: tuple[bool, ...] | None = None
) -> tuple[list[Array], Callable[..., PyTree]]:
    """Returns the float leaves (only the `differentiated` ones), and a function that puts such
    leaves back into the tree; in a `cotangent` all other leaves are None, which stands for 0."""
    leaves, structure = jax.tree.flatten(tree)
    selected = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
    if differentiated is not None:
        selected = [s and d for s, d in zip(selected, differentiated, strict=True)]

    def combine(floats, cotangent=False):
        floats = iter(floats)
        return structure.unflatten(
            [
                next(floats) if s else None if cotangent else x
                for x, s in zip(leaves, selected, strict=True)
            ]
        )

    return [x for x, s in zip(leaves, selected, strict=True) if s], combine


def _tokens(x: PyTree) -> int:
    return jax.tree.leaves(x)[0].shape[1]


def _split_tree(tree: PyTree, chunk: int, mode: str = "edge") -> PyTree:
    return jax.tree.map(lambda x: split_chunks(x, chunk, mode=mode), tree)


def _join_tree(tree: PyTree, T: int) -> PyTree:
    return jax.tree.map(lambda x: join_chunks(x, T), tree)
