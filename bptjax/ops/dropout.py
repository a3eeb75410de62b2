"""Dropout that depends only on an element's row and column, not on chunks or shards."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, UInt32

from bptjax.ops.arguments import check_rate

MULTIPLIER, KEY_STEP = 0xD256D193, 0x9E3779B9
ROUNDS: int = 7
# Columns that differ only in this bit use the two words of one block. One GPU thread holds the
# weights of both columns, in a tile of attention and in its transpose.
PAIR = 8


def keep(
    key: Array, rate: float, rows: Int[Array, "*r t"], columns: Int[Array, "*r s"]
) -> Bool[Array, "*r t s"]:
    """Returns True with probability 1 - rate, independently for each (key, row, column).

    The bit of element (row, column) comes from a Philox-2x32 block under `key` whose counter is the
    row and the column without bit `PAIR`; that bit selects the word. So an element gets the same
    bit in any tile, in the forward and in the backward pass, and no bits are stored.

    Args:
      key: uint32 `[*r, 2]`, key data.
      rate: probability of False, in [0, 1).
    """
    if key.ndim > 1:
        return jax.vmap(keep, (0, None, 0, 0))(key, rate, rows, columns)
    rows, columns = rows.astype(jnp.uint32)[:, None], columns.astype(jnp.uint32)[None, :]
    first, second = philox(key, rows, columns - (columns & PAIR))
    words = jnp.where(columns & PAIR != 0, second, first)
    return words >= jnp.uint32(round(rate * 2**32))


def philox(
    key: UInt32[Array, "2"], rows: UInt32[Array, "*#t"], columns: UInt32[Array, "*#t"]
) -> tuple[UInt32[Array, "*t"], UInt32[Array, "*t"]]:
    """Returns the two random words of Philox-2x32 for each counter, with the fewest rounds that
    pass BigCrush. Philox's key has one word; the second word of `key` enters the counter. Salmon et
    al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 4.
    """
    x, y = columns ^ key[1], rows
    for step in range(ROUNDS):
        round_key = key[0] + jnp.uint32(step * KEY_STEP % 2**32)
        x, y = _high_word(x) ^ round_key ^ y, x * jnp.uint32(MULTIPLIER)
    return x, y


def _high_word(x: UInt32[Array, "*t"]) -> UInt32[Array, "*t"]:
    """Returns the upper 32 of the 64 bits of x · MULTIPLIER, from 16-bit products."""
    half = jnp.uint32(0xFFFF)
    low, high = x & half, x >> 16
    m_low, m_high = jnp.uint32(MULTIPLIER & 0xFFFF), jnp.uint32(MULTIPLIER >> 16)
    cross, other = low * m_high, high * m_low
    carry = (low * m_low >> 16) + (cross & half) + (other & half)
    return high * m_high + (cross >> 16) + (other >> 16) + (carry >> 16)


def dropout(
    x: Float[Array, "B T D"],
    key: Array | None,
    rate: float,
    rows: Int[Array, "B T"],
    first: Int[Array, "*#D"] | int = 0,
) -> Float[Array, "B T D"]:
    """Drops elements of `x` and scales the rest by 1 / (1 - rate).

    Args:
      key: uint32 `[2]` key data; None drops nothing.
      rows: a number per token, unique in the batch. Equal numbers drop equal elements.
      first: number to add to the index of all columns, or of each column, if these are only some of
        the columns.
    """
    check_rate(rate=rate)
    if key is None or rate == 0.0:
        return x
    columns = first + jnp.arange(x.shape[-1])
    kept = keep(key, rate, rows.reshape(-1), columns).reshape(x.shape)
    return jnp.where(kept, x / (1.0 - rate), 0.0).astype(x.dtype)
