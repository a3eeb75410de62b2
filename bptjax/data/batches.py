"""Endless batches of a run, made ahead on a thread, shard by shard."""

import atexit
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
from grain import experimental as gx

from bptjax.data.concat import Example

# Enough to step on while the next shuffle window fills.
PREFETCH_BATCHES = 8


class TrainIterator(gx.ThreadPrefetchDatasetIterator):
    """Batches made ahead on a thread, which ends with `close()` or with the interpreter.

    `get_state()` can be stored as JSON. After `set_state()` with it, in this or another process,
    the batches continue exactly where they were.
    """

    def __init__(self, batches: grain.IterDataset):
        super().__init__(iter(batches), PREFETCH_BATCHES)
        self._running = True
        # A thread that is inside grain's C++ code when the interpreter exits aborts the process.
        atexit.register(self.close)

    def close(self) -> None:
        # Only once: grain's __del__ closes too, at exit when the modules it needs are gone.
        if self._running:
            self._running = False
            atexit.unregister(self.close)
            super().close()


class Batches:
    """Batches without end `[rows, T]`, of which each shard of the documents makes an equal part:
    consecutive rows. Those of shards that are not `read` are blank.
    """

    def __init__(self, read: dict[int, TrainIterator], shards: int):
        self._read, self._shards = read, shards

    def __iter__(self) -> Iterator[Example]:
        return self

    def __next__(self) -> Example:
        parts = {shard: next(batches) for shard, batches in self._read.items()}
        blank = {name: np.zeros_like(x) for name, x in next(iter(parts.values())).items()}
        each = [parts.get(shard, blank) for shard in range(self._shards)]
        return {name: np.concatenate([part[name] for part in each]) for name in blank}

    def get_state(self) -> list[dict[str, Any] | None]:
        """Returns the state of each shard, as JSON; None for shards that are not read here."""
        return [
            self._read[shard].get_state() if shard in self._read else None
            for shard in range(self._shards)
        ]

    @staticmethod
    def whole_state(states: Sequence[list[dict[str, Any] | None]]) -> list[dict[str, Any]]:
        """Merges the states of readers that together read every shard."""
        return [next(x for x in of_readers if x) for of_readers in zip(*states, strict=True)]

    def set_state(self, states: Sequence[dict[str, Any]]) -> None:
        """The batches go on where those were whose shards had these states, in this or another
        process."""
        for shard, batches in self._read.items():
            batches.set_state(states[shard])

    def token_shares(self) -> list[float]:
        """Returns the share of the tokens so far that came from each source of a mixture, padding
        not counted, over the shards that are read here; empty if there is one source."""
        states = [batches.get_state() for batches in self._read.values()]
        counts = np.array([state["tokens"] for state in states if "tokens" in state])
        return (counts.sum(0) / max(1, counts.sum())).tolist() if counts.size else []

    def close(self) -> None:
        for batches in self._read.values():
            batches.close()
