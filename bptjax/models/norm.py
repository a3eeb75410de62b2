"""The norm of a model."""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from bptjax.models.config import ModelConfig
from bptjax.ops.norm import layer_norm, rms_norm


class Norm(nnx.Module):
    """The config's norm over the last axis, of `size` features; defaults to the residual stream's
    width. `axis` is the logical axis of its parameters."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: DTypeLike,
        size: int | None = None,
        axis: str | None = "embed",
    ):
        shape = (config.hidden_size if size is None else size,)
        own = self.choices = config.norms
        start = jnp.zeros if own.unit_offset else jnp.ones
        self.scale = nnx.Param(start(shape, dtype), axes=(axis,)) if own.scale else None
        self.bias = nnx.Param(jnp.zeros(shape, dtype), axes=(axis,)) if own.bias else None

    def __call__(self, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        scale = jnp.ones(x.shape[-1]) if self.scale is None else self.scale[...]
        if self.choices.unit_offset:
            scale = 1.0 + scale.astype(jnp.float32)
        if self.choices.type == "rms":
            return rms_norm(x, scale, eps=self.choices.eps)
        bias = None if self.bias is None else self.bias[...]
        return layer_norm(x, scale, bias, eps=self.choices.eps)
