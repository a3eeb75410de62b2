"""Records as examples: which are too long, without a label, or bad, and what happens to them."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grain

from bptjax.data.concat import Example, is_masked
from bptjax.data.files import Document, Location, location


@dataclass(frozen=True)
class BadRecord:
    """A line of bad_records.jsonl."""

    file: str
    record: str
    reason: str


@dataclass(frozen=True)
class Record:
    """One record, tokenized.

    Attributes:
      examples: what is trained on; empty if the record was left out.
      too_long: tokens of each example longer than the sequence length.
      cut: tokens that were dropped or truncated for that.
      unlabeled: examples left out because no token of them is in the loss.
      error: why the record is bad; None if it is good.
    """

    examples: list[Example] = field(default_factory=list)
    too_long: tuple[int, ...] = ()
    cut: int = 0
    unlabeled: int = 0
    error: str | None = None


@dataclass(frozen=True)
class RecordReader:
    """Turns documents into examples that fit into sequences.

    Attributes:
      encode: the examples of a document; ValueError if it is bad.
      seq_len: length that examples with a loss mask may not exceed. Others are cut when packed.
      too_long: `drop`, `truncate_left` (keep the last `seq_len` tokens) or `error`.
      bad_records: `error` or `skip`.
    """

    encode: Callable[[Document], list[Example]]
    seq_len: int
    too_long: str = "drop"
    bad_records: str = "error"

    def __call__(self, read: Callable[[], Document], where: Location) -> Record:
        """Reads and tokenizes the document at `where`.

        Raises:
          ValueError: the record is bad, or too long, and not to be skipped or shortened.
        """
        try:
            examples = self.encode(read())
        except ValueError as error:
            reason = str(error).removeprefix(f"{where}: ")
            if self.bad_records == "skip":
                return Record(error=reason)
            raise ValueError(
                f"{where}: {reason}; set data.bad_records=skip to leave out such records"
            ) from error
        kept, too_long, cut, unlabeled = [], [], 0, 0
        for example in examples:
            length = len(example["tokens"])
            if length > self.seq_len and is_masked(example):
                if self.too_long == "error":
                    raise ValueError(
                        f"{where}: {length} tokens exceed train.seq_len={self.seq_len}; raise it, "
                        "or set data.too_long to drop or truncate_left"
                    )
                too_long.append(length)
                cut += length - self.seq_len if self.too_long == "truncate_left" else length
                if self.too_long == "drop":
                    continue
                example = {name: value[-self.seq_len :] for name, value in example.items()}
            if not length:
                continue
            if (example["labels"] == -100).all():
                unlabeled += 1
                continue
            kept.append(example)
        return Record(kept, tuple(too_long), cut, unlabeled)


class Records(Sequence[list[Example]]):
    """The examples of each of `documents`, read when asked for."""

    def __init__(self, documents: Sequence[Document], reader: RecordReader):
        self.documents, self.reader = documents, reader

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def total(self) -> int | None:
        """Number of records, if it is known."""
        return len(self)

    def __getitem__(self, index: int) -> list[Example]:
        return self.inspect(index).examples

    def inspect(self, index: int) -> Record:
        """Reads a record, with an account of what was left out."""
        documents = self.documents
        return self.reader(lambda: documents[index], location(documents, index))

    def each(self, shard: int = 0, shards: int = 1) -> Iterator[tuple[Location, Record]]:
        """Reads every record of a shard, in order."""
        for index in range(shard, len(self), shards):
            yield location(self.documents, index), self.inspect(index)

    def dataset(self, shard: int, shards: int, *, shuffle: bool, seed: int) -> grain.MapDataset:
        """Returns the endless lists of examples of one shard, in another order each epoch."""
        found = grain.MapDataset.source(self)[shard::shards]
        return (found.shuffle(seed=seed) if shuffle else found).repeat()


class Readable(Protocol):
    """Documents that are not at random access."""

    def reads(self) -> Iterator[Callable[[], Document]]: ...


def reads(documents: Sequence[Any] | Readable) -> Iterator[Callable[[], Any]]:
    """Yields a function for each document, which reads it."""
    if isinstance(documents, Sequence):
        return (functools.partial(documents.__getitem__, n) for n in range(len(documents)))
    return documents.reads()


def readable(documents: Sequence[Any] | Readable, bad_records: str) -> Iterator[Any]:
    """Yields the documents; with `skip`, without those that cannot be read."""
    for read in reads(documents):
        try:
            yield read()
        except ValueError:
            if bad_records != "skip":
                raise
