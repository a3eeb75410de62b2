"""Dynamic loss scale of float16."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """Factor on the loss in float16. An overflow halves it; `INTERVAL` steps without an overflow
    double it. Micikevicius et al. 2018, arXiv 1710.03740, Section 3.2.

    Attributes:
      value: float32 scalar.
      good_steps: int32 scalar, steps since the last change.
    """

    INTERVAL = 1000

    value: Array
    good_steps: Array

    @classmethod
    def start(cls) -> "LossScale":
        # The loss is a sum over tokens, so its gradients are already large.
        return cls(jnp.asarray(1.0, jnp.float32), jnp.zeros((), jnp.int32))

    def update(self, finite: Array) -> "LossScale":
        """Returns the scale for the next step. `finite`: whether this step's gradients are
        finite."""
        good = jnp.where(finite, self.good_steps + 1, 0)
        grown = good >= self.INTERVAL
        value = jnp.where(finite, jnp.where(grown, 2.0, 1.0), 0.5) * self.value
        return LossScale(value, jnp.where(grown, 0, good))
