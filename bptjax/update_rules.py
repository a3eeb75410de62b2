"""Update rules: the arithmetic of an optimizer for one parameter, in float32."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import jax.numpy as jnp
from jax import Array


class UpdateRule(Protocol):
    """Step direction of one parameter. Weight decay, learning rate, storage and sharding are common
    to all rules; `optimizer.apply_gradients` applies them.

    Attributes:
      slots: name of each array that the rule keeps beside the parameter, up to three, and whether
        it is a mean of squares. int8 storage keeps the square root of such a mean.
    """

    slots: ClassVar[Mapping[str, bool]]

    def update(
        self, slots: dict[str, Array], g: Array, *, count: Array
    ) -> tuple[Array, dict[str, Array]]:
        """Returns (direction, new slots). The parameter moves by -learning_rate × direction.

        Args:
          slots: zeros before the first update.
          g: gradient, of a parameter or of some of its slices.
          count: int32 scalar, updates including this one.
        """
        ...


@dataclass(frozen=True)
class AdamW(UpdateRule):
    """Kingma & Ba 2015, arXiv 1412.6980; Loshchilov & Hutter 2019, arXiv 1711.05101."""

    beta1: float
    beta2: float
    epsilon: float

    slots: ClassVar[Mapping[str, bool]] = {"mu": False, "nu": True}

    def update(self, slots, g, *, count):
        m = self.beta1 * slots["mu"] + (1 - self.beta1) * g
        v = self.beta2 * slots["nu"] + (1 - self.beta2) * jnp.square(g)
        m_hat, v_hat = m / (1 - self.beta1**count), v / (1 - self.beta2**count)
        return m_hat / (jnp.sqrt(v_hat) + self.epsilon), {"mu": m, "nu": v}


@dataclass(frozen=True)
class Lion(UpdateRule):
    """Chen et al. 2023, arXiv 2302.06675, Algorithm 2."""

    beta1: float
    beta2: float

    slots: ClassVar[Mapping[str, bool]] = {"mu": False}

    def update(self, slots, g, *, count):
        m = slots["mu"]
        direction = jnp.sign(self.beta1 * m + (1 - self.beta1) * g)
        return direction, {"mu": self.beta2 * m + (1 - self.beta2) * g}
