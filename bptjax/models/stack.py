"""The layers of a model, in one scan."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from bptjax.models.config import Execution, ModelConfig
from bptjax.models.layers import Layer
from bptjax.ops.attention import attention as attention_here
from bptjax.ops.blockwise import blockwise, blockwise_transformer
from bptjax.ops.checkpoint_names import checkpoint_named
from bptjax.ops.mask import Mask
from bptjax.ops.position import BY_LENGTH, alibi_slopes, document_lengths
from bptjax.parallel.mesh import constrain
from bptjax.parallel.sequence import (
    FOLDED_BATCH,
    attention,
    fold_sequence_shards,
    unfold_sequence_shards,
)


def new_layers(config: ModelConfig, key: Array, dtype: jnp.dtype) -> Layer:
    """New layers, their parameters stacked on axis 0."""
    keys = jax.random.split(key, config.num_layers)
    return jax.vmap(lambda key: Layer(config, key, dtype))(keys)


def run(
    layers: Layer,
    config: ModelConfig,
    x: Float[Array, "B T D"],
    *,
    positions: Int[Array, "B T"],
    rows: Int[Array, "B T"],
    mask: Mask,
    length: Int[Array, "B"] | None = None,
    dropout_key: Array | None = None,
    execution: Execution,
    sequence_strategy: str = "auto",
    past: tuple[Array, Array, Array] | None = None,
    hidden_states: bool = False,
) -> tuple[Float[Array, "B T D"], Any]:
    """The residual stream after the last layer.

    Args:
      positions: of each token in its document, for rotary embeddings.
      rows: a number for each token of the batch, for dropout.
      mask: who sees whom, but for the windows, which are the layers' own.
      length: tokens that each sequence, which is then one document, has in all. By default the
        length of each document is its largest position here, plus one.
      dropout_key: None for no dropout.
      past: keys and values `[L, B, S, K, H]` of a cache, and how many tokens it holds: those of
        these tokens are written behind them, and all are read.
      hidden_states: return the stream after every layer.

    Returns:
      the stream, and the keys and values with these tokens in them, or the stream after each layer
      `[L, B, T, D]`, or None.
    """
    lengths = None
    if any(kind in BY_LENGTH for kind in config.rope_types):
        if length is None:
            lengths = document_lengths(positions, mask.segments)
        else:
            lengths = jnp.broadcast_to(length[:, None], positions.shape)
    kinds = jnp.asarray(config.kinds)
    alibi = None
    if config.position_embedding == "alibi":
        slopes = alibi_slopes(config.num_heads, interleaved=config.alibi_interleaved)
        alibi = jnp.asarray(config.alibi_scale * slopes)

    def step(carry, scanned):
        (x, old), (layer, number, kind) = carry, scanned
        layer = execution.prepare(layer, x.dtype)
        x = checkpoint_named(x, "layer_input", execution.offload)
        keys, place = _keys(dropout_key, number), (positions, kind, lengths)
        k, v = (
            checkpoint_named(part, name, execution.offload)
            for part, name in zip(
                layer.keys_values(x, place, keys and (keys[3], rows)), ("key", "value"), strict=True
            )
        )
        if past is not None:
            old, k, v = _recall(old, (k, v), number - 1, past[2])
        options = dict(
            mask=mask.within(config.windows, kind),
            alibi=alibi,
            sinks=None if layer.sinks is None else layer.sinks[...],
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            dropout=(config.attention_dropout or 0.0) if keys else 0.0,
            dropout_key=keys[0] if keys and config.attention_dropout else None,
            impl=execution.attention_implementation,
            offload=execution.offload,
            q_chunk=execution.q_chunk,
            k_chunk=execution.k_chunk,
        )
        shared = layer, kind, keys and keys[1:]
        if execution.schedule == "fused":
            finish = _fused
        elif past is None:
            finish = partial(_split, execution, sequence_strategy)
        else:
            finish = partial(_cached, execution)
        tokens = x, positions, lengths, rows
        x = finish(shared, tokens, k.astype(x.dtype), v.astype(x.dtype), options)
        x = constrain(x, "batch", "sequence", None)
        return (x, old), x if hidden_states else None

    # The whole cache is carried, and so written in place.
    start = (x, None if past is None else past[:2])
    numbers = jnp.arange(1, config.num_layers + 1, dtype=jnp.int32)
    (x, old), each = execution.scan(step, start, (layers, numbers, kinds))
    return x, each if past is None else old


def _recall(old, new, layer, held):
    """The cache with a layer's new keys and values behind those held, and all of that layer's."""
    zero = jnp.zeros_like(held)
    at = (layer, zero, held, zero, zero)
    old = tuple(
        jax.lax.dynamic_update_slice(whole, part[None].astype(whole.dtype), at)
        for whole, part in zip(old, new, strict=True)
    )
    return old, *(jax.lax.dynamic_index_in_dim(whole, layer, keepdims=False) for whole in old)


def _keys(key: Array | None, number: Array) -> tuple[Array, Array, Array, Array] | None:
    """A layer's dropout keys: attention, after attention, after the feed-forward, in kernels."""
    if key is None:
        return None
    first, *others = jax.random.split(jax.random.fold_in(key, number), 4)
    second, third, fourth = (jax.random.key_data(other) for other in others)
    return first, second, third, fourth


def _query(shared, chunk):
    layer, kind, keys = shared
    x, positions, lengths, rows = chunk
    return layer.queries(x, (positions, kind, lengths), keys and (keys[2], rows))


def _finish(shared, chunk, out, offload=0.0):
    layer, _, keys = shared
    x, *_, rows = chunk
    return layer.finish(x, out, rows, keys, offload)


def _split(execution, strategy, shared, tokens, k, v, options):
    """Attention over the whole sequence, then the feed-forward in chunks."""
    q = checkpoint_named(_query(shared, tokens), "query", execution.offload)
    out = attention(q, k, v, strategy=strategy, **options)
    return unfold_sequence_shards(
        _feed_forward(execution, shared, *fold_sequence_shards((tokens, out)), axes=FOLDED_BATCH)
    )


def _cached(execution, shared, tokens, k, v, options):
    """`_split` of a few tokens and many keys, which no mesh is asked to cut."""
    out = attention_here(_query(shared, tokens), k, v, **options)
    return _feed_forward(execution, shared, tokens, out)


def _feed_forward(execution, shared, tokens, out, axes=()):
    return blockwise(
        lambda shared, chunk: _finish(shared, chunk[0], chunk[1], execution.offload),
        shared,
        (tokens, out),
        chunk=execution.ffn_chunk,
        axes=axes,
    )


def _fused(shared, tokens, k, v, options):
    """Algorithm 1: attention and feed-forward, one block of queries at a time."""
    return blockwise_transformer(_query, _finish, shared, tokens, k, v, **options)
