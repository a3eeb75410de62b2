"""Normalization over the last axis, in float32 for any input dtype."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


def rms_norm(
    x: Float[Array, "*b D"], scale: Float[Array, "D"], *, eps: float = 1e-6
) -> Float[Array, "*b D"]:
    """Computes x / rms(x) · scale. Zhang & Sennrich 2019, arXiv 1910.07467."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    return (y * _broadcast(scale, y)).astype(x.dtype)


def layer_norm(
    x: Float[Array, "*b D"],
    scale: Float[Array, "D"],
    bias: Float[Array, "D"] | None = None,
    *,
    eps: float = 1e-5,
) -> Float[Array, "*b D"]:
    """Computes (x - mean) / std · scale + bias. Ba et al. 2016, arXiv 1607.06450."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, -1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps) * _broadcast(scale, y)
    return (y if bias is None else y + _broadcast(bias, y)).astype(x.dtype)


def l2_norm(x: Float[Array, "*b D"], *, eps: float = 1e-6) -> Float[Array, "*b D"]:
    """Computes x / sqrt(|x|² + eps)."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.sum(y * y, -1, keepdims=True) + eps)).astype(x.dtype)


def _broadcast(v: Array, like: Array) -> Array:
    """Reshapes `v` `[D]` to the number of axes of `like`, in float32."""
    return v.astype(jnp.float32).reshape((1,) * (like.ndim - 1) + v.shape)
