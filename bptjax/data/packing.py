"""Packs documents of any length into sequences of fixed length, a window at a time."""

import bisect
import functools
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from bptjax.data.examples import Example, is_masked, sequence
from bptjax.data.iterated import Iterated

PACKINGS = ("none", "concat", "best_fit")
BUFFER_TOKENS = 2**22
# Maximum pieces in a window. A piece takes about half a KiB in addition to its tokens.
MOST_PIECES = 2**16
# In short windows, a partial sequence waits this many sequences at most for more documents.
LONGEST_WAIT = 64


def part(example: Example, start: int, stop: int) -> Example:
    return {name: value[start:stop] for name, value in example.items()}


def piece_edges(
    length: int, seq_len: int, rng: np.random.Generator | None = None, unit: int = 1
) -> list[tuple[int, int]]:
    """Returns the start and stop of consecutive pieces of up to `seq_len` tokens of an example.

    With `rng`, the first piece has a random length, a multiple of `unit`. An example that fits is
    one piece; an empty example has none.
    """
    first = seq_len
    if rng and length > seq_len:
        first = unit * int(rng.integers(1, seq_len // unit + 1))
    edges = [0, *range(first, length, seq_len), length]
    return [(a, b) for a, b in zip(edges, edges[1:], strict=False) if b > a]


def buffer_sequences(seq_len: int) -> int:
    """Returns the number of sequences of a window, which are packed and shuffled together."""
    return max(4, min(4096, BUFFER_TOKENS // seq_len))


class Open:
    """A sequence that is being filled.

    Attributes:
      pieces: (record, example, start, arrays) of each piece, with its place in the epoch's records.
      free: number of free tokens.
      splits: whether examples are split where the sequence is full.
      state: state of the iterator of records before the first piece's record.
      waited: number of windows that the sequence has waited for more pieces.
    """

    __slots__ = ("pieces", "free", "splits", "state", "waited")

    def __init__(self, free: int, splits: bool, state: Any, waited: int = 0):
        self.pieces: list[tuple[int, int, int, Example]] = []
        self.free, self.splits, self.state, self.waited = free, splits, state, waited

    def add(self, record: int, example: int, start: int, arrays: Example) -> None:
        self.pieces.append((record, example, start, arrays))
        self.free -= len(arrays["tokens"])


class Packer:
    """Packs examples into the sequences of one window after the other; see `pack`.

    Args:
      limit: number of sequences in a window.
      seeds: seeds of random splits; None for no random splits.
    """

    def __init__(
        self,
        packing: str,
        seq_len: int,
        limit: int,
        *,
        seeds: Sequence[int] | None = None,
        unit: int = 1,
    ):
        self._packing, self._seq_len, self._limit = packing, seq_len, limit
        self._seeds, self._unit = seeds, unit
        self._patience = max(1, LONGEST_WAIT // limit)
        self._start([])

    def _start(self, sequences: list[Open]) -> None:
        """Starts a window with the open sequences of the previous one."""
        self.sequences, self._pieces, self._before = sequences, 0, len(sequences)
        splits = [each for each in sequences if each.splits]
        self._text = splits[0] if splits else None
        # Sorted (free, index) of the sequences for pieces that are not split.
        self._by_free = [(each.free, n) for n, each in enumerate(sequences) if not each.splits]

    @property
    def is_full(self) -> bool:
        return len(self.sequences) > self._limit + self._before or self._pieces >= MOST_PIECES

    def add(self, record: int, examples: Sequence[Example], state: Any) -> None:
        """Adds the examples of record number `record`; `state` is the iterator's state before it.

        Raises:
          ValueError: an example with a loss mask is longer than a sequence, with packing=concat.
        """
        for number, example in enumerate(examples):
            length = len(example["tokens"])
            unsplit = self._packing == "concat" and is_masked(example)
            if unsplit and length > self._seq_len:
                raise ValueError(
                    f"record of {length} tokens: must be at most seq_len={self._seq_len}"
                )
            if self._packing == "concat" and not unsplit:
                self._append(record, number, example, state)
                continue
            rng = None
            if self._seeds is not None and self._packing == "none" and length > self._seq_len:
                rng = np.random.default_rng((*self._seeds, record))
            for start, stop in piece_edges(length, self._seq_len, rng, self._unit):
                self._place(record, number, start, part(example, start, stop), state)

    def _open(self, splits: bool, state: Any) -> Open:
        self.sequences.append(Open(self._seq_len, splits, state))
        return self.sequences[-1]

    def _append(self, record: int, number: int, example: Example, state: Any) -> None:
        """Appends the example, and splits it where a sequence is full."""
        start, length = 0, len(example["tokens"])
        while start < length:
            own = self._text or self._open(True, state)
            stop = min(length, start + own.free)
            own.add(record, number, start, part(example, start, stop))
            self._text, start = own if own.free else None, stop
            self._pieces += 1

    def _place(self, record: int, number: int, start: int, piece: Example, state: Any) -> None:
        """Puts the piece into the fullest sequence that has room, or else into a new one."""
        by_free, self._pieces = self._by_free, self._pieces + 1
        place = bisect.bisect_left(by_free, (len(piece["tokens"]), -1))
        if place < len(by_free) and self._packing != "none":
            index = by_free.pop(place)[1]
            own = self.sequences[index]
        else:
            index, own = len(self.sequences), self._open(False, state)
        own.add(record, number, start, piece)
        if own.free:
            bisect.insort(by_free, (own.free, index))

    def close(self, last: bool) -> list[Open]:
        """Ends the window, and returns its sequences in the order in which they were opened.

        Unless the window is the last of the epoch, two sequences wait for the next window: the open
        sequence of examples that are split, and the emptiest of the others. To limit the wait, a
        sequence waits once, or in windows of few sequences for about `LONGEST_WAIT` sequences.
        """
        wait = [] if last or self._packing == "none" else [self._text]
        if wait:
            emptiest = self._by_free[-max(1, self._limit // 4) :]
            numbers = [number for free, number in emptiest if free > self._seq_len // 8]
            wait += [self.sequences[number] for number in numbers]
        wait = [each for each in wait if each is not None and each.waited < self._patience]
        for each in wait:
            each.waited += 1
        closed = [each for each in self.sequences if each not in wait]
        self._start(wait)
        return closed

    def waiting(self, record: int) -> dict[str, Any] | None:
        """Returns the state of the waiting sequences, as JSON, before the record with this number;
        None if no sequence waits."""
        if not self.sequences:
            return None
        first = min(self.sequences, key=lambda each: each.pieces[0][0])
        start = first.pieces[0][0]
        return {
            "parent": first.state,
            "record": start,
            "records": record - start,
            "open": [
                {
                    "splits": each.splits,
                    "waited": each.waited,
                    "pieces": [[record - start, n, at] for record, n, at, _ in each.pieces],
                }
                for each in self.sequences
            ],
        }

    def wait(self, state: dict[str, Any], records: list[tuple[list[Example], Any]]) -> None:
        """Restores the waiting sequences from the examples of their records, each with the state of
        the iterator before its record."""
        waiting = []
        for own in state["open"]:
            first = records[own["pieces"][0][0]][1]
            restored = Open(self._seq_len, own["splits"], first, own["waited"])
            for record, number, start in own["pieces"]:
                example = records[record][0][number]
                piece = part(example, start, start + self._seq_len)
                restored.add(state["record"] + record, number, start, piece)
            waiting.append(restored)
        self._start(waiting)


def in_order(examples: grain.MapDataset | grain.IterDataset, threads: int = 0) -> grain.IterDataset:
    """Returns the examples as an iterable, read ahead with `threads`. Without threads nothing is
    read ahead: grain's default read-ahead costs hundreds of microseconds per record, and the loader
    works on one thread."""
    if isinstance(examples, grain.IterDataset):
        return examples
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=4 * threads)
    return examples.to_iter_dataset(options)


def pack(
    examples: grain.MapDataset | grain.IterDataset,
    *,
    packing: str,
    seq_len: int,
    window: int | None = None,
    seed: int = 0,
    epoch: int = 0,
    threads: int = 0,
    unit: int = 1,
    layout: Callable[[list[Example]], Any] | None = None,
) -> grain.IterDataset:
    """Packs each record's list of examples into sequences: dicts of int32 [T] `segments`,
    `positions` and the examples' own arrays.

    `labels` are -100 where no token is predicted. `segments` number the documents in a sequence
    from 1; 0 is padding. `positions` restart at 0 in each document, and also in each piece of a
    document split over several sequences. Every token of `examples` is in exactly one sequence.

    - `none`: one document, or one piece of a document, per sequence.
    - `concat`: documents one after the other, split wherever a sequence is full. Examples with a
      loss mask are never split, because their answers would lose their prompts: they are packed
      into separate sequences, as by `best_fit`.
    - `best_fit`: complete documents, each in the fullest open sequence that has room; documents
      longer than `seq_len` are split first.

    Sequences are packed in windows: records are read until they fill `window` sequences, which are
    then shuffled, so that a batch neither holds consecutive pieces of one long document nor lacks
    one kind of records. With a window, `none` also splits long documents at other tokens in each
    epoch. Without a window, sequences follow the order of the examples. Examples whose lengths are
    multiples of `unit`, a divisor of `seq_len`, are split at multiples of `unit`.

    `threads` read the examples of a `MapDataset` ahead; without threads, the caller's thread reads
    them. `layout` makes a sequence from its list of pieces; the default is `examples.sequence`.
    """
    if packing not in PACKINGS:
        raise ValueError(f"data.packing={packing!r}: must be one of {', '.join(PACKINGS)}")
    seeds = (seed, epoch) if window else None
    # Without packing and shuffling, one sequence at a time: a window of images takes gigabytes.
    limit = window or (1 if packing == "none" else buffer_sequences(seq_len))
    packer = functools.partial(Packer, packing, seq_len, limit, seeds=seeds, unit=unit)
    layout = layout or functools.partial(sequence, seq_len=seq_len)
    packed = functools.partial(_Packed, packer=packer, layout=layout, seeds=seeds)
    return Iterated(packed, in_order(examples, threads))


class _Packed(grain.DatasetIterator):
    """Packed sequences. The state is the parent's state before the first record of the window, or
    of a sequence that waits at the window's start, and the number of sequences to skip from
    there."""

    def __init__(
        self,
        parent: grain.DatasetIterator,
        packer: Callable[[], Packer],
        layout: Callable[[list[Example]], Any],
        seeds: Sequence[int] | None,
    ):
        super().__init__(parent)
        self._new, self._layout, self._seeds = packer, layout, seeds
        self._packer, self._record, self._window = packer(), 0, 0
        self._mark()

    def _mark(self) -> None:
        """Stores the state before the next window."""
        waiting = self._packer.waiting(self._record) or {
            "parent": self._parent.get_state(),
            "record": self._record,
            "records": 0,
            "open": [],
        }
        self._before, self._ready, self._emitted = waiting, [], 0

    def _fill(self) -> None:
        """Packs a window.

        Raises:
          StopIteration: no record is left.
        """
        packer, last = self._packer, False
        closed: list[Open] = []
        while not closed and not last:
            while not packer.is_full and not last:
                state = self._parent.get_state()
                try:
                    packer.add(self._record, next(self._parent), state)
                    self._record += 1
                except StopIteration:
                    last = True
            closed = packer.close(last)
        if not closed:
            raise StopIteration
        if self._seeds is not None:
            order = np.random.default_rng((*self._seeds, self._window)).permutation(len(closed))
            closed = [closed[index] for index in order]
        self._ready = closed[::-1]

    def __next__(self) -> Any:
        if not self._ready:
            self._fill()
        batch = self._layout([piece for *_, piece in self._ready.pop().pieces])
        self._emitted += 1
        if not self._ready:
            self._window += 1
            self._mark()
        return batch

    def get_state(self) -> dict[str, Any]:
        return self._before | {"window": self._window, "emitted": self._emitted}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["parent"])
        records = []
        for _ in range(state["records"]):
            before = self._parent.get_state()
            records.append((next(self._parent), before))
        self._packer, self._window = self._new(), state["window"]
        self._packer.wait(state, records)
        self._record = state["record"] + state["records"]
        self._mark()
        if state["emitted"]:
            self._fill()
            del self._ready[-state["emitted"] :]
            self._emitted = state["emitted"]
