"""Applies the layers of a model in order."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, UInt32

from bptjax.models.cache import Cache
from bptjax.models.config import ModelConfig
from bptjax.models.execution import Execution
from bptjax.models.feed_forward import Auxiliary
from bptjax.models.feed_forwards import FEED_FORWARDS
from bptjax.models.head_groups import GroupContext, HeadGroups, check_head_groups
from bptjax.models.layer_backward import Inputs, LayerRunner, Stack, Use
from bptjax.models.layer_kinds import FULL, PROJECTIONS, LayerKind
from bptjax.models.layers import DropoutKeys, Layer, TokenContext, adapter_dropout
from bptjax.models.mixer import heads_of_trees
from bptjax.models.norm import Norm
from bptjax.models.params import expert_placement, param_path
from bptjax.ops.blockwise import blockwise_transformer
from bptjax.ops.checkpoint_names import checkpoint_named
from bptjax.ops.mask import Mask
from bptjax.ops.position import BY_LENGTH, alibi_slopes, document_lengths
from bptjax.ops.stacked import close_slots, read_entry, split_gradient, with_gradient
from bptjax.parallel import cached
from bptjax.parallel.mesh import constrain
from bptjax.parallel.sequence import attention, in_chunks, tensor_shards


class StackOutput(NamedTuple):
    """Results of the layers.

    Attributes:
      x: the residual stream after the last layer.
      states: the residual stream after each layer; None unless requested.
      aux: float32 auxiliary sums, by name, of each layer that has them, over all tokens except
        padding.
      cache: the given cache with these tokens appended; None without a cache.
    """

    x: Float[Array, "B T D"]
    states: Float[Array, "L B T D"] | None
    aux: dict[str, Float[Array, "L ..."]]
    cache: Cache | None


class Shared(NamedTuple):
    """Inputs that several layers share and that have a gradient.

    Attributes:
      embedding_norm: `norm` of `LayerEmbedding.read`.
      first: the residual stream before the first layer; None if no layer reads it.
      kv: final keys and values of each layer type, for layers without their own.
    """

    embedding_norm: Norm | None
    first: Float[Array, "B T D"] | None
    kv: dict[bool, tuple[Array, Array]] | None = None


class _Inputs(NamedTuple):
    """Arrays that all chunks of tokens share."""

    layer: Layer
    keys: DropoutKeys | None


class _Chunk(NamedTuple):
    """Inputs of a layer for one chunk of tokens."""

    x: Float[Array, "B T D"]
    tokens: TokenContext


def new_layers(config: ModelConfig, key: Array, dtype: DTypeLike) -> Layer:
    """Makes new layers with their parameters stacked on axis 0. A part that some layers lack is
    stacked over the layers that have it."""
    keys = jax.random.split(key, config.num_layers)
    layers = jax.vmap(lambda key: Layer(config, key, dtype))(keys)
    for name, own in _own_layers(config).items():
        stack = jax.tree.map(lambda x, own=own: x[np.array(own)], getattr(layers, name))
        setattr(layers, name, stack)
    return layers


def run(
    layers: Layer,
    config: ModelConfig,
    x: Float[Array, "B T D"],
    tokens: TokenContext,
    *,
    mask: Mask,
    length: Int[Array, "B"] | None = None,
    dropout_key: Array | None = None,
    execution: Execution,
    sequence_strategy: str = "auto",
    cache: Cache | None = None,
    k_positions: Int[Array, "B S"] | None = None,
    k_marked: Bool[Array, "B S"] | None = None,
    embedding_norm: Norm | None = None,
    hidden_states: bool = False,
) -> StackOutput:
    """Applies the layers to the residual stream.

    Args:
      tokens: without `lengths`, which this function computes.
      mask: mask of all layers, without a window. Each layer adds its window.
      length: number of tokens of each sequence, if each sequence is one document. Otherwise a
        document's length is its largest position among these tokens, plus one.
      dropout_key: None for no dropout.
      cache: keys and values of earlier tokens, which these tokens attend to as well, always with
        the schedule `split`.
      k_positions, k_marked: `positions` and `marked` of the keys in the cache.
      embedding_norm: `norm` of `LayerEmbedding.read`.
      hidden_states: also return the residual stream after each layer.
    """
    tokens = tokens._replace(lengths=_lengths(config, tokens.positions, mask, length))
    apply = _layer_function(
        config,
        tokens,
        mask,
        dropout_key=dropout_key,
        execution=execution,
        sequence_strategy=sequence_strategy,
        k_positions=k_positions,
        k_marked=k_marked,
        hidden_states=hidden_states,
    )
    own, kinds = config.num_layers - config.later_layers, config.layer_kinds
    (values, slots), stack = split_gradient(layers), None
    if execution.scans_stack(kinds):
        index = _entry_index(config, kinds[0], jnp.int32(0))
        stack = jax.tree.map_with_path(lambda p, x: None if index(p) is None else x, values)
    shared, latest_kv = Shared(embedding_norm, x if config.layer_embedding.size else None), None
    if config.later_layers and cache is None:
        latest_kv = _zero_kv(config, x)

    def step(carry, index, entry, kind, shared=shared):
        x, past, slots, latest_kv = carry
        place = _entry_index(config, kind, index)
        entry = read_entry(values, place) if entry is None else entry
        layer, slots = with_gradient(entry, slots, place)
        carry, output = apply(layer, (x, past, latest_kv), index, kind, shared)
        return (*carry[:2], slots, carry[2]), output

    # The loops carry the cache of all layers, so that they write it in place.
    carry = x, cache, slots, latest_kv
    carry, (states, aux) = execution.scan(step, carry, kinds[:own], stack)
    if own < config.num_layers:
        # The later layers read the final keys and values: their loops do not save them again, and
        # sum their gradients in float32.
        *rest, latest_kv = carry
        shared = shared._replace(kv=jax.tree.map(lambda y: y.astype(jnp.float32), latest_kv))

        def later(carry, index, entry, kind):
            return step(carry, index + own, entry, kind, shared)

        carry, outputs = execution.scan(later, (*rest, None), kinds[own:])
        states, aux = jax.tree.map(lambda *x: jnp.concatenate(x), (states, aux), outputs)
    x, cache, slots, _ = carry
    x = close_slots(x, slots)
    if cache is not None:
        cache = replace(cache.constrained(), length=cache.length + x.shape[1])
    return StackOutput(x, states, _of_feed_forwards(config, aux), cache)


# Maps (cotangent of the residual stream after the last layer, cotangents of the auxiliary sums,
# state, use of the gradients of layers) to (cotangent of the residual stream before the first
# layer, cotangent of `embedding_norm`, new state).
StackBackward = Callable[[Array, Auxiliary, Any, Use], tuple[Array, Any, Any]]


def run_with_backward(
    layers: Layer,
    is_trained: Callable[[Array], bool],
    config: ModelConfig,
    x: Float[Array, "A B T D"],
    tokens: TokenContext,
    *,
    segments: Int[Array, "A B T"] | None,
    order: np.ndarray | None,
    dropout_keys: UInt32[Array, "A 2"] | None,
    execution: Execution,
    sequence_strategy: str = "auto",
    embedding_norm: Norm | None = None,
) -> tuple[Float[Array, "A B T D"], Auxiliary, StackBackward]:
    """Applies the layers to the residual streams of micro-batches as `run`, for training.

    Args:
      is_trained: whether a leaf of `layers` is trained.
      tokens: as for `run`, with an axis of micro-batches.
      segments, order: `segments` and `positions` of the mask.
      dropout_keys: key data of each micro-batch.

    Returns:
      The residual streams after the last layer; auxiliary sums `[L, A, ...]` as in `StackOutput`;
      and the backward pass.

    Raises:
      NotImplementedError: as `Execution.run`.
    """

    def mask_of(segments):
        return Mask(causal=config.causal, segments=segments, positions=order)

    def lengths(positions, segments):
        return _lengths(config, positions, mask_of(segments), None)

    def step(layer, carry, shared, weights, data, index, kind):
        tokens, segments, key = data
        key = None if key is None else jax.random.wrap_key_data(key)
        options = dict(execution=execution, sequence_strategy=sequence_strategy)
        apply = _layer_function(config, tokens, mask_of(segments), dropout_key=key, **options)
        x, latest_kv = carry
        shared = Shared(weights, *shared)
        (x, _, latest_kv), (_, aux) = apply(layer, (x, None, latest_kv), index, kind, shared)
        return (x, latest_kv), aux

    tokens = tokens._replace(
        lengths=jax.lax.map(lambda y: lengths(*y), (tokens.positions, segments))
    )
    first = x if config.layer_embedding.size else None
    stack = Stack(layers, is_trained, partial(_entry_index, config))
    data = tokens, segments, dropout_keys
    runner = LayerRunner(step, stack, Inputs((first, None), embedding_norm), data, len(x))
    kinds, own = config.layer_kinds, config.num_layers - config.later_layers
    latest_kv = later = None
    if config.later_layers:
        kv = _zero_kv(config, x[0])
        latest_kv = jax.tree.map(lambda y: jnp.broadcast_to(y[None], (len(x), *y.shape)), kv)
    (out, latest_kv), aux, early = execution.run(runner, (x, latest_kv), kinds[:own])
    if config.later_layers:
        # As in `run`.
        final = jax.tree.map(lambda y: y.astype(jnp.float32), latest_kv)
        runner = replace(runner, inputs=Inputs((first, final), embedding_norm))
        (out, _), more, later = execution.run(runner, (out, None), kinds[own:], own)
        aux = jax.tree.map(lambda *x: jnp.concatenate(x), aux, more)
    aux, select = jax.vjp(partial(_of_feed_forwards, config), aux)

    def backward(d_x, d_aux, state, use):
        (d_aux,) = select(d_aux)
        d_kv, sums = None, Inputs((jax.tree.map(jnp.zeros_like, first), None), None)
        if later is not None:
            late = jax.tree.map(lambda y: y[own:], d_aux)
            (d_x, _), sums, state = later((d_x, None), late, state, use)
            d_kv = jax.tree.map(lambda d, y: d.astype(y.dtype), sums.shared[1], latest_kv)
        d_aux = jax.tree.map(lambda y: y[:own], d_aux)
        (d_x, _), more, state = early((d_x, d_kv), d_aux, state, use)
        for inputs in (sums, more):
            if first is not None:
                d_x = d_x + inputs.shared[0]
        norms = [inputs.weights for inputs in (sums, more) if inputs.weights is not None]
        return d_x, jax.tree.map(lambda *d: sum(d), *norms) if norms else None, state

    return out, aux, backward


def _layer_function(
    config: ModelConfig,
    tokens: TokenContext,
    mask: Mask,
    *,
    dropout_key: Array | None,
    execution: Execution,
    sequence_strategy: str,
    k_positions: Int[Array, "B S"] | None = None,
    k_marked: Bool[Array, "B S"] | None = None,
    hidden_states: bool = False,
) -> Callable[..., Any]:
    """Returns a function from (entry of the stacked layers, carry, index of the layer, its kind,
    shared arrays) to (carry, (hidden state, auxiliary sums)). The carry is the residual stream, the
    cache, and the latest keys and values of each layer type. For the other arguments see `run`.
    """
    check_head_groups(execution.head_groups, config, tensor_shards())
    alibi = None
    if config.position_embedding == "alibi":
        slopes = alibi_slopes(config.num_heads, interleaved=config.alibi.interleaved)
        alibi = jnp.asarray(config.alibi.scale * slopes)
    positions: Any = tokens.positions
    if mask.segments is None:
        # Static positions keep the kernels' tiles static.
        positions = (
            np.arange(tokens.positions.shape[1], dtype=np.int32)
            if mask.positions is None
            else mask.positions
        )
    k_positions = positions if k_positions is None else k_positions
    marks = tokens.marked, tokens.marked if k_marked is None else k_marked
    trees: dict[str, Any] = {}
    if tokens.ends is not None:
        check_trees(config)
        trees = dict(segments=None, ends=tokens.ends)
    tokens = tokens._replace(marked=None, ends=None)

    def apply(layer, carry, index, kind, shared):
        x, past, latest_kv = carry
        layer = execution.prepare(_arranged(layer, kind), x.dtype)
        x = checkpoint_named(x, "layer_input", execution.offload)
        context = tokens
        if layer.embedding is not None:
            assert tokens.tokens is not None and shared.embedding_norm is not None
            embedded = layer.embedding.read(tokens.tokens, shared.first, shared.embedding_norm)
            context = tokens._replace(embedded=embedded, tokens=None)
        inputs, chunk = _Inputs(layer, _dropout_keys(dropout_key, index)), _Chunk(x, context)
        if kind.mixer is not None:
            mixed = chunk, mask, trees.get("ends")
            out, past = _mix(config, execution, kind.mixer, inputs, *mixed, past, index)
            x, aux = _split(execution, inputs, chunk, out)
        else:
            kv = None
            if kind.shares and past is None:
                kv = jax.tree.map(lambda y: y.astype(x.dtype), shared.kv[kind.full])
            x, aux, past, kv = attend(inputs, chunk, past, index, kind, kv)
            if latest_kv is not None:
                latest_kv = latest_kv | {kind.full: kv}
        x = constrain(x, "batch", "sequence", None)
        aux = jax.tree.map(lambda sums: sums.sum(0), aux)
        if "mlp" in kind.absent:
            shapes = FEED_FORWARDS[config.feed_forward].auxiliary_shapes(config)
            aux = {name: jnp.zeros(shape) for name, shape in shapes.items()}
        return (x, past, latest_kv), (x if hidden_states else None, aux)

    def attend(inputs, chunk, past, index, kind, kv):
        if past is not None:
            own = config.kv_layers(kind.full)
            index = jnp.asarray(len(own) - 1) if kind.shares else _number(config, own, index)
        in_groups = past is None and execution.head_groups > 1
        # Groups compute their own keys and values, unless later layers need those of all heads.
        if not kind.shares and not (in_groups and not config.later_layers):
            k, v = inputs.layer.keys_values(chunk.x, tokens, kind.rope, inputs.keys)
            k = checkpoint_named(k, "key", execution.offload)
            v = checkpoint_named(v, "value", execution.offload)
            if past is not None:
                kv = cached.append(past.keys_values(kind.full), (k, v), index, past.length)
                past = past.with_keys_values(kind.full, *kv)
            else:
                kv = k.astype(chunk.x.dtype), v.astype(chunk.x.dtype)
        k: Any = None
        v: Any = None
        if past is not None or kv is not None:
            k, v = kv if past is None else past.keys_values(kind.full)
        of_layer = replace(mask, window=kind.window, **trees)
        if trees and (kind.window is not None or alibi is not None):
            of_layer = replace(of_layer, depths=tokens.positions)
        if kind.pattern is not None:
            S = chunk.x.shape[1] if past is None else k.shape[-3]
            of_layer = kind.pattern.apply(of_layer, positions, k_positions, S, *marks)
        if in_groups:
            bind = partial(_specify_group, config, execution, kind, sequence_strategy)
            groups = HeadGroups(execution, kind, config.num_heads, bind)
            context = GroupContext(tokens, of_layer, inputs.keys, alibi)
            x, out = groups(inputs.layer, chunk.x, kv, context)
            layer = copy(inputs.layer)
            layer.out = layer.gate = None
            inputs, chunk = inputs._replace(layer=layer), chunk._replace(x=x)
            return *_split(execution, inputs, chunk, out), past, kv
        specify = partial(_specify, config, execution, kind, inputs, of_layer, alibi)
        if past is not None:
            function = partial(specify(cached.attention), index=index, held=past.length)
        elif execution.schedule == "fused":
            transform = partial(specify(blockwise_transformer), offload=execution.offload)
            return *_fused(transform, kind, inputs, chunk, k, v), past, kv
        else:
            function = partial(specify(attention), strategy=sequence_strategy)
            function = partial(function, offload=execution.offload)
        q = checkpoint_named(_query(kind, inputs, chunk), "query", execution.offload)
        return *_split(execution, inputs, chunk, function(q, k, v)), past, kv

    return apply


def check_trees(config: ModelConfig, *, two: bool = True) -> None:
    """Checks that all layers can read trees of tokens, with up to two branches or with any.

    Raises:
      NotImplementedError: the attention has a pattern or is not causal; a layer has none, and trees
        may have more than two branches.
    """
    if not config.causal:
        raise NotImplementedError("trees of tokens: need a model with causal attention")
    for kind in config.layer_kinds:
        if kind.mixer is not None and not two:
            raise NotImplementedError(
                f"trees of tokens: layers of {kind.mixer} carry a state from token to token, of at "
                "most two branches; train on separate sequences"
            )
        if kind.pattern is not None:
            raise NotImplementedError(
                f"trees of tokens: model.attention_pattern.type={kind.pattern.type} counts tokens "
                "of a document in one line; train on separate sequences"
            )


def _own_layers(config: ModelConfig) -> dict[str, list[int]]:
    """Returns the indices of the layers that have a part, for each part that some layers lack."""
    kinds = config.layer_kinds
    names = {name for kind in kinds for name in kind.absent}
    return {name: [i for i, kind in enumerate(kinds) if name not in kind.absent] for name in names}


def _number(config: ModelConfig, own: list[int], index: Int[Array, ""]) -> Int[Array, ""]:
    """Returns the position of layer `index` among the layers `own`."""
    if len(own) == config.num_layers:
        return index
    return jnp.asarray(np.searchsorted(own, np.arange(config.num_layers)), index.dtype)[index]


def _entry_index(
    config: ModelConfig, kind: LayerKind, index: Int[Array, ""]
) -> Callable[[tuple], Int[Array, ""] | None]:
    """Returns a function from the key path of a stacked parameter to the index of layer `index` in
    that stack; None if the layer lacks the parameter."""
    places: dict[str, Any] = dict.fromkeys(kind.absent)
    for name, own in _own_layers(config).items():
        if name not in kind.absent:
            places[name] = _number(config, own, index)
    return lambda path: places.get(param_path(path).partition(".")[0], index)


def _arranged(layer: Layer, kind: LayerKind) -> Layer:
    """Returns an entry of the stacked layers whose `mlp` is its feed-forward network and whose
    `PROJECTIONS` have the sizes of its heads."""
    for name in kind.absent:
        setattr(layer, name, None)
    if layer.mlp is None:
        layer.mlp, layer.dense = layer.dense, None
    for name in PROJECTIONS if kind.full else ():
        setattr(layer, name, getattr(layer, FULL + name))
        setattr(layer, FULL + name, None)
    return layer


def _of_feed_forwards(config: ModelConfig, aux: Auxiliary) -> Auxiliary:
    """Returns the auxiliary sums of the layers that have them."""
    if not config.dense_layers:
        return aux
    return jax.tree.map(lambda sums: sums[np.array(config.expert_layers)], aux)


def _zero_kv(config: ModelConfig, x: Float[Array, "B T D"]) -> dict[bool, tuple[Array, Array]]:
    """Returns zero keys and values per layer type."""

    def zeros(full):
        shape = *x.shape[:2], *config.heads(full)
        return constrain(jnp.zeros(shape, x.dtype), "batch", "sequence", "kv_heads", None)

    return {full: (zeros(full), zeros(full)) for full in (False, True)}


def _lengths(
    config: ModelConfig, positions: Int[Array, "B T"], mask: Mask, length: Int[Array, "B"] | None
) -> Int[Array, "B T"] | None:
    """Returns the length of each token's document; None if no rotary scaling depends on it."""
    if not any(rope_type in BY_LENGTH for rope_type in config.rope_types):
        return None
    if length is None:
        return document_lengths(positions, mask.segments)
    return jnp.broadcast_to(length[:, None], positions.shape)


def _dropout_keys(key: Array | None, index: Int[Array, ""]) -> DropoutKeys | None:
    """Returns the dropout keys of layer `index`. `fold_in` with 0 is the key of the embeddings."""
    if key is None:
        return None
    keys = jax.random.split(jax.random.fold_in(key, index + 1), 4)
    return DropoutKeys(*(jax.random.key_data(key) for key in keys))


def _specify(
    config: ModelConfig,
    execution: Execution,
    kind: LayerKind,
    inputs: _Inputs,
    mask: Mask,
    alibi: Float[Array | np.ndarray, "N"] | None,
    attend: Callable[..., Any],
) -> Callable[..., Any]:
    """Binds this layer's options to `attend`, which takes the options of `ops.attention`."""
    (layer, keys), rate = inputs, config.attention_dropout or 0.0
    block = kind.pattern.landmark_block if kind.pattern else None
    if block is not None:
        attend = partial(attend, landmark_block=block)
    return partial(
        attend,
        mask=mask,
        alibi=alibi,
        sinks=None if layer.sinks is None else layer.sinks[...],
        scale=config.attention.scale,
        softcap=config.attention.softcap,
        dropout=rate if keys else 0.0,
        dropout_key=keys.attention if keys and rate else None,
        impl=execution.attention_implementation,
        q_chunk=execution.q_chunk,
        k_chunk=execution.k_chunk,
    )


def _specify_group(
    config: ModelConfig,
    execution: Execution,
    kind: LayerKind,
    strategy: str,
    layer: Layer,
    context: GroupContext,
    attend: Callable[..., Any],
    head_numbers: Int[Array, "N"],
) -> Callable[..., Any]:
    """Binds the options of one group of heads to `attend`."""
    inputs = _Inputs(layer, context.keys)
    attend = _specify(config, execution, kind, inputs, context.mask, context.alibi, attend)
    if config.attention_dropout and context.keys:
        attend = partial(attend, head_numbers=head_numbers)
    return partial(attend, strategy=strategy)


def _query(kind: LayerKind, inputs: _Inputs, chunk: _Chunk) -> Float[Array, "B T N H"]:
    return inputs.layer.queries(chunk.x, chunk.tokens, kind.rope, inputs.keys)


def _finish(
    inputs: _Inputs,
    chunk: _Chunk,
    out: Float[Array, "B T *heads"],
    inside: Bool[Array, "T"],
    offload: float = 0.0,
) -> tuple[Float[Array, "B T D"], Auxiliary]:
    return inputs.layer.finish(chunk.x, out, chunk.tokens, inside, inputs.keys, offload)


def _mix(
    config: ModelConfig,
    execution: Execution,
    kind: str,
    inputs: _Inputs,
    chunk: _Chunk,
    mask: Mask,
    ends: Int[Array, "B T"] | None,
    cache: Cache | None,
    index: Int[Array, ""],
) -> tuple[Float[Array, "B T *heads"], Cache | None]:
    """Runs `heads` of an attention-free layer on the full sequence, of trees with these ends."""
    layer, order = inputs.layer, mask.positions
    assert layer.mixer is not None
    seeds = adapter_dropout(inputs.keys, chunk.tokens)
    options = dict(segments=mask.segments, seeds=seeds, offload=execution.offload)
    with jax.named_scope("attention"):
        x = layer.read(chunk.x)
        if cache is None:
            assert order is None or isinstance(order, np.ndarray)  # `run` of a model gives them.
            if ends is None:
                return layer.mixer.heads(x, order=order, **options)[0], None
            heads = partial(layer.mixer.heads, offload=execution.offload)
            return heads_of_trees(heads, x, ends, seeds, order), None
        index = _number(config, config.layers_of(kind), index)
        # All tokens of a prompt have segment 1.
        previous = (cache.length > cache.start).astype(jnp.int32)
        out, carried = layer.mixer.heads(
            x, carried=cache.carried(kind, index), previous=previous, **options
        )
        return out, cache.carry(kind, index, carried)


def _split(
    execution: Execution, inputs: _Inputs, chunk: _Chunk, out: Float[Array, "B T *heads"]
) -> tuple[Float[Array, "B T D"], Auxiliary]:
    """Runs everything after attention on the full sequence, the feed-forward network in chunks of
    tokens. Returns the residual stream, and auxiliary sums per sequence or shard of a sequence."""
    return in_chunks(
        lambda inputs, per_token, inside: _finish(
            inputs, per_token[0], per_token[1], inside, execution.offload
        ),
        inputs,
        (chunk, out),
        chunk=execution.ffn_chunk,
        placement=expert_placement(inputs),
        has_aux=True,
    )


def _fused(
    transform: Callable[..., Any],
    kind: LayerKind,
    inputs: _Inputs,
    chunk: _Chunk,
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
) -> tuple[Float[Array, "B T D"], Auxiliary]:
    """Runs attention and feed-forward network on one block of queries at a time: Algorithm 1."""
    return transform(partial(_query, kind), _finish, inputs, chunk, k, v, has_aux=True)
