"""Predicts the next token of texts and of the answers of chats."""

from dataclasses import dataclass

from bptjax.models.config import ModelConfig
from bptjax.objectives.objective import Objective


@dataclass(frozen=True)
class NextToken(Objective):
    """The objective of decoders."""

    name = "next_token"
    needs = "a decoder"
    likelihood = True

    def fits(self, model: ModelConfig) -> bool:
        return model.causal
