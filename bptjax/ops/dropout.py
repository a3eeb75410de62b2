"""Dropout that depends on an element's row and column alone, not on how the work is divided into
chunks or shards."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.random import threefry_2x32
from jaxtyping import Bool, Float, Int

from bptjax.ops.arguments import check_rate


def keep(
    key: Array, rate: float, rows: Int[Array, "*r t"], columns: Int[Array, "*r s"]
) -> Bool[Array, "*r t s"]:
    """Returns True with probability 1 - rate, independently for each (key, row, column).

    The bit of element (row, column) comes from the Threefry-2x32 block of that counter under `key`.
    So an element gets the same bit in any tile, in the forward and in the backward pass, and no
    bits are stored. Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".

    Args:
      key: uint32 `[*r, 2]`, key data.
      rate: probability of False, in [0, 1).
    """
    if key.ndim > 1:
        return jax.vmap(keep, (0, None, 0, 0))(key, rate, rows, columns)
    t, s = rows.shape[-1], columns.shape[-1]
    counter = jnp.stack(
        [
            jnp.broadcast_to(rows.astype(jnp.uint32)[:, None], (t, s)),
            jnp.broadcast_to(columns.astype(jnp.uint32)[None, :], (t, s)),
        ]
    )
    bits = threefry_2x32(key, counter)[0]
    return bits >= jnp.uint32(round(rate * 2**32))


def dropout(
    x: Float[Array, "B T D"],
    key: Array | None,
    rate: float,
    rows: Int[Array, "B T"],
) -> Float[Array, "B T D"]:
    """Drops elements of `x` and scales the rest by 1 / (1 - rate).

    Args:
      key: uint32 `[2]` key data; None drops nothing.
      rows: a number for each token, unique in the batch. The same numbers drop the same elements.
    """
    check_rate(rate=rate)
    if key is None or rate == 0.0:
        return x
    kept = keep(key, rate, rows.reshape(-1), jnp.arange(x.shape[-1])).reshape(x.shape)
    return jnp.where(kept, x / (1.0 - rate), 0.0).astype(x.dtype)
