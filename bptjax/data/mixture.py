"""Mixes sequences of several sources so that their shares of the tokens follow their weights."""

from collections.abc import Callable, Sequence
from typing import Any

import grain

from bptjax.data.examples import Example
from bptjax.data.iterated import Iterated


def tokens_of(sequence: Example) -> int:
    """Returns the number of tokens of a sequence, without padding."""
    return int((sequence["segments"] > 0).sum())


def mixed(
    parents: Sequence[grain.IterDataset],
    weights: Sequence[float],
    tokens: Callable[[Any], int] = tokens_of,
) -> grain.IterDataset:
    """Returns sequences of several datasets. Each sequence comes from the dataset that is furthest
    behind its share of the tokens.

    Padding does not count. The choice depends only on the weights and on the tokens so far, not on
    random numbers. Each dataset is always within about one sequence of its share, so the shares are
    exact over any long range, not only on average.

    Args:
      parents: datasets of packed sequences. The mixture ends when the first dataset ends.
      weights: positive weight of each dataset; their sum may be any number.
      tokens: returns the number of tokens of a sequence.
    """
    shares = [weight / sum(weights) for weight in weights]
    return Iterated(lambda *iterators: _Mixed(iterators, shares, tokens), *parents)


class _Mixed(grain.DatasetIterator):
    def __init__(
        self,
        parents: Sequence[grain.DatasetIterator],
        weights: Sequence[float],
        tokens: Callable[[Any], int],
    ):
        super().__init__(parents)
        self._weights, self._tokens = weights, tokens
        self._totals = [0] * len(weights)

    def __next__(self) -> Any:
        total = sum(self._totals)
        lag = [w * total - n for w, n in zip(self._weights, self._totals, strict=True)]
        number = lag.index(max(lag))
        sequence = next(self._parents[number])
        self._totals[number] += self._tokens(sequence)
        return sequence

    def get_state(self) -> dict[str, Any]:
        parents = [parent.get_state() for parent in self._parents]
        return {"sources": parents, "tokens": list(self._totals)}

    def set_state(self, state: dict[str, Any]) -> None:
        for parent, own in zip(self._parents, state["sources"], strict=True):
            parent.set_state(own)
        self._totals = list(state["tokens"])
