"""Landmark attention: the last token of every block is a landmark; its attention weight is divided
among the block's other tokens.

A query's own block and the landmarks of the other blocks compete in one softmax; the weight of
landmark c is divided among the tokens of block c in proportion to a softmax among them. With x the
logits, l_c the logit of the landmark of block c and L_c the log-sum-exp of x over the block's other
tokens, token j of block c has the weight of a plain softmax over the logits x_j + l_c - L_c. So
landmark attention is blockwise attention with one more step per tile, and its tiles merge like any
others.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from bptjax.ops.arguments import check_chunk
from bptjax.ops.attention import differentiable, make_spec, scan
from bptjax.ops.attention.contract import QKV, AttentionSpec, AttentionState
from bptjax.ops.attention.tile import Tile
from bptjax.ops.mask import Mask


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

    Block c holds the positions from c · block_size to its last one, the landmark, inclusive. With
    x_j = scale · q·k_j, a query at position p gives key j of block c the weight

      exp(x_j) / Z                                 in its own block, c = p // block_size;
      exp(l_c) / Z · exp(x_j) / Σ_{i in c} exp(x_i)     in another block;
      0                                            where j is the landmark of any block;
      Z = Σ_{i in own} exp(x_i) + Σ_{c not own} exp(l_c).

    All sums run over the keys that `mask` allows; sums over i leave out landmarks. The weights sum
    to 1. A block whose landmark is masked gets no attention from other blocks, and a landmark
    counts only if some token of its block is allowed. The incomplete last block of a text has no
    landmark. The value of a landmark is not read.

    Args:
      block_size: tokens in a block, the landmark included.
      mask: which query may attend to which key. Keys come in blocks: the `k_positions` at indices
        that are multiples of block_size are multiples of block_size too, and positions are
        consecutive up to the block's end.
      scale: factor on q·k; H^-0.5 if left out.
      q_chunk, k_chunk: tokens in a chunk; k_chunk is rounded to a multiple of block_size.

    Raises:
      ValueError: block_size below 2; arguments that `attention` refuses.

    Mohtashami & Jaggi 2023, https://arxiv.org/abs/2305.16300, Section 3.1.
    """
    if block_size < 2:
        raise ValueError(f"block_size={block_size}: must be at least 2, a token and its landmark")
    check_chunk(k_chunk=k_chunk)
    x = QKV(q, k, v)
    chunks = dict(q_chunk=q_chunk, k_chunk=max(1, round(k_chunk / block_size)) * block_size)
    return differentiable(_Landmarks(block_size), x, make_spec(x, mask=mask, scale=scale, **chunks))


@dataclass(frozen=True)
class _Landmarks:
    """The kernel `scan` with the tiles of landmark attention."""

    block_size: int

    def _make_tile(self, x: QKV, spec: AttentionSpec) -> "_LandmarkTile":
        return _LandmarkTile(self.block_size, x, spec)

    def unsupported(self, x: QKV, spec: AttentionSpec) -> str | None:
        return scan.unsupported(x, spec)

    def forward(self, x: QKV, spec: AttentionSpec) -> AttentionState:
        return scan.forward(x, spec, make_tile=self._make_tile)

    def backward(self, x: QKV, state: AttentionState, dout: Array, spec: AttentionSpec) -> QKV:
        return scan.backward(x, state, dout, spec, make_tile=self._make_tile)


class _LandmarkTile(Tile):
    """A tile whose keys are n complete blocks."""

    def __init__(self, block_size: int, x: QKV, spec: AttentionSpec):
        super().__init__(x, spec)
        self.block_size = block_size

    def _split(self, x: Array, fill: float) -> Array:
        """Reshapes `[..., s]` to `[..., n, block_size]`, the last block padded."""
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
            """Returns the cotangent of the logits. A token passes its share of the block's
            cotangent on to the landmark."""
            d = self._split(dgated, 0.0)
            gate = jnp.where(other, d.sum(-1, keepdims=True), 0.0)
            return pull(
                self._join(d + gate * (is_landmark.astype(jnp.float32) - jnp.exp(tokens - total)))
            )

        return self._join(tokens + jnp.where(other, x[..., -1:] - total, 0.0)), pull_gate
