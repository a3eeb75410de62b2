"""Packed documents as kernels see them: where they start, and padding."""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from bptjax.ops.attention.contract import QKV, AttentionState


def document_starts(segments: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Returns where a document starts."""
    before = jnp.pad(segments, ((0, 0), (1, 0)))[:, :-1]
    return (segments != 0) & (segments != before)


def single_documents(segments: Int[Array, "B T"]) -> Bool[Array, ""]:
    """Returns whether each sequence is one document followed by padding, which causal attention
    never attends to."""
    start = document_starts(segments)
    return (start[:, 0] & (start.sum(-1) == 1)).all()


def zero_padding(segments: Int[Array, "B T"], result: Any) -> Any:
    """Zeroes the padding of an AttentionState (-inf in its lse) or of a QKV: a kernel may leave it
    unwritten."""
    real = (segments != 0)[..., None]
    if isinstance(result, AttentionState):
        out = jnp.where(real[..., None], result.out, 0)
        return AttentionState(out, jnp.where(real, result.lse, -jnp.inf))
    return QKV(*(jnp.where(real[..., None], y, 0) for y in result))


def hide_padding(segments: Int[Array, "B T"], state: AttentionState) -> AttentionState:
    """Returns the state with an lse of -inf for padding, whose lse is finite beside a sink."""
    return state._replace(lse=jnp.where((segments != 0)[..., None], state.lse, -jnp.inf))
