"""Endless batches of a run, prefetched on a thread, shard by shard."""

import atexit
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
from grain import experimental as gx

from bptjax.data.concat import Example

# Enough for the run to continue while the next shuffle window fills.
PREFETCH_BATCHES = 8


class TrainIterator(gx.ThreadPrefetchDatasetIterator):
    """Batches prefetched on a thread, which ends with `close()` or with the interpreter.

    The result of `get_state()` can be stored as JSON. After `set_state()`, in this or another
    process, the batches continue exactly where they were.
    """

    def __init__(self, batches: grain.IterDataset):
        super().__init__(iter(batches), PREFETCH_BATCHES)
        self._running = True
        # If a thread is inside grain's C++ code when the interpreter exits, the process aborts.
        atexit.register(self.close)

    def close(self) -> None:
        # Close only once: grain's __del__ closes again at exit, when modules it needs are gone.
        if self._running:
            self._running = False
            atexit.unregister(self.close)
            super().close()


class Batches:
    """Endless batches `[B, T]`. Each shard of the documents provides an equal number of consecutive
    sequences; the sequences of shards without an iterator are blank.
    """

    def __init__(self, iterators: dict[int, TrainIterator], shards: int):
        self._iterators, self._shards = iterators, shards

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

    def set_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Continues from the states of all shards, saved by this or another process."""
        for shard, batches in self._iterators.items():
            batches.set_state(states[shard])

    def token_shares(self) -> list[float]:
        """Returns the share of each source of a mixture in the tokens so far, without padding, over
        the shards that this process reads; empty if there is one source."""
        states = [batches.get_state() for batches in self._iterators.values()]
        counts = np.array([state["tokens"] for state in states if "tokens" in state])
        return (counts.sum(0) / max(1, counts.sum())).tolist() if counts.size else []

    def close(self) -> None:
        for batches in self._iterators.values():
            batches.close()
