"""Converts records to examples, and handles records that are bad, too long or without a label."""

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grain
import numpy as np

from bptjax.data.changes import ChangedRecord
from bptjax.data.config import TOO_LONG
from bptjax.data.examples import Example, is_masked
from bptjax.data.files import Location, location
from bptjax.data.iterated import Iterated
from bptjax.data.rows import Document, UnfitData


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
      examples: the examples to train on; empty if the record was left out.
      too_long: length in tokens of each example that exceeds the sequence length.
      removed_tokens: number of tokens dropped or truncated because an example was too long.
      unlabeled: number of examples left out because none of their tokens counts in the loss.
      error: why the record is bad; None if it is good.
    """

    examples: list[Example] = field(default_factory=list)
    too_long: tuple[int, ...] = ()
    removed_tokens: int = 0
    unlabeled: int = 0
    error: str | None = None


@dataclass(frozen=True)
class RecordReader:
    """Converts documents to examples that fit into sequences.

    Attributes:
      encode: returns the examples of a document; raises ValueError if the document is bad.
      seq_len: largest length of examples with a loss mask. Packing splits other examples.
      too_long: `drop`, `truncate_left` (keep the last `seq_len` tokens), `truncate_right` (keep the
        first) or `error`.
      bad_records: `error` or `skip`.
      truncates: `encode` takes the keyword `limit`, a number of tokens, and truncates the document
        to it.
      choices: values that `too_long` may have, for advice.
      images: the documents are images, with one sequence each.
      unit: lengths of examples and their pieces are multiples of this number of tokens.
      pick: reads the document at an index of all documents of a source.
    """

    encode: Callable[..., list[Example]]
    seq_len: int
    too_long: str = "drop"
    bad_records: str = "error"
    truncates: bool = False
    choices: tuple[str, ...] = TOO_LONG
    images: bool = False
    unit: int = 1
    pick: Callable[[Sequence[Document], int], Document] = operator.getitem

    def __call__(self, read: Callable[[], Document], where: Location) -> Record:
        """Reads and tokenizes the document at `where`.

        Raises:
          ChangedRecord: the record is not one of those that the run began with.
          UnfitData: no record is bad, but the run cannot train on them.
          ValueError: the record is bad or too long, and the setting for it is `error`.
        """
        try:
            document = read()
            examples = self.encode(document)
        except ChangedRecord as error:
            raise ChangedRecord(f"{where}: {error}") from error
        except UnfitData as error:
            raise UnfitData(f"{where}: {str(error).removeprefix(f'{where}: ')}") from error
        except ValueError as error:
            reason = str(error).removeprefix(f"{where}: ")
            if self.bad_records == "skip":
                return Record(error=reason)
            raise ValueError(
                f"{where}: {reason}; set data.bad_records=skip to skip such records"
            ) from error
        kept, too_long, removed_tokens, unlabeled = [], [], 0, 0
        for example in examples:
            length = len(example["tokens"])
            if length > self.seq_len and is_masked(example):
                if self.too_long == "error":
                    others = " or ".join(each for each in self.choices if each != "error")
                    raise ValueError(
                        f"{where}: {length} tokens: must be at most train.seq_len={self.seq_len}; "
                        f"raise it, or set data.too_long to {others}"
                    )
                too_long.append(length)
                truncate = self.too_long.startswith("truncate")
                removed_tokens += length - self.seq_len if truncate else length
                if self.too_long == "drop":
                    continue
                kept_part = slice(-self.seq_len, None)
                if self.too_long == "truncate_right":
                    kept_part = slice(self.seq_len)
                if self.truncates:
                    (example,) = self.encode(document, limit=self.seq_len)
                else:
                    example = {name: value[kept_part] for name, value in example.items()}
            if not length:
                continue
            if (example["labels"] < 0).all():
                unlabeled += 1
                continue
            kept.append(example)
        return Record(kept, tuple(too_long), removed_tokens, unlabeled)


class Records(Sequence[list[Example]]):
    """The list of examples of each document, read on demand."""

    def __init__(self, documents: Sequence[Document], reader: RecordReader):
        self.documents, self.reader = documents, reader

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def total(self) -> int | None:
        """Number of records."""
        return len(self)

    def __getitem__(self, index: int) -> list[Example]:
        return self.inspect(index).examples

    def inspect(self, index: int) -> Record:
        """Reads a record, and counts the tokens and examples left out of it."""
        read = functools.partial(self.reader.pick, self.documents, index)
        return self.reader(read, location(self.documents, index))

    def each(self, shard: int = 0, shards: int = 1) -> Iterator[tuple[Location, Record]]:
        """Reads every record of a shard, in order."""
        for index in range(shard, len(self), shards):
            yield location(self.documents, index), self.inspect(index)

    def epoch(
        self,
        number: int,
        shard: int,
        shards: int,
        *,
        seed: int | None,
        sizes: Sequence[list[Example]] | None = None,
    ) -> grain.MapDataset | grain.IterDataset:
        """Returns the lists of examples of one shard in an epoch, or their `sizes`, shuffled with
        `seed`."""
        order = np.arange(shard, len(self), shards)
        if seed is not None:
            np.random.default_rng((seed % 2**32, number)).shuffle(order)
        if sizes is not None:
            # Iterators of grain's map datasets take ten times as long per record.
            return Iterated(functools.partial(_Iterator, _Ordered(sizes, order)))
        return grain.MapDataset.source(_Ordered(self, order))


class _Ordered(Sequence[list[Example]]):
    """Records in another order."""

    def __init__(self, records: Sequence[list[Example]], order: np.ndarray):
        self._records, self._order = records, order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> list[Example]:
        return self._records[int(self._order[index])]


class _Iterator(grain.DatasetIterator):
    def __init__(self, records: Sequence[list[Example]]):
        super().__init__()
        self._records, self._next = records, 0

    def __next__(self) -> list[Example]:
        if self._next == len(self._records):
            raise StopIteration
        self._next += 1
        return self._records[self._next - 1]

    def get_state(self) -> int:
        return self._next

    def set_state(self, state: int) -> None:
        self._next = state


class Readable(Protocol):
    """Documents without random access."""

    def reads(self) -> Iterator[Callable[[], Document]]: ...


def reads(documents: Sequence[Any] | Readable) -> Iterator[Callable[[], Any]]:
    """Yields a function for each document that reads the document."""
    if isinstance(documents, Sequence):
        return (functools.partial(documents.__getitem__, n) for n in range(len(documents)))
    return documents.reads()


def readable(documents: Sequence[Any] | Readable, bad_records: str) -> Iterator[Any]:
    """Yields the documents; with bad_records=skip, skips documents that cannot be read."""
    for read in reads(documents):
        try:
            yield read()
        except ValueError:
            if bad_records != "skip":
                raise
