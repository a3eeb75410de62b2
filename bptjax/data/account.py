"""Counts the records, tokens, lengths, omissions and sequences per epoch of a data source."""

import textwrap
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bptjax.data.config import TOO_LONG
from bptjax.data.examples import Example, is_masked
from bptjax.data.landmarks import ignored
from bptjax.data.packing import PACKINGS, Packer, buffer_sequences
from bptjax.data.records import Record
from bptjax.ops.labels import IGNORED
from bptjax.run.output import plural


class Blanks:
    """Makes examples with the right lengths and masks but no content; they share their memory."""

    def __init__(self):
        self._labels = _labels(1)

    def __call__(self, length: int, masked: bool) -> Example:
        if length > len(self._labels[0]):
            self._labels = _labels(2 * length)
        return {"tokens": self._labels[0][:length], "labels": self._labels[masked][:length]}


def _labels(length: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(length, np.int8), np.full(length, IGNORED, np.int8)


class Sizes(Sequence[list[Example]]):
    """The `Blanks` of each record, at four bytes per example and eight per record."""

    def __init__(self):
        self._lengths, self._ends, self._blanks = array("i"), array("q", [0]), Blanks()

    def append(self, examples: Sequence[Example]) -> None:
        for example in examples:
            length = len(example["tokens"])
            self._lengths.append(-length if is_masked(example) else length)
        self._ends.append(len(self._lengths))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> list[Example]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        own = self._lengths[self._ends[index] : self._ends[index + 1]]
        return [self._blanks(abs(n), n < 0) for n in own]


@dataclass
class Account:
    """Counts over the records of one source, added up record by record.

    Attributes:
      name: name of the source.
      seq_len: tokens in a sequence.
      total: number of records of the source; None for a stream that has not reached its end.
      masked: probability with which a token is masked; None without masking.
      images: the records are images, with one sequence each.
      random_unit: packing=none splits long examples at random multiples of this number of tokens; 0
        if it fills all sequences but the last.
      choices: values that data.too_long may have.
      records: number of records read so far.
      bad: number of records that could not be read or tokenized.
      too_long: number of records with a loss mask that exceed `seq_len`.
      too_long_tokens: number of tokens dropped or truncated because a record was too long.
      unlabeled: number of examples left out because they have no token in the loss.
      examples: number of examples to train on; `tokens` and `loss_tokens` count all their tokens
        and those that can be in the loss.
      first: the first example to train on.
      longest: tokens of the longest example, before it is truncated or dropped.
      lengths: number of examples to train on by length, rounded up to a power of two.
      sizes: the examples' lengths; None if they are not stored.
      sequences: packed sequences in one epoch with each packing, in the order of the records;
        another order changes the number slightly.
    """

    name: str
    seq_len: int
    total: int | None = None
    masked: float | None = None
    images: bool = False
    random_unit: int = 0
    choices: tuple[str, ...] = TOO_LONG
    records: int = 0
    bad: int = 0
    too_long: int = 0
    too_long_tokens: int = 0
    unlabeled: int = 0
    examples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    first: Example | None = field(default=None, compare=False)
    longest: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    sizes: Sequence[list[Example]] | None = field(default_factory=Sizes, compare=False)
    _closed: Counter[str] = field(default_factory=Counter)
    _blanks: Blanks = field(default_factory=Blanks, compare=False)

    def __post_init__(self):
        seeds, unit = (0,) if self.random_unit else None, self.random_unit or 1
        limit = buffer_sequences(self.seq_len)
        self._packers = {
            name: Packer(name, self.seq_len, limit, seeds=seeds, unit=unit) for name in PACKINGS
        }

    @property
    def complete(self) -> bool:
        """Whether every record has been read."""
        return self.total == self.records

    @property
    def sequences(self) -> dict[str, int]:
        return {
            name: self._closed[name] + len(own.sequences) for name, own in self._packers.items()
        }

    def padding(self, packing: str) -> float:
        """Returns the fraction of padding in the sequences of an epoch."""
        return 1 - self.tokens / max(1, self.sequences[packing] * self.seq_len)

    def epoch(self, packing: str) -> int | None:
        """Returns the number of sequences in an epoch, extrapolated until every record has been
        read; None if the number of records is unknown."""
        if self.total is None:
            return None
        return round(self.sequences[packing] * self.total / max(1, self.records))

    def add(self, record: Record) -> None:
        """Counts one more record."""
        self.records += 1
        self.bad += record.error is not None
        self.too_long += bool(record.too_long)
        self.too_long_tokens += record.removed_tokens
        self.unlabeled += record.unlabeled
        self.longest = max(self.longest, *record.too_long, 0)
        # Packers hold thousands of examples; as images they would take gigabytes.
        blanks = [self._blanks(len(each["tokens"]), is_masked(each)) for each in record.examples]
        if isinstance(self.sizes, Sizes):
            self.sizes.append(blanks)
        for name, packer in self._packers.items():
            packer.add(self.records, blanks, None)
            if packer.is_full:
                self._closed[name] += len(packer.close(False))
        for example in record.examples:
            self.first = self.first or ignored(example)
            length = len(example["tokens"])
            self.examples += 1
            self.tokens += length
            self.loss_tokens += int((example["labels"] >= 0).sum())
            self.longest = max(self.longest, length)
            self.lengths[1 << (length - 1).bit_length()] += 1


def describe(
    account: Account,
    *,
    packing: str,
    too_long: str,
    listed: bool = False,
    epoch: int | None = None,
) -> list[str]:
    """Formats an account in lines of up to 80 columns, unless its name is long.

    Args:
      listed: as in `summary`.
      epoch: number of sequences per epoch; by default `Account.epoch` estimates it.
    """
    a, lines = account, summary(account, too_long, listed)
    if not a.records or a.images:
        return lines
    if a.examples:
        shares = [f"{n / a.examples:.1%} to {size:,}" for size, n in sorted(a.lengths.items())]
        lines += _detail(f"lengths in tokens: {', '.join(shares)}; longest {a.longest:,}")
    others = [f"{other} {a.padding(other):.1%}" for other in PACKINGS if other != packing]
    epoch = epoch or a.epoch(packing)
    if epoch is None:
        sequences = f"{plural(a.sequences[packing], 'sequence')} from these records"
    else:
        sequences = f"{'' if a.complete else 'about '}{plural(epoch, 'sequence')} per epoch"
    padding = f"{a.padding(packing):.1%} padding ({', '.join(others)})"
    lines += _detail(f"{sequences} with packing={packing}, {padding}")
    if a.complete and a.tokens < a.seq_len:
        lines += _detail(
            f"warning: {plural(a.tokens, 'token')}, fewer than train.seq_len={a.seq_len}: padding "
            "completes the sequences of an epoch; set a smaller train.seq_len"
        )
    return lines


def summary(account: Account, too_long: str, listed: bool = False) -> list[str]:
    """Formats the numbers of records read and left out, in lines of up to 80 columns.

    Args:
      listed: name the file in the run directory that lists the bad records.
    """
    a, kind = account, "images" if account.images else "records"
    if not a.records:
        return [f"{a.name}: no records read"]
    read = f"{a.records:,} {kind}"
    if not a.complete:
        total = "" if a.total is None else f" of {a.total:,}"
        read = f"first {a.records:,}{total} {kind}"
    share = a.loss_tokens / max(1, a.tokens)
    base = "of them"
    if a.masked is not None:
        share, base = share * a.masked, "of the tokens that are not special"
    loss = "" if a.images else f", {share:.1%} {base} in the loss"
    lines = [f"{a.name}: {read}, {a.tokens:,} tokens{loss}"]
    if a.too_long:
        done = {
            "drop": "were dropped",
            "truncate_left": "lost their beginning",
            "truncate_right": "lost their end",
        }.get(too_long, "")
        share = a.too_long_tokens / max(1, a.too_long_tokens + a.tokens)
        lines += _detail(
            f"{a.too_long:,} of {a.records:,} records ({a.too_long / a.records:.1%}, "
            f"{share:.1%} of the tokens) are longer than train.seq_len={a.seq_len} and {done}; "
            f"data.too_long: {' or '.join(a.choices)}"
        )
    if a.bad:
        file = "; see bad_records.jsonl" * listed
        lines += _detail(f"{plural(a.bad, 'bad record')} left out{file}")
    if a.unlabeled:
        lines += _detail(f"{a.unlabeled:,} examples without a token in the loss were left out")
    return lines


def _detail(text: str) -> list[str]:
    """Wraps text to lines of up to 80 columns, indented below the line with the name."""
    return textwrap.wrap(
        text, 80, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
    )
