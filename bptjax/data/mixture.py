"""Mixes sequences of several sources so that their shares of the tokens follow their weights."""

from collections.abc import Sequence
from typing import Any

import grain

from bptjax.data.concat import Example


class MixIterDataset(grain.IterDataset):
    """Sequences of several datasets. Each next sequence comes from the dataset that lags its share
    of the tokens most.

    Padding does not count. The choice depends only on the weights and on the tokens so far, not on
    random numbers. After any number of sequences, each dataset is within about one sequence of its
    share, so the shares are exact over any long range, not only on average.

    Args:
      parents: endless datasets of packed sequences.
      weights: positive weight of each dataset; their sum may be any number.
    """

    def __init__(self, parents: Sequence[grain.IterDataset], weights: Sequence[float]):
        super().__init__(parents)
        self._sources = parents
        self._weights = [weight / sum(weights) for weight in weights]

    def __iter__(self) -> grain.DatasetIterator:
        return _Mix([iter(parent) for parent in self._sources], self._weights)


class _Mix(grain.DatasetIterator):
    def __init__(self, parents: Sequence[grain.DatasetIterator], weights: Sequence[float]):
        super().__init__(parents)
        self._weights = weights
        self._tokens = [0] * len(weights)

    def __next__(self) -> Example:
        total = sum(self._tokens)
        lag = [w * total - n for w, n in zip(self._weights, self._tokens, strict=True)]
        number = lag.index(max(lag))
        sequence = next(self._parents[number])
        self._tokens[number] += int((sequence["segments"] > 0).sum())
        return sequence

    def get_state(self) -> dict[str, Any]:
        parents = [parent.get_state() for parent in self._parents]
        return {"sources": parents, "tokens": list(self._tokens)}

    def set_state(self, state: dict[str, Any]) -> None:
        for parent, own in zip(self._parents, state["sources"], strict=True):
            parent.set_state(own)
        self._tokens = list(state["tokens"])
