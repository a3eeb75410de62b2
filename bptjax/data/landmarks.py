"""Landmarks: a token after every few tokens of a document, for landmark attention."""

from dataclasses import dataclass

import numpy as np

from bptjax.data.examples import Example
from bptjax.ops.labels import IGNORED

# Label of a token before a landmark. Unlike `IGNORED`, it lets packing split a text.
BEFORE_LANDMARK = -1


@dataclass(frozen=True)
class Landmarks:
    """Blocks of `block_size` tokens, the last of which is the landmark `token`."""

    block_size: int
    token: int

    def insert(self, example: Example) -> Example:
        """Returns the example in complete blocks. A landmark predicts the token after it; the token
        before a landmark predicts nothing. Landmarks fill up the last block."""
        inside = self.block_size - 1
        short = -len(example["tokens"]) % inside
        tokens, labels = (
            np.pad(example[name], (0, short), constant_values=fill).reshape(-1, inside)
            for name, fill in (("tokens", self.token), ("labels", BEFORE_LANDMARK))
        )
        landmarks = np.full_like(tokens[:, :1], self.token)
        before = np.minimum(labels[:, -1:], BEFORE_LANDMARK)
        return {
            "tokens": np.concatenate([tokens, landmarks], 1).reshape(-1),
            "labels": np.concatenate([labels[:, :-1], before, labels[:, -1:]], 1).reshape(-1),
        }

    def is_due(self, length: int) -> bool:
        """Returns whether a landmark follows the first `length` tokens of a text with landmarks."""
        return (length + 1) % self.block_size == 0

    def longest(self, count: int) -> int:
        """Returns the maximum length of `count` consecutive tokens with their landmarks."""
        return count + -(-count // (self.block_size - 1))

    def prompt(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the start of a text with the landmarks of its complete blocks."""
        at = np.arange(self.block_size - 1, len(tokens) + 1, self.block_size - 1)
        return np.insert(tokens, at, self.token)


def ignored(batch: Example) -> Example:
    """Returns a sequence or a batch without `BEFORE_LANDMARK` among its labels."""
    labels = batch["labels"]
    return batch | {"labels": np.where(labels == BEFORE_LANDMARK, IGNORED, labels)}
