"""The state of a run (parameters, optimizer state and keys): created, loaded or restored, with the
sharding and memory of each array."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import NamedSharding, PartitionSpec

from bptjax.models.architecture import new_model
from bptjax.models.params import is_variable, param_path
from bptjax.models.transformer import Transformer
from bptjax.ops.determinism import compiler_options, deterministic
from bptjax.optim.loss_scale import LossScale
from bptjax.optim.optimizer import OptState, init_opt_state
from bptjax.parallel.mesh import STATE_AXIS, sharding
from bptjax.training.spec import TrainSpec
from bptjax.weights.float8_kernels import float8_kernels
from bptjax.weights.hf.peft_modules import embeddings, modules
from bptjax.weights.lora import (
    Adapters,
    LoraKernel,
    LoraWeights,
    TrainedEmbedding,
    attach,
    embeddings_to_train,
    in_checkpoint,
    is_trained,
    join,
    new_adapters,
    split,
    target_kernels,
    train_in_full,
)
from bptjax.weights.quantized_kernels import linear_kernels, quantize_model, quantizer

# Host memory that devices can access directly.
HOST = "pinned_host"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state that a step reads and writes.

    Attributes:
      step: int32 scalar, optimizer steps done.
      key: uint32 `[2]`, data of the key for dropout and rounding.
      loss_scale: loss scale in float16; else None.
      last_norm: norm of the last finite gradients, with optimizer.clip=delayed; else None.
      gradients: arrays in host memory that the gradients of the layers overwrite in each step, with
        `TrainSpec.gradients_on_host`; else None. Not in checkpoints.
    """

    model: Transformer
    opt_state: OptState
    step: Array
    key: Array
    loss_scale: LossScale | None
    last_norm: Array | None = None
    gradients: Any = None


def abstract_state(spec: TrainSpec) -> TrainState:
    """Returns shapes, dtypes and shardings of the state, without allocating the state. Cached in
    the spec, because a run's start needs them several times and tracing is slow."""
    cache = vars(spec)
    if "abstract_state" not in cache:
        cache["abstract_state"] = _abstract_state(spec)
    return cache["abstract_state"]


def _abstract_state(spec: TrainSpec) -> TrainState:
    state = jax.eval_shape(partial(_new_state, spec), None, _loaded_adapters(spec))
    model = with_shardings(spec, state.model, sharded=spec.config.parallel.zero_stage == 3)
    state = replace(with_shardings(spec, state), model=model)
    state = replace(state, gradients=jax.tree.map(_in_host_memory, state.gradients))
    if spec.config.optimizer.state_memory_kind == "device":
        return state
    slots = jax.tree.map(_in_host_memory, state.opt_state.slots)
    return replace(state, opt_state=replace(state.opt_state, slots=slots))


def init_state(
    spec: TrainSpec, *, load: bool = True, show: Callable[[str], None] | None = None
) -> TrainState:
    """Returns the state at step 0. Loads the checkpoint if `load`; otherwise initializes. Every
    array is created sharded.

    Args:
      show: shows the progress of loading; see `Progress`.
    """
    model, pretrained, adapter = None, spec.pretrained, spec.config.adapter
    with deterministic(spec.config.train.deterministic):
        options = compiler_options()
    if pretrained is not None and load:
        plain = with_shardings(spec, _abstract_model(spec))
        put = None
        if adapter.type == "qlora":
            put = quantizer(plain, adapter.codebook, adapter.double_quant, options=options)
        model = pretrained.fill(plain, put, show)
    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(spec))

    with jax.set_mesh(spec.mesh):
        new = jax.jit(
            partial(_new_state, spec),
            out_shardings=shardings,
            donate_argnums=0,
            compiler_options=options,
        )
        return new(model, _loaded_adapters(spec))


def checkpoint_view(spec: TrainSpec, state: TrainState) -> TrainState:
    """Returns the state in a checkpoint: everything except gradients, and weights that adapters
    freeze."""
    state = replace(state, gradients=None)
    if spec.config.adapter.type == "none":
        return state
    return replace(state, model=split(state.model, in_checkpoint)[0])


def from_checkpoint(
    spec: TrainSpec, saved: TrainState, show: Callable[[str], None] | None = None
) -> TrainState:
    """Inverts `checkpoint_view`: reloads the frozen weights from the base model's checkpoint, and
    allocates memory for gradients. `show` shows the progress; see `Progress`."""
    if spec.gradients_on_host:
        state = abstract_state(spec)
        shardings = jax.tree.map(lambda x: x.sharding, state.gradients)
        new = jax.jit(lambda: _zero_gradients(spec, state.model), out_shardings=shardings)
        with jax.set_mesh(spec.mesh):
            saved = replace(saved, gradients=new())
    if spec.config.adapter.type == "none":
        return saved
    frozen = split(init_state(spec, show=show).model, in_checkpoint)[1]
    return replace(saved, model=join(saved.model, frozen))


def split_trained(spec: TrainSpec, model: Transformer) -> tuple[Any, Any]:
    """Returns (trained parameters, frozen parameters); `lora.join` is the inverse."""
    if spec.config.adapter.type == "none":
        return split(model, lambda v: isinstance(v, nnx.Param))
    return split(model, is_trained)


def gather_adapters(spec: TrainSpec, state: TrainState) -> Adapters:
    """Returns the adapters, and any embeddings trained in full, as NumPy arrays. All processes must
    call it, because it gathers the shards of all processes."""
    values, modules = {}, {}
    leaves = jax.tree.leaves_with_path(
        state.model, is_leaf=lambda x: isinstance(x, LoraKernel | TrainedEmbedding)
    )
    for path, leaf in leaves:
        if isinstance(leaf, LoraKernel):
            arrays = (v.get_value() for v in (leaf.a, leaf.b, leaf.scale))
            values[param_path(path)] = tuple(process_allgather(x, tiled=True) for x in arrays)
        elif isinstance(leaf, TrainedEmbedding):
            modules[param_path(path)] = process_allgather(leaf.get_value(), tiled=True)
    return Adapters(spec.config.adapter, values, modules)


class ParameterCounts(NamedTuple):
    """Number of all parameters, including adapters, and of trained parameters."""

    total: int
    trained: int


def parameter_counts(
    spec: TrainSpec, share: Callable[[str], Fraction | int] = lambda path: 1
) -> ParameterCounts:
    """Counts the parameters, weighting each by the `share` of its path."""

    def size(tree):
        leaves = jax.tree.leaves_with_path(tree, is_leaf=is_variable)
        return int(sum(v.get_value().size * share(param_path(path)) for path, v in leaves))

    base = size(_abstract_model(spec))
    if spec.config.adapter.type == "none":
        return ParameterCounts(base, base)
    state = jax.eval_shape(partial(_new_state, spec), None, _loaded_adapters(spec))
    trained, _ = split_trained(spec, state.model)
    # The base model's count includes the embeddings that are trained in full.
    in_full, low_rank = split(trained, lambda v: isinstance(v, TrainedEmbedding))
    return ParameterCounts(base + size(low_rank), size(in_full) + size(low_rank))


def adapted_kernels(spec: TrainSpec) -> set[str]:
    """Returns the paths of the kernels that have an adapter.

    Raises:
      ValueError: adapter.target_modules names no linear layer of the model, or is empty.
    """
    own = {path.removesuffix(".kernel"): (path,) for path in linear_kernels(_abstract_model(spec))}
    family = spec.pretrained.family if spec.pretrained else None
    return target_kernels(spec.config.adapter.target_modules, modules(spec.model, family) or own)


def kernel_sizes(spec: TrainSpec, sharded: bool) -> dict[str, tuple[int, int, int]]:
    """Returns the number of layers, inputs and outputs that a device holds of each of
    `float8_kernels`, by path. For `sharded` see `with_shardings`."""
    model = with_shardings(spec, _abstract_model(spec), sharded)
    in_ndims, sizes = float8_kernels(model), {}
    for at, v in jax.tree.leaves_with_path(model, is_leaf=is_variable):
        if (path := param_path(at)) in in_ndims:
            x = v.get_value()
            layers, *shape = x.sharding.shard_shape(x.shape)
            n = in_ndims[path]
            sizes[path] = layers, math.prod(shape[:n]), math.prod(shape[n:])
    return sizes


def fully_trained_embeddings(spec: TrainSpec) -> set[str]:
    """Returns the paths of the embeddings that are trained in full in addition to adapters.

    Raises:
      ValueError: adapter.modules_to_save names modules other than embeddings.
    """
    if spec.config.adapter.type == "none":
        return set()
    pretrained = spec.pretrained
    loaded = pretrained.adapters if pretrained else None
    modules = embeddings_to_train(
        spec.config.adapter.modules_to_save,
        embeddings(spec.model, pretrained.family if pretrained else None),
        bool(spec.model.add_tokens),
    )
    return modules | (set(loaded.modules) if loaded else set())


def _loaded_adapters(spec: TrainSpec) -> dict[str, LoraWeights] | None:
    """Returns the adapters that training continues from."""
    adapters = spec.pretrained.adapters if spec.pretrained else None
    return adapters.values if adapters else None


def _abstract_model(spec: TrainSpec) -> Transformer:
    """Returns shapes and dtypes of the model without adapters."""
    return jax.eval_shape(partial(_new_model, spec), jax.random.key(0))


def _new_model(spec: TrainSpec, key: Array) -> Transformer:
    """Returns a new model without adapters. If adapters will freeze it, its weights have the
    compute dtype."""
    train, frozen = spec.config.train, spec.config.adapter.type != "none"
    dtype = spec.compute_dtype if frozen else jnp.dtype(train.param_dtype)
    model = new_model(spec.model, key, dtype)
    return train_in_full(model, fully_trained_embeddings(spec), jnp.dtype(train.param_dtype))


def _new_state(
    spec: TrainSpec,
    model: Transformer | None = None,
    adapters: dict[str, LoraWeights] | None = None,
) -> TrainState:
    """Returns the state at step 0 from `model` and `adapters`, by default new ones."""
    adapter = spec.config.adapter
    model_key, key = jax.random.split(jax.random.key(spec.config.seed))
    if model is None:
        model = _new_model(spec, model_key)
        if adapter.type == "qlora":
            model = quantize_model(model, adapter.codebook, adapter.double_quant)
    if adapter.type != "none":
        dtype = jnp.dtype(spec.config.train.param_dtype)
        if adapters is None:
            adapters = new_adapters(model, adapted_kernels(spec), adapter, dtype, model_key)
        else:
            adapters = {
                path: (a.astype(dtype), b.astype(dtype), scale)
                for path, (a, b, scale) in adapters.items()
            }
        model = attach(model, adapters, adapter.dropout)
    return TrainState(
        model=model,
        gradients=_zero_gradients(spec, model),
        opt_state=init_opt_state(spec.config.optimizer, split_trained(spec, model)[0]),
        step=jnp.zeros((), jnp.int32),
        key=jax.random.key_data(key),
        loss_scale=LossScale.start() if spec.compute_dtype == jnp.float16 else None,
        last_norm=jnp.zeros(()) if spec.config.optimizer.clip == "delayed" else None,
    )


def _zero_gradients(spec: TrainSpec, model: Transformer) -> Any:
    """Returns `TrainState.gradients` of zeros. Gradients of several micro-batches are sums in
    float32."""
    if not spec.gradients_on_host:
        return None
    dtype = None if spec.config.train.gradient_accumulation_steps == 1 else jnp.float32
    layers = split_trained(spec, model)[0].layers
    return jax.tree.map(lambda p: jnp.zeros_like(p, dtype), layers)


def with_shardings(spec: TrainSpec, tree: Any, sharded: bool = True) -> Any:
    """Returns the abstract leaves with shardings: parameters by their logical axes, along
    `STATE_AXIS` only if `sharded`; other leaves are replicated."""
    replicated = () if sharded else (STATE_AXIS,)

    def place(leaf):
        if not isinstance(leaf, nnx.Variable):
            where = NamedSharding(spec.mesh, PartitionSpec())
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
        value = leaf.get_value()
        where = sharding(spec.mesh, leaf.axes, value.shape, replicated)
        return leaf.replace(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=where))

    return jax.tree.map(place, tree, is_leaf=is_variable)


def constrain(spec: TrainSpec, tree: Any, sharded: bool) -> Any:
    """Constrains arrays of a traced program to the shardings of `with_shardings`."""
    where = jax.tree.map(lambda x: x.sharding, with_shardings(spec, tree, sharded))
    return jax.lax.with_sharding_constraint(tree, where)


def _in_host_memory(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding.with_memory_kind(HOST))
