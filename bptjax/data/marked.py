"""The text of a training example, split where tokens start or stop to count in the loss."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from bptjax.data.examples import Example
from bptjax.data.tokenizer import Tokenizer
from bptjax.ops.labels import IGNORED


def next_tokens(example: Example) -> tuple[np.ndarray, np.ndarray]:
    """Returns the text of an example whose labels are the next tokens (the text ends with the last
    label, which is not an input), and whether each token is in the loss."""
    ids, labels = example["tokens"], example["labels"]
    predicted = labels != IGNORED
    # The last label of a document is its next token, not the landmark that completes its block.
    ids = np.append(ids[:1], np.where(predicted, labels, np.append(ids[1:], labels[-1:])))
    predicted = np.r_[False, predicted]
    return (ids, predicted) if predicted[-1] else (ids[:-1], predicted[:-1])


def own_tokens(example: Example) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of an example, and whether each token has a label in the loss."""
    return example["tokens"], example["labels"] != IGNORED


def marked(
    example: Example,
    tokenizer: Tokenizer,
    shown: int,
    text: Callable[[Example], tuple[np.ndarray, np.ndarray]] = next_tokens,
) -> Iterator[tuple[str, bool] | tuple[str, None]]:
    """Yields texts of an example, each with whether its tokens are in the loss, or with None for a
    note about tokens that are left out.

    Args:
      example: `tokens` and `labels`, int32 [T].
      shown: maximum number of tokens to show; the middle of a longer example is left out.
      text: returns the tokens of the example, and whether each is in the loss.
    """
    ids, predicted = text(example)
    half = max(1, shown // 2)
    parts = [slice(None)] if len(ids) <= shown else [slice(half), slice(-half, None)]
    for n, part in enumerate(parts):
        if n:
            yield f" … {len(ids) - 2 * half:,} tokens … ", None
        yield from _runs(ids[part], predicted[part], tokenizer)


def _runs(ids: np.ndarray, flags: np.ndarray, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """Yields runs of tokens with the same flag, as text. Decodes all ids up to the run's end and up
    to its start and takes the difference, because a tokenizer may decode a token differently at the
    start of a text."""
    edges = sorted({0, *(np.flatnonzero(np.diff(flags)) + 1).tolist(), len(ids)})
    before = ""
    for start, stop in pairwise(edges):
        after = tokenizer.decode(ids[:stop])
        yield after[len(before) :], bool(flags[start])
        before = after
