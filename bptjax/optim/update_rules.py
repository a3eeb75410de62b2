"""Update rules: the arithmetic of an optimizer for one parameter, in float32."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from bptjax.parallel.mesh import constrain

# Root mean square of Muon's updates, which is about AdamW's in practice, so that both can use the
# same learning rate and weight decay. Liu et al. 2025, arXiv 2502.16982, Section 2.2.
MUON_RMS = 0.2


class UpdateRule(Protocol):
    """Step direction of one parameter. `optimizer.apply_gradients` adds weight decay, learning
    rate, storage and sharding, which all rules share.

    Attributes:
      slots: name of each array that the rule keeps for a parameter, up to three, and whether the
        array is a mean of squares, of which int8 storage holds the square root.
    """

    slots: ClassVar[Mapping[str, bool]]

    @property
    def unsliced_axes(self) -> int:
        """Number of last axes that `update` needs unsliced; more than one for matrix products."""
        return 1

    def update(
        self, slots: dict[str, Array], g: Array, *, count: Array
    ) -> tuple[Array, dict[str, Array]]:
        """Returns (direction, new slots). The parameter moves by -learning_rate × direction.

        Args:
          slots: zeros before the first update.
          g: gradient of a parameter or of some of its slices.
          count: int32 scalar, number of updates including this one.
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
        m_hat, v_hat = m / bias(self.beta1, count), v / bias(self.beta2, count)
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


@dataclass(frozen=True)
class Muon(UpdateRule):
    """Nesterov momentum, orthogonalized: Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon. With the bias correction of Dozat 2016, as in optax.

    Attributes:
      momentum: decay rate.
      inputs, outputs: number of input axes of the matrix, and of output axes after them. Leading
        axes stack matrices.
      dtype: dtype of the orthogonalization.
    """

    momentum: float
    inputs: int
    outputs: int
    dtype: DTypeLike

    slots: ClassVar[Mapping[str, bool]] = {"mu": False}

    @property
    def unsliced_axes(self) -> int:
        return self.inputs + self.outputs

    def update(self, slots, g, *, count):
        beta, stacked = self.momentum, g.ndim - self.unsliced_axes
        m = beta * slots["mu"] + (1 - beta) * g
        ahead = beta * m / bias(beta, count + 1) + (1 - beta) * g / bias(beta, count)
        I, O = (  # noqa: E741
            math.prod(g.shape[start:][:axes])
            for start, axes in ((stacked, self.inputs), (stacked + self.inputs, self.outputs))
        )
        x = orthogonalize(ahead.reshape(-1, I, O), self.dtype).astype(jnp.float32)
        return MUON_RMS * max(I, O) ** 0.5 * x.reshape(g.shape), {"mu": m}


def bias(beta: float, count: Array) -> Array:
    """Returns 1 - beta^count, the sum of the weights in a moving average that started at 0."""
    return 1 - jax.lax.pow(jnp.float32(beta), count)


def orthogonalize(x: Float[Array, "L I O"], dtype: DTypeLike) -> Float[Array, "L I O"]:
    """Moves the singular values of each matrix near 1: to between 0.6 and 1.25, unless they are
    tiny. Takes five Newton-Schulz steps with the quintic polynomial of Jordan et al. 2024 in
    `dtype`. On a mesh, each device computes the complete result."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-8)
    x = constrain(x.astype(dtype), None, None, None)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    # Otherwise the compiler would shard the products and communicate in every step.
    return constrain(x.mT if tall else x, None, None, None)
