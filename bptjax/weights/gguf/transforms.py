"""Differences between a tensor of a GGUF file and the tensor of a Hugging Face file."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bptjax.models.config import ModelConfig

Change = Callable[[np.ndarray, ModelConfig], np.ndarray]


@dataclass(frozen=True)
class Transform:
    """A change of one tensor.

    Attributes:
      there: converts the tensor of a Hugging Face file.
      back: converts the tensor of a GGUF file.
      axis: axis that both only reorder, 0 for outputs and 1 for inputs; None for other changes. An
        adapter's matrices B and A are reordered alike.
    """

    there: Change
    back: Change
    axis: int | None = None


IDENTITY = Transform(lambda w, c: w, lambda w, c: w, axis=0)


def reordered(order: Callable[[ModelConfig], np.ndarray], axis: int = 0) -> Transform:
    """Returns the transform of a tensor whose GGUF file has entry `order(config)[i]` at place i."""
    return Transform(
        lambda w, c: np.take(w, order(c), axis),
        lambda w, c: np.take(w, np.argsort(order(c)), axis),
        axis,
    )


def _rotated_pairs(heads: int, size: int) -> np.ndarray:
    """Returns the order in which the two features of each rotated pair are neighbors."""
    return np.arange(heads * size).reshape(heads, 2, size // 2).swapaxes(1, 2).reshape(-1)


QUERIES = reordered(lambda c: _rotated_pairs(c.num_heads, c.H))
KEYS = reordered(lambda c: _rotated_pairs(c.K, c.H))
# A norm that multiplies by 1 + scale.
PLUS_ONE = Transform(
    lambda w, c: w.astype(np.float32) + 1, lambda w, c: w.astype(np.float32) - np.float32(1)
)
# A tensor that stays as it is, although its name ends as another's.
VALUE_LAST = IDENTITY
TRANSPOSED = Transform(lambda w, c: w.T, lambda w, c: w.T)
# A convolution [channels, 1, size].
CONVOLUTION = Transform(lambda w, c: w[:, 0], lambda w, c: w[:, None])


def _tiled(c: ModelConfig, size: int = 1) -> np.ndarray:
    """Returns the order of value heads with features of this size in which neighbors have different
    key heads."""
    (K, _), (N, _) = c.linear_attention.heads
    return np.arange(N * size).reshape(K, N // K, size).swapaxes(0, 1).reshape(-1)


def _tiled_outputs(c: ModelConfig, outputs: int) -> np.ndarray:
    """Returns the same order for the last of `outputs` outputs, with the others before them."""
    _, (N, size) = c.linear_attention.heads
    first = outputs - N * size
    return np.concatenate([np.arange(first), first + _tiled(c, size)])


def _inverse(order: np.ndarray) -> np.ndarray:
    return np.argsort(order)


VALUE_HEADS = reordered(_tiled)
VALUE_INPUTS = reordered(lambda c: _tiled(c, c.linear_attention.heads[1][1]), axis=1)
VALUE_OUTPUTS = Transform(
    lambda w, c: w[_tiled_outputs(c, len(w))],
    lambda w, c: w[_inverse(_tiled_outputs(c, len(w)))],
    axis=0,
)
VALUE_CONVOLUTION = Transform(
    lambda w, c: w[_tiled_outputs(c, len(w)), 0],
    lambda w, c: w[_inverse(_tiled_outputs(c, len(w))), None],
)
# The logarithm of a rate of decay.
DECAY = Transform(
    lambda w, c: -np.exp(w.astype(np.float32)), lambda w, c: np.log(-w.astype(np.float32))
)
VALUE_DECAY = Transform(
    lambda w, c: DECAY.there(w, c)[_tiled(c)], lambda w, c: DECAY.back(w[_inverse(_tiled(c))], c)
)
