"""Log-probabilities of answers and losses of documents, from the chunked loss: sums over the tokens
with one number."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from bptjax.data.examples import ANSWERS, WEIGHTS
from bptjax.objectives.cross_entropy import ForwardPass, head_inputs
from bptjax.ops.labels import IGNORED
from bptjax.ops.loss import linear_cross_entropy
from bptjax.parallel.sequence import FOLDED_BATCH, fold_sequence_shards, sequence_shards


class Answers(NamedTuple):
    """Sums over the answers of each sequence, by number; float32. Zeros follow the last answer.

    Attributes:
      logps: log-probability of each answer given its prompt, in nats.
      tokens: number of its tokens.
    """

    logps: Float[Array, "B N"]
    tokens: Float[Array, "B N"]

    @property
    def means(self) -> Float[Array, "B N"]:
        """Mean log-probability per token."""
        return self.logps / jnp.maximum(self.tokens, 1.0)


def score_answers(forward: ForwardPass) -> Answers:
    """Returns the log-probabilities of the answers in a micro-batch, numbered by its array
    `answers`, whose numbers are at most T."""
    losses = _token_losses(forward)
    numbers = fold_sequence_shards(forward.batch[ANSWERS])
    with jax.named_scope("loss"):
        return Answers(sum_by_number(-losses, numbers), sum_by_number(losses >= 0, numbers))


def sum_by_document(
    forward: ForwardPass,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Returns the sum of the cross-entropy of each document of a micro-batch, by its number in
    `segments`, and the sum of the weights of its labels, without z-loss; float32."""
    batch = forward.batch
    weights = jnp.where(batch["labels"] == IGNORED, 0.0, batch.get(WEIGHTS, 1.0))
    numbers, weights = fold_sequence_shards((batch["segments"], weights))
    losses = _token_losses(forward)
    return sum_by_number(losses * weights, numbers), sum_by_number(weights, numbers)


def _token_losses(forward: ForwardPass) -> Float[Array, "B t"]:
    """Returns the cross-entropy of each label, folded as in `head_inputs`."""
    model = forward.model
    vectors, labels = head_inputs(forward)
    with jax.named_scope("loss"):
        return linear_cross_entropy(
            vectors,
            model.head_matrix,
            labels,
            bias=model.logits_bias,
            softcap=model.config.logits_softcap,
            chunk=forward.chunk,
            axes=FOLDED_BATCH,
            reduction="none",
        )


def sum_by_number(
    values: Float[Array, "B t"] | Array, numbers: Int[Array, "B t"]
) -> Float[Array, "sequences T"]:
    """Returns float32 sums of the values with each number from 1 to T in a sequence.

    Args:
      values, numbers: results of `fold_sequence_shards`, `[sp · B, T / sp]`.
    """
    shards = sequence_shards()
    T = shards * numbers.shape[1]

    def sums(values, numbers):
        return jax.ops.segment_sum(values.astype(jnp.float32), numbers, T + 1)[1:]

    return jax.vmap(sums)(values, numbers).reshape(shards, -1, T).sum(0)
