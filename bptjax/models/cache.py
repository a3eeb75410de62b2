"""Keys and values of earlier tokens, for decoding."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from bptjax.models.config import ModelConfig
from bptjax.parallel.cached import AXES, cache_size
from bptjax.parallel.mesh import sharding


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Room for the keys and values of S tokens, of which the first `length` are filled.

    Attributes:
      k, v: `[L, B, S, K, H]`; `parallel.cached` says which token is in which slot.
      length: int32 scalar, number of tokens held.
      start: int32 `[B]`, index of the first token of each sequence; before it is padding.
    """

    k: Array
    v: Array
    length: Array
    start: Array

    @classmethod
    def empty(cls, config: ModelConfig, batch: int, size: int, dtype: DTypeLike) -> "Cache":
        """Makes a cache for `batch` sequences of up to `size` tokens, without padding, on the mesh
        set by `jax.set_mesh`."""
        shape = (config.num_layers, batch, cache_size(size), config.K, config.H)
        mesh, zeros = jax.sharding.get_abstract_mesh(), partial(jnp.zeros, shape, dtype)
        if not mesh.empty:
            zeros = jax.jit(zeros, out_shardings=sharding(mesh, AXES, shape).spec)
        return cls(zeros(), zeros(), jnp.zeros((), jnp.int32), jnp.zeros(batch, jnp.int32))
