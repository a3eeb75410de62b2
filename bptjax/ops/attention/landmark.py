"""Landmark attention: the last token of every block is a landmark, whose attention weight is shared
out among the block's other tokens.

A query's own block and the landmarks of the others compete in one softmax; what landmark c gets
goes to the tokens of block c in proportion to a softmax among them. With x the logits, l_c that of
the landmark of block c and L_c the log-sum-exp of x over the block's other tokens, token j of block
c has the weight of a plain softmax over the logits x_j + l_c - L_c: blockwise attention with one
step more for each tile, whose parts merge like any other's.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from bptjax.ops.arguments import check_chunk
from bptjax.ops.attention import differentiable, make_score, scan
from bptjax.ops.attention.tile import Score, Tile
from bptjax.ops.mask import Mask
from bptjax.ops.softmax import Partial


def landmark_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    block_size: int,
    mask: Mask = Mask(causal=True),  # noqa: B008 (frozen)
    scale: float | None = None,
    q_chunk: int = 512,
    k_chunk: int = 512,
) -> Float[Array, "B T N H"]:
    """Attention by grouped softmax, in O(T) memory; a `lax.scan` on any device.

    Block c is the positions from c · block_size up to and with its landmark, which is the last of
    them. With x_j = scale · q·k_j, a query at position p gives key j of block c the weight

      exp(x_j) / Z                                 in its own block, c = p // block_size;
      exp(l_c) / Z · exp(x_j) / Σ_{i in c} exp(x_i)     in another one;
      0                                            where j is a landmark, of whatever block;
      Z = Σ_{i in own} exp(x_i) + Σ_{c not own} exp(l_c),

    all sums over the keys that `mask` shows it, landmarks left out of those over i. The weights sum
    to 1. A block whose landmark is not seen is not seen from outside, nor does a landmark count
    that has no seen token: so with a text's incomplete last block. A landmark's value is not read.

    Args:
      block_size: tokens in a block, the landmark included.
      mask: who sees whom. Keys stand in blocks: `k_positions` at multiples of block_size are
        multiples of it, and consecutive from there to the block's end.
      scale: factor on q·k; H^-0.5 if left out.
      q_chunk, k_chunk: tokens in a chunk; k_chunk is rounded to whole blocks.

    Raises:
      ValueError: block_size below 2; arguments that `attention` refuses.

    Mohtashami & Jaggi 2023, https://arxiv.org/abs/2305.16300, Section 3.1.
    """
    if block_size < 2:
        raise ValueError(f"block_size={block_size}: must be at least 2, a token and its landmark")
    check_chunk(q_chunk=q_chunk, k_chunk=k_chunk)
    score = make_score(q, k, v, mask=mask, scale=scale)
    k_chunk = max(1, round(k_chunk / block_size)) * block_size
    return differentiable((_Landmarks(block_size), q_chunk, k_chunk, 0.0), q, k, v, score)


@dataclass(frozen=True)
class _Landmarks:
    """`scan`'s pair with the tiles of landmark attention."""

    block_size: int

    def _tile(self, *arguments) -> "_LandmarkTile":
        return _LandmarkTile(self.block_size, *arguments)

    def forward(self, q: Array, k: Array, v: Array, score: Score, **chunks) -> Partial:
        return scan.forward(q, k, v, score, make=self._tile, **chunks)

    def backward(self, *arguments, **chunks) -> tuple[Array, Array, Array]:
        return scan.backward(*arguments, make=self._tile, **chunks)


class _LandmarkTile(Tile):
    """A tile of whole blocks of keys."""

    def __init__(self, block_size: int, *arguments):
        super().__init__(*arguments)
        self.block_size = block_size

    def _cut(self, x: Array, fill: float) -> Array:
        """`[..., s]` to `[..., n, block_size]`, the last block filled up."""
        width = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % self.block_size)]
        x = jnp.pad(x, width, constant_values=fill)
        return x.reshape(*x.shape[:-1], -1, self.block_size)

    def _join(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-2], -1)[..., : self.k_chunk]

    def _logits(self, q: Array, k: Array, i, j):
        logits, pull = super()._logits(q, k, i, j)
        x = self._cut(logits, -jnp.inf)
        is_landmark = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) == x.shape[-1] - 1
        tokens = jnp.where(is_landmark, -jnp.inf, x)
        total = jax.nn.logsumexp(tokens, -1, keepdims=True)
        total = jnp.where(total == -jnp.inf, jnp.inf, total)
        p, s = (x // self.block_size for x in self.tiles.positions(i, j))
        s = s[:, None, None, None, :: self.block_size, None]
        other = p[:, None, None, :, None, None] != s

        def pull_gate(dgated):
            """A token's cotangent, less its share of the block's, which the landmark gets."""
            d = self._cut(dgated, 0.0)
            gate = jnp.where(other, d.sum(-1, keepdims=True), 0.0)
            return pull(self._join(d + gate * (is_landmark - jnp.exp(tokens - total))))

        return self._join(tokens + jnp.where(other, x[..., -1:] - total, 0.0)), pull_gate
