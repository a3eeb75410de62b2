"""Predicts the next token of conversations with several continuations, which share their start."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array

from bptjax.data.branches import BRANCHED, encode_branches
from bptjax.data.encoding import Encoding
from bptjax.data.examples import FIELDS, WEIGHTS
from bptjax.models.config import ModelConfig
from bptjax.models.stack import check_trees
from bptjax.objectives.cross_entropy import ForwardPass, Losses, cross_entropy, head_inputs
from bptjax.objectives.objective import Objective
from bptjax.ops.labels import IGNORED
from bptjax.parallel.sequence import fold_sequence_shards


@dataclass(frozen=True)
class NextTokenOfBranches(Objective):
    """The objective of records with branches. A token counts by the share of the branches that
    continue it, in the loss and in its divisor."""

    name = "branched"
    needs = "a decoder"
    record = BRANCHED
    too_long = "drop", "error"

    def fits(self, model: ModelConfig) -> bool:
        return model.causal

    def check(self, model: ModelConfig, keys: Mapping[str, Any]) -> None:
        check_trees(model, two=False)

    def encoding(self, model: ModelConfig) -> Encoding:
        fields = (*FIELDS, "ends", WEIGHTS)
        return replace(super().encoding(model), encode=encode_branches, fields=fields)

    def count(self, batch: Mapping[str, Array]) -> Array:
        """Returns the sum of the weights, float32."""
        return jnp.where(batch["labels"] != IGNORED, batch[WEIGHTS], 0.0).sum()

    def loss(self, forward: ForwardPass) -> Losses:
        weights = fold_sequence_shards(forward.batch[WEIGHTS])
        loss, z_loss = cross_entropy(forward, *head_inputs(forward), weights)
        return Losses(loss, z_loss, {})
