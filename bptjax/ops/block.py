"""The Blockwise Parallel Transformer's Algorithm 1: for each block of queries, attention and then
the feed-forward, in one scan."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from bptjax.ops.arguments import check_chunk, check_tokens
from bptjax.ops.attention import attention
from bptjax.ops.feed_forward import feed_forward
from bptjax.ops.mask import Mask

PyTree = Any


def block(
    query: Callable[[PyTree, PyTree], Array],
    finish: Callable[[PyTree, PyTree, Array], PyTree],
    params: PyTree,
    x: PyTree,
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    mask: Mask = Mask(causal=True),  # noqa: B008 (frozen)
    alibi: Float[Array | np.ndarray, "N"] | None = None,
    dropout_key: Array | None = None,
    q_chunk: int = 512,
    **options,
) -> PyTree:
    """`finish(params, x, attention(query(params, x), k, v))`, a block of queries at a time.

    Keys and values alone exist at full length; queries, attention output and the feed-forward's
    insides exist for one block. The backward pass runs each block again; gradients of `params`, `k`
    and `v` accumulate in float32.

    Args:
      query: position-wise, (params, chunk of x) to `[B, chunk, N, H]`.
      finish: position-wise, (params, chunk of x, attention's output `[B, chunk, N, H]`) to a pytree
        of `[B, chunk, ...]`: output projection, residual, norm, feed-forward. Neither may close
        over traced values.
      params: pytree shared by all chunks.
      x: pytree of `[B, T, ...]`.
      mask, alibi, dropout_key, options: as in `attention`.

    Returns:
      pytree of `[B, T, ...]`.

    Raises:
      ValueError, NotImplementedError: as `attention` and `feed_forward`.

    Liu & Abbeel 2023, https://arxiv.org/abs/2305.19370, Algorithm 1.
    """
    check_chunk(q_chunk=q_chunk)
    check_tokens(jax.tree.leaves(x))
    T = jax.tree.leaves(x)[0].shape[1]
    mask.check(k.shape[0], T, k.shape[1])
    whole = mask.each_window()[0].resolve(T, k.shape[1])
    B = k.shape[0]
    rows = {
        "positions": _rows(whole.positions, B),
        "segments": whole.segments,
        "global_tokens": _rows(whole.global_tokens, B),
    }
    columns = {
        "k_positions": jnp.asarray(whole.k_positions),
        "k_segments": whole.k_segments,
        "window_index": mask.window_index,
        "k_global_tokens": whole.k_global_tokens,
        "block_mask": whole.block_mask,
    }

    def one(shared, chunk):
        params, k, v, columns, alibi, key = shared
        x, rows = chunk
        out = attention(
            query(params, x),
            k,
            v,
            mask=replace(mask, **rows, **columns),
            alibi=alibi,
            dropout_key=key,
            q_chunk=q_chunk,
            **options,
        )
        return finish(params, x, out)

    shared = (params, k, v, columns, alibi, dropout_key)
    return feed_forward(one, shared, (x, rows), chunk=q_chunk)


def _rows(x: Any, batch: int) -> Array | None:
    """`[T]` or `[B, T]` to `[B, T]`."""
    return None if x is None else jnp.broadcast_to(jnp.asarray(x), (batch, x.shape[-1]))
