"""Direct preference optimization and losses like it, which compare a policy with a reference."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from bptjax.objectives.preferences import Pairs, Preferences, check_sft_weight
from bptjax.objectives.reference import REFERENCES, Referring

PerPair = Float[Array, "B P"]


class PairLoss(NamedTuple):
    """A loss of pairs; a value of `LOSSES`.

    Attributes:
      of: returns the loss of each pair, given the pairs, beta and label smoothing.
      smoothed: the loss is defined with label smoothing.
    """

    of: Callable[[Pairs, float, float], PerPair]
    smoothed: bool = False


def _margin(gains: Float[Array, "B P 2"]) -> PerPair:
    return gains[..., 0] - gains[..., 1]


def _log_sigmoid(x: PerPair, smoothing: float) -> PerPair:
    """Returns -log σ(x), for labels that are wrong with probability `smoothing`."""
    return -(1 - smoothing) * jax.nn.log_sigmoid(x) - smoothing * jax.nn.log_sigmoid(-x)


def _sigmoid(pairs: Pairs, beta: float, smoothing: float) -> PerPair:
    """Rafailov et al. 2023, arXiv 2305.18290, Equation 7; with smoothing, conservative DPO
    (Mitchell 2023)."""
    return _log_sigmoid(beta * _margin(pairs.gains), smoothing)


def _robust(pairs: Pairs, beta: float, smoothing: float) -> PerPair:
    """Chowdhury et al. 2024, arXiv 2403.00409, Equation 5."""
    x = beta * _margin(pairs.gains)
    right, wrong = -jax.nn.log_sigmoid(x), -jax.nn.log_sigmoid(-x)
    return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)


def _hinge(pairs: Pairs, beta: float, smoothing: float) -> PerPair:
    """Zhao et al. 2023, arXiv 2305.10425, with margin 1."""
    return jax.nn.relu(1 - beta * _margin(pairs.gains))


def _ipo(pairs: Pairs, beta: float, smoothing: float) -> PerPair:
    """Azar et al. 2023, arXiv 2310.12036, Equation 17, with means per token as in TRL."""
    return jnp.square(_margin(pairs.mean_gains) - 1 / (2 * beta))


def _sigmoid_norm(pairs: Pairs, beta: float, smoothing: float) -> PerPair:
    """DPO with means per token, as in Tulu 3 and OLMo 3 (arXiv 2411.15124, Section 5.1.2)."""
    return _log_sigmoid(beta * _margin(pairs.mean_gains), smoothing)


def _apo_zero(pairs: Pairs, beta: float, smoothing: float) -> PerPair:
    """D'Oosterlinck et al. 2024, arXiv 2408.06266, Equation 7."""
    gains = beta * pairs.gains
    return 1 - jax.nn.sigmoid(gains[..., 0]) + jax.nn.sigmoid(gains[..., 1])


# Values of objective.loss.
LOSSES: dict[str, PairLoss] = {
    "sigmoid": PairLoss(_sigmoid, smoothed=True),
    "robust": PairLoss(_robust, smoothed=True),
    "hinge": PairLoss(_hinge),
    "ipo": PairLoss(_ipo),
    "sigmoid_norm": PairLoss(_sigmoid_norm, smoothed=True),
    "apo_zero": PairLoss(_apo_zero),
}


@dataclass(frozen=True)
class DPO(Referring, Preferences):
    """Direct preference optimization.

    Attributes:
      loss_: key of `LOSSES`.
      sft_weight: weight of the negative log-likelihood of the better answer, as a mean per token,
        in each pair's loss.
    """

    name = "dpo"

    loss_: str = "sigmoid"
    label_smoothing: float = 0.0
    sft_weight: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if self.loss_ not in LOSSES:
            raise ValueError(f"objective.loss={self.loss_}: must be one of {', '.join(LOSSES)}")
        smoothing, key = self.label_smoothing, "objective.label_smoothing"
        if not 0.0 <= smoothing < 0.5:
            raise ValueError(f"{key}={smoothing}: must be in [0, 0.5)")
        if smoothing and not LOSSES[self.loss_].smoothed:
            known = ", ".join(name for name, row in LOSSES.items() if row.smoothed)
            raise ValueError(
                f"{key}={smoothing}: must be 0 with objective.loss={self.loss_}; {known} read it"
            )
        check_sft_weight(self.sft_weight)

    def describe(self) -> str:
        text = f"{super().describe()}, loss {self.loss_}"
        for name in ("label_smoothing", "sft_weight"):
            text += f", {name} {getattr(self, name):g}" * bool(getattr(self, name))
        return f"{text}, reference {REFERENCES[self.reference]}"

    def rewards(self, pairs: Pairs) -> Float[Array, "B P 2"]:
        return pairs.gains

    def pair_loss(self, pairs: Pairs) -> PerPair:
        losses = LOSSES[self.loss_].of(pairs, self.beta, self.label_smoothing)
        return losses - self.sft_weight * pairs.means[..., 0]
