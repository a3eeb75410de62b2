"""Batches: shuffled without end for training, in order and once for evaluation."""

import functools
import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace

import grain
import numpy as np
from grain import experimental as gx

from bptjax.data.batches import Batches, TrainIterator
from bptjax.data.check import DataCheck
from bptjax.data.config import DataConfig
from bptjax.data.encode import encode
from bptjax.data.files import Document
from bptjax.data.mixture import MixIterDataset
from bptjax.data.packing import Example, buffer_rows, grouped, pack
from bptjax.data.records import RecordReader, Records
from bptjax.data.sources import Mixture, Training
from bptjax.data.stream import AnyRecords, Stream, StreamRecords
from bptjax.data.tokenizer import Tokenizer


def train_loader(
    documents: Training,
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
        packing, or `config.num_shards` does not divide `rows`.
    """
    n = config.num_shards
    if rows % n:
        raise ValueError(
            f"data.num_shards={n} does not divide the {rows} rows of a step; use a divisor of them"
        )
    mixed = documents if isinstance(documents, Mixture) else Mixture([documents], [""], [1.0])
    reader, found = _reader(tokenizer, config, seq_len), {}
    for i in sorted({row // (rows // n) for row in (range(rows) if here is None else here)}):
        parts = []
        for number, (name, own) in enumerate(zip(mixed.names, mixed.files, strict=True)):
            # Shards with equal seeds would put neighbouring documents into one batch.
            settings = replace(config, seed=config.seed + i + n * number)
            parts.append(
                _shard(_records(own, reader), i, settings, rows // n, name and f" of {name}")
            )
        batches = parts[0]
        if isinstance(documents, Mixture):
            batches = MixIterDataset(parts, mixed.weights).batch(rows // n)
        elif not config.group_by_length:
            batches = batches.batch(rows // n)
        found[i] = TrainIterator(batches)
    return Batches(found, n)


def _shard(
    records: AnyRecords, shard: int, config: DataConfig, rows: int, of: str
) -> grain.IterDataset:
    """Returns the endless sequences of one shard of the records; batches of `rows`, if grouped by
    length. `of` names the source in errors."""
    n, seq_len = config.num_shards, records.reader.seq_len
    labels = pieces = too_long = bad = 0
    limit = max(4, buffer_rows(seq_len) // n)
    read = 0
    for _, record in records.each(shard, n):
        read += 1
        for one in record.examples:
            length = len(one["labels"])
            labels, pieces = labels + length, pieces + -(-length // seq_len)
        too_long += bool(record.too_long)
        bad += record.error is not None
        if labels >= seq_len and pieces >= limit:
            break
    _check_tokens(labels, too_long, bad, seq_len, f"{read} documents{of} in shard {shard} of {n}")
    if config.group_by_length:
        if isinstance(records, StreamRecords):
            raise ValueError("data.group_by_length: the data are too large for memory; unset it")
        examples = grain.MapDataset.source(records)
        return grouped(
            examples, seq_len=seq_len, rows=rows, shuffle=config.shuffle, seed=config.seed
        )
    # A window does not reach far beyond an epoch, nor beyond some thousand documents.
    window = min(limit, labels // seq_len if config.packing == "concat" else pieces)
    return pack(
        records.dataset(shard, n, shuffle=config.shuffle, seed=config.seed),
        packing=config.packing,
        seq_len=seq_len,
        window=window if config.shuffle else None,
        seed=config.seed,
    )


def data_check(
    documents: Training,
    held_out: Sequence[Document],
    tokenizer: Tokenizer,
    config: DataConfig,
    *,
    seq_len: int,
) -> DataCheck:
    """Returns the check of all records, training ones by source, that nothing has been read for."""
    if not isinstance(documents, Mixture):
        documents = Mixture([documents], ["training data"], [1.0])
    reader = _reader(tokenizer, config, seq_len)
    records = [_records(own, reader) for own in documents.files]
    return DataCheck(documents.names, records, _records(held_out, reader), config)


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
    reader = _reader(tokenizer, config, seq_len)
    examples = grain.MapDataset.source(Records(documents, reader))
    packed = pack(examples, packing=config.packing, seq_len=seq_len)
    batches = packed.batch(rows, batch_fn=functools.partial(_fill, rows=rows))
    return batches if max_batches is None else gx.LimitIterDataset(batches, max_batches)


def _check_tokens(labels: int, too_long: int, bad: int, seq_len: int, what: str) -> None:
    """
    Raises:
      ValueError: the documents have too few tokens that count in the loss to train on.
    """
    if not labels and too_long:
        raise ValueError(
            f"the {what}: all {too_long} records with tokens in the loss are longer than "
            f"train.seq_len={seq_len}; raise it, or set data.too_long=truncate_left"
        )
    if not labels and bad:
        raise ValueError(
            f"the {what}: {bad} records are bad and none of the others has a token that counts in "
            "the loss; data.bad_records=error tells why"
        )
    if not labels:
        raise ValueError(
            f"the {what} contain no token that counts in the loss: all are empty, or all answers "
            "are"
        )
    if labels < seq_len:
        raise ValueError(
            f"the {what} have {labels} tokens to train on, fewer than seq_len={seq_len}; use a "
            "shorter one, more text or fewer data.num_shards"
        )


def _records(documents: Sequence[Document] | Stream, reader: RecordReader) -> AnyRecords:
    if isinstance(documents, Stream):
        return StreamRecords(documents, reader)
    return Records(documents, reader)


def _reader(tokenizer: Tokenizer, config: DataConfig, seq_len: int) -> RecordReader:
    """Returns what turns a document into its examples."""

    examples = functools.partial(
        encode,
        tokenizer=tokenizer,
        source_max_len=config.source_max_len,
        target_max_len=config.target_max_len,
        train_on_source=config.train_on_source,
    )
    return RecordReader(examples, seq_len, config.too_long, config.bad_records)


def _fill(batch: Sequence[Example], rows: int) -> Example:
    blank = {key: np.full_like(value, -100 * (key == "labels")) for key, value in batch[0].items()}
    full = [*batch, *itertools.repeat(blank, rows - len(batch))]
    return {key: np.stack([row[key] for row in full]) for key in blank}
