"""Kahneman-Tversky optimization, which learns from single answers that are good or bad."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from bptjax.data.encoding import Encoding
from bptjax.data.preferences import described_parts
from bptjax.data.unpaired import KINDS, UNPAIRED, encode_unpaired, with_another
from bptjax.models.config import ModelConfig
from bptjax.objectives.answers import score_answers
from bptjax.objectives.cross_entropy import ForwardPass, Losses
from bptjax.objectives.reference import REFERENCES, Referring


class _Records(NamedTuple):
    """Values of the records of each sequence; see `KINDS`.

    Attributes:
      logps, gains: log-probability of a record's own answer, and the same minus the reference's.
      others: gains of the other record's answer.
      desirable, exist: whether the answer is good, and whether there is a record.
    """

    logps: Float[Array, "B R"]
    gains: Float[Array, "B R"]
    others: Float[Array, "B R"]
    desirable: Bool[Array, "B R"]
    exist: Bool[Array, "B R"]


@dataclass(frozen=True)
class KTO(Referring):
    """The gain of an answer over the reference, compared with KL, the mean gain of answers to other
    prompts over the global batch; at least 0, and without a gradient.

    Ethayarajh et al. 2024, arXiv 2402.01306, Equation 7.

    Attributes:
      desirable_weight, undesirable_weight: factors on the losses of good and bad answers.
    """

    name = "kto"
    record = UNPAIRED
    unit = "record"
    metrics = (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/margins",
        "logps/chosen",
        "logps/rejected",
        "kl",
    )
    totals = True
    least_batch = 2
    answers: ClassVar[int] = len(KINDS)

    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        for name in ("desirable_weight", "undesirable_weight"):
            if not 0.0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"objective.{name}={value}: must be finite and not negative")

    @property
    def sums(self) -> tuple[str, ...]:
        return ("chosen", *(name for name in self.metrics if name != "rewards/margins"))

    def describe(self) -> str:
        text = super().describe()
        for name in ("desirable_weight", "undesirable_weight"):
            text += f", {name} {getattr(self, name):g}" * (getattr(self, name) != 1.0)
        return f"{text}, reference {REFERENCES[self.reference]}"

    def encoding(self, model: ModelConfig) -> Encoding:
        return replace(
            super().encoding(model),
            encode=partial(encode_unpaired, shared=bool(self.share_prompt)),
            parts=partial(described_parts, names=KINDS),
            pick=with_another,
        )

    def batch_sums(self, forward: ForwardPass) -> Float[Array, "2"]:
        """Returns the sum of the gains of other records' answers, and their number."""
        return _kl_sums(self._records(forward))

    def loss(self, forward: ForwardPass) -> Losses:
        records = self._records(forward)
        with jax.named_scope("loss"):
            own = _kl_sums(records)
            gain, number = own if forward.totals is None else forward.totals
            kl = jnp.maximum(gain / jnp.maximum(number, 1.0), 0.0)
            desirable, exist = records.desirable, records.exist
            weights = jnp.where(desirable, self.desirable_weight, self.undesirable_weight)
            above = jnp.where(desirable, records.gains - kl, kl - records.gains)
            losses = weights * (1 - jax.nn.sigmoid(self.beta * above))
            rewards, logps = jax.lax.stop_gradient((self.beta * records.gains, records.logps))
            chosen, rejected = exist & desirable, exist & ~desirable
            sums = {
                "chosen": chosen.sum(dtype=jnp.float32),
                "rewards/chosen": _sum(rewards, chosen),
                "rewards/rejected": _sum(rewards, rejected),
                "logps/chosen": _sum(logps, chosen),
                "logps/rejected": _sum(logps, rejected),
                "kl": kl * own[1],
            }
            return Losses(_sum(losses, exist), jnp.zeros(()), sums, records=(losses, exist))

    def means(self, sums: Mapping[str, Any], count: Any) -> dict[str, Any]:
        chosen = sums["chosen"]
        found = {"kl": sums["kl"] / count}
        for name in ("rewards", "logps"):
            found[f"{name}/chosen"] = sums[f"{name}/chosen"] / chosen
            found[f"{name}/rejected"] = sums[f"{name}/rejected"] / (count - chosen)
        margin = found["rewards/chosen"] - found["rewards/rejected"]
        return found | {"rewards/margins": margin}

    def _records(self, forward: ForwardPass) -> _Records:
        scored = score_answers(forward)
        reference = jax.lax.stop_gradient(self.reference_logps(forward))
        with jax.named_scope("loss"):
            logps, tokens = self.by_record(scored.logps), self.by_record(scored.tokens)
            gains = logps - self.by_record(reference)
            # A record has one of the first two answers; the sum of the other one is 0.
            own, own_gains = logps[..., :2].sum(-1), gains[..., :2].sum(-1)
            others = jax.lax.stop_gradient(gains[..., 2])
            return _Records(own, own_gains, others, tokens[..., 0] > 0, tokens[..., 2] > 0)


def _kl_sums(records: _Records) -> Float[Array, "2"]:
    number = records.exist.sum(dtype=jnp.float32)
    return jnp.stack([_sum(records.others, records.exist), number])


def _sum(values: Float[Array, "B R"], chosen: Bool[Array, "B R"]) -> Float[Array, ""]:
    return jnp.where(chosen, values, 0.0).sum()
