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


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and the learning-rate schedule, in the terms of Hugging Face.

    Attributes:
      learning_rate: highest learning rate of the schedule.
      lr_scheduler_type: schedule after the warm-up.
      warmup_steps: steps of linear rise from 0.
      min_lr_ratio: final learning rate of cosine and linear, as a share of learning_rate.
      adam_beta1: decay rate of the first moment.
      adam_beta2: decay rate of the second moment.
      adam_epsilon: constant added to the denominator.
      weight_decay: weight decay of linear layers. Norms, biases and embeddings have none.
      max_grad_norm: gradients are scaled down to this global norm. 0 turns that off.
      state_dtype: dtype of the two moments. float32 takes 8 bytes a parameter, bfloat16 4, int8
        2.03. If not set, the dtype of the parameters.
      state_memory: memory that holds the moments between steps. host frees device memory, and each
        step moves the moments there and back.
    """

    learning_rate: float = 3e-4
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    state_dtype: Literal["float32", "bfloat16", "int8"] | None = None
    state_memory: Literal["device", "host"] = "device"

    def __post_init__(self):
        for name in ("warmup_steps", "weight_decay", "max_grad_norm"):
            if getattr(self, name) < 0:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} is negative")
        for name in ("learning_rate", "adam_epsilon"):
            if not getattr(self, name) > 0:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} is not positive")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} is not in [0, 1)")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"optimizer.min_lr_ratio={self.min_lr_ratio} is not in [0, 1]")


def learning_rate(config: OptimizerConfig, max_steps: int) -> optax.Schedule:
    """Learning rate of each step, 0-based."""
    peak, warmup = config.learning_rate, config.warmup_steps
    rest = max(1, max_steps - warmup)
    floor = peak * config.min_lr_ratio
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, floor, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest, config.min_lr_ratio),
    }[config.lr_scheduler_type]
    if not warmup:
        return after
    # The first step already moves: the rise ends at `peak` after `warmup` steps.
    rise = optax.linear_schedule(peak / warmup, peak, warmup - 1)
    return optax.join_schedules([rise, after], [warmup])


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
            or self.config.state_memory == "host"
            or jax.default_backend() == "cpu"
        )
        new, trees = [], map(treedef.flatten_up_to, (gradients, state.mu, state.nu))
        for number, ((path, p), g, mu, nu) in enumerate(zip(at, *trees, strict=True)):
            # Kernels of linear layers decay, whatever shape they and the biases have.
            names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
            decay = self.config.weight_decay * ("kernel" in names)
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
