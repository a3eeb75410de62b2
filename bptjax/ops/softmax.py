"""The online-softmax algebra: attention over a part of the keys, and how parts become the whole."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


class Partial(NamedTuple):
    """Attention over some of the keys: all that is needed to merge it with attention over others.

    Attributes:
      out: `[B, T, N, H]`, softmax-weighted mean of those keys' values; 0 where a query sees none of
        them.
      lse: float32 `[B, T, N]`, log-sum-exp of the logits; -inf where a query sees none.
    """

    out: Float[Array, "B T N H"]
    lse: Float[Array, "B T N"]


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the union of two disjoint sets of keys; float32 out. Milakov & Gimelshein
    2018, arXiv 1805.02867."""
    lse = jnp.logaddexp(a.lse, b.lse)
    shift = jnp.where(lse == -jnp.inf, 0.0, lse)
    weight_a, weight_b = jnp.exp(a.lse - shift)[..., None], jnp.exp(b.lse - shift)[..., None]
    return Partial(weight_a * a.out + weight_b * b.out, lse)


class Running(NamedTuple):
    """Softmax over the keys met so far, not yet divided: `acc` float32 `[..., t, H]`, `top` and
    `total` float32 `[..., t]`."""

    acc: Array
    top: Array
    total: Array

    @classmethod
    def start(cls, like: Array) -> "Running":
        """No key met yet, for rows shaped like `[..., t, H]`."""
        acc = jnp.zeros_like(like, jnp.float32)
        return cls(acc, jnp.full_like(acc[..., 0], -jnp.inf), jnp.zeros_like(acc[..., 0]))

    def rescale(self, logits: Array) -> tuple["Running", Array]:
        """Takes logits `[..., t, s]` in: the running softmax with `total` updated and `acc`
        rescaled, and the new keys' weights exp(logits - top), whose product with the values is to
        be added to `acc`."""
        top = jnp.maximum(self.top, logits.max(-1))
        shift = jnp.where(top == -jnp.inf, 0.0, top)
        weights = jnp.exp(logits - shift[..., None])
        decay = jnp.exp(self.top - shift)
        total = decay * self.total + weights.sum(-1)
        return Running(decay[..., None] * self.acc, top, total), weights

    def finish(self) -> tuple[Array, Array]:
        """`(out, lse)`, float32 `[..., t, H]` and `[..., t]`."""
        total = jnp.where(self.total == 0.0, 1.0, self.total)
        return self.acc / total[..., None], self.top + jnp.log(total)
