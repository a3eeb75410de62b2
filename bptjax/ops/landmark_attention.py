"""Landmark attention: the last token of every block is a landmark, whose attention weight is
divided among the block's other tokens. `ops.attention.landmark_tile` has the arithmetic.
"""

from jax import Array
from jaxtyping import Float

from bptjax.ops.attention import attention
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
    """Computes attention by grouped softmax, in O(T) memory; a `lax.scan` on any device.

    Block c holds the positions from c · block_size to its last one, the landmark, inclusive. With
    x_j = scale · q·k_j and l_c the logit of block c's landmark, a query at position p gives key j
    of block c the weight

      exp(x_j) / Z                                 in its own block, c = p // block_size;
      exp(l_c) / Z · exp(x_j) / Σ_{i in c} exp(x_i)     in another block;
      0                                            where j is the landmark of any block;
      Z = Σ_{i in own} exp(x_i) + Σ_{c not own} exp(l_c).

    All sums run over the keys that `mask` allows; sums over i leave out landmarks. The weights sum
    to 1. A block whose landmark is masked gets no attention from other blocks, and a landmark
    counts only if some token of its block is allowed. An incomplete last block has no landmark.
    Values of landmarks are not read.

    Args:
      block_size: tokens per block, including the landmark.
      mask: which query may attend to which key. Keys form blocks: the `k_positions` at indices
        that are multiples of block_size are multiples of block_size too, and positions are
        consecutive up to the block's end.
      scale: factor on q·k; H^-0.5 if left out.
      q_chunk, k_chunk: tokens per chunk; k_chunk is rounded to a multiple of block_size.

    Raises:
      ValueError: block_size below 2; arguments that `attention` refuses.

    Mohtashami & Jaggi 2023, https://arxiv.org/abs/2305.16300, Section 3.1.
    """
    chunks = dict(q_chunk=q_chunk, k_chunk=k_chunk)
    return attention(q, k, v, mask=mask, scale=scale, landmark_block=block_size, **chunks)
