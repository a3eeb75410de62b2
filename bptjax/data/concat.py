"""Concat packing: fills sequences with documents in order, and never splits masked records."""

from collections import deque
from typing import Any

import grain
import numpy as np

# Arrays int32 [n]: `tokens`, `labels`, and for classifiers of text `token_types`. A packed sequence
# also has `segments` and `positions`. The `tokens` of an image are patches, float32 [n, P].
Example = dict[str, np.ndarray]
FIELDS = "tokens", "labels"


def is_masked(example: Example) -> bool:
    """Returns whether the example has a token that does not count in the loss."""
    return bool((example["labels"] == -100).any())


def sequence(examples: list[Example], seq_len: int) -> Example:
    """Lays out examples one after the other in one padded sequence, as `packing.pack` describes."""
    numbers = dict.fromkeys(("segments", "positions"), np.zeros(0, np.int32))
    found = {
        name: np.full((seq_len, *x.shape[1:]), -100 * (name == "labels"), x.dtype)
        for name, x in (examples[0] | numbers).items()
    }
    end = 0
    for number, example in enumerate(examples, 1):
        start, end = end, end + len(example["tokens"])
        own = dict(segments=number, positions=np.arange(end - start))
        for name, value in (example | own).items():
            found[name][start:end] = value
    return found


class Bins:
    """Open sequences for examples that are not split. An example goes into the fullest open
    sequence that has room.

    Attributes:
      limit: largest number of open sequences.
      room: number of free tokens of each open sequence.
    """

    def __init__(self, limit: int, seq_len: int):
        self.limit, self.seq_len = limit, seq_len
        self.room: list[int] = []

    def find(self, length: int) -> int | None:
        """Takes room for `length` tokens, and returns the index of the open sequence; None if no
        sequence has room."""
        fits = [(room, number) for number, room in enumerate(self.room) if room >= length]
        if fits:
            number = min(fits)[1]
        elif len(self.room) < self.limit:
            number = len(self.room)
            self.room.append(self.seq_len)
        else:
            return None
        self.room[number] -= length
        return number


class ConcatIterDataset(grain.IterDataset):
    """Sequences of `seq_len` tokens from examples.

    Examples without a loss mask follow one another and are split where a sequence is full. An
    example with a loss mask is never split, or its answer would lose its prompt: it goes into the
    fullest of up to `bins` other open sequences that has room. If no sequence has room, all open
    sequences are emitted.

    Raises:
      ValueError: an example with a loss mask is longer than `seq_len`.
    """

    def __init__(self, parent: grain.IterDataset, *, seq_len: int, bins: int):
        super().__init__(parent)
        self._seq_len, self._bins = seq_len, bins

    def __iter__(self) -> grain.DatasetIterator:
        return _Concat(iter(self._parent), self._seq_len, self._bins)


class _Concat(grain.DatasetIterator):
    """The iterator. Its state is the parent's state before the first example in an open sequence,
    and the number of sequences to pack again and skip from there."""

    def __init__(self, parent: grain.DatasetIterator, seq_len: int, limit: int):
        super().__init__(parent)
        self._seq_len, self._limit = seq_len, limit
        self._restart(parent.get_state(), 0)

    def _restart(self, parent: Any, offset: int) -> None:
        self._text: list[Example] = []
        self._text_room = self._seq_len
        self._masked: list[list[Example]] = []
        self._bins = Bins(self._limit, self._seq_len)
        self._ready: deque[Example] = deque()
        # Sequences packed and emitted since the start, and tokens of the next example to skip.
        self._packed, self._emitted, self._offset = 0, 0, offset
        # Restart points without open sequences: (parent's state, offset, sequences packed before).
        self._points: deque[tuple[Any, int, int]] = deque([(parent, offset, 0)])

    def __next__(self) -> Example:
        while not self._ready:
            state = self._parent.get_state()
            try:
                example = next(self._parent)
            except StopIteration:
                self._flush(state)
                if not self._ready:
                    raise
                break
            if is_masked(example):
                self._place(example, state)
            else:
                self._append(example, state)
        self._emitted += 1
        while len(self._points) > 1 and self._points[1][2] <= self._emitted:
            self._points.popleft()
        return self._ready.popleft()

    def _place(self, example: Example, state: Any) -> None:
        length = len(example["tokens"])
        if length > self._seq_len:
            raise ValueError(f"record of {length} tokens: must be at most seq_len={self._seq_len}")
        number = self._bins.find(length)
        if number is None:
            self._flush(state)
            number = self._bins.find(length) or 0
        if number == len(self._masked):
            self._masked.append([])
        self._masked[number].append(example)

    def _append(self, example: Example, state: Any) -> None:
        start, self._offset = self._offset, 0
        length = len(example["tokens"])
        while start < length:
            stop = min(length, start + self._text_room)
            self._text.append({name: value[start:stop] for name, value in example.items()})
            self._text_room -= stop - start
            start = stop
            if not self._text_room:
                self._emit(self._text)
                self._text, self._text_room = [], self._seq_len
                if not self._masked:
                    rest = start < length
                    self._mark(state if rest else self._parent.get_state(), start if rest else 0)

    def _flush(self, state: Any) -> None:
        """Emits all open sequences. `state` is the parent's state before the next example."""
        for examples in [self._text] * bool(self._text) + self._masked:
            self._emit(examples)
        self._text, self._text_room = [], self._seq_len
        self._masked, self._bins = [], Bins(self._limit, self._seq_len)
        self._mark(state, 0)

    def _emit(self, examples: list[Example]) -> None:
        self._ready.append(sequence(examples, self._seq_len))
        self._packed += 1

    def _mark(self, state: Any, offset: int) -> None:
        self._points.append((state, offset, self._packed))

    def get_state(self) -> dict[str, Any]:
        parent, offset, packed = self._points[0]
        return {"parent": parent, "offset": offset, "emitted": self._emitted - packed}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["parent"])
        self._restart(state["parent"], state["offset"])
        for _ in range(state["emitted"]):
            next(self)
