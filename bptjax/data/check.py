"""Checks every record before a run, or during the run if the check takes too long."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bptjax.data.account import Account, describe, summary
from bptjax.data.config import DataConfig
from bptjax.data.epochs import Counted, Limit, limit
from bptjax.data.records import BadRecord
from bptjax.data.stream import AnyRecords
from bptjax.ops.labels import IGNORED
from bptjax.run.output import plural

# Seconds that a run waits for the data check. A large stream would finish in neither time.
FIRST_SECONDS, FIRST_STREAM_SECONDS = 60.0, 10.0
# Number of passes over a source above which a run warns.
MOST_PASSES = 4
BAD_RECORDS = "bad_records.jsonl"


class DataCheck:
    """Reads and tokenizes every record once, finds bad records and counts the others.

    Held-out records are read first, then one record of each source in turn.

    Attributes:
      accounts: counts of each source of training data.
      held_out: counts of the held-out records.
      bad: bad records so far.
      error: first error on the thread, with data.bad_records=error or data.too_long=error; None if
        there is none.
    """

    def __init__(
        self,
        names: Sequence[str],
        sources: Sequence[AnyRecords],
        held_out: AnyRecords,
        config: DataConfig,
        masked: float | None = None,
        weights: Sequence[float] | None = None,
    ):
        """Prepares the check. For `masked` see `Account`.

        Args:
          weights: weight of each source.
        """
        self.config, self.weights = config, weights or [1.0] * len(names)
        random = config.shuffle and not config.group_by_length
        self.accounts = [
            _account(name, records, masked, random)
            for name, records in zip(names, sources, strict=True)
        ]
        self.held_out = _account("held-out data", held_out, masked)
        self.held_out.sizes = None
        self._epochs: dict[int, int] = {}
        self.bad: list[BadRecord] = []
        self.error: str | None = None
        self._sources, self._held_out = sources, held_out
        self._rest = self._read()
        self._directory: Path | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def complete(self) -> bool:
        return all(account.complete for account in (*self.accounts, self.held_out))

    @property
    def records(self) -> list[AnyRecords]:
        """The records of each source, and the held-out records."""
        return [*self._sources, self._held_out]

    @property
    def total(self) -> int | None:
        """Number of these records; None if it is unknown."""
        totals = [account.total for account in (*self.accounts, self.held_out)]
        return None if None in totals else sum(n for n in totals if n is not None)

    @property
    def sequences_per_epoch(self) -> int | None:
        """Number of sequences that hold every training record once; with several sources, in one
        pass over the source that runs out first. An estimate until the check is complete; None if
        the number of records of a stream is unknown."""
        epochs = [self._epoch(number) for number in range(len(self.accounts))]
        if None in epochs or len(epochs) == 1 or not all(a.tokens for a in self.accounts):
            return None if None in epochs else sum(n for n in epochs if n is not None)
        return round(float(np.dot([n or 0 for n in epochs], self.passes(epochs=1))))

    @property
    def tokens_per_epoch(self) -> float:
        """Number of tokens in the sequences of `sequences_per_epoch`."""
        if len(self.accounts) == 1:
            (account,) = self.accounts
            # Images can be counted without being read. Each fills a sequence.
            return account.tokens or (account.total or 0) * account.seq_len
        return float(np.dot([a.tokens for a in self.accounts], self.passes(epochs=1)))

    def _epoch(self, number: int) -> int | None:
        """Returns the number of sequences of a source in its first epoch."""
        account = self.accounts[number]
        if account.sizes is None or len(account.sizes) != account.total:
            return account.epoch(self.config.packing)
        if number not in self._epochs:
            shards = range(self.config.num_shards)
            counted = self._counted[number]
            limits = [limit([counted], self.config, shard, 1.0, 1) for shard in shards]
            self._epochs[number] = sum(shard_limit.sequences for shard_limit in limits)
        return self._epochs[number]

    def limits(self, epochs: float, batch_size: int) -> list[Limit]:
        """Returns the limit of each shard in a run over `epochs`, after a complete check.

        With several sources, these are passes over the source that runs out first.
        """
        shards = range(self.config.num_shards)
        size = batch_size // len(shards)
        return [limit(self._counted, self.config, shard, epochs, size) for shard in shards]

    @property
    def _counted(self) -> list[Counted]:
        each = zip(self._sources, self.accounts, self.weights, strict=True)
        return [
            Counted(number, records, account.sizes or [], weight)
            for number, (records, account, weight) in enumerate(each)
        ]

    def count_images(self) -> None:
        """Counts every image as one sequence, without reading it."""
        (account,) = self.accounts
        image = {"tokens": np.zeros(account.seq_len), "labels": np.full(account.seq_len, IGNORED)}
        account.sizes = [[image]] * (account.total or 0)

    def passes(self, *, epochs: float | None = None, sequences: int = 0) -> list[float]:
        """Returns the number of passes over each source, in a run over `epochs` or over a number of
        packed sequences. An estimate until the check is complete."""
        weights = np.array(self.weights) / sum(self.weights)
        tokens = np.array([a.tokens * (a.total or a.records) / a.records for a in self.accounts])
        if epochs is not None:
            each = weights / tokens
            return (epochs * each / each.max()).tolist()
        packed = [a.tokens / max(1, a.sequences[self.config.packing]) for a in self.accounts]
        return (sequences / (weights / packed).sum() * weights / tokens).tolist()

    def describe_passes(self, *, epochs: float | None = None, sequences: int = 0) -> list[str]:
        """Formats the passes over each source, and warns about a source of a mixture with more than
        `MOST_PASSES` passes; empty if the size of a source is unknown."""
        if not all(account.examples and account.total for account in self.accounts):
            return []
        if len(self.accounts) == 1 and epochs is not None:
            return []
        passes = self.passes(epochs=epochs, sequences=sequences)
        each = list(zip([account.name for account in self.accounts], passes, strict=True))
        length = f"train.epochs={epochs:g}" if epochs is not None else plural(sequences, "sequence")
        lines = [
            f"passes over the data in {length}: " + ", ".join(f"{name} {n:.3g}" for name, n in each)
        ]
        for name, n in each:
            if n > MOST_PASSES and len(each) > 1:
                lines.append(
                    f"warning: {n:.3g} passes over {name}, more than {MOST_PASSES}: lower its "
                    "weight or the number of steps"
                )
        return lines

    def run(self, seconds: float | None = None) -> None:
        """Checks records for up to `seconds`, by default `FIRST_SECONDS`, or `FIRST_STREAM_SECONDS`
        if a source is streamed.

        Raises:
          ValueError: a bad record, or one that is too long.
        """
        if seconds is None:
            streamed = any(account.total is None for account in self.accounts)
            seconds = FIRST_STREAM_SECONDS if streamed else FIRST_SECONDS
        end = time.monotonic() + seconds
        for _ in self._rest:
            if time.monotonic() > end:
                break

    def start(self, directory: Path) -> None:
        """Checks the remaining records on a thread that uses up to half of a core, and writes bad
        records to `bad_records.jsonl` in the run directory."""
        self._directory = directory
        (directory / BAD_RECORDS).unlink(missing_ok=True)
        new, self.bad = self.bad, []
        for bad in new:
            self._note(bad)
        if not self.complete:
            for account in self.accounts:
                account.sizes = None
            self._thread = threading.Thread(target=self._background, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def lines(self) -> list[str]:
        """Formats the counts so far, for messages."""
        own: dict[str, Any] = {"too_long": self.config.too_long, "listed": self._listed}
        own["packing"] = self.config.packing
        epochs = [self._epochs.get(number) for number in range(len(self.accounts))]
        found = zip(self._used, [*epochs, None], strict=False)
        return [line for account, epoch in found for line in describe(account, **own, epoch=epoch)]

    def summary(self) -> list[str]:
        """Formats the number of records read and left out so far, for messages."""
        return [line for a in self._used for line in summary(a, self.config.too_long, self._listed)]

    @property
    def _listed(self) -> bool:
        return self._directory is not None

    @property
    def _used(self) -> list[Account]:
        return [*self.accounts, *[self.held_out] * bool(self.held_out.total)]

    def _read(self) -> Iterator[None]:
        """Reads one record after the other, and yields after each."""
        yield from self._count(self.held_out, self._held_out)
        turns = [self._count(*each) for each in zip(self.accounts, self._sources, strict=True)]
        while turns:
            for turn in list(turns):
                try:
                    yield next(turn)
                except StopIteration:
                    turns.remove(turn)

    def _count(self, account: Account, records: AnyRecords) -> Iterator[None]:
        for where, record in records.each():
            account.add(record)
            if record.error is not None:
                self._note(BadRecord(where.file, where.record, record.error))
            yield
        account.total = account.records

    def _note(self, bad: BadRecord) -> None:
        self.bad.append(bad)
        if self._directory is not None:
            with (self._directory / BAD_RECORDS).open("a") as file:
                file.write(json.dumps(vars(bad)) + "\n")

    def _background(self) -> None:
        try:
            while not self._stopped.is_set():
                start = time.monotonic()
                if next(self._rest, self) is self:
                    break
                self._stopped.wait(time.monotonic() - start)
        except (ValueError, OSError) as error:
            self.error = str(error)


def _account(name: str, records: AnyRecords, masked: float | None, random: bool = False) -> Account:
    """Makes an account. `random` is whether packing=none splits texts at random."""
    reader = records.reader
    unit = reader.unit if random and not reader.images else 0
    how = masked, reader.images, unit, reader.choices
    return Account(name, reader.seq_len, records.total, *how)
