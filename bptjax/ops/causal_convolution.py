"""Short causal convolution per channel, within documents."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from bptjax.ops.documents import check_previous, number_documents


def causal_convolution(
    x: Float[Array, "B T C"],
    kernel: Float[Array, "J C"],
    *,
    silu: bool = True,
    segments: Int[Array | np.ndarray, "B T"] | None = None,
    history: Float[Array, "B J-1 C"] | None = None,
    previous: Int[Array, "B"] | None = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "B J-1 C"]]:
    """Computes the sum of kernel[J-1-i] · x_{t-i} over 0 ≤ i < J, or its SiLU, for each channel
    separately, in float32. Saves only its arguments for the backward pass. Returns the output, in
    x's dtype, and the history after the last token.

    Args:
      segments: document numbers, 0 for padding. Tokens before the start of a document count as 0,
        and so does padding, whose output is 0. If left out, a sequence is one document.
      history: the J-1 tokens before the first; 0 if left out, and before the document's start.
      previous: segment of the document that `history` belongs to, which may continue here; no other
        document reads the history. Required with segments and history.

    Raises:
      ValueError: mismatched shapes; a history and segments without `previous`, or `previous`
        without segments.
    """
    check_convolution(x, kernel, history)
    check_previous(segments, previous, history)
    (B, T, C), J = x.shape, kernel.shape[0]
    documents, padding = number_documents(B, T, segments, previous)
    padding = jnp.zeros((1, 1, 1), bool) if padding is None else padding[..., None]
    if history is None:
        history = jnp.zeros((B, J - 1, C), x.dtype)
    zero = jnp.zeros((), x.dtype)
    x = jnp.concatenate([history.astype(x.dtype), jnp.where(padding, zero, x)], 1)
    documents = jnp.pad(documents, ((0, 0), (J - 1, 0)))
    out = jnp.where(padding, zero, _convolve(x, kernel, documents, silu))
    own = documents[:, T:] == documents[:, -1:]
    return out, jnp.where(own[..., None], x[:, T:], zero)


@partial(jax.checkpoint, static_argnums=3)
def _convolve(x: Array, kernel: Array, documents: Array, silu: bool) -> Array:
    """Convolves all tokens except the first J - 1."""
    J = kernel.shape[0]
    T = x.shape[1] - J + 1
    kernel = kernel.astype(jnp.float32)

    def term(j):
        same = documents[:, j : j + T] == documents[:, J - 1 :]
        before = jnp.where(same[..., None], x[:, j : j + T], jnp.zeros((), x.dtype))
        return kernel[j][None, None] * before.astype(jnp.float32)

    y = sum(map(term, range(1, J)), term(0))
    return (jax.nn.silu(y) if silu else y).astype(x.dtype)


def check_convolution(x: Array, kernel: Array, history: Array | None) -> None:
    """Checks the shapes.

    Raises:
      ValueError: mismatched shapes, or an empty array.
    """
    if x.ndim != 3 or 0 in x.shape:
        raise ValueError(f"x: must be [batch, tokens, channels], not empty, not {x.shape}")
    (B, _, C), J = x.shape, kernel.shape[0]
    if kernel.shape != (J, C) or J < 1:
        raise ValueError(f"kernel: must be [width, {C}], as x {x.shape}, not {kernel.shape}")
    if history is not None and history.shape != (B, J - 1, C):
        raise ValueError(f"history: must be {(B, J - 1, C)}, not {history.shape}")
