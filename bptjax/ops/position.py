"""Where a token stands: rotary embedding and ALiBi slopes, in float32."""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int


def rope_frequencies(size: int, theta: float = 10_000.0) -> Float[np.ndarray, "R"]:
    """Radians per token of each rotated pair: theta^(-2i / size). Su et al. 2021, arXiv 2104.09864,
    Section 3.2.2."""
    return (theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)).astype(np.float32)


def rope(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    frequencies: Float[Array | np.ndarray, "R"],
) -> Float[Array, "B T N H"]:
    """Rotates the first 2R of the H features by position · frequency; the others pass. Hugging
    Face's half-split layout: feature i turns with feature i + R."""
    R = frequencies.shape[0]
    angle = positions.astype(jnp.float32)[..., None, None] * jnp.asarray(frequencies).reshape(
        1, 1, 1, R
    )
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :R].astype(jnp.float32), x[..., R : 2 * R].astype(jnp.float32)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
    return turned if 2 * R == x.shape[-1] else jnp.concatenate([turned, x[..., 2 * R :]], -1)


def alibi_slopes(heads: int) -> Float[np.ndarray, "heads"]:
    """ALiBi's slope of each head: 2^(-8i / N) for a power of two, else those of the next smaller
    one followed by every other one of the next larger. Press et al. 2021, arXiv 2108.12409, and its
    code."""
    base = 2 ** math.floor(math.log2(heads))
    slopes = 2.0 ** (-8.0 * np.arange(1, base + 1) / base)
    extra = 2.0 ** (-4.0 * np.arange(1, 2 * (heads - base), 2) / base)
    return np.concatenate([slopes, extra]).astype(np.float32)
