"""Endless batches of a run, prefetched on a thread, shard by shard."""

import atexit
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import numpy as np
from grain import experimental as gx

from bptjax.data.epochs import Limit
from bptjax.data.examples import Example

# Enough batches to continue the run while the next shuffle window fills.
PREFETCH_BATCHES = 8
# Version of saved states. A state of another version would continue with other sequences.
VERSION = 2


class TrainIterator(gx.ThreadPrefetchDatasetIterator):
    """Batches prefetched on a thread, which ends with `close()` or with the interpreter.

    `get_state()` returns JSON. After `set_state()`, in this or another process, the batches
    continue exactly where they were.
    """

    def __init__(self, batches: grain.IterDataset):
        super().__init__(iter(batches), PREFETCH_BATCHES)
        self._running = True
        # The process aborts if a thread is inside grain's C++ code when the interpreter exits.
        atexit.register(self.close)

    def close(self) -> None:
        # Close only once: grain's __del__ closes again at exit, when modules it needs are gone.
        if self._running:
            self._running = False
            atexit.unregister(self.close)
            super().close()


class ShardIterator(grain.DatasetIterator):
    """Endless batches of one shard's sequences.

    Args:
      parent: endless iterator of sequences.
      size: number of sequences in a batch.
      stack: makes a batch of a list of sequences.
      blank: a sequence of padding.
      sequences, steps: number of sequences of the run, after which the shard provides blank
        sequences, and number of batches of the run; None for no limit. A run that skips batches
        after a spike takes more batches, which continue with the parent's sequences.
    """

    def __init__(
        self,
        parent: grain.DatasetIterator,
        *,
        size: int,
        stack: Callable[[list[Example]], Example],
        blank: Example,
        sequences: int | None,
        steps: int,
    ):
        super().__init__(parent)
        self._size, self._stack, self._blank = size, stack, blank
        self._sequences, self._steps = sequences, steps
        # Sequences taken from the parent, and batches returned.
        self._taken = self._batches = 0

    def __next__(self) -> Example:
        count = self._size
        if self._sequences is not None and self._batches < self._steps:
            count = max(0, min(count, self._sequences - self._taken))
        found = [next(self._parent) for _ in range(count)]
        self._taken, self._batches = self._taken + count, self._batches + 1
        return self._stack([*found, *[self._blank] * (self._size - count)])

    def get_state(self) -> dict[str, Any]:
        own = {"version": VERSION, "taken": self._taken, "batches": self._batches}
        return own | {"parent": self._parent.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._taken, self._batches = state["taken"], state["batches"]
        self._parent.set_state(state["parent"])


class Batches:
    """Endless batches `[B, T]`, with an equal number of consecutive sequences from each shard.

    Shards that this process does not read provide blank sequences.

    Args:
      shards: the datasets of the shards that are read: without limits, or with the limits and the
        number of steps of `limit`.
      count: number of all shards.
    """

    def __init__(
        self,
        shards: Callable[[Sequence[Limit] | None, int], dict[int, grain.IterDataset]],
        count: int,
    ):
        self._datasets, self._shards = shards, count
        self._open(None, 0)

    def _open(self, limits: Sequence[Limit] | None, steps: int) -> None:
        found = self._datasets(limits, steps)
        self._iterators = {shard: TrainIterator(dataset) for shard, dataset in found.items()}

    def limit(self, limits: Sequence[Limit], steps: int) -> None:
        """Limits the run to the given sequences of each shard over a number of steps, padded with
        blank sequences."""
        self.close()
        self._open(limits, steps)

    def __iter__(self) -> Iterator[Example]:
        return self

    def __next__(self) -> Example:
        parts = {shard: next(batches) for shard, batches in self._iterators.items()}
        blank = {name: np.zeros_like(x) for name, x in next(iter(parts.values())).items()}
        each = [parts.get(shard, blank) for shard in range(self._shards)]
        return {name: np.concatenate([part[name] for part in each]) for name in blank}

    def get_state(self) -> list[dict[str, Any] | None]:
        """Returns the state of each shard, as JSON; None for shards that this process does not
        read."""
        return [
            self._iterators[shard].get_state() if shard in self._iterators else None
            for shard in range(self._shards)
        ]

    @staticmethod
    def merge_states(states: Sequence[list[dict[str, Any] | None]]) -> list[dict[str, Any]]:
        """Merges the states of processes that together read every shard."""
        return [next(x for x in of_shard if x) for of_shard in zip(*states, strict=True)]

    def set_state(self, states: Sequence[Any]) -> None:
        """Continues from states, saved by any process, of at least the shards that this process
        reads.

        Raises:
          ValueError: an earlier version of bptjax saved the states.
        """
        if any(states[shard].get("version") != VERSION for shard in self._iterators):
            raise ValueError("saved by a version of bptjax that packs the data in another order")
        for shard, batches in self._iterators.items():
            batches.set_state(states[shard])

    def token_shares(self) -> list[float]:
        """Returns each source's share of the tokens so far, without padding, over the shards that
        this process reads; empty if there is one source."""
        states = [batches.get_state() for batches in self._iterators.values()]
        parents = [state["parent"] for state in states]
        counts = np.array([parent["tokens"] for parent in parents if "tokens" in parent])
        return (counts.sum(0) / max(1, counts.sum())).tolist() if counts.size else []

    def close(self) -> None:
        for batches in self._iterators.values():
            batches.close()
