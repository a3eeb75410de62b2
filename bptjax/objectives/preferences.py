"""The common parts of objectives of answers, and of those that compare a better and a worse one."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from bptjax.data.encoding import Encoding
from bptjax.data.examples import ANSWERS, FIELDS
from bptjax.data.preferences import PREFERENCE, described_parts, encode_preference
from bptjax.models.config import ModelConfig
from bptjax.models.stack import check_trees
from bptjax.objectives.answers import score_answers
from bptjax.objectives.cross_entropy import ForwardPass, Losses
from bptjax.objectives.objective import Objective


@dataclass(frozen=True)
class AnswersObjective(Objective):
    """An objective of answers to prompts. Its loss is a mean over records.

    Attributes:
      answers: how many answers a record has, in the order of their numbers.
    """

    needs = "a decoder"
    too_long = "drop", "error"
    token_losses = True
    learning_rates = 1e-6, 1e-5

    answers: ClassVar[int] = 2
    # Values that keys of other groups may have.
    ALLOWED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "data.train_on_source": (False,),
        "train.z_loss": (0.0,),
    }

    beta: float = 0.1
    share_prompt: bool | None = None

    def __post_init__(self):
        if not 0.0 < self.beta < math.inf:
            raise ValueError(f"objective.beta={self.beta}: must be positive and finite")

    def fits(self, model: ModelConfig) -> bool:
        return model.causal

    def of_model(self, model: ModelConfig) -> Self:
        if self.share_prompt is not None:
            return self
        try:
            check_trees(model, two=False)
        except NotImplementedError:
            return replace(self, share_prompt=False)
        return replace(self, share_prompt=True)

    def describe(self) -> str:
        text = f"{self.name}, beta {self.beta:g}"
        return text + ", one copy of each prompt" * bool(self.share_prompt)

    def check(self, model: ModelConfig, keys: Mapping[str, Any]) -> None:
        if self.share_prompt:
            check_trees(model)
        for key, values in self.ALLOWED.items():
            if keys[key] not in values:
                known = " or ".join(str(x).lower() for x in values)
                raise ValueError(
                    f"{key}={keys[key]}: must be {known} with objective.type={self.name}"
                )

    def encoding(self, model: ModelConfig) -> Encoding:
        fields = (*FIELDS, ANSWERS, *["ends"] * bool(self.share_prompt))
        return replace(super().encoding(model), fields=fields)

    def count(self, batch: Mapping[str, Array]) -> Array:
        return (batch[ANSWERS].max(-1) // self.answers).sum()

    def by_record(self, x: Float[Array, "B N"]) -> Float[Array, "B R answers"]:
        """Returns values of numbered answers by record."""
        padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % self.answers)))
        return padded.reshape(x.shape[0], -1, self.answers)


@dataclass(frozen=True)
class Pairs:
    """Values of the two answers of each pair, `[B, pairs, 2]`, the better answer first.

    Attributes:
      logps, means: log-probability of each answer, and its mean per token.
      gains, mean_gains: the same minus the reference's; equal to `logps` and `means` without a
        reference.
    """

    logps: Float[Array, "B P 2"]
    means: Float[Array, "B P 2"]
    gains: Float[Array, "B P 2"]
    mean_gains: Float[Array, "B P 2"]


@dataclass(frozen=True)
class Preferences(AnswersObjective):
    """An objective of pairs of answers, the better one first. Its loss is a mean over pairs."""

    record = PREFERENCE
    unit = "pair"
    metrics = (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "rewards/margins",
        "logps/chosen",
        "logps/rejected",
    )

    def encoding(self, model: ModelConfig) -> Encoding:
        encode = partial(encode_preference, shared=bool(self.share_prompt))
        return replace(super().encoding(model), encode=encode, parts=described_parts)

    def loss(self, forward: ForwardPass) -> Losses:
        answers = score_answers(forward)
        with jax.named_scope("loss"):
            logps, means, tokens = map(
                self.by_record, (answers.logps, answers.means, answers.tokens)
            )
            reference = self.reference_logps(forward)
            gains, mean_gains = logps, means
            if reference is not None:
                reference = jax.lax.stop_gradient(self.by_record(reference))
                gains = logps - reference
                mean_gains = gains / jnp.maximum(tokens, 1.0)
            pairs, exist = Pairs(logps, means, gains, mean_gains), tokens[..., 0] > 0
            rewards = jax.lax.stop_gradient(self.beta * self.rewards(pairs))
            chosen, rejected = rewards[..., 0], rewards[..., 1]
            logps = jax.lax.stop_gradient(logps)
            values = (
                chosen,
                rejected,
                chosen > rejected,
                chosen - rejected,
                logps[..., 0],
                logps[..., 1],
            )
            each = (_sum(x, exist) for x in values)
            metrics = dict(zip(self.metrics, each, strict=True))
            margins = jnp.where(exist, chosen - rejected, jnp.inf)
            losses = self.pair_loss(pairs)
            return Losses(
                _sum(losses, exist), jnp.zeros(()), metrics, margins, records=(losses, exist)
            )

    def reference_logps(self, forward: ForwardPass) -> Float[Array, "B N"] | None:
        """Returns the reference's log-probabilities of the answers; None without a reference."""
        return None

    def rewards(self, pairs: Pairs) -> Float[Array, "B P 2"]:
        """Returns the implicit rewards of the answers, divided by beta."""
        return pairs.means

    def pair_loss(self, pairs: Pairs) -> Float[Array, "B P"]:
        """Returns the loss of each pair, finite where all values of a pair are 0."""
        raise NotImplementedError


def check_sft_weight(value: float) -> None:
    """Checks objective.sft_weight.

    Raises:
      ValueError: the value is negative or not finite.
    """
    if not 0.0 <= value < math.inf:
        raise ValueError(f"objective.sft_weight={value}: must be finite and not negative")


def _sum(values: Array, exist: Bool[Array, "B P"]) -> Float[Array, ""]:
    return jnp.where(exist, values.astype(jnp.float32), 0.0).sum()
