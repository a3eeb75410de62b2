"""Odds ratio preference optimization, which needs no reference."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from bptjax.objectives.preferences import Pairs, Preferences


@dataclass(frozen=True)
class ORPO(Preferences):
    """The likelihood of the better answer, and the odds of it against the worse one.

    Hong et al. 2024, arXiv 2403.07691, Equations 4 to 7, with mean log-probabilities per token.
    """

    name = "orpo"

    def pair_loss(self, pairs: Pairs) -> Float[Array, "B P"]:
        # A mean of 0 has infinite odds: pairs that do not exist, or answers that are certain.
        means = jnp.minimum(pairs.means, -1e-7)
        log_odds = means - jnp.log(-jnp.expm1(means))
        ratio = jax.nn.log_sigmoid(log_odds[..., 0] - log_odds[..., 1])
        return -pairs.means[..., 0] - self.beta * ratio
