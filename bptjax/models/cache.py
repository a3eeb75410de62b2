"""Keys and values of earlier tokens, for decoding."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from bptjax.models.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Room for the keys and values of S tokens, of which the first `length` are filled.

    Attributes:
      k, v: `[L, B, S, K, H]`.
      length: int32 scalar, number of tokens held.
      start: int32 `[B]`, index of the first token of each sequence; before it is padding.
    """

    k: Array
    v: Array
    length: Array
    start: Array

    @classmethod
    def empty(cls, config: ModelConfig, batch: int, size: int, dtype: DTypeLike) -> "Cache":
        """Makes a cache for `batch` sequences of up to `size` tokens, without padding."""
        shape = (config.num_layers, batch, size, config.K, config.H)
        zero = jnp.zeros((), jnp.int32)
        return cls(
            jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), zero, jnp.zeros(batch, jnp.int32)
        )
