"""The sums of a loss, and the cross-entropy in most objectives."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from jax import Array
from jaxtyping import Bool, Float, Int

from bptjax.models.transformer import Transformer
from bptjax.ops.loss import cross_entropy_and_z_loss
from bptjax.parallel.sequence import FOLDED_BATCH, fold_sequence_shards


class ForwardPass(NamedTuple):
    """A forward pass of a micro-batch.

    Attributes:
      batch: the micro-batch `[B, T]`, with the fields of the objective's encoding, `segments` and
        `positions`.
      hidden: hidden states of `Objective.inputs(batch)`, `[B, T, E]`.
      again: returns the hidden states of the same inputs in another model, without dropout.
      z_loss: train.z_loss; 0 in evaluations.
      chunk: number of tokens whose logits exist at once.
      totals: `Objective.batch_sums` over the global batch, without a gradient; None if the batch
        has only this micro-batch.
    """

    model: Transformer
    batch: Mapping[str, Array]
    hidden: Float[Array, "B T E"]
    again: Callable[[Transformer], Array]
    z_loss: float
    chunk: int
    totals: Array | None = None


class Losses(NamedTuple):
    """Float32 sums over a micro-batch, divided once by `Objective.count` of all micro-batches.

    Attributes:
      loss: minimized sum, in nats, including z-loss.
      z_loss: share of z-loss in `loss`, without a gradient.
      metrics: sums of other metrics, without a gradient, by the names in `Objective.sums`.
      margins: reward margin of each pair, infinite where there is none; None without pairs. For
        evaluations.
      records: loss of each record, and whether the record exists; None if the loss is a sum over
        tokens. For evaluations.
    """

    loss: Float[Array, ""]
    z_loss: Float[Array, ""]
    metrics: dict[str, Float[Array, ""]]
    margins: Float[Array, "B P"] | None = None
    records: tuple[Float[Array, "B R"], Bool[Array, "B R"]] | None = None


def head_inputs(forward: ForwardPass) -> tuple[Float[Array, "B T E"], Int[Array, "B T"]]:
    """Returns the vectors that the head multiplies, and their labels. Each sequence shard becomes a
    separate sequence; see `fold_sequence_shards`."""
    model, batch = forward.model, forward.batch
    hidden = model.pool(forward.hidden, batch["segments"])
    hidden, labels = fold_sequence_shards((hidden, batch["labels"]))
    with jax.named_scope("loss"):
        return model.for_head(hidden), labels


def cross_entropy(
    forward: ForwardPass,
    vectors: Float[Array, "B T E"],
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the sum of cross-entropy and z-loss over the labels, and z-loss alone.

    Args:
      vectors, labels: results of `head_inputs`.
      weights: factor on the loss of each token, folded like the labels; 1 by default.
    """
    model = forward.model
    with jax.named_scope("loss"):
        return cross_entropy_and_z_loss(
            vectors,
            model.head_matrix,
            labels,
            weights,
            bias=model.logits_bias,
            z_loss=forward.z_loss,
            softcap=model.config.logits_softcap,
            chunk=forward.chunk,
            axes=FOLDED_BATCH,
        )
