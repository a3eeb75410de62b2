"""Compressed files too large for memory, read in order, shuffled in a window, resumed by offset."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import grain
import numpy as np
from grain import experimental as gx

from bptjax.data.changes import check_unchanged, file_version
from bptjax.data.examples import Example
from bptjax.data.files import (
    BLOCK,
    Location,
    decompressed,
    extension,
    location,
    parse,
)
from bptjax.data.iterated import Iterated
from bptjax.data.records import Record, RecordReader, Records
from bptjax.data.rows import Document
from bptjax.data.split import draw, group_sizes

# Number of records from which the size of a record is estimated.
WINDOW_SAMPLE = 256


@dataclass(frozen=True)
class StreamSizes:
    """Sizes that decide which files are a stream, and how much of a stream is in memory.

    Attributes:
      memory: bytes of decompressed files of records that stay in memory; larger files are a stream.
      held_out: number of held-out records of a stream, which are read at the start and stay in
        memory.
      window: bytes of the records in a shuffle window.
      block: bytes read at a time to reach a place in a file.
    """

    memory: int = 2**28
    held_out: int = 512
    window: int = 2**26
    block: int = BLOCK


SIZES = StreamSizes()


@dataclass(frozen=True)
class Entry:
    """A record, read on demand.

    Attributes:
      number: index of the record in its file.
      after: place of the next record in the file, as in `Lines`.
    """

    where: Location
    number: int
    read: Callable[[], Document]
    after: tuple[int, int]


def decompress(path: Path, limit: int) -> bytes | None:
    """Returns the content of a compressed file, or None if it exceeds `limit` bytes.

    Raises:
      ValueError: the file cannot be decompressed.
    """
    with decompressed(path) as stream:
        data = stream.read(limit + 1)
    return data if len(data) <= limit else None


class Lines:
    """The records of a compressed text file, in order. A place is (byte offset, record number)."""

    def __init__(
        self,
        path: Path,
        sample_by: str,
        read: Callable[[object, str], Document],
        sizes: StreamSizes,
    ):
        self.path, self.read, self.version = path, read, file_version(path)
        self.sizes = sizes
        self.json = extension(path) == ".jsonl"
        self.paragraphs = sample_by == "paragraph" and not self.json

    def entries(self, place: Sequence[int]) -> Iterator[Entry]:
        """Yields the records from `place` on."""
        check_unchanged(self.path, self.version)
        with decompressed(self.path) as stream:
            left = place[0]
            while left > 0 and (block := stream.read(min(left, self.sizes.block))):
                left -= len(block)
            yield from self._entries(stream, *place)

    def _entries(self, file: Iterator[bytes], offset: int, number: int) -> Iterator[Entry]:
        lines: list[bytes] = []
        stop = offset
        for line in file:
            blank = line.isspace()
            if lines and (blank or not self.paragraphs):
                yield self._entry(lines, offset, stop, number)
                lines, number = [], number + 1
            if not blank:
                offset = stop if not lines else offset
                lines.append(line)
            stop += len(line)
        if lines:
            yield self._entry(lines, offset, stop, number)

    def _entry(self, lines: list[bytes], start: int, stop: int, number: int) -> Entry:
        data, where = b"".join(lines), Location(str(self.path), f"record {number + 1}")

        def read() -> Document:
            text, row = parse(data, str(where), json_lines=self.json, first=not start)
            return self.read(row, str(where)) if self.json else text.rstrip("\r\n")

        return Entry(where, number, read, (stop, number + 1))


@dataclass(frozen=True)
class Stream:
    """The records of several files, at least one of which is too large for memory.

    Attributes:
      held_out: the held-out records: the number of a file, and an index in it.
    """

    files: tuple[Sequence[Document] | Lines, ...]
    sizes: StreamSizes
    held_out: frozenset[tuple[int, int]] = frozenset()

    def entries(self, file: int, place: Sequence[int] = (0, 0)) -> Iterator[Entry]:
        """Yields the records of a file from `place` on, including held-out records."""
        own = self.files[file]
        if isinstance(own, Lines):
            yield from own.entries(place)
            return
        for number in range(place[0], len(own)):
            read = functools.partial(own.__getitem__, number)
            yield Entry(location(own, number), number, read, (number + 1, 0))

    def training(self) -> Iterator[tuple[int, Entry]]:
        """Yields each training record once, with the number of its file, in the order of the
        files."""
        for file in range(len(self.files)):
            own = self.entries(file)
            yield from ((file, e) for e in own if (file, e.number) not in self.held_out)

    def reads(self) -> Iterator[Callable[[], Document]]:
        """Yields one function per training record that reads the record."""
        return (entry.read for _, entry in self.training())

    def __iter__(self) -> Iterator[Document]:
        return (read() for read in self.reads())

    def split(self, eval_fraction: float, seed: int | None) -> tuple["Stream", "HeldOut"]:
        """Returns the training and the held-out records, chosen at the beginning of each file as
        `draw` does, or evenly spaced without a seed: up to about `sizes.held_out` in all files
        together."""
        held = math.ceil(self.sizes.held_out / len(self.files))
        every = max(2, round(1 / eval_fraction))
        head = held * every if seed is None else int(held / eval_fraction)

        def choose(sizes: list[int]) -> list[tuple[int, int]]:
            if seed is None:
                return [
                    (n, i) for n, size in enumerate(sizes) for i in range(every // 2, size, every)
                ]
            chosen = draw(group_sizes(self.files, sizes), eval_fraction, seed)
            ends = np.cumsum(sizes)
            files = np.searchsorted(ends, chosen, side="right")
            return list(zip(files.tolist(), (chosen - (ends - sizes)[files]).tolist(), strict=True))

        # The numbers of records are known only after reading.
        most = [head if isinstance(f, Lines) else min(head, len(f)) for f in self.files]
        first, read, sizes = frozenset(choose(most)), {}, []
        for file in range(len(self.files)):
            sizes.append(0)
            for sizes[-1], entry in enumerate(islice(self.entries(file), head), 1):
                if (file, entry.number) in first:
                    read[file, entry.number] = entry
        chosen = choose(sizes)
        # Without a record of `first`, another one is held out.
        entries = [read.get(at) or next(islice(self.entries(at[0]), at[1], None)) for at in chosen]
        return replace(self, held_out=frozenset(chosen)), HeldOut(entries)

    @property
    def window(self) -> int:
        """Number of records in the shuffle window."""
        first = [entry.after[0] for entry in islice(self.entries(0), WINDOW_SAMPLE)]
        mean = max(1, first[-1] // len(first)) if isinstance(self.files[0], Lines) and first else 1
        return max(16, min(4096, self.sizes.window // mean))


class HeldOut(Sequence[Document]):
    """Held-out records of a stream."""

    def __init__(self, entries: list[Entry]):
        self.entries = entries

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Document:
        return self.entries[index].read()

    def location(self, index: int) -> Location:
        return self.entries[index].where


class StreamRecords:
    """The examples of a stream's training records, in order.

    Attributes:
      counts: number of training records of each file that `each` has read, over all shards.
    """

    def __init__(self, stream: Stream, reader: RecordReader):
        self.stream, self.reader = stream, reader
        self.counts = [0] * len(stream.files)

    @property
    def total(self) -> int | None:
        """Number of records; None, because it is unknown."""
        return None

    def each(self, shard: int = 0, shards: int = 1) -> Iterator[tuple[Location, Record]]:
        """Reads every record of a shard, in order."""
        counts = [0] * len(self.counts)
        for file, entry in self.stream.training():
            counts[file] += 1
            if entry.number % shards == shard:
                yield entry.where, self.reader(entry.read, entry.where)
        self.counts = counts

    def epoch(
        self,
        number: int,
        shard: int,
        shards: int,
        *,
        seed: int | None,
        sizes: Sequence[list[Example]] | None = None,
    ) -> grain.IterDataset:
        """Returns the lists of examples of one shard in an epoch, or their `sizes`. With `seed`,
        the order of the files changes each epoch, and records are shuffled in a window."""
        stream = self.stream if sizes is None else self._counted()
        seeds = None if seed is None else (seed, number)
        dataset = Iterated(functools.partial(_StreamIterator, stream, shard, shards, seeds))
        if seed is not None:
            own = int(np.random.default_rng((seed, number)).integers(2**31))
            dataset = gx.WindowShuffleIterDataset(dataset, window_size=self.window, seed=own)
        if sizes is not None:
            return dataset.map(lambda entry: sizes[int(entry.read())])
        return dataset.map(lambda entry: self.reader(entry.read, entry.where).examples)

    @functools.cached_property
    def window(self) -> int:
        return self.stream.window

    def _counted(self) -> Stream:
        """Returns a stream that yields the index of each training record instead of the record."""
        starts = np.cumsum([0, *self.counts])
        files: list[Any] = []
        for file, (start, count) in enumerate(zip(starts, self.counts, strict=False)):
            numbers = sorted(number for n, number in self.stream.held_out if n == file)
            places = [number - before for before, number in enumerate(numbers)]
            files.append(np.insert(np.arange(start, start + count), places, -1))
        return replace(self.stream, files=tuple(files))


AnyRecords = Records | StreamRecords


class _StreamIterator(grain.DatasetIterator):
    def __init__(self, stream: Stream, shard: int, shards: int, seed: Sequence[int] | None):
        super().__init__()
        self._stream, self._shard, self._shards = stream, shard, shards
        count = len(stream.files)
        self._order = range(count)
        if seed is not None:
            self._order = np.random.default_rng(seed).permutation(count).tolist()
        self.set_state({"turn": 0, "place": (0, 0)})

    def __next__(self) -> Entry:
        while self._turn < len(self._order):
            file = self._order[self._turn]
            if self._entries is None:
                self._entries = self._stream.entries(file, self._place)
            for entry in self._entries:
                self._place = entry.after
                own = entry.number % self._shards == self._shard
                if own and (file, entry.number) not in self._stream.held_out:
                    return entry
            self._entries, self._turn, self._place = None, self._turn + 1, (0, 0)
        raise StopIteration

    def get_state(self) -> dict[str, Any]:
        return {"turn": self._turn, "place": tuple(self._place)}

    def set_state(self, state: dict[str, Any]) -> None:
        self._turn, self._place = state["turn"], tuple(state["place"])
        self._entries: Iterator[Entry] | None = None
