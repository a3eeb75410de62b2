"""A causal language model: embedding, a scan over layers, final norm, output embedding."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from bptjax.models.cache import Cache
from bptjax.models.config import Execution, ModelConfig
from bptjax.models.layers import Layer, Norm
from bptjax.ops.attention import attention
from bptjax.ops.block import block
from bptjax.ops.dropout import dropout
from bptjax.ops.feed_forward import feed_forward
from bptjax.ops.mask import Mask
from bptjax.ops.position import alibi_slopes
from bptjax.parallel.mesh import constrain


class Decoder(nnx.Module):
    """Parameters and config; calls are pure, so `jax.jit`, `grad` and `scan` take the module
    itself. Layers are stacked on axis 0.

    Args:
      key: for new parameters; under `jax.eval_shape` none are made.
      dtype: of the parameters.
    """

    def __init__(self, config: ModelConfig, key: Array, dtype: jnp.dtype = jnp.float32):
        embedding, position, layers, head = jax.random.split(key, 4)

        def table(key, rows, axis):
            new = config.init_std * jax.random.normal(key, (rows, config.hidden_size), jnp.float32)
            return nnx.Param(new.astype(dtype), axes=(axis, "embed"))

        self.config = config
        self.embedding = table(embedding, config.V, "vocab")
        self.positions = (
            table(position, config.max_positions, None) if config.position == "learned" else None
        )
        self.layers = jax.vmap(lambda key: Layer(config, key, dtype))(
            jax.random.split(layers, config.num_layers)
        )
        self.norm = Norm(config, dtype)
        self.head = None if config.tied_head else table(head, config.V, "vocab")

    @property
    def head_matrix(self) -> Float[Array, "V D"]:
        """The output embedding: the input embedding itself where they are tied."""
        return (self.embedding if self.head is None else self.head)[...]

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Float32 logits of a few tokens; training uses `linear_cross_entropy`."""
        return jnp.einsum(
            "btd,vd->btv",
            hidden,
            self.head_matrix.astype(hidden.dtype),
            preferred_element_type=jnp.float32,
        )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        dropout_key: Array | None = None,
        dtype: jnp.dtype = jnp.float32,
        execution: Execution = Execution(),  # noqa: B008 (frozen)
        remat: Callable[[Callable], Callable] = lambda f: f,
    ) -> Float[Array, "B T D"]:
        """Hidden states after the final norm, in `dtype`.

        Args:
          positions: of each token in its document, for rotary and learned embeddings; 0..T-1 if
            left out.
          segments: document numbers, 0 for padding; without them a row is one document.
          dropout_key: None for no dropout.
          dtype: of the computation; parameters are cast as they are used.
          execution: how to compute it.
          remat: wraps the function of one layer, `memory.remat(...)` for example.

        Raises:
          ValueError: more tokens than learned positions.
        """
        x, positions, rows = self._embed(tokens, positions, dropout_key, dtype)
        mask = Mask(causal=True, segments=segments)

        def step(x, layer_and_number):
            layer, number = layer_and_number
            keys = _keys(dropout_key, number)
            k, v = layer.keys_values(x, positions)
            run = _fused if execution.schedule == "fused" else _split
            x = run(layer, x, k, v, positions, rows, mask, keys, execution)
            return constrain(x, "batch", "sequence", None), None

        numbers = jnp.arange(1, self.config.num_layers + 1)
        x, _ = jax.lax.scan(remat(step), x, (self.layers, numbers))
        return self.norm(x)

    def decode(
        self,
        tokens: Int[Array, "B T"],
        cache: Cache,
        *,
        dtype: jnp.dtype = jnp.float32,
        execution: Execution = Execution(),  # noqa: B008 (frozen)
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Hidden states of the next T tokens after those in the cache, and the cache with them in
        it.
        """
        B, T = tokens.shape
        here = cache.length + jnp.arange(T)
        positions = jnp.broadcast_to(here, (B, T))
        x, positions, rows = self._embed(tokens, positions, None, dtype)
        mask = Mask(causal=True, positions=here, k_positions=jnp.arange(cache.k.shape[2]))

        def step(x, layer_and_cache):
            layer, k, v = layer_and_cache
            new = layer.keys_values(x, positions)
            k, v = (
                jax.lax.dynamic_update_slice_in_dim(old, add.astype(old.dtype), cache.length, 1)
                for old, add in zip((k, v), new, strict=True)
            )
            x = _split(
                layer, x, k.astype(dtype), v.astype(dtype), positions, rows, mask, None, execution
            )
            return x, (k, v)

        x, (k, v) = jax.lax.scan(step, x, (self.layers, cache.k, cache.v))
        return self.norm(x), replace(cache, k=k, v=v, length=cache.length + T)

    def _embed(self, tokens, positions, dropout_key, dtype):
        """Embedded tokens `[B, T, D]`, positions, and a number for each token of the batch."""
        config, (B, T) = self.config, tokens.shape
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(T), (B, T))
        x = jnp.take(self.embedding[...], tokens, axis=0).astype(dtype)
        if self.positions is not None:
            if T > self.positions.shape[0]:
                raise ValueError(
                    f"{T} tokens, but model.max_positions={config.max_positions} learned positions"
                )
            x = x + jnp.take(self.positions[...], positions, axis=0).astype(dtype)
        rows = jnp.arange(B * T).reshape(B, T)
        key = None if dropout_key is None else jax.random.key_data(_fold(dropout_key, 0))
        x = dropout(x, key, config.embedding_dropout, rows)
        return constrain(x, "batch", "sequence", None), positions, rows


def _fold(key: Array, number: Array | int) -> Array:
    return jax.random.fold_in(key, number)


def _keys(key: Array | None, number: Array) -> tuple[Array, Array, Array] | None:
    """A layer's dropout keys: attention, after attention, after the feed-forward."""
    if key is None:
        return None
    first, second, third = jax.random.split(_fold(key, number), 3)
    return first, jax.random.key_data(second), jax.random.key_data(third)


def _options(config: ModelConfig, keys, execution: Execution) -> dict:
    alibi = alibi_slopes(config.num_heads) if config.position == "alibi" else None
    return dict(
        alibi=None if alibi is None else jnp.asarray(alibi),
        dropout=config.attention_dropout if keys else 0.0,
        dropout_key=keys[0] if keys and config.attention_dropout else None,
        impl=execution.attention,
        q_chunk=execution.q_chunk,
        k_chunk=execution.k_chunk,
    )


def _query(shared, chunk):
    layer, _ = shared
    x, positions, _ = chunk
    return layer.queries(x, positions)


def _finish(shared, chunk, out):
    layer, keys = shared
    x, _, rows = chunk
    return layer.finish(x, out, rows, keys)


def _split(layer, x, k, v, positions, rows, mask, keys, execution):
    """Attention over the whole sequence, then the feed-forward in chunks."""
    shared, tokens = (layer, keys and keys[1:]), (x, positions, rows)
    options = _options(layer.config, keys, execution)
    out = attention(_query(shared, tokens), k, v, mask=mask, **options)
    return feed_forward(
        lambda shared, chunk: _finish(shared, *chunk),
        shared,
        (tokens, out),
        chunk=execution.ffn_chunk,
    )


def _fused(layer, x, k, v, positions, rows, mask, keys, execution):
    """Algorithm 1: attention and feed-forward, one block of queries at a time."""
    shared, tokens = (layer, keys and keys[1:]), (x, positions, rows)
    options = _options(layer.config, keys, execution)
    return block(_query, _finish, shared, tokens, k, v, mask=mask, **options)
