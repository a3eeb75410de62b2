"""AdamW with a learning-rate schedule and clipping, from optax; and float16's loss scale."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, in Hugging Face's words.

    Attributes:
      learning_rate: the highest of the schedule.
      lr_scheduler_type: what follows the warm-up.
      warmup_steps: steps of linear rise from 0.
      min_lr_ratio: where cosine and linear end, as a share of learning_rate.
      adam_beta1, adam_beta2, adam_epsilon: AdamW's.
      weight_decay: of linear layers; norms, biases and embeddings are left alone.
      max_grad_norm: gradients are scaled down to this global norm; 0 leaves them.
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

    def __post_init__(self):
        for name in ("warmup_steps", "weight_decay", "max_grad_norm"):
            if getattr(self, name) < 0:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} is negative")
        if self.learning_rate <= 0:
            raise ValueError(f"optimizer.learning_rate={self.learning_rate} is not positive")


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


def optimizer(config: OptimizerConfig, max_steps: int) -> optax.GradientTransformation:
    """The transformation; its state is a pytree shaped like the model."""
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm)
        if config.max_grad_norm
        else optax.identity(),
        optax.adamw(
            learning_rate(config, max_steps),
            b1=config.adam_beta1,
            b2=config.adam_beta2,
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            mask=_decayed,
        ),
    )


def _decayed(model: Any) -> Any:
    """True for the kernels of linear layers, whatever shape they and the biases have."""
    return jax.tree.map_with_path(
        lambda path, p: p.replace(path[-1].name == "kernel"),
        model,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )


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
