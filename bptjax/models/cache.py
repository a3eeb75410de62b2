"""Keys and values of the tokens already read, for decoding."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from bptjax.models.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Room for S tokens, the first `length` of which are filled.

    Attributes:
      k, v: `[L, B, S, K, H]`.
      length: int32 scalar, tokens held.
      start: int32 `[B]`, where each row's text begins: what stands before is padding.
    """

    k: Array
    v: Array
    length: Array
    start: Array

    @classmethod
    def empty(cls, config: ModelConfig, batch: int, size: int, dtype: jnp.dtype) -> "Cache":
        """A cache for `batch` rows of up to `size` tokens, without padding."""
        shape = (config.num_layers, batch, size, config.K, config.H)
        zero = jnp.zeros((), jnp.int32)
        return cls(
            jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), zero, jnp.zeros(batch, jnp.int32)
        )
