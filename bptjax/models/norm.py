"""The norm of a model."""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from bptjax.models.config import ModelConfig
from bptjax.ops.norm import layer_norm, rms_norm


class Norm(nnx.Module):
    """The config's norm over the last axis, of `size` features; by default the residual stream's.
    Its parameters have the logical axis `axis`.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: DTypeLike,
        size: int | None = None,
        axis: str | None = "embed",
    ):
        shape = (config.hidden_size if size is None else size,)
        self.kind, self.eps, self.offset = config.norm, config.norm_eps, config.norm_unit_offset
        start = jnp.zeros if config.norm_unit_offset else jnp.ones
        self.scale = nnx.Param(start(shape, dtype), axes=(axis,)) if config.norm_scale else None
        self.bias = nnx.Param(jnp.zeros(shape, dtype), axes=(axis,)) if config.norm_bias else None

    def __call__(self, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        scale = jnp.ones(x.shape[-1]) if self.scale is None else self.scale[...]
        if self.offset:
            scale = 1.0 + scale.astype(jnp.float32)
        if self.kind == "rms":
            return rms_norm(x, scale, eps=self.eps)
        bias = None if self.bias is None else self.bias[...]
        return layer_norm(x, scale, bias, eps=self.eps)
