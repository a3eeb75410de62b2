"""Simple preference optimization, which needs no reference."""

import math
from dataclasses import dataclass

import jax
from jax import Array
from jaxtyping import Float

from bptjax.objectives.preferences import Pairs, Preferences, check_sft_weight


@dataclass(frozen=True)
class SimPO(Preferences):
    """A margin between mean log-probabilities per token.

    Meng et al. 2024, arXiv 2405.14734, Equation 6.

    Attributes:
      gamma: the margin.
      sft_weight: as of `DPO`.
    """

    name = "simpo"

    beta: float = 2.0
    gamma: float = 0.5
    sft_weight: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if not 0.0 <= self.gamma < math.inf:
            raise ValueError(f"objective.gamma={self.gamma}: must be finite and not negative")
        check_sft_weight(self.sft_weight)

    def describe(self) -> str:
        text = f"{super().describe()}, gamma {self.gamma:g}"
        return text + f", sft_weight {self.sft_weight:g}" * bool(self.sft_weight)

    def pair_loss(self, pairs: Pairs) -> Float[Array, "B P"]:
        margin = self.beta * (pairs.means[..., 0] - pairs.means[..., 1])
        losses = -jax.nn.log_sigmoid(margin - self.gamma)
        return losses - self.sft_weight * pairs.means[..., 0]
