"""First-order Taylor attention: exp(x) ≈ 1 + x. The keys are summed once, into arrays whose size
does not depend on the number of keys."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from bptjax.ops.arguments import check_qkv


def taylor_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    keys: Bool[Array, "B S"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attention in which query i gives key j the weight 1 + q_i·k_j / (|q_i| |k_j|), divided by the
    sum of its weights; not causal, O(T) time and memory. Computes in float32.

    On a mesh that shards the tokens, devices exchange `[K, H, H + 1]` sums per sequence,
    independent of T.

    Args:
      keys: True for the keys to attend to; all if left out. If no key is True, the result is 0.

    Raises:
      ValueError: mismatched shapes or dtypes of q, k, v and keys.

    Li et al. 2020, arXiv 2007.14902, Section 3.
    """
    check_qkv(q, k, v)
    if keys is not None and keys.shape != k.shape[:2]:
        raise ValueError(f"keys: must be {k.shape[:2]}, as k, not {keys.shape}")
    (B, T, N, H), K = q.shape, k.shape[2]
    q, k = (_unit(x.astype(jnp.float32)) for x in (q, k))
    allowed = jnp.ones(k.shape[:2]) if keys is None else keys.astype(jnp.float32)
    # A column of ones after the values gives numerator and denominator in one product.
    ones = jnp.ones((*v.shape[:3], 1))
    values = jnp.concatenate([v.astype(jnp.float32), ones], -1) * allowed[:, :, None, None]
    linear = jnp.einsum("bskh,bske->bkhe", k, values)
    constant = values.sum(1)
    q = q.reshape(B, T, K, N // K, H)
    both = jnp.einsum("btkgh,bkhe->btkge", q, linear) + constant[:, None, :, None]
    total = both[..., H:]
    out = jnp.where(total > 0, both[..., :H] / jnp.where(total > 0, total, 1.0), 0.0)
    return out.reshape(B, T, N, H).astype(v.dtype)


def _unit(x: Array) -> Array:
    """Scales the last axis to length 1; 0 stays 0."""
    return x * jax.lax.rsqrt(jnp.maximum(jnp.square(x).sum(-1, keepdims=True), 1e-12))
