"""The decoding cache: keys and values of earlier tokens, states of attention-free layers."""

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from bptjax.models.config import ModelConfig
from bptjax.models.mixers import MIXERS
from bptjax.parallel.cached import AXES, cache_size
from bptjax.parallel.mesh import constrain, sharding
from bptjax.parallel.sequence import sequence_shards


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of up to S tokens, of which the first `length` are filled.

    Attributes:
      k, v: `[L, B, S, K, H]` over the attention layers; `parallel.cached` defines the order of the
        slots. Layers that share the keys and values of another layer have none.
      length: int32 scalar, number of tokens held.
      start: int32 `[B]`, index of each sequence's first token; earlier slots are padding.
      marked: bool `[B, S]`, markers of the attention pattern; None if it has none.
      full: `k` and `v` of the layers with heads of `full_attention`; `k` and `v` then cover the
        other layers only.
      mixed: stacked states of the attention-free layers, by kind in `layer_types`.
    """

    k: Array
    v: Array
    length: Array
    start: Array
    marked: Array | None = None
    full: tuple[Array, Array] | None = None
    mixed: dict[str, tuple[Array, ...]] = field(default_factory=dict)

    @classmethod
    def empty(cls, config: ModelConfig, batch: int, size: int, dtype: DTypeLike) -> "Cache":
        """Makes a cache for `batch` unpadded sequences of up to `size` tokens, on the mesh set by
        `jax.set_mesh`."""
        pattern = config.pattern
        # Landmark attention reads only complete blocks.
        block = 1 if pattern is None else pattern.landmark_block or 1
        if block > 1 and sequence_shards() > 1:
            raise ValueError(
                f"sp={sequence_shards()}: must be 1 with model.attention_pattern.type=landmark"
            )
        slots = cache_size(size, block)

        def zeros(full):
            shape = len(config.kv_layers(full)), batch, slots, *config.heads(full)
            return _zeros(shape, AXES, dtype), _zeros(shape, AXES, dtype)

        has_markers = pattern is not None and pattern.global_markers
        marked = jnp.zeros((batch, slots), bool) if has_markers else None

        def carried(kind):
            L, shapes = len(config.layers_of(kind)), MIXERS[kind].state_shapes(config, batch, dtype)
            pairs = zip(shapes, _stacked_axes(kind), strict=True)
            return tuple(_zeros((L, *x.shape), axes, x.dtype) for x, axes in pairs)

        start, length = jnp.zeros(batch, jnp.int32), jnp.zeros((), jnp.int32)
        full = zeros(True) if config.full_layers else None
        mixed = {kind: carried(kind) for kind in config.mixers}
        return cls(*zeros(False), length, start, marked, full, mixed)

    def keys_values(self, full: bool) -> tuple[Array, Array]:
        """Returns `k` and `v` of layers with heads of `full_attention`, or of other layers."""
        return self.full if full and self.full is not None else (self.k, self.v)

    def with_keys_values(self, full: bool, k: Array, v: Array) -> "Cache":
        """Returns the cache with these arrays as `keys_values(full)`."""
        return replace(self, full=(k, v)) if full else replace(self, k=k, v=v)

    def carried(self, kind: str, index: Array) -> tuple[Array, ...]:
        """Returns the state of the layer at `index` among the layers of this kind."""
        return tuple(x[index] for x in self.mixed[kind])

    def carry(self, kind: str, index: Array, carried: tuple[Array, ...]) -> "Cache":
        """Returns the cache with this state as `carried(kind, index)`."""
        new = tuple(
            jax.lax.dynamic_update_index_in_dim(old, x.astype(old.dtype), index, 0)
            for old, x in zip(self.mixed[kind], carried, strict=True)
        )
        return replace(self, mixed=self.mixed | {kind: new})

    def constrained(self) -> "Cache":
        """Shards the arrays by their logical axes."""
        k, v, full = jax.tree.map(lambda x: constrain(x, *AXES), (self.k, self.v, self.full))
        mixed = {
            kind: tuple(constrain(x, *a) for x, a in zip(each, _stacked_axes(kind), strict=True))
            for kind, each in self.mixed.items()
        }
        return replace(self, k=k, v=v, full=full, mixed=mixed)


def _stacked_axes(kind: str) -> list[tuple[str | None, ...]]:
    """Returns the logical axes of the stacked states of this kind of layer."""
    return [(None, *axes) for axes in MIXERS[kind].AXES]


def _zeros(shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: DTypeLike) -> Array:
    """Makes zeros with these logical axes on the mesh set by `jax.set_mesh`."""
    mesh, zeros = jax.sharding.get_abstract_mesh(), partial(jnp.zeros, shape, dtype)
    if not mesh.empty:
        zeros = jax.jit(zeros, out_shardings=sharding(mesh, axes, shape).spec)
    return zeros()
