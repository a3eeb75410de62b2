"""AdamW in place, its state in as many bits as wanted, on the device or off it; optax's
schedules; and float16's loss scale."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.typing import ArrayLike

from bptjax.ops.quantize import (
    BLOCK,
    dequantize,
    dynamic_codebook,
    quantize,
    random_bits,
    stochastic_round,
)
from bptjax.parallel.parts import in_parts

# wsd's default share of the run for the decay.
DECAY_RATIO = 0.1


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and the learning-rate schedule, in the terms of Hugging Face.

    Attributes:
      learning_rate: highest learning rate of the schedule. If not set, 3e-4; if a checkpoint is
        fine-tuned 2e-5, or 2e-4 with adapters.
      lr_scheduler_type: schedule after the warm-up. linear and cosine decay to the end of the run;
        wsd (warmup, stable, decay) is constant, then decays linearly over the last decay_ratio.
      warmup_steps: steps of linear rise from 0. If neither this nor warmup_ratio is set, 0 for
        pre-training.
      warmup_ratio: warm-up as a share of the steps, rounded up, instead of warmup_steps. If
        neither is set, 0.03 for fine-tuning.
      min_lr_ratio: learning rate at the end of the decay, as a share of learning_rate. constant has
        no decay.
      decay_ratio: share of the run over which wsd decays. If not set, 0.1.
      adam_beta1: decay rate of the first moment.
      adam_beta2: decay rate of the second moment.
      adam_epsilon: constant added to the denominator.
      weight_decay: weight decay of linear layers. Norms, biases and embeddings have none. If not
        set, 0.1; 0 if a checkpoint is fine-tuned.
      max_grad_norm: gradients are scaled down to this global norm. 0 turns that off.
      state_dtype: dtype of the two moments. float32 takes 8 bytes a parameter, bfloat16 4, int8
        2.03. If not set, the dtype of the parameters.
      state_memory_kind: memory that holds the moments between steps. pinned_host frees device
        memory, and each step moves the moments there and back.
    """

    learning_rate: float | None = None
    lr_scheduler_type: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_steps: int | None = None
    warmup_ratio: float | None = None
    min_lr_ratio: float = 0.1
    decay_ratio: float | None = None
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    weight_decay: float | None = None
    max_grad_norm: float = 1.0
    state_dtype: Literal["float32", "bfloat16", "int8"] | None = None
    state_memory_kind: Literal["device", "pinned_host"] = "device"

    def __post_init__(self):
        for name in ("warmup_steps", "weight_decay", "max_grad_norm"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} is negative")
        for name in ("learning_rate", "adam_epsilon"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} is not positive")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} is not in [0, 1)")
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError(
                f"optimizer.warmup_ratio={self.warmup_ratio}: must not be set beside "
                f"optimizer.warmup_steps={self.warmup_steps}; set one of them"
            )
        for name in ("warmup_ratio", "min_lr_ratio", "decay_ratio"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"optimizer.{name}={value} is not in [0, 1]")
        if self.decay_ratio is not None and self.lr_scheduler_type != "wsd":
            raise ValueError(
                f"optimizer.decay_ratio={self.decay_ratio}: must not be set with "
                f"lr_scheduler_type={self.lr_scheduler_type}; only wsd reads it"
            )

    def known(self, name: str) -> float:
        """Returns the value of a key whose default is part of a `Config`.

        Raises:
          ValueError: it has no value yet.
        """
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"optimizer.{name}: must be set outside a Config, which sets defaults")
        return value


def phases(config: OptimizerConfig, steps: int) -> tuple[int, int]:
    """Returns the number of steps of the warm-up and of the decay in a run of `steps` steps.

    Raises:
      ValueError: the run is shorter.
    """
    warmup, name = config.warmup_steps or 0, "warmup_steps"
    if config.warmup_ratio is not None:
        warmup, name = _share(config.warmup_ratio, steps), "warmup_ratio"
    if warmup > steps:
        raise ValueError(
            f"optimizer.{name}={getattr(config, name)}: the warm-up must end within the {steps} "
            "steps of the run; set fewer"
        )
    if config.lr_scheduler_type != "wsd":
        return warmup, 0 if config.lr_scheduler_type == "constant" else steps - warmup
    ratio = DECAY_RATIO if config.decay_ratio is None else config.decay_ratio
    decay = _share(ratio, steps)
    if warmup + decay > steps:
        raise ValueError(
            f"optimizer.decay_ratio={ratio}: {warmup} steps of warm-up and {decay} of decay must "
            f"fit into the {steps} steps of the run; lower optimizer.decay_ratio or {name}"
        )
    return warmup, decay


def _share(ratio: float, steps: int) -> int:
    """Returns a share of the steps, rounded up; 0.07 × 100 is 7 despite its last bit."""
    return math.ceil(round(ratio * steps, 6))


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns the function from a step, 0-based, to its learning rate, in a run of `steps` steps.

    Raises:
      ValueError: the warm-up, or the warm-up and the decay, are longer than the run.
    """
    peak, (warmup, decay) = config.known("learning_rate"), phases(config, steps)
    floor = peak * config.min_lr_ratio
    after = optax.constant_schedule(peak)
    if config.lr_scheduler_type == "cosine" and decay:
        after = optax.cosine_decay_schedule(peak, decay, config.min_lr_ratio)
    elif decay:
        after = optax.linear_schedule(peak, floor, decay)
    if stable := steps - warmup - decay:
        after = optax.join_schedules([optax.constant_schedule(peak), after], [stable])
    if not warmup:
        return after
    # The first step already moves: the rise ends at `peak` after `warmup` steps.
    rise = optax.linear_schedule(peak / warmup, peak, warmup - 1)
    return optax.join_schedules([rise, after], [warmup])


def describe_schedule(config: OptimizerConfig, steps: int) -> str:
    """Formats the schedule of a run, and its learning rate if the run is extended, for people.

    Raises:
      ValueError: as `learning_rate`.
    """
    peak, (warmup, decay) = config.known("learning_rate"), phases(config, steps)
    text = f"schedule: {config.lr_scheduler_type} over {steps:,} steps, learning rate {peak:g}"
    text += f", warm-up {warmup:,} steps" if warmup else ""
    if not decay:
        return f"{text}; extending the run later does not change the learning rate"
    text += f", decay to {peak * config.min_lr_ratio:g} in the last {decay:,}"
    if config.lr_scheduler_type == "wsd":
        return f"{text}; extending the run before the decay does not change the learning rate"
    return f"{text}; extending the run later makes the learning rate jump"


class AdamState(NamedTuple):
    """
    Attributes:
      count: int32 scalar, updates done.
      mu, nu: first and second moment, in trees like the model's. In 8 bits there are, in place of a
        parameter, its `codes` and the `absmax` of each block; those of nu are of its square root.
    """

    count: Array
    mu: Any
    nu: Any


@dataclass(frozen=True)
class AdamW:
    """Clipping and AdamW, in place.

    Not an `optax.GradientTransformation`, which returns the updates of the whole model: here they
    exist nowhere, or for a part at a time. The arithmetic is float32. What is kept in fewer bits,
    parameters too, is rounded stochastically: to the nearest, a change of less than half of the
    last bit would be lost at every step, as nearly all of the second moment are with beta2 = 0.999.

    Kingma & Ba 2015, arXiv 1412.6980; Loshchilov & Hutter 2019, arXiv 1711.05101. In 8 bits the
    blocks and code books of Dettmers et al. 2021, arXiv 2110.02861.
    """

    config: OptimizerConfig
    max_steps: int

    def init(self, model: Any) -> AdamState:
        """The state before the first update of `model`, a tree of `nnx.Variable`."""
        mu, nu = (jax.tree.map(self._zeros, model, is_leaf=_is_variable) for _ in range(2))
        return AdamState(jnp.zeros((), jnp.int32), mu, nu)

    def _zeros(self, p: nnx.Variable) -> Any:
        value, kind = p.get_value(), self.config.state_dtype
        if kind != "int8":
            return p.replace(jnp.zeros_like(value, kind))
        *rest, S = value.shape
        # Devices that share the last axis share whole blocks, or each has all maxima of a row.
        axes = (*p.axes[:-1], None if S % BLOCK else p.axes[-1])
        return {
            "codes": p.replace(jnp.zeros_like(value, jnp.uint8)),
            "absmax": nnx.Param(jnp.zeros((*rest, math.ceil(S / BLOCK)), jnp.float32), axes=axes),
        }

    def update(
        self, gradients: Any, state: AdamState, model: Any, *, divisor: ArrayLike, key: Array
    ) -> tuple[Any, AdamState, Array]:
        """(model, state, norm) after a step with gradients / divisor, whose global norm, before
        clipping, is the third. Where that is not finite, model and state stay as they are.

        Jitted with model and state donated, it overwrites them; 8-bit moments, and those in host
        memory, which pass through the device, a part at a time.

        Args:
          gradients, model: trees of `nnx.Variable`, gradients in any float dtype.
          key: of the rounding; on another mesh the same key rounds differently.
        """
        at, treedef = jax.tree.flatten_with_path(model, is_leaf=_is_variable)
        scale = 1 / jnp.asarray(divisor, jnp.float32)
        squares = [
            jnp.square(g.astype(jnp.float32) * scale).sum() for g in jax.tree.leaves(gradients)
        ]
        norm = jnp.sqrt(sum(squares))
        finite = jnp.isfinite(norm)
        if self.config.max_grad_norm:
            scale *= jnp.minimum(1, self.config.max_grad_norm / jnp.maximum(norm, 1e-30))
        rate = learning_rate(self.config, self.max_steps)(state.count)
        # What blocks and transfers need beside would be as large as a leaf. The rest XLA fuses into
        # one kernel that overwrites all three, but on the CPU.
        parts = (
            self.config.state_dtype == "int8"
            or self.config.state_memory_kind == "pinned_host"
            or jax.default_backend() == "cpu"
        )
        new, trees = [], map(treedef.flatten_up_to, (gradients, state.mu, state.nu))
        for number, ((path, p), g, mu, nu) in enumerate(zip(at, *trees, strict=True)):
            # Kernels of linear layers decay, whatever shape they and the biases have.
            names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
            decay = self.config.known("weight_decay") * ("kernel" in names)
            step = partial(self._step, scale, rate, decay, state.count + 1)
            leaf_key = jax.random.fold_in(key, number)
            old = p, mu, nu
            if parts:
                new.append(in_parts(step, old, g, leaf_key, axes=p.axes, when=finite))
            else:
                chosen = partial(jnp.where, finite)
                new.append(jax.tree.map(chosen, step(old, g, leaf_key), old))
        model, mu, nu = (treedef.unflatten(leaves) for leaves in zip(*new, strict=True))
        return model, AdamState(state.count + finite, mu, nu), norm

    def _step(self, scale, rate, decay, count, kept, g, key):
        """Parameter and moments after a step with gradient `g`, of a leaf or some layers of it."""
        p, mu, nu = kept
        b1, b2 = self.config.adam_beta1, self.config.adam_beta2
        g = g.get_value().astype(jnp.float32) * scale
        m = b1 * _load(mu) + (1 - b1) * g
        v = b2 * _load(nu, squared=True) + (1 - b2) * jnp.square(g)
        m_hat, v_hat = m / (1 - b1**count), v / (1 - b2**count)
        x = p.get_value().astype(jnp.float32)
        x -= rate * (m_hat / (jnp.sqrt(v_hat) + self.config.adam_epsilon) + decay * x)
        first, second = random_bits(key, x.shape)
        mu = _store(m, mu, (first >> 16).astype(jnp.uint16))
        nu = _store(v, nu, first.astype(jnp.uint16), squared=True)
        return _store(x, p, second.astype(jnp.uint16)), mu, nu


def _load(moment: Any, squared: bool = False) -> Array:
    if not isinstance(moment, dict):
        return moment.get_value().astype(jnp.float32)
    codes, absmax = moment["codes"].get_value(), moment["absmax"].get_value()
    x = dequantize(codes, absmax, dynamic_codebook(signed=not squared))
    return jnp.square(x) if squared else x


def _store(x: Array, like: Any, noise: Array, squared: bool = False) -> Any:
    """float32 `x` as `like` is kept. In 8 bits the root of a square, which has the range of the
    first moment, and the precision that the update needs.
    """
    if not isinstance(like, dict):
        return like.replace(stochastic_round(x, noise) if like.dtype == jnp.bfloat16 else x)
    book = dynamic_codebook(signed=not squared)
    codes, absmax = quantize(jnp.sqrt(x) if squared else x, book, noise)
    if squared:
        # Not to zero: with epsilon alone below it, what is left of the first moment is huge.
        codes = jnp.maximum(codes, 1)
    return {"codes": like["codes"].replace(codes), "absmax": like["absmax"].replace(absmax)}


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """Float16's factor on the loss: halved by an overflow, doubled after `INTERVAL` steps without.
    Micikevicius et al. 2018, arXiv 1710.03740, Section 3.2.

    Attributes:
      value: float32 scalar.
      good_steps: int32 scalar, steps since it last changed.
    """

    INTERVAL = 1000

    value: Array
    good_steps: Array

    @classmethod
    def start(cls) -> "LossScale":
        # The loss is a sum over tokens, so gradients are large to begin with.
        return cls(jnp.asarray(1.0, jnp.float32), jnp.zeros((), jnp.int32))

    def update(self, finite: Array) -> "LossScale":
        """The scale for the next step, given whether this step's gradients were finite."""
        good = jnp.where(finite, self.good_steps + 1, 0)
        grown = good >= self.INTERVAL
        value = jnp.where(finite, jnp.where(grown, 2.0, 1.0), 0.5) * self.value
        return LossScale(value, jnp.where(grown, 0, good))
