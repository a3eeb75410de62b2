"""The reference of a preference loss: adapters off, or log-probabilities from before training."""

from dataclasses import dataclass, replace
from typing import Self

import jax
from jax import Array
from jaxtyping import Float

from bptjax.data.encoding import Encoding
from bptjax.data.examples import ANSWERS
from bptjax.data.references import REFERENCE
from bptjax.models.config import ModelConfig
from bptjax.objectives.answers import score_answers, sum_by_number
from bptjax.objectives.cross_entropy import ForwardPass
from bptjax.objectives.preferences import AnswersObjective
from bptjax.parallel.sequence import fold_sequence_shards
from bptjax.weights.lora import AdapterConfig, without_adapters

AUTO, ADAPTERS_OFF, CACHED = "auto", "adapters_off", "cached"
# Values of objective.reference, for messages.
REFERENCES = {
    AUTO: "auto",
    ADAPTERS_OFF: "the model without adapters",
    CACHED: "log-probabilities from before training",
}


@dataclass(frozen=True)
class Referring(AnswersObjective):
    """An objective that compares the model with a reference.

    Attributes:
      reference: key of `REFERENCES`.
    """

    reference: str = AUTO

    def __post_init__(self):
        super().__post_init__()
        if self.reference not in REFERENCES:
            known = ", ".join(REFERENCES)
            raise ValueError(f"objective.reference={self.reference}: must be one of {known}")

    def for_adapters(self, adapter: AdapterConfig, continued: bool) -> Self:
        return replace(self, reference=_chosen(self.reference, adapter, continued))

    def encoding(self, model: ModelConfig) -> Encoding:
        encoding = super().encoding(model)
        if self.reference != CACHED:
            return encoding
        return replace(encoding, fields=(*encoding.fields, REFERENCE))

    @property
    def reference_passes(self) -> int:
        return int(self.reference == ADAPTERS_OFF)

    def reference_logps(self, forward: ForwardPass) -> Float[Array, "B N"]:
        """Returns the reference's log-probabilities of the answers."""
        if self.reference == CACHED:
            x = jax.lax.bitcast_convert_type(forward.batch[REFERENCE], jax.numpy.float32)
            numbers = fold_sequence_shards(forward.batch[ANSWERS])
            return sum_by_number(fold_sequence_shards(x), numbers)
        base = without_adapters(forward.model)
        return score_answers(forward._replace(model=base, hidden=forward.again(base))).logps


def _chosen(reference: str, adapter: AdapterConfig, continued: bool) -> str:
    """Returns the reference that a run uses for a value of objective.reference.

    Args:
      continued: whether adapters are trained further, so that the start is not the base model.

    Raises:
      ValueError: adapters_off, but the model without adapters is not the start of the run.
    """
    why = None
    if adapter.type == "none":
        why = "adapter.type=none"
    elif continued:
        why = "a checkpoint that is an adapter"
    elif adapter.modules_to_save:
        why = f"adapter.modules_to_save={', '.join(adapter.modules_to_save)}"
    if reference == AUTO:
        return ADAPTERS_OFF if why is None else CACHED
    if reference == ADAPTERS_OFF and why is not None:
        raise ValueError(f"objective.reference=adapters_off: must be auto or cached with {why}")
    return reference
