"""Batches: shuffled without end for training, in order and once for evaluation."""

import atexit
import functools
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import grain
import numpy as np
from grain import experimental as gx

from bptjax.data.chat import Chat, encode
from bptjax.data.files import Document
from bptjax.data.packing import Example, buffer_rows, example, grouped, pack
from bptjax.data.records import RecordReader, Records
from bptjax.data.text import open_documents, split_documents
from bptjax.data.tokenizer import Tokenizer

# Enough to step on while the next shuffle window fills.
PREFETCH_BATCHES = 8


@dataclass(frozen=True)
class DataConfig:
    """Training data: files, formats, packing.

    Attributes:
      path: file, directory, glob, or python-stdlib (the source files of this Python).
      eval_path: held-out data. If not set, eval_fraction of path is held out.
      eval_fraction: share of the documents to hold out. Of a single document, the tail is held out.
      sample_by: unit of a plain-text file that becomes one document.
      text_key: field of a record that holds its text.
      format: record format. auto takes the first format whose fields a record has, else text.
      train_on_source: include prompts in the loss. By default only answers are.
      source_max_len: tokens kept of the prompt of a record, which is all before its first answer.
      target_max_len: tokens kept from the first answer of a record on.
      tokenizer: byte, char, or a directory with a Hugging Face tokenizer. If not set, the tokenizer
        of the checkpoint, or byte without one.
      packing: how documents fill sequences. concat joins all documents and splits them at seq_len;
        best_fit packs whole documents tightly; none puts one document in each sequence. Packed
        documents do not attend to each other. No packing splits a record with a loss mask.
      too_long: what happens to records with a loss mask that are longer than train.seq_len. Text
        without one is split instead.
      group_by_length: batch sequences of similar length, padded to the longest of each batch; needs
        packing=none.
      shards: number of equal parts of the documents, read by different processes. Each part
        provides the same number of sequences per step.
      shuffle: shuffle documents and sequences anew in each epoch.
      seed: shuffle seed.
    """

    path: str | None = None
    eval_path: str | None = None
    eval_fraction: float = 0.1
    sample_by: Literal["line", "paragraph", "document"] = "document"
    text_key: str = "text"
    format: Literal[
        "auto", "text", "messages", "alpaca", "self_instruct", "prompt_answer", "hh_rlhf"
    ] = "auto"
    train_on_source: bool = False
    source_max_len: int | None = None
    target_max_len: int | None = None
    tokenizer: str | None = None
    packing: Literal["none", "concat", "best_fit"] = "concat"
    too_long: Literal["drop", "truncate_left", "error"] = "drop"
    group_by_length: bool = False
    shards: int = 1
    shuffle: bool = True
    seed: int = 0

    def __post_init__(self):
        for name in ("source_max_len", "target_max_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"data.{name}={value} is less than 1")
        if self.group_by_length and self.packing != "none":
            raise ValueError(f"data.group_by_length needs data.packing=none, not {self.packing}")
        if self.shards < 1:
            raise ValueError(f"data.shards={self.shards} is less than 1")
        if self.group_by_length and self.shards > 1:
            raise ValueError(f"data.group_by_length needs data.shards=1, not {self.shards}")


def open_split(config: DataConfig) -> tuple[Sequence[Document], Sequence[Document]]:
    """(training, held-out) documents. Held-out is empty when `eval_fraction` is 0."""
    if config.path is None:
        raise ValueError("data.path is not set; give a file, directory, glob or python-stdlib")

    def read(key, path):
        try:
            return open_documents(
                path,
                sample_by=config.sample_by,
                text_key=config.text_key,
                format=config.format,
            )
        except ValueError as error:
            raise ValueError(f"data.{key}: {error}") from error

    train = read("path", config.path)
    if config.eval_path is not None:
        return train, read("eval_path", config.eval_path)
    return split_documents(train, config.eval_fraction)


class TrainIterator(gx.ThreadPrefetchDatasetIterator):
    """Batches made ahead on a thread, which ends with `close()` or with the interpreter.

    `get_state()` can be stored as JSON. After `set_state()` with it, in this or another process,
    the batches continue exactly where they were.
    """

    def __init__(self, batches: grain.IterDataset):
        super().__init__(iter(batches), PREFETCH_BATCHES)
        self._running = True
        # A thread that is inside grain's C++ code when the interpreter exits aborts the process.
        atexit.register(self.close)

    def close(self) -> None:
        # Only once: grain's __del__ closes too, at exit when the modules it needs are gone.
        if self._running:
            self._running = False
            atexit.unregister(self.close)
            super().close()


class Batches:
    """Batches without end `[rows, T]`, of which each shard of the documents makes an equal part:
    consecutive rows. Those of shards that are not `read` are blank.
    """

    def __init__(self, read: dict[int, TrainIterator], shards: int):
        self._read, self._shards = read, shards

    def __iter__(self) -> Iterator[Example]:
        return self

    def __next__(self) -> Example:
        parts = {shard: next(batches) for shard, batches in self._read.items()}
        blank = {name: np.zeros_like(x) for name, x in next(iter(parts.values())).items()}
        each = [parts.get(shard, blank) for shard in range(self._shards)]
        return {name: np.concatenate([part[name] for part in each]) for name in blank}

    def get_state(self) -> list[dict[str, Any] | None]:
        """Of each shard, as JSON; None of those that are not read."""
        return [
            self._read[shard].get_state() if shard in self._read else None
            for shard in range(self._shards)
        ]

    @staticmethod
    def whole_state(states: Sequence[list[dict[str, Any] | None]]) -> list[dict[str, Any]]:
        """What readers that together read every shard got, as one."""
        return [next(x for x in of_readers if x) for of_readers in zip(*states, strict=True)]

    def set_state(self, states: Sequence[dict[str, Any]]) -> None:
        """The batches go on where those were whose shards had these states, in this or another
        process."""
        for shard, batches in self._read.items():
            batches.set_state(states[shard])

    def close(self) -> None:
        for batches in self._read.values():
            batches.close()


def train_loader(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    config: DataConfig,
    *,
    seq_len: int,
    rows: int,
    here: Collection[int] | None = None,
) -> Batches:
    """Batches without end: dicts of int32 [rows, T] as `packing.pack` describes them, or
    `packing.grouped`.

    The order depends on `config.seed` alone and is another one in each epoch. Shard i of n reads
    the documents [i::n]. Nothing else bounds an epoch: a window of shuffled rows, or a packed row,
    may hold the end of one and the start of the next.

    Args:
      here: which of the rows are asked for; all, if left out. Shards of which none is stay unread.

    Raises:
      ValueError: a shard's documents give fewer than `seq_len` labels or none that is learnt, a bad
        packing, or `config.shards` does not divide `rows`.
    """
    n = config.shards
    if rows % n:
        raise ValueError(
            f"data.shards={n} does not divide the {rows} rows of a step; use a divisor of them"
        )
    found = {}
    for i in sorted({row // (rows // n) for row in (range(rows) if here is None else here)}):
        # With the same seed, a batch would be of documents that stand beside one another.
        own = replace(config, seed=config.seed + i)
        found[i] = _shard(_records(documents, tokenizer, own, seq_len), i, own, rows // n)
    return Batches(found, n)


def _shard(records: Records, shard: int, config: DataConfig, rows: int) -> TrainIterator:
    """Returns the batches `[rows, T]` of one shard of the records."""
    n, seq_len = config.shards, records.reader.seq_len
    labels = pieces = too_long = 0
    limit = max(4, buffer_rows(seq_len) // n)
    for index in range(shard, len(records), n):
        record = records.inspect(index)
        for one in record.examples:
            length = len(one["labels"])
            labels, pieces = labels + length, pieces + -(-length // seq_len)
        too_long += bool(record.too_long)
        if labels >= seq_len and pieces >= limit:
            break
    examples = grain.MapDataset.source(records)[shard::n]
    _check_tokens(labels, too_long, seq_len, f"{len(examples)} training", f"shard {shard} of {n}")
    if config.group_by_length:
        return TrainIterator(
            grouped(examples, seq_len=seq_len, rows=rows, shuffle=config.shuffle, seed=config.seed)
        )
    # A window does not reach far beyond an epoch, nor beyond some thousand documents.
    window = min(limit, labels // seq_len if config.packing == "concat" else pieces)
    if config.shuffle:
        examples = examples.shuffle(seed=config.seed)
    packed = pack(
        examples.repeat(),
        packing=config.packing,
        seq_len=seq_len,
        window=window if config.shuffle else None,
        seed=config.seed,
    )
    return TrainIterator(packed.batch(rows))


def eval_loader(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    config: DataConfig,
    *,
    seq_len: int,
    rows: int,
    max_batches: int | None = None,
) -> grain.IterDataset:
    """Batches of one pass in fixed order, every label once; each `for` starts the pass anew.

    The last batch is filled with rows of padding. With `max_batches`, the pass ends early.
    """
    records = _records(documents, tokenizer, config, seq_len)
    packed = pack(grain.MapDataset.source(records), packing=config.packing, seq_len=seq_len)
    batches = packed.batch(rows, batch_fn=functools.partial(_fill, rows=rows))
    return batches if max_batches is None else gx.LimitIterDataset(batches, max_batches)


def _check_tokens(labels: int, too_long: int, seq_len: int, documents: str, shard: str) -> None:
    """
    Raises:
      ValueError: the documents have too few tokens that count in the loss to train on.
    """
    what = f"the {documents} documents of {shard}"
    if not labels and too_long:
        raise ValueError(
            f"{what}: all {too_long} records with tokens in the loss are longer than "
            f"train.seq_len={seq_len}; raise it, or set data.too_long=truncate_left"
        )
    if not labels:
        raise ValueError(
            f"{what} contain no token that counts in the loss: all are empty, or all answers are"
        )
    if labels < seq_len:
        raise ValueError(
            f"{what} have {labels} tokens to train on, fewer than seq_len={seq_len}; use a shorter "
            "one, more text or fewer data.shards"
        )


def _records(
    documents: Sequence[Document], tokenizer: Tokenizer, config: DataConfig, seq_len: int
) -> Records:
    """Returns the list of examples of each document, made when asked for."""

    def examples(document: Document) -> list[Example]:
        if not isinstance(document, Chat):
            return [example(document, tokenizer)]
        return [
            encode(
                document,
                tokenizer,
                source_max_len=config.source_max_len,
                target_max_len=config.target_max_len,
                train_on_source=config.train_on_source,
            )
        ]

    return Records(documents, RecordReader(examples, seq_len, config.too_long))


def _fill(batch: Sequence[Example], rows: int) -> Example:
    blank = {key: np.full_like(value, -100 * (key == "labels")) for key, value in batch[0].items()}
    full = [*batch, *itertools.repeat(blank, rows - len(batch))]
    return {key: np.stack([row[key] for row in full]) for key in blank}
