"""Arrays in few bits: block-wise codes with a code book, rounded to nearest or stochastically, and
bfloat16, rounded stochastically."""

import math
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, UInt8, UInt16, UInt32

# Elements that share one absolute maximum.
BLOCK = 256


@lru_cache
def dynamic_codebook(signed: bool) -> np.ndarray:
    """Dynamic (tree) quantisation's 256 values, ascending, the greatest of them 1: of each decade
    from 1e-7 to 1 twice as many as of the one below. float32 `[256]`.

    Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861, Section
    1.3; unsigned, the sign's bit is one more of the fraction (Section 2.2).
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        means = 10.0 ** (decade - 6) * (edges[1:] + edges[:-1]) / 2
        values += [*means, *(-means if signed else ())]
    return np.sort(np.asarray(values, np.float32))


def quantize(
    x: Float[Array, "*b S"], codebook: np.ndarray, noise: UInt16[Array, "*b S"] | None = None
) -> tuple[UInt8[Array, "*b S"], Float[Array, "*b C"]]:
    """`x` as codes, and the absolute maximum of each block of 256 along the last axis, the last of
    which may be shorter: C = ⌈S / 256⌉.

    Args:
      codebook: ascending `[2**n]`, n ≤ 8, within [-1, 1].
      noise: uniform random bits, for stochastic rounding: what comes back from `dequantize` is `x`
        in the mean. None rounds to the nearest.
    """
    x = x.astype(jnp.float32)
    S, short = x.shape[-1], -x.shape[-1] % BLOCK
    blocks = jnp.pad(jnp.abs(x), [(0, 0)] * (x.ndim - 1) + [(0, short)])
    absmax = blocks.reshape(*x.shape[:-1], -1, min(BLOCK, S + short)).max(-1)
    x = x / _each(jnp.where(absmax > 0, absmax, 1.0), S)
    book = jnp.asarray(codebook)
    half = len(codebook) // 2
    below = jnp.where(x >= book[half], half, 0)
    while half := half // 2:
        below = jnp.where(x >= book[below + half], below + half, below)
    above = jnp.minimum(below + 1, len(codebook) - 1)
    low, high = book[below], book[above]
    part = 0.5 if noise is None else (noise.astype(jnp.float32) + 0.5) / 2**16
    return jnp.where(x - low > part * (high - low), above, below).astype(jnp.uint8), absmax


def dequantize(
    codes: UInt8[Array, "*b S"], absmax: Float[Array, "*b C"], codebook: np.ndarray
) -> Float[Array, "*b S"]:
    """What `quantize` made, in float32."""
    return jnp.asarray(codebook)[codes.astype(jnp.int32)] * _each(absmax, codes.shape[-1])


def _each(blocks: Float[Array, "*b C"], size: int) -> Float[Array, "*b S"]:
    """A number of each block, for each of the `size` elements."""
    return jnp.repeat(blocks, BLOCK, axis=-1)[..., :size]


def random_bits(
    key: Array, shape: tuple[int, ...]
) -> tuple[UInt32[Array, "*b"], UInt32[Array, "*b"]]:
    """Two words for each element, by its number: what rounding needs, at a tenth of the price of
    `jax.random.bits`; not for sampling.

    Murmur3's finalizer (Appleby 2011) over number and key. Numbers are 32 bits: elements 2³² apart
    share theirs.
    """

    def mixed(x):
        x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
        return x ^ (x >> 16)

    number = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
    one, other = jax.random.bits(key, (2,))
    first = mixed(mixed(number ^ one) + other)
    return first, mixed(first + jnp.uint32(0x9E3779B9))


def stochastic_round(x: Float[Array, "*b"], noise: UInt16[Array, "*b"]) -> Float[Array, "*b"]:
    """float32 as bfloat16, rounded up or down with the probabilities that make it `x` in the mean.

    Args:
      noise: uniform random bits.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    bits = (bits + noise.astype(jnp.uint32)) >> 16
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
