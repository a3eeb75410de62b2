"""Datasets of grain that only make an iterator."""

from collections.abc import Callable

import grain


class Iterated(grain.IterDataset):
    """A dataset with the iterators that `make` returns, from the iterators of its parents."""

    def __init__(self, make: Callable[..., grain.DatasetIterator], *parents: grain.IterDataset):
        super().__init__(parents)
        self._sources, self._make = parents, make

    def __iter__(self) -> grain.DatasetIterator:
        return self._make(*map(iter, self._sources))
