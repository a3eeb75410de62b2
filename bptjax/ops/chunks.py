"""Divides sequences into chunks of equal length, and joins them."""

import jax.numpy as jnp
from jax import Array


def split_chunks(x: Array, chunk: int, **pad) -> Array:
    """Reshapes `[B, T, ...]` to `[n, B, chunk, ...]`; `pad` goes to `jnp.pad`."""
    chunk = min(chunk, x.shape[1])
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % chunk)] + [(0, 0)] * (x.ndim - 2), **pad)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)


def join_chunks(x: Array, T: int) -> Array:
    """Reshapes `[n, B, chunk, ...]` to `[B, T, ...]` without the padding."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :T]
