"""A tile of landmark attention: the weight of a landmark, the last token of a block, is divided
among the block's other tokens.

The query's own block and the landmarks of the other blocks compete in one softmax; the weight of
landmark c is divided among the tokens of block c in proportion to a softmax among them. Let x be
the logits, l_c the logit of block c's landmark and L_c the log-sum-exp of x over the block's other
tokens. Token j of block c then has the weight of a plain softmax over the logits x_j + l_c - L_c.
So landmark attention is blockwise attention with one more step per tile, and its tiles merge like
any others.
"""

import jax
import jax.numpy as jnp
from jax import Array

from bptjax.ops.attention.contract import QKV, AttentionSpec
from bptjax.ops.attention.tile import Tile


class LandmarkTile(Tile):
    """A tile whose keys are complete blocks of `spec.landmark_block` tokens."""

    def __init__(self, x: QKV, spec: AttentionSpec):
        super().__init__(x, spec)
        assert spec.landmark_block is not None
        self.block_size = spec.landmark_block

    def _split(self, x: Array, fill: float) -> Array:
        """Reshapes `[..., s]` to `[..., n, block_size]`, padding the last block."""
        width = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % self.block_size)]
        x = jnp.pad(x, width, constant_values=fill)
        return x.reshape(*x.shape[:-1], -1, self.block_size)

    def _join(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-2], -1)[..., : self.k_chunk]

    def _logits(self, q: Array, k: Array, i, j):
        logits, pull = super()._logits(q, k, i, j)
        x = self._split(logits, -jnp.inf)
        is_landmark = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) == x.shape[-1] - 1
        tokens = jnp.where(is_landmark, -jnp.inf, x)
        total = jax.nn.logsumexp(tokens, -1, keepdims=True)
        total = jnp.where(total == -jnp.inf, jnp.inf, total)
        p, s = (positions // self.block_size for positions in self.tiles.positions(i, j))
        s = s[:, None, None, None, :: self.block_size, None]
        other = p[:, None, None, :, None, None] != s

        def pull_gate(dgated):
            """Returns the logits' cotangent. Each token also passes its share of the block's
            cotangent to the landmark."""
            d = self._split(dgated, 0.0)
            gate = jnp.where(other, d.sum(-1, keepdims=True), 0.0)
            return pull(
                self._join(d + gate * (is_landmark.astype(jnp.float32) - jnp.exp(tokens - total)))
            )

        return self._join(tokens + jnp.where(other, x[..., -1:] - total, 0.0)), pull_gate
