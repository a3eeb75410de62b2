"""Soft-capped logits, and online softmax: attention to one set of keys, merged with attention to
another set."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from bptjax.ops.target import platform


class AttentionState(NamedTuple):
    """Attention to a subset of the keys, which can be merged with attention to another subset.

    Attributes:
      out: softmax-weighted mean of these keys' values; 0 where a query attends to no key.
      lse: float32 log-sum-exp of the logits; -inf where a query attends to no key.
    """

    out: Float[Array, "B T N H"]
    lse: Float[Array, "B T N"]


def soft_cap(logits: Array, cap: float | None) -> tuple[Array, Array | float]:
    """Returns soft-capped logits and their derivative with respect to the uncapped logits."""
    if cap is None:
        return logits, 1.0
    tanh = jnp.tanh(logits / cap)
    return cap * tanh, 1.0 - tanh * tanh


def logsumexp(logits: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """Returns the log-sum-exp over the last axis. Has no gradient."""
    # A GPU is bound by memory, so it reads the logits once. Elsewhere the additional exponentials
    # would cost more.
    return _in_one_pass(logits) if platform() == "gpu" else jax.nn.logsumexp(logits, -1)


def _in_one_pass(logits: Array) -> Array:
    """Computes `logsumexp` in one reduction to the maximum and the sum of exp(logit - maximum)."""

    def merge(a, b):
        (i, m), (j, n) = a, b
        top = jnp.maximum(i, j)
        smaller, larger = jnp.where(i < j, m, n), jnp.where(i < j, n, m)
        return top, larger + smaller * jnp.exp(jnp.minimum(i, j) - top)

    # Not -inf: its difference from itself is NaN.
    start = jnp.finfo(logits.dtype).min, jnp.zeros((), logits.dtype)
    operands = logits, jnp.ones_like(logits)
    top, total = jax.lax.reduce(operands, start, merge, (logits.ndim - 1,))
    return top + jnp.log(total)


def empty_state(q: Float[Array, "B T N H"]) -> AttentionState:
    """Returns attention to no keys, in float32."""
    lse = jnp.full_like(q[..., 0], -jnp.inf, jnp.float32)
    return AttentionState(jnp.zeros_like(q, jnp.float32), lse)


def merge_states(a: AttentionState, b: AttentionState) -> AttentionState:
    """Returns attention to the union of two disjoint sets of keys; `out` is float32. Milakov &
    Gimelshein 2018, arXiv 1805.02867."""
    lse = jnp.logaddexp(a.lse, b.lse)
    shift = jnp.where(lse == -jnp.inf, 0.0, lse)
    weight_a, weight_b = jnp.exp(a.lse - shift)[..., None], jnp.exp(b.lse - shift)[..., None]
    out = weight_a * a.out.astype(jnp.float32) + weight_b * b.out.astype(jnp.float32)
    return AttentionState(out, lse)


class OnlineSoftmax(NamedTuple):
    """Softmax over the keys visited so far, not yet normalized.

    Attributes:
      acc: float32 `[..., t, H]`, weighted sum of the values.
      row_max: float32 `[..., t]`, largest logit.
      row_sum: float32 `[..., t]`, sum of exp(logit - row_max).
    """

    acc: Array
    row_max: Array
    row_sum: Array

    @classmethod
    def start(cls, like: Array) -> "OnlineSoftmax":
        """Returns the softmax over no keys, for queries shaped like `[..., t, H]`."""
        acc = jnp.zeros_like(like, jnp.float32)
        return cls(acc, jnp.full_like(acc[..., 0], -jnp.inf), jnp.zeros_like(acc[..., 0]))

    def update(self, logits: Array) -> tuple["OnlineSoftmax", Array]:
        """Adds keys with logits `[..., t, s]`. Returns the softmax with `acc` rescaled, and the new
        keys' weights exp(logits - row_max), whose product with the values the caller adds to `acc`.
        """
        row_max = jnp.maximum(self.row_max, logits.max(-1))
        shift = jnp.where(row_max == -jnp.inf, 0.0, row_max)
        weights = jnp.exp(logits - shift[..., None])
        decay = jnp.exp(self.row_max - shift)
        row_sum = decay * self.row_sum + weights.sum(-1)
        return OnlineSoftmax(decay[..., None] * self.acc, row_max, row_sum), weights

    def normalize(self) -> tuple[Array, Array]:
        """Returns `(out, lse)`, float32 `[..., t, H]` and `[..., t]`."""
        row_sum = jnp.where(self.row_sum == 0.0, 1.0, self.row_sum)
        return self.acc / row_sum[..., None], self.row_max + jnp.log(row_sum)
