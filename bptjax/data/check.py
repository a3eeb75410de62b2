"""Checks every record before a run, or during the run if that takes too long."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bptjax.data.account import Account, describe, summary
from bptjax.data.config import DataConfig
from bptjax.data.records import BadRecord
from bptjax.data.stream import AnyRecords

# Seconds that a run waits for the check of its data. A large stream would not finish in either.
FIRST_SECONDS, FIRST_STREAM_SECONDS = 60.0, 10.0
BAD_RECORDS = "bad_records.jsonl"


class DataCheck:
    """Reads and tokenizes every record once, finds bad records and counts the others.

    Held-out records are read first, then one record of each source in turn.

    Attributes:
      accounts: counts of each source of training data.
      held_out: counts of the held-out records.
      bad: bad records so far.
      error: the first error found on the thread, with data.bad_records=error or
        data.too_long=error; None if there is none.
    """

    def __init__(
        self,
        names: Sequence[str],
        sources: Sequence[AnyRecords],
        held_out: AnyRecords,
        config: DataConfig,
        masked: float | None = None,
    ):
        """Takes the share of the tokens that is masked, or None; see `Account`."""
        self.config = config
        random = config.shuffle and not config.group_by_length
        self.accounts = [
            _account(name, records, masked, random)
            for name, records in zip(names, sources, strict=True)
        ]
        self.held_out = _account("held-out data", held_out, masked)
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
    def sequences_per_epoch(self) -> int | None:
        """Number of sequences that hold every training record once. An estimate until the check is
        complete; None if the number of records of a stream is not known."""
        epochs = [account.epoch(self.config.packing) for account in self.accounts]
        return None if None in epochs else sum(n for n in epochs if n is not None)

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
        """Checks the remaining records on a thread that uses up to half of a core. Writes bad
        records to `bad_records.jsonl` in the run directory.
        """
        self._directory = directory
        (directory / BAD_RECORDS).unlink(missing_ok=True)
        found, self.bad = self.bad, []
        for bad in found:
            self._note(bad)
        if not self.complete:
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
        return [line for account in self._used for line in describe(account, **own)]

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
    """Makes an account; `random` is whether packing=none splits texts at random."""
    reader = records.reader
    unit = reader.unit if random and not reader.images else 0
    return Account(name, reader.seq_len, records.total, masked, reader.images, unit)
