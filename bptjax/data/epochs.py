"""Passes over the records of a shard, and the number of sequences in each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grain

from bptjax.data.config import DataConfig
from bptjax.data.examples import Example, is_masked
from bptjax.data.grouping import Grouped
from bptjax.data.iterated import Iterated
from bptjax.data.mixture import mixed
from bptjax.data.packing import buffer_sequences, in_order, pack
from bptjax.data.stream import AnyRecords, StreamRecords

# Numbers of records without and with a loss mask, in the order of an epoch.
Ranks = Sequence[int]
# Returns an epoch by its number; of each kind of records, those between two ranks, or all.
Epoch = Callable[[int, Ranks | None, Ranks | None], grain.IterDataset]


@dataclass(frozen=True)
class Limit:
    """The sequences of one shard in a run over train.epochs.

    Attributes:
      sequences: number of sequences.
      epoch: number of complete epochs of the source that runs out first.
      stop: for each source, number of records of each kind in the final fraction of an epoch.
    """

    sequences: int
    epoch: int
    stop: Sequence[Ranks]


class Epochs(grain.DatasetIterator):
    """Endless epochs, each of which has every record once.

    An epoch may be divided. Its first part then has the same share of the records with a loss mask
    as of the records without. The records of each part are packed separately.

    Args:
      epoch: returns an epoch.
      divided: number of the divided epoch, and the ranks at which it is divided.
      ends: stop at the division.
    """

    def __init__(self, epoch: Epoch, divided: tuple[int, Ranks] | None = None, ends: bool = False):
        super().__init__()
        self._new_epoch, self._divided, self._ends_at_division = epoch, divided, ends
        self._enter(0, None)

    def _enter(self, epoch: int, start: Ranks | None) -> None:
        """Starts an epoch, or the rest of an epoch."""
        stop = None
        if self._divided and epoch == self._divided[0]:
            ranks = self._divided[1]
            if any(b > a for a, b in zip(start or (0, 0), ranks, strict=True)):
                stop = ranks
        self._open(epoch, start, stop)

    def _open(self, epoch: int, start: Ranks | None, stop: Ranks | None) -> None:
        self._epoch, self._start, self._stop = epoch, start, stop
        self._own = iter(self._new_epoch(epoch, start, stop))

    def __next__(self) -> Any:
        for _ in range(4):
            if (
                self._ends_at_division
                and self._divided
                and self._start is None
                and self._stop is None
            ):
                if self._epoch == self._divided[0]:
                    raise StopIteration
            try:
                return next(self._own)
            except StopIteration:
                if self._stop is None:
                    self._enter(self._epoch + 1, None)
                elif self._ends_at_division:
                    raise
                else:
                    self._enter(self._epoch, self._stop)
        raise ValueError("data: must hold a record to train on; one epoch passed without any")

    def get_state(self) -> dict[str, Any]:
        state = {"epoch": self._epoch, "start": self._start, "stop": self._stop}
        return state | {"own": self._own.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._open(state["epoch"], state["start"], state["stop"])
        self._own.set_state(state["own"])


class _Part(grain.DatasetIterator):
    """The records of each kind from one rank to another, without records that have no examples."""

    def __init__(self, parent: grain.DatasetIterator, start: Ranks | None, stop: Ranks | None):
        super().__init__(parent)
        self._start, self._stop, self._seen = start or (0, 0), stop, [0, 0]

    def __next__(self) -> list[Example]:
        while self._stop is None or any(n < m for n, m in zip(self._seen, self._stop, strict=True)):
            record = next(self._parent)
            if not record:
                continue
            kind = kind_of(record)
            rank = self._seen[kind]
            self._seen[kind] += 1
            if rank >= self._start[kind] and (self._stop is None or rank < self._stop[kind]):
                return record
        raise StopIteration

    def get_state(self) -> dict[str, Any]:
        return {"parent": self._parent.get_state(), "seen": list(self._seen)}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["parent"])
        self._seen = list(state["seen"])


def kind_of(record: Sequence[Example]) -> int:
    """Returns 1 for a record with a loss mask, else 0."""
    return int(any(map(is_masked, record)))


def epochs_of(
    records: AnyRecords,
    shard: int,
    config: DataConfig,
    batch_size: int,
    sizes: Sequence[list[Example]] | None = None,
    threads: int = 0,
) -> Epoch:
    """Returns the function that opens epochs of one shard.

    Args:
      config: config of the data, with the shard's seed.
      batch_size: number of the shard's sequences in a batch.
      threads: number of threads that read records ahead.
      sizes: examples of every record with the right lengths and masks; the epochs then yield the
        number of tokens of each sequence. Without `sizes`, records are read.

    Raises:
      ValueError: data.group_by_length of a stream.
    """
    reader, n = records.reader, config.num_shards
    seq_len, shuffle = reader.seq_len, config.shuffle
    if config.group_by_length:
        if isinstance(records, StreamRecords):
            raise ValueError(
                "data.group_by_length=true: must be false, because the data do not fit in memory"
            )
        grouped = Grouped(
            records if sizes is None else sizes,
            seq_len=seq_len,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=config.seed,
        )
        if sizes is None:
            return grouped.epoch
        return lambda n, a, b: grouped.epoch(n, a, b).map(lambda example: len(example["tokens"]))
    # Images are shuffled as records: each is one sequence.
    window = max(4, buffer_sequences(seq_len) // n) if shuffle and not reader.images else None

    def epoch(number: int, start: Ranks | None, stop: Ranks | None) -> grain.IterDataset:
        examples = records.epoch(
            number, shard, n, seed=config.seed if shuffle else None, sizes=sizes
        )
        if start is not None or stop is not None:
            part = partial(_Part, start=start, stop=stop)
            examples = Iterated(part, in_order(examples, threads))
        return pack(
            examples,
            packing=config.packing,
            seq_len=seq_len,
            window=window,
            seed=config.seed,
            epoch=number,
            threads=threads,
            unit=reader.unit,
            layout=None if sizes is None else _tokens,
        )

    return epoch


@dataclass(frozen=True)
class Counted:
    """A source whose records have been read.

    Attributes:
      number: index of the source.
      sizes: the examples of each record; see `account.Sizes`.
    """

    number: int
    records: AnyRecords
    sizes: Sequence[list[Example]]
    weight: float = 1.0


def limit(
    sources: Sequence[Counted], config: DataConfig, shard: int, epochs: float, batch_size: int
) -> Limit:
    """Returns the limit of a shard in a run over `epochs` of the source that runs out first.

    A fraction of an epoch is a fraction of the records of each kind.

    Args:
      batch_size: number of the shard's sequences in a batch.
    """
    complete = int(epochs + 1e-9)
    fraction = max(0.0, epochs - complete)
    epochs_of_each, stops, steady = [], [], True
    for own in sources:
        settings = replace(config, seed=shard_seed(config, shard, own.number))
        epoch = epochs_of(own.records, shard, settings, batch_size, own.sizes)
        counts, longest = [0, 0], 0
        order = own.records.epoch(0, shard, config.num_shards, seed=None, sizes=own.sizes)
        for record in filter(None, in_order(order)):
            counts[kind_of(record)] += 1
            longest = max(longest, *(len(example["tokens"]) for example in record))
        # Shards with equal numbers of records round differently, so that their sum is right.
        stop = [int(fraction * count + (shard + 0.5) / config.num_shards) for count in counts]
        if not complete and not any(stop):
            stop[int(counts[1] > counts[0])] = 1
        epochs_of_each.append(epoch)
        stops.append(stop)
        fits = longest <= own.records.reader.seq_len
        # True if an epoch has the same number of sequences in every order.
        steady &= {"none": fits or not config.shuffle, "concat": not counts[1]}.get(
            config.packing, False
        )
    if len(sources) == 1 and (steady or config.group_by_length):
        (epoch,), (stop,) = epochs_of_each, stops
        sequences = complete * sum(1 for _ in epoch(0, None, None)) if complete else 0
        if any(stop):
            sequences += sum(1 for _ in epoch(complete, None, stop))
        return Limit(sequences, complete, stops)
    parts = [
        Iterated(partial(Epochs, epoch, (complete, stop), ends=True))
        for epoch, stop in zip(epochs_of_each, stops, strict=True)
    ]
    weights = [own.weight for own in sources]
    return Limit(sum(1 for _ in mixed(parts, weights, int)), complete, stops)


def shard_seed(config: DataConfig, shard: int, source: int) -> int:
    """Returns the seed of a source in a shard. With equal seeds, shards would put neighboring
    documents into one batch."""
    return config.seed + shard + config.num_shards * source


def _tokens(pieces: list[Example]) -> int:
    return sum(len(piece["tokens"]) for piece in pieces)
