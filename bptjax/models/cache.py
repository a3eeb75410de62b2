"""Keys, values and states of linear attention of earlier tokens, for decoding."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from bptjax.models.config import ModelConfig
from bptjax.models.linear_attention import Carried
from bptjax.parallel.cached import AXES, cache_size
from bptjax.parallel.mesh import constrain, sharding
from bptjax.parallel.sequence import sequence_shards

STATE_AXES = None, "batch", "heads", None, None
HISTORY_AXES = None, "batch", None, None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Room for the keys and values of S tokens, of which the first `length` are filled.

    Attributes:
      k, v: `[L, B, S, K, H]`, of the layers of attention; `parallel.cached` says which token is in
        which slot. Layers that attend to the keys and values of another layer have none.
      length: int32 scalar, number of tokens held.
      start: int32 `[B]`, index of the first token of each sequence; before it is padding.
      marked: bool `[B, S]`, markers of the attention pattern; None if it has none.
      full: `k` and `v` of the layers with heads of full_head_dim, which `k` and `v` then leave out.
      linear: the state and history of the layers of linear attention, stacked; None without such
        layers.
    """

    k: Array
    v: Array
    length: Array
    start: Array
    marked: Array | None = None
    full: tuple[Array, Array] | None = None
    linear: tuple[Array, Array] | None = None

    @classmethod
    def empty(cls, config: ModelConfig, batch: int, size: int, dtype: DTypeLike) -> "Cache":
        """Makes a cache for `batch` sequences of up to `size` tokens, without padding, on the mesh
        set by `jax.set_mesh`."""
        pattern = config.pattern
        # Landmark attention reads complete blocks.
        block = 1 if pattern is None else pattern.landmark_block or 1
        if block > 1 and sequence_shards() > 1:
            raise ValueError(
                f"sp={sequence_shards()}: must be 1 with model.attention_pattern.type=landmark"
            )
        slots = cache_size(size, block)

        def room(full):
            shape = len(config.kv_layers(full)), batch, slots, *config.heads(full)
            return _zeros(shape, AXES, dtype), _zeros(shape, AXES, dtype)

        has_markers = pattern is not None and pattern.global_markers
        marked = jnp.zeros((batch, slots), bool) if has_markers else None
        linear = None
        if L := len(config.linear_layers):
            (K, H), (N, W) = config.linear_heads
            history = L, batch, config.linear_conv_size - 1, 2 * K * H + N * W
            state = _zeros((L, batch, N, H, W), STATE_AXES, jnp.float32)
            linear = state, _zeros(history, HISTORY_AXES, dtype)
        start, length = jnp.zeros(batch, jnp.int32), jnp.zeros((), jnp.int32)
        full = room(True) if config.full_layers else None
        return cls(*room(False), length, start, marked, full, linear)

    def keys_values(self, full: bool) -> tuple[Array, Array]:
        """Returns `k` and `v` of the layers with heads of full_head_dim, or of the others."""
        return self.full if full and self.full is not None else (self.k, self.v)

    def with_keys_values(self, full: bool, k: Array, v: Array) -> "Cache":
        """Replaces the result of `keys_values`."""
        return replace(self, full=(k, v)) if full else replace(self, k=k, v=v)

    def carried(self, index: Array) -> Carried:
        """Returns the state and history of the layer of linear attention with this number."""
        assert self.linear is not None
        return Carried(*(x[index] for x in self.linear))

    def carry(self, index: Array, carried: Carried) -> "Cache":
        """Replaces the state and history of the layer of linear attention with this number."""
        assert self.linear is not None
        state, history = (
            jax.lax.dynamic_update_index_in_dim(old, new.astype(old.dtype), index, 0)
            for old, new in zip(self.linear, carried, strict=True)
        )
        return replace(self, linear=(state, history))

    def constrained(self) -> "Cache":
        """Constrains the sharding of the arrays to their logical axes."""
        k, v, full = jax.tree.map(lambda x: constrain(x, *AXES), (self.k, self.v, self.full))
        if self.linear is None:
            return replace(self, k=k, v=v, full=full)
        state, history = self.linear
        linear = constrain(state, *STATE_AXES), constrain(history, *HISTORY_AXES)
        return replace(self, k=k, v=v, full=full, linear=linear)


def _zeros(shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: DTypeLike) -> Array:
    """Makes zeros with these logical axes on the mesh set by `jax.set_mesh`."""
    mesh, zeros = jax.sharding.get_abstract_mesh(), partial(jnp.zeros, shape, dtype)
    if not mesh.empty:
        zeros = jax.jit(zeros, out_shardings=sharding(mesh, axes, shape).spec)
    return zeros()
