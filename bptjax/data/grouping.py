"""Batches of sequences of similar length."""

from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from bptjax.data.examples import Example, is_masked, sequence
from bptjax.data.packing import part

# Number of different batch widths, each compiled once; and number of batches sorted together.
WIDTHS = 8
GROUPED_BATCHES = 50


class Grouped:
    """Sequences of one document or piece each, in an order that gives batches of similar lengths.

    In every epoch the sequences are shuffled, and each group of `GROUPED_BATCHES` batches is sorted
    by length, longest first, as in Hugging Face's Trainer. The longest sequence of all is in the
    first batch, so that a run that needs too much memory fails at once. Every example is read once
    at the start.
    """

    def __init__(
        self,
        examples: Sequence[list[Example]],
        *,
        seq_len: int,
        batch_size: int,
        shuffle: bool,
        seed: int,
    ):
        self._examples, self._seq_len, self._batch_size = examples, seq_len, batch_size
        self._shuffle, self._seed = shuffle, seed
        self._pieces, self._kinds = [], []
        for index in range(len(examples)):
            record = examples[index] or []
            self._kinds.append(any(map(is_masked, record)) if record else -1)
            for number, example in enumerate(record):
                length = len(example["tokens"])
                for start in range(0, length, seq_len):
                    stop = min(start + seq_len, length)
                    self._pieces.append((index, number, start, stop))

    def epoch(
        self, epoch: int, start: Sequence[int] | None = None, stop: Sequence[int] | None = None
    ) -> grain.IterDataset:
        """Returns the pieces of one epoch, or of a part of its records; see `epochs.Epoch`."""
        order = self._order(epoch, start, stop)
        direct = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        return grain.MapDataset.source(order.tolist()).map(self._piece).to_iter_dataset(direct)

    def _piece(self, number: int) -> Example:
        index, example, start, stop = self._pieces[number]
        return part((self._examples[index] or [])[example], start, stop)

    def _order(
        self, epoch: int, start: Sequence[int] | None, stop: Sequence[int] | None
    ) -> np.ndarray:
        rng = np.random.default_rng((self._seed, epoch))
        sizes = np.array([b - a for _, _, a, b in self._pieces])
        order = np.arange(len(sizes))
        if start is not None or stop is not None:
            records = np.arange(len(self._kinds))
            if self._shuffle:
                np.random.default_rng((self._seed, epoch, 1)).shuffle(records)
            used = np.zeros(len(records), bool)
            kinds = np.array(self._kinds)[records]
            for kind in (0, 1):
                part_of = slice(start and start[kind], stop and stop[kind])
                used[records[kinds == kind][part_of]] = True
            order = order[used[[index for index, *_ in self._pieces]]]
        if self._shuffle:
            rng.shuffle(order)
        # Make several groups even of few batches, because a single group would not be shuffled.
        n, size = len(order), self._batch_size
        group = size * max(1, min(n // (4 * size), GROUPED_BATCHES))
        # The first sequences complete the last batch of the previous epoch, and form one group.
        parts = np.split(order, range(-epoch * len(sizes) % size, n, group))
        order = np.concatenate([part[np.argsort(-sizes[part], kind="stable")] for part in parts])
        if epoch == 0 and n:
            longest = int(sizes[order].argmax())
            order[[0, longest]] = order[[longest, 0]]
        return order


def grouped_batch(pieces: Sequence[Example], seq_len: int) -> dict[str, Any]:
    """Returns a batch `[B, T]` of pieces, each one sequence. T is the smallest of `WIDTHS` widths
    up to `seq_len` that fits the longest piece."""
    width = -(-seq_len // WIDTHS)
    longest = max(1, max(len(each["tokens"]) for each in pieces))
    T = min(-(-longest // width) * width, seq_len)
    return stacked([sequence([piece], T) for piece in pieces])


def stacked(sequences: Sequence[Example]) -> Example:
    """Returns the batch of sequences of equal length."""
    return {key: np.stack([each[key] for each in sequences]) for key in sequences[0]}
