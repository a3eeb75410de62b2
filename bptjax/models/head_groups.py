"""Attention of a layer for one group of heads at a time, so that a layer needs less memory.

The queries, keys and values of all heads never exist at once, nor do their gradients. Each group
runs from its projections to its product with the output matrix, and the products are added.

Automatic differentiation of the loop over groups would save the queries, keys and values of every
group. The backward pass below computes them again, one group at a time.
"""

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from bptjax.models.config import ModelConfig
from bptjax.models.execution import Execution
from bptjax.models.layer_kinds import ATTENTION_PARTS, LayerKind
from bptjax.models.layers import DropoutKeys, Layer, TokenContext, adapter_dropout
from bptjax.models.linear import dequantize, spread
from bptjax.models.params import is_variable
from bptjax.ops.attention import RESIDUAL_NAMES
from bptjax.ops.checkpoint_names import checkpoint_named
from bptjax.ops.mask import Mask
from bptjax.ops.softmax import AttentionState
from bptjax.ops.static_arrays import split_static
from bptjax.parallel.mesh import RULES
from bptjax.parallel.sequence import attention, attention_state, in_chunks, tensor_shards

# Names of the activations of a group, in the order in which they are computed.
GROUP_NAMES = ("query", "key", "value", *RESIDUAL_NAMES)
# Logical axes that are divided into groups.
HEAD_AXES = ("heads", "kv_heads")

KeysValues = tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]


class GroupContext(NamedTuple):
    """Inputs of attention without a gradient."""

    tokens: TokenContext
    mask: Mask
    keys: DropoutKeys | None
    alibi: Float[Array, "N"] | None


def max_head_groups(model: ModelConfig, tp: int) -> int:
    """Returns the largest number of groups into which tp devices can divide their key heads."""
    heads = [model.heads(i in model.full_layers)[0] for i in model.attention_layers]
    return max(math.gcd(*heads) // tp, 1)


def check_head_groups(groups: int, model: ModelConfig, tp: int) -> None:
    """Checks that groups divide the key heads of each of tp devices.

    Raises:
      ValueError: they do not, or the heads of a layer depend on each other.
    """
    name = f"execution.head_groups={groups}"
    if groups == 1:
        return
    if model.attention.qk_norm_joint:
        raise ValueError(
            f"{name}: must be 1 with model.attention.qk_norm_joint=true, which normalizes all "
            "heads of a token together"
        )
    for full in {i in model.full_layers for i in model.attention_layers}:
        heads, _ = model.heads(full)
        if heads % tp:
            raise ValueError(
                f"{name}: must be 1 with parallel.tp={tp}, which does not divide the {heads} key "
                "heads"
            )
        if heads // tp % groups:
            each = " of each device" if tp > 1 else ""
            raise ValueError(
                f"{name}: must divide the {heads // tp} key heads{each}; use "
                f"{math.gcd(groups, heads // tp)}"
            )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Heads:
    """An array whose heads are divided into groups.

    Attributes:
      array: `[..., devices, groups, heads of a group, ...]`.
      axis: axis of the groups.
    """

    array: Array
    axis: int = field(metadata={"static": True})

    def of(self, group: Int[Array, ""]) -> Array:
        """Returns the heads of a group, `[..., heads, ...]`."""
        x = jax.lax.dynamic_index_in_dim(self.array, group, self.axis, keepdims=False)
        return x.reshape(*x.shape[: self.axis - 1], -1, *x.shape[self.axis + 1 :])

    def write(self, group: Int[Array, ""], x: Array) -> "_Heads":
        """Replaces the heads of a group."""
        shape = *self.array.shape[: self.axis], *self.array.shape[self.axis + 1 :]
        update = jax.lax.dynamic_update_index_in_dim
        return _Heads(update(self.array, x.reshape(shape), group, self.axis), self.axis)


def _is_heads(x: Any) -> bool:
    return isinstance(x, _Heads)


def _of_group(tree: Any, group: Int[Array, ""]) -> Any:
    """Selects the heads of a group in all arrays that are divided."""
    return jax.tree.map(lambda x: x.of(group) if _is_heads(x) else x, tree, is_leaf=_is_heads)


class _Inputs(NamedTuple):
    """Inputs of all groups.

    Attributes:
      weights: arrays of the layer's variables; None for those that have no gradient.
      kv: keys and values; None if each group computes its own.
    """

    weights: list[Any]
    kv: tuple[_Heads, _Heads] | None


class _Data(NamedTuple):
    """Inputs of all groups without a gradient.

    Attributes:
      weights: arrays of the layer's variables that `_Inputs` lacks.
      numbers: index of each query head in the layer.
    """

    weights: list[Any]
    context: list[Any]
    numbers: _Heads
    alibi: _Heads | None


@dataclass(frozen=True)
class HeadGroups:
    """Attention of a layer, one group of heads at a time.

    Attributes:
      num_heads: query heads of the layer.
      bind: maps (layer, its context, a function with the options of `parallel.sequence.attention`,
        head numbers) to the function with these options.
    """

    execution: Execution
    kind: LayerKind
    num_heads: int
    bind: Callable[..., Callable[..., Any]]

    def __call__(
        self,
        layer: Layer,
        x: Float[Array, "B T D"],
        kv: KeysValues | None,
        context: GroupContext,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        """Returns the residual stream `x` itself, and the output projection of attention, summed
        over the groups in the dtype of x. Use this `x` in the rest of the layer: its cotangent is
        then the start of a sum over groups.

        Args:
          kv: keys and values of all heads; None if each group computes its own.
        """
        part = dequantize(_attention_part(layer), x.dtype)
        bias, part.out = part.out.bias, copy(part.out)
        part.out.bias = None
        variables, structure = jax.tree.flatten(part, is_leaf=is_variable)
        weights = [self._divided(v) for v in variables]
        inexact = [jnp.issubdtype(v[...].dtype, jnp.inexact) for v in variables]
        trained, others = (
            [w if flag == chosen else None for w, flag in zip(weights, inexact, strict=True)]
            for chosen in (True, False)
        )

        def rebuild(trained, others):
            arrays = [b if a is None else a for a, b in zip(trained, others, strict=True)]
            pairs = zip(variables, arrays, strict=True)
            return structure.unflatten([v.replace(y) for v, y in pairs])

        alibi = None if context.alibi is None else self._divide(context.alibi, 0)
        numbers = self._divide(jnp.arange(self.num_heads, dtype=jnp.int32), 0)
        traced, make_context = split_static(context._replace(alibi=None))
        run = _Groups(self, rebuild, make_context)
        divided: Any = kv and tuple(self._divide(y, 2, "kv_heads") for y in kv)
        inputs = _Inputs(trained, divided)
        x, y = _attend(run, x, inputs, _Data(others, traced, numbers, alibi))
        return x, y if bias is None else y + spread(bias[...], y.shape, y.dtype)

    def _divided(self, v: nnx.Variable) -> Any:
        x = v[...]
        for name in HEAD_AXES:
            if name in v.axes:
                return self._divide(x, x.ndim - len(v.axes) + v.axes.index(name), name)
        return x

    def _divide(self, x: Array, axis: int, name: str = "heads") -> _Heads:
        """Divides the heads on an axis so that each device has heads of each group."""
        shards = tensor_shards()
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        x = x.reshape(*before, shards, self.execution.head_groups, -1, *after)
        if shards > 1:
            free = PartitionSpec.UNCONSTRAINED
            partition = *(free for _ in before), RULES[name], None, None, *(free for _ in after)
            x = jax.lax.with_sharding_constraint(x, PartitionSpec(*partition))
        return _Heads(x, axis + 1)


def _attention_part(layer: Layer) -> Layer:
    """Returns a layer that has only the parts of attention, and its norm if attention reads it."""
    part, names = copy(layer), {*ATTENTION_PARTS}
    if layer.config.norms.position != "post":
        names.add("attention_norm")
    for name, value in vars(layer).items():
        if isinstance(value, (nnx.Module, nnx.Variable)) and name not in names:
            setattr(part, name, None)
    return part


@dataclass(frozen=True)
class _Groups:
    """Static arguments of `_attend`.

    Attributes:
      rebuild: maps the two lists of a group's weights to the layer with its heads.
      context: maps the traced arrays of the context to the context.
    """

    heads: HeadGroups
    rebuild: Callable[[list, list], Layer]
    context: Callable[[list], GroupContext]

    def group(self, inputs: _Inputs, data: _Data, group: Int[Array, ""]) -> "_Group":
        """Returns one group, given its own `inputs`."""
        own: Any = _of_group(data, group)
        kv: Any = inputs.kv
        layer = self.rebuild(inputs.weights, own.weights)
        context = self.context(own.context)._replace(alibi=own.alibi)
        return _Group(self.heads, layer, kv, context, own.numbers)


class _PerToken(NamedTuple):
    """Arrays per token of the functions before and after attention."""

    x: Float[Array, "B T D"] | None
    tokens: TokenContext
    out: Float[Array, "B T N H"] | None = None
    total: Float[Array, "B T D"] | None = None


class _Group(NamedTuple):
    """One group of heads. `layer` has the weights of these heads."""

    heads: HeadGroups
    layer: Layer
    kv: KeysValues | None
    context: GroupContext
    numbers: Int[Array, "N"]

    def queries_keys_values(self, x: Float[Array, "B T D"]) -> tuple[Array, ...]:
        """Returns x itself, queries, keys and values. The cotangent of this x is then the start of
        the sum that is the cotangent of the argument."""
        given, rope = self.kv is not None, self.heads.kind.rope

        def function(params, chunk):
            layer, keys = params
            options = chunk.tokens, rope, keys
            q = layer.queries(chunk.x, *options)
            return chunk.x, q, *(() if given else layer.keys_values(chunk.x, *options))

        params = self.layer, self.context.keys
        return *self._in_chunks(function, params, _PerToken(x, self._tokens)), *(self.kv or ())

    def attend(self, function: Callable[..., Any], *qkv: Array, **options: Any) -> Any:
        function = self.heads.bind(self.layer, self.context, function, self.numbers)
        return function(*qkv, **options)

    def project(
        self, x: Float[Array, "B T D"], out: Array, total: Float[Array, "B T D"] | None = None
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        """Returns x itself, as `queries_keys_values`, and the output projection, plus `total`."""

        def function(params, chunk):
            layer, keys, numbers = params
            y = layer.project(chunk.x, chunk.out, adapter_dropout(keys, chunk.tokens), numbers)
            return chunk.x, y if chunk.total is None else chunk.total + y

        # Without a gate, only the output of attention is read.
        read = None if self.layer.gate is None else x
        chunks = _PerToken(read, self._tokens, out, total)
        params = self.layer, self.context.keys, self.numbers
        same, y = self._in_chunks(function, params, chunks)
        return x if same is None else same, y

    @property
    def _tokens(self) -> TokenContext:
        """The inputs per token that these functions read."""
        tokens = self.context.tokens
        return TokenContext(tokens.positions, tokens.ids, lengths=tokens.lengths)

    def _in_chunks(self, function: Callable[..., Any], params: Any, chunks: _PerToken) -> Any:
        """Runs a position-wise function in chunks as large as the feed-forward network's, but for
        the narrower heads of a group."""
        execution = self.heads.execution
        chunk = execution.ffn_chunk * execution.head_groups
        return in_chunks(function, params, chunks, chunk=chunk)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(run, x, inputs, data):
    return _forward(run, x, inputs, data)[0]


def _forward(run, x, inputs, data):
    execution = run.heads.execution

    @jax.named_scope("attention")
    def body(total, group):
        this = run.group(_of_group(inputs, group), data, group)
        _, *qkv = this.queries_keys_values(x)
        state = this.attend(attention_state, *qkv)
        named = dict(zip(GROUP_NAMES, (*qkv, *state), strict=True))
        saved = {name: y for name, y in named.items() if name in execution.saved}
        return this.project(x, state.out, total)[1], saved

    groups = jnp.arange(execution.head_groups, dtype=jnp.int32)
    total, saved = jax.lax.scan(body, jnp.zeros_like(x), groups)
    for name, y in saved.items():
        named = partial(checkpoint_named, name=name, offload=execution.offload)
        saved[name] = jax.vmap(named)(y)
    return (x, total), (x, inputs, data, saved)


def _backward(run, residuals, cotangents):
    x, inputs, data, saved = residuals
    dx, dy = cotangents
    # Zeros tied to the cotangent: otherwise XLA would make them before the rest of the layer runs
    # backward.
    dy, zero = jax.lax.optimization_barrier((dy, jnp.zeros((), jnp.float32)))

    def zeros(y):
        # Weights of one group have their gradient from that group, shared ones from all groups.
        dtype = y.array.dtype if _is_heads(y) else jnp.float32
        return jax.tree.map(lambda y: jnp.full(y.shape, zero.astype(dtype)), y)

    def add(group):
        def one(total, y):
            if _is_heads(total):
                return total.write(group, y)
            return total + y.astype(total.dtype)

        return one

    @jax.named_scope("attention")
    def body(sums, group):
        group, saved = group

        def function(x, inputs):
            this = run.group(inputs, data, group)
            x, *computed = this.queries_keys_values(x)
            computed = zip(GROUP_NAMES, computed, strict=False)
            qkv = [_saved_or_computed(saved.get(name), y) for name, y in computed]
            state = [saved.get(name) for name in RESIDUAL_NAMES]
            if None in state:
                state = this.attend(attention_state, *jax.lax.stop_gradient(qkv))
            out = this.attend(attention, *qkv, state=AttentionState(*state))
            return this.project(x, out)

        total, gradients = sums
        _, pull = jax.vjp(function, x, _of_group(inputs, group))
        total, of_group = pull((total, dy))
        return (total, jax.tree.map(add(group), gradients, of_group, is_leaf=_is_heads)), None

    start = jnp.full(x.shape, zero.astype(x.dtype)), jax.tree.map(zeros, inputs, is_leaf=_is_heads)
    groups = jnp.arange(run.heads.execution.head_groups, dtype=jnp.int32)
    (total, gradients), _ = jax.lax.scan(body, start, (groups, saved))
    gradients = jax.tree.map(lambda d, y: d.astype(y.dtype), gradients, inputs)
    return dx + total, gradients, None


_attend.defvjp(_forward, _backward)


@jax.custom_vjp
def _saved_or_computed(saved, computed):
    """Returns the saved array, if any; its gradient is that of the computed array, whose
    computation XLA then removes."""
    return computed if saved is None else saved


_saved_or_computed.defvjp(
    lambda saved, computed: (_saved_or_computed(saved, computed), None),
    lambda _, cotangent: (None, cotangent),
)
