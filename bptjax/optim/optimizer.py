"""Optimizer steps: in-place updates of parameters and optimizer state, in float32, bfloat16 or
int8, on the device or in host memory."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import UInt32

from bptjax.ops.choices import record
from bptjax.ops.quantize import (
    BLOCK,
    DynamicCodebook,
    block_maxima,
    dequantize,
    encode,
    fold_in,
    random_bits,
    rounding_key,
    stochastic_round,
)
from bptjax.ops.stacked import get_entry, put_entry
from bptjax.ops.target import platform
from bptjax.optim import adamw_triton
from bptjax.optim.update_rules import AdamW, Lion, Muon, UpdateRule
from bptjax.parallel.sliced_update import SLICE_ELEMENTS, update_in_slices


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule, in Hugging Face's terms.

    Attributes:
      type: adamw, lion or muon. adamw keeps two slots of state per parameter, lion one. muon keeps
        one per weight matrix of a linear layer, including low-rank factors of adapters, and updates
        all other parameters like adamw.
      learning_rate: peak learning rate. If not set, 3e-4 for pre-training, 2e-5 for fine-tuning,
        and 2e-4 for adapters; lion takes a quarter of these.
      lr_scheduler_type: schedule after the warm-up. linear and cosine decay to the end of the run;
        wsd (warmup, stable, decay) is constant, then decays linearly over the last decay_ratio.
      warmup_steps: steps of linear rise from 0. If neither this nor warmup_ratio is set, 0 for
        pre-training.
      warmup_ratio: warm-up as a share of the steps, rounded up, instead of warmup_steps. If neither
        is set, 0.03 for fine-tuning.
      min_lr_ratio: learning rate at the end of the decay, as a share of learning_rate. constant has
        no decay.
      decay_ratio: share of the run over which wsd decays. If not set, 0.1.
      adam_beta1: decay rate of the first moment.
      adam_beta2: decay rate of the second moment.
      adam_epsilon: constant added to the denominator.
      lion_beta1: weight of the momentum in the average whose sign is lion's step.
      lion_beta2: decay rate of the momentum.
      muon_momentum: decay rate of the momentum.
      muon_dtype: dtype in which muon orthogonalizes the momentum of a weight matrix.
      weight_decay: weight decay of linear layers. Norms, biases and embeddings have none. If not
        set, 0.1 (0.4 for lion) for pre-training and 0 for fine-tuning.
      max_grad_norm: maximum norm of the gradients; larger gradients are scaled down. 0 turns this
        off.
      clip: norm that max_grad_norm limits. exact is the global norm of the step; delayed that of
        the previous step, and none in the first step; per_layer that of each layer, and that of
        all other parameters.
      in_backward: update each layer inside the backward pass, as soon as its gradient is known, so
        that the gradients of all layers never exist at once on the device. Where the norm of all
        gradients must be known first, with clip=exact and max_grad_norm above 0, the gradients move
        to host memory instead, and the updates follow the backward pass. If not set, true with
        clip=delayed, clip=per_layer or max_grad_norm=0.
      state_dtype: dtype of the optimizer state. Each slot takes 4 bytes per parameter in float32, 2
        in bfloat16, 1.02 in int8. If not set, the dtype of the parameters.
      state_memory_kind: memory that holds the optimizer state between steps. pinned_host frees
        device memory, but each step moves the state to the device and back.
    """

    type: str = "adamw"
    learning_rate: float | None = None
    lr_scheduler_type: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_steps: int | None = None
    warmup_ratio: float | None = None
    min_lr_ratio: float = 0.1
    decay_ratio: float | None = None
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    lion_beta1: float = 0.9
    lion_beta2: float = 0.99
    muon_momentum: float = 0.95
    muon_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    weight_decay: float | None = None
    max_grad_norm: float = 1.0
    clip: Literal["exact", "delayed", "per_layer"] = "exact"
    in_backward: bool | None = None
    state_dtype: Literal["float32", "bfloat16", "int8"] | None = None
    state_memory_kind: Literal["device", "pinned_host"] = "device"

    def __post_init__(self):
        for name in ("warmup_steps", "weight_decay", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"optimizer.{name}={value}: must be finite and not negative")
        for name in ("learning_rate", "adam_epsilon"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"optimizer.{name}={value}: must be finite and positive")
        if self.type not in OPTIMIZERS:
            names = ", ".join(OPTIMIZERS)
            raise ValueError(f"optimizer.type={self.type}: must be one of {names}")
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name.endswith(("_beta1", "_beta2", "_momentum")) and not 0 <= value < 1:
                raise ValueError(f"optimizer.{f.name}={value}: must be in [0, 1)")
            readers = [name for name, row in OPTIMIZERS.items() if f.name in row.keys]
            if readers and self.type not in readers and value != f.default:
                raise ValueError(
                    f"optimizer.{f.name}={value}: must be {f.default} with "
                    f"optimizer.type={self.type}, which does not read it"
                )
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError(
                f"optimizer.warmup_ratio={self.warmup_ratio}: must not be set together with "
                f"optimizer.warmup_steps={self.warmup_steps}; set one of them"
            )
        for name in ("warmup_ratio", "min_lr_ratio", "decay_ratio"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"optimizer.{name}={value}: must be in [0, 1]")
        if self.decay_ratio is not None and self.lr_scheduler_type != "wsd":
            raise ValueError(
                f"optimizer.decay_ratio={self.decay_ratio}: must not be set with "
                f"lr_scheduler_type={self.lr_scheduler_type}; only wsd reads it"
            )

    def known(self, name: str) -> float:
        """Returns the value of a key whose default is set by `Config`.

        Raises:
          ValueError: the key has no value yet.
        """
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"optimizer.{name}: must be set; a `Config` sets its default")
        return value


def _adamw(config: OptimizerConfig, p: nnx.Variable) -> UpdateRule:
    return AdamW(config.adam_beta1, config.adam_beta2, config.adam_epsilon)


def _muon(config: OptimizerConfig, p: nnx.Variable) -> UpdateRule:
    """Returns Muon for hidden matrices, including low-rank factors, and AdamW for embeddings, head,
    norms and biases, as Jordan et al. advise."""
    # (number of input axes, number of output axes), for kernels only.
    matrix = p.get_metadata().get("matrix")
    if matrix is None:
        return _adamw(config, p)
    inputs, outputs = matrix
    return Muon(config.muon_momentum, inputs, outputs, config.muon_dtype)


def is_decayed(p: nnx.Variable) -> bool:
    """Returns whether weight decay applies: to weights of linear layers, including low-rank factors
    and routers. Shapes do not distinguish these from biases."""
    metadata = p.get_metadata()
    return "matrix" in metadata or metadata.get("decayed", False)


@dataclass(frozen=True)
class Optimizer:
    """A value of `optimizer.type`.

    Attributes:
      rule: returns the update rule of a parameter.
      keys: names of the `OptimizerConfig` fields that not every optimizer reads, but this one does.
      rate_divisor: divides AdamW's default learning rate and multiplies its default weight decay.
    """

    rule: Callable[[OptimizerConfig, nnx.Variable], UpdateRule]
    keys: tuple[str, ...] = ()
    rate_divisor: float = 1.0


ADAM_KEYS = ("adam_beta1", "adam_beta2", "adam_epsilon")
OPTIMIZERS = {
    "adamw": Optimizer(_adamw, ADAM_KEYS),
    # Chen et al. 2023, arXiv 2302.06675, Section 5: Lion takes a learning rate 3 to 10 times lower
    # than AdamW, and a weight decay higher by the same factor.
    "lion": Optimizer(
        lambda config, _: Lion(config.lion_beta1, config.lion_beta2),
        ("lion_beta1", "lion_beta2"),
        rate_divisor=4.0,
    ),
    "muon": Optimizer(_muon, (*ADAM_KEYS, "muon_momentum", "muon_dtype")),
}


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class OptState:
    """Optimizer state.

    Attributes:
      count: int32 scalar, number of updates done.
      slots: trees like the model's, by the names of `UpdateRule.slots`. In int8, a dict of `codes`
        and block-wise `absmax` replaces each parameter. None replaces a parameter whose rule has no
        such slot.
    """

    count: Array
    slots: dict[str, Any]

    # Keys without "slots" keep the names of arrays in checkpoints as in version 0.1.
    def tree_flatten_with_keys(self):
        children = {"count": self.count, **self.slots}
        keyed = [(jax.tree_util.GetAttrKey(name), child) for name, child in children.items()]
        return keyed, tuple(self.slots)

    @classmethod
    def tree_unflatten(cls, names, children):
        count, *slots = children
        return cls(count, dict(zip(names, slots, strict=True)))


def init_opt_state(config: OptimizerConfig, model: Any) -> OptState:
    """Returns the state before the first update of `model`, a tree of `nnx.Variable`."""
    parameters, treedef = jax.tree.flatten(model, is_leaf=_is_variable)
    each = [
        {name: _zeros(config, p) for name in OPTIMIZERS[config.type].rule(config, p).slots}
        for p in parameters
    ]
    return OptState(jnp.zeros((), jnp.int32), _by_name(each, treedef))


def _by_name(each: list[dict[str, Any]], treedef: Any) -> dict[str, Any]:
    """Returns one tree per slot, given the slots of each parameter."""
    names = sorted({name for slots in each for name in slots})
    return {name: treedef.unflatten([slots.get(name) for slots in each]) for name in names}


def _zeros(config: OptimizerConfig, p: nnx.Variable) -> Any:
    """Returns a slot of zeros, stored as config.state_dtype."""
    value = p.get_value()
    if config.state_dtype != "int8":
        return p.replace(jnp.zeros_like(value, config.state_dtype))
    *rest, S = value.shape
    # Shard the maxima only if shards of the last axis hold full blocks; else replicate them.
    axes = (*p.axes[:-1], None if S % BLOCK else p.axes[-1])
    return {
        "codes": p.replace(jnp.zeros_like(value, jnp.uint8)),
        "absmax": nnx.Param(jnp.zeros((*rest, math.ceil(S / BLOCK)), jnp.float32), axes=axes),
    }


def apply_gradients(
    config: OptimizerConfig,
    gradients: Any,
    state: OptState,
    model: Any,
    *,
    rate: ArrayLike,
    divisor: ArrayLike,
    key: Array,
    last_norm: ArrayLike | None = None,
    norm: Array | None = None,
    slice_elements: int = SLICE_ELEMENTS,
) -> tuple[Any, OptState, Array]:
    """Clips the gradients and takes one step. Returns (model, state, norm).

    Not an `optax.GradientTransformation`, which would return the updates of the complete model:
    here the updates never exist all at once. Under jit with donated model and state, both are
    overwritten; int8 state and state in host memory slice by slice. If the norm is not finite,
    model and state do not change.

    The arithmetic is float32. Values stored in fewer bits, including parameters, are rounded
    stochastically. Rounding to nearest would drop every update below half an ulp; with beta2 =
    0.999 these are nearly all updates of the second moment. int8 uses the blocks and codebooks of
    Dettmers et al. 2021, arXiv 2110.02861.

    Args:
      gradients, model: trees of `nnx.Variable`, gradients in any float dtype.
      rate: learning rate.
      divisor: divisor of the gradients. The returned global norm is computed after the division and
        before clipping.
      key: key of the rounding. On another mesh, the same key rounds differently.
      last_norm: norm of the previous step's gradients, with config.clip=delayed.
      norm: norm of the gradients after the division, if known.
      slice_elements: see `update_in_slices`.
    """
    parameters, treedef = jax.tree.flatten(model, is_leaf=_is_variable)
    scale = 1 / jnp.asarray(divisor, jnp.float32)
    if norm is None:
        norm = jnp.sqrt(sum_of_squares(gradients, scale))
    factor = clip_factor(config, norm if last_norm is None else last_norm)
    update = Update(config, rate, scale * factor, state.count + 1, rounding_key(key))
    finite = jnp.isfinite(norm)
    trees = map(treedef.flatten_up_to, (gradients, *state.slots.values()))
    new = []
    for number, (p, g, *values) in enumerate(zip(parameters, *trees, strict=True)):
        slots = dict(zip(state.slots, values, strict=True))
        new.append(update(number, p, g, slots, when=finite, slice_elements=slice_elements))
    model = treedef.unflatten([p for p, _ in new])
    slots = _by_name([slots for _, slots in new], treedef)
    return model, OptState(state.count + finite.astype(jnp.int32), slots), norm


def sum_of_squares(gradients: Any, scale: ArrayLike) -> Array:
    """Returns the float32 sum of the squares of scaled gradients."""
    leaves = jax.tree.leaves(gradients)
    return sum((jnp.square(g.astype(jnp.float32) * scale).sum() for g in leaves), jnp.zeros(()))


def clip_factor(config: OptimizerConfig, norm: ArrayLike) -> Array:
    """Returns the factor on gradients of this global norm."""
    if not config.max_grad_norm:
        return jnp.ones(())
    return jnp.minimum(1, config.max_grad_norm / jnp.maximum(norm, 1e-30))


@dataclass(frozen=True)
class Update:
    """An optimizer step, applied to one parameter at a time; see `apply_gradients`.

    Attributes:
      scale: factor on the gradients.
      count: number of the step, from 1.
      key: key of the rounding, from `rounding_key`.
    """

    config: OptimizerConfig
    rate: ArrayLike
    scale: ArrayLike
    count: Array
    key: UInt32[Array, "2"]

    def __call__(
        self,
        number: int,
        p: nnx.Variable,
        g: nnx.Variable,
        slots: dict[str, Any],
        *,
        when: Array,
        index: Array | None = None,
        slice_elements: int = SLICE_ELEMENTS,
    ) -> tuple[nnx.Variable, dict[str, Any]]:
        """Returns the parameter and its slots after the step.

        Args:
          number: index of the parameter in the model, for the rounding.
          g: its gradient.
          when: bool scalar; nothing changes if it is false.
          index: entry of the parameter to update; `g` is the gradient of this entry. None updates
            all of it.
        """
        config, key = self.config, fold_in(self.key, number)
        if index is not None:
            key = fold_in(key, index)
        rule = OPTIMIZERS[config.type].rule(config, p)
        decay = config.known("weight_decay") * is_decayed(p)
        given = self.scale, self.rate, decay, self.count
        old = p, {name: slots[name] for name in rule.slots}
        if _kernel(rule, old, g, index is not None) == "triton" and isinstance(rule, AdamW):
            if config.state_dtype == "int8":
                key = fold_in(key, 0)  # The bits of a single slice.
            return adamw_triton.step(rule, *given, old, g, key, when, 0 if index is None else index)
        step = partial(_step, rule, *given)
        # In XLA, int8 blocks, host transfers and matrix products need leaf-sized temporaries, so
        # update these slice by slice. It fuses the rest into one in-place kernel (except on CPU).
        spaces = {jax.typeof(x).memory_space for x in jax.tree.leaves((g, slots))}
        sliced = (
            config.state_dtype == "int8" or jax.memory.Space.Host in spaces or platform() == "cpu"
        )
        if sliced or rule.unsliced_axes > 1:
            options = dict(axes=p.axes, when=when, unsliced_axes=rule.unsliced_axes)
            return update_in_slices(
                step, old, g, key, index=index, slice_elements=slice_elements, **options
            )
        entry = old
        if index is not None:
            # `when` depends on the gradient. Without the barrier, XLA may read the slots of a layer
            # long before their update.
            later, when = jax.lax.optimization_barrier((index, when))
            entry = get_entry(p, index), get_entry(old[1], later)
        new = jax.tree.map(partial(jnp.where, when), step(entry, g, key), entry)
        return new if index is None else put_entry(old, new, index)


def _step(rule, scale, rate, decay, count, old, g, key):
    """Returns (parameter, slots) after a step with gradient `g`; all may be slices."""
    if _kernel(rule, old, g, last=True) == "triton" and isinstance(rule, AdamW):
        return adamw_triton.step(rule, scale, rate, decay, count, old, g, key)
    p, slots = old
    g = g.get_value().astype(jnp.float32) * scale
    loaded = {name: _load(slots[name], squared) for name, squared in rule.slots.items()}
    direction, loaded = rule.update(loaded, g, count=count)
    x = p.get_value().astype(jnp.float32)
    # Skip a product with 0: XLA would share its zeros with those at the start of the loss, and keep
    # an array as large as the output embedding alive until here.
    x -= rate * (direction + decay * x if decay else direction)
    first, second = random_bits(key, x.shape)
    noises = (first >> 16, first, second >> 16)
    eight_bits = [name for name in rule.slots if isinstance(slots[name], dict)]
    # The root of a mean of squares has the first moment's range, and enough precision for the
    # update.
    loaded |= {name: jnp.sqrt(loaded[name]) for name in eight_bits if rule.slots[name]}
    # Without the barrier, XLA computes codes of one slot in the kernel that reduces the maxima of
    # another, which takes several times as long as two kernels.
    maxima = jax.lax.optimization_barrier({name: block_maxima(loaded[name]) for name in eight_bits})
    slots = {
        name: _store(loaded[name], slots[name], noise.astype(jnp.uint16), maxima.get(name), squared)
        for (name, squared), noise in zip(rule.slots.items(), noises, strict=False)
    }
    return _store(x, p, second.astype(jnp.uint16)), slots


def _kernel(
    rule: UpdateRule, old: Any, g: nnx.Variable, entry: bool = False, last: bool = False
) -> str:
    """Returns the implementation that updates a parameter, or slices of it. An open
    `record_choices` records it, but not where XLA needs one kernel only: states in more bits than
    int8, unless one entry of a stack is updated.

    Args:
      entry: whether to update one entry of a stack.
      last: whether no smaller slices follow, which another implementation might update.
    """
    int8 = any(isinstance(slot, dict) for slot in old[1].values())
    if not int8 and not entry:
        return "xla"
    reason = (
        "updates states of adamw only"
        if not isinstance(rule, AdamW)
        else adamw_triton.unsupported(old, g)
    )
    name = "xla" if reason else "triton"
    if last or not int8 or name == "triton":
        record("update of states", name, {"triton": reason} if reason else {})
    return name


def _load(stored: Any, squared: bool = False) -> Array:
    """Returns a slot in float32."""
    if not isinstance(stored, dict):
        return stored.get_value().astype(jnp.float32)
    codes, absmax = stored["codes"].get_value(), stored["absmax"].get_value()
    x = dequantize(codes, absmax, DynamicCodebook(signed=not squared))
    return jnp.square(x) if squared else x


def _store(
    x: Array, like: Any, noise: Array, absmax: Array | None = None, squared: bool = False
) -> Any:
    """Returns float32 `x`, stored like `like`. int8 takes the maxima of its blocks, and the root of
    a mean of squares."""
    if absmax is None:
        return like.replace(stochastic_round(x, noise) if like.dtype == jnp.bfloat16 else x)
    codes = encode(x, absmax, DynamicCodebook(signed=not squared), noise)
    if squared:
        # Avoid zero: dividing the first moment by epsilon alone would give a huge update.
        codes = jnp.maximum(codes, 1)
    return {"codes": like["codes"].replace(codes), "absmax": like["absmax"].replace(absmax)}


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)
