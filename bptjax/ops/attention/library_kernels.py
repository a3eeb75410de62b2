"""Functions that the cuDNN and FlashAttention-4 kernels share: refusals of arguments, starts of
packed documents, and padding."""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from bptjax.ops.attention.contract import QKV, AttentionSpec, AttentionState
from bptjax.ops.mask import counts_from_zero


def unsupported(x: QKV, spec: AttentionSpec, largest: int, *, trees: bool = False) -> str | None:
    """Returns why neither kernel can honor these arguments, or None if they can.

    Args:
      largest: the largest supported head size.
      trees: whether the kernel reads trees of tokens.
    """
    mask, (_, T, _, H), S = spec.mask, x.q.shape, x.k.shape[1]
    if jnp.dtype(x.q.dtype) not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {jnp.dtype(x.q.dtype).name}"
    if H % 8 or H > largest:
        return f"takes head sizes that are multiples of 8 up to {largest}, not {H}"
    for name, value in (("ALiBi", spec.alibi), ("soft cap", spec.softcap)):
        if value is not None:
            return f"has no {name}"
    if spec.dropout:
        return "has no dropout that drops the same weights as the other kernels"
    if mask.global_tokens is not None or mask.block_mask is not None:
        return "has no global tokens and no block masks"
    if mask.ends is not None and not trees:
        return "has no trees"
    if mask.window and T != S:
        return "has windows where T = S only"
    if (mask.causal or mask.window) and not counts_from_zero(mask.positions, mask.k_positions):
        return "counts positions from 0"
    if mask.ends is not None and T != S:
        return "takes trees only where queries and keys are the same tokens"
    if mask.segments is not None and (T != S or mask.k_segments is not None):
        return "takes documents only where queries and keys are the same tokens"
    return None


def document_starts(segments: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Returns a mask of the first token of each document."""
    before = jnp.pad(segments, ((0, 0), (1, 0)))[:, :-1]
    return (segments != 0) & (segments != before)


def single_documents(segments: Int[Array, "B T"]) -> Bool[Array, ""]:
    """Returns whether each sequence is one document followed by padding, which causal attention
    never attends to."""
    start = document_starts(segments)
    return (start[:, 0] & (start.sum(-1) == 1)).all()


def zero_padding(segments: Int[Array, "B T"], result: Any) -> Any:
    """Zeroes the padding of an AttentionState (its lse becomes -inf) or of a QKV, because kernels
    may leave padding unwritten."""
    real = (segments != 0)[..., None]
    if isinstance(result, AttentionState):
        out = jnp.where(real[..., None], result.out, 0)
        return AttentionState(out, jnp.where(real, result.lse, -jnp.inf))
    return QKV(*(jnp.where(real[..., None], y, 0) for y in result))


def hide_padding(segments: Int[Array, "B T"], state: AttentionState) -> AttentionState:
    """Sets lse to -inf for padding, whose lse is finite with a sink."""
    return state._replace(lse=jnp.where((segments != 0)[..., None], state.lse, -jnp.inf))
