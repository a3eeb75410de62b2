"""The protocol of an objective, with what most of them share: the cross-entropy of the labels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jax import Array

from bptjax.data.encoding import Encoding
from bptjax.data.files import RecordFormat
from bptjax.models.config import ModelConfig
from bptjax.objectives.cross_entropy import ForwardPass, Losses, cross_entropy, head_inputs


@dataclass(frozen=True)
class Objective:
    """What a model is trained to do: a row of `OBJECTIVES`. The fields of a subclass, which is a
    frozen dataclass too, are config keys of its own; see `ObjectiveConfig`.

    Attributes:
      name: value of objective.type.
      needs: the models that it trains, for errors.
      keys: keys of other groups that only this objective reads.
      record: the only record format that it reads; None for text, token ids and chats.
      unit: what the loss is a mean over, for reports.
      likelihood: whether the loss is that of all tokens of a text, so that bits per byte follow
        from it.
      metrics: names of the other sums that `loss` returns. Their means are logged as `train/NAME`
        and `eval/NAME`.
    """

    name: ClassVar[str]
    needs: ClassVar[str]
    keys: ClassVar[tuple[str, ...]] = ()
    record: ClassVar[RecordFormat | None] = None
    unit: ClassVar[str] = "token"
    likelihood: ClassVar[bool] = False
    metrics: ClassVar[tuple[str, ...]] = ()

    def fits(self, model: ModelConfig) -> bool:
        """Returns whether the model has the head that this objective trains."""
        raise NotImplementedError

    def check(self, model: ModelConfig, keys: Mapping[str, Any]) -> None:
        """Checks the config of a run, `{"group.key": value}`.

        Raises:
          ValueError: a key has a value that the objective does not work with.
        """

    def encoding(self, model: ModelConfig) -> Encoding:
        """Returns how documents become examples for the model."""
        return Encoding(landmarks=model.landmarks)

    def inputs(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        """Returns the arrays of a batch `[..., B, T]` that the model reads: `tokens`, `positions`,
        `segments` and, if there are any, `token_types`. They may have other numbers of
        sequences."""
        return batch

    def count(self, batch: Mapping[str, Array]) -> Array:
        """Returns the number that the sums of a batch `[..., B, T]` are divided by, int32."""
        return (batch["labels"] != -100).sum()

    def loss(self, forward: ForwardPass) -> Losses:
        """Returns the sums over a micro-batch."""
        loss, z_loss = cross_entropy(forward, *head_inputs(forward))
        return Losses(loss, z_loss, {})
