"""The protocol of an objective. By default the loss is the cross-entropy of the labels."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jax import Array

from bptjax.data.config import TOO_LONG
from bptjax.data.encoding import Encoding
from bptjax.data.rows import RecordFormat
from bptjax.models.config import ModelConfig
from bptjax.objectives.cross_entropy import ForwardPass, Losses, cross_entropy, head_inputs
from bptjax.ops.labels import IGNORED
from bptjax.weights.lora import AdapterConfig


@dataclass(frozen=True)
class Objective:
    """What a model is trained to do; a value of `OBJECTIVES`. Subclasses are frozen dataclasses
    too. Their fields are keys of `ObjectiveConfig` with the same name; a field may end with `_` to
    avoid the name of a method.

    Attributes:
      name: value of objective.type.
      needs: kind of model that the objective trains, for errors.
      keys: keys of other groups that only this objective reads.
      record: the only record format that the objective reads; None for text, token ids and chats.
      too_long: values that data.too_long may have.
      unit: unit over which the loss is averaged, for reports.
      likelihood: whether the loss covers all tokens of a text, so that bits per byte follow from
        it.
      metrics: names of the other metrics, logged as `train/NAME` and `eval/NAME`; see `means`.
      totals: whether `loss` reads `ForwardPass.totals`.
      least_batch: smallest number of sequences in an optimizer step, if each has one record.
      token_losses: whether the loss reads the log-probabilities of single tokens, whose gradients
        need the logits twice if the output embedding is trained.
      learning_rates: default of optimizer.learning_rate for a checkpoint that is fine-tuned,
        without and with adapters.
    """

    name: ClassVar[str]
    needs: ClassVar[str]
    keys: ClassVar[tuple[str, ...]] = ()
    record: ClassVar[RecordFormat | None] = None
    too_long: ClassVar[tuple[str, ...]] = TOO_LONG
    unit: ClassVar[str] = "token"
    likelihood: ClassVar[bool] = False
    metrics: ClassVar[tuple[str, ...]] = ()
    totals: ClassVar[bool] = False
    least_batch: ClassVar[int] = 1
    token_losses: ClassVar[bool] = False
    learning_rates: ClassVar[tuple[float, float]] = 2e-5, 2e-4

    @property
    def sums(self) -> tuple[str, ...]:
        """Names of the sums that `loss` returns for the metrics."""
        return self.metrics

    @classmethod
    def settings(cls) -> dict[str, str]:
        """Returns the field of each key of the group objective that this objective reads."""
        return {f.name.rstrip("_"): f.name for f in fields(cls)}

    def for_adapters(self, adapter: AdapterConfig, continued: bool) -> "Objective":
        """Returns the objective of a run with these adapters.

        Args:
          continued: whether training continues adapters of a checkpoint.

        Raises:
          ValueError: a key of the objective does not work with the adapters.
        """
        return self

    @property
    def reference_passes(self) -> int:
        """Number of additional forward passes over each batch, without gradients."""
        return 0

    def describe(self) -> str:
        """Formats the objective for the first lines of a run."""
        return self.name

    def fits(self, model: ModelConfig) -> bool:
        """Returns whether the model has the head that this objective trains."""
        raise NotImplementedError

    def of_model(self, model: ModelConfig) -> Self:
        """Returns the objective with the values that depend on the model."""
        return self

    def check(self, model: ModelConfig, keys: Mapping[str, Any]) -> None:
        """Checks the config of a run, `{"group.key": value}`.

        Raises:
          ValueError: a key has a value that does not work with the objective.
        """

    def encoding(self, model: ModelConfig) -> Encoding:
        """Returns how documents become examples for the model."""
        return Encoding(landmarks=model.landmarks, too_long=self.too_long)

    def inputs(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        """Returns the arrays of a batch `[..., B, T]` that the model reads: `tokens`, `positions`,
        `segments` and, if present, `token_types`. The number of sequences may differ from the
        batch's."""
        return batch

    def count(self, batch: Mapping[str, Array]) -> Array:
        """Returns the divisor of the sums of a batch `[..., B, T]`, int32."""
        return (batch["labels"] != IGNORED).sum()

    def batch_sums(self, forward: ForwardPass) -> Array:
        """Returns float32 sums over a micro-batch, whose totals over the global batch `loss` reads.
        With several micro-batches, they take another forward pass over each."""
        return jnp.zeros(0)

    def means(self, sums: Mapping[str, Any], count: Any) -> dict[str, Any]:
        """Returns the values of `metrics`, given the sums of `loss` over a batch and its count; NaN
        for a mean over nothing."""
        return {name: sums[name] / count for name in self.metrics}

    def loss(self, forward: ForwardPass) -> Losses:
        """Returns the sums over a micro-batch."""
        loss, z_loss = cross_entropy(forward, *head_inputs(forward))
        return Losses(loss, z_loss, {})
