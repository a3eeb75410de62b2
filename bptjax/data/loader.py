"""Loads batches: endless and shuffled for training, one pass or a sample for evaluation."""

import functools
import itertools
import operator
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import grain
import numpy as np

from bptjax.data.batches import Batches, ShardIterator
from bptjax.data.check import DataCheck
from bptjax.data.config import DataConfig
from bptjax.data.encoding import Encoding, Masking, Processor
from bptjax.data.epochs import Epoch, Epochs, Limit, epochs_of, shard_seed
from bptjax.data.examples import Example, blank, padding, sequence
from bptjax.data.grouping import grouped_batch, stacked
from bptjax.data.iterated import Iterated
from bptjax.data.landmarks import ignored
from bptjax.data.mixture import mixed
from bptjax.data.packing import pack
from bptjax.data.records import RecordReader, Records
from bptjax.data.rows import Document
from bptjax.data.sample import Sample, sample
from bptjax.data.sources import HeldOutSources, Mixture, Training
from bptjax.data.stream import AnyRecords, Stream, StreamRecords
from bptjax.ops.labels import IGNORED
from bptjax.run.output import plural

# Maximum number of threads per shard or evaluation.
MOST_THREADS = 16


def train_loader(
    documents: Training,
    processor: Processor,
    config: DataConfig,
    *,
    seq_len: int,
    batch_size: int,
    encoding: Encoding = Encoding(),  # noqa: B008 (frozen)
    local: Collection[int] | None = None,
) -> Batches:
    """Returns endless batches: dicts of int32 [batch_size, T], packed by `packing.pack` or
    `packing.group_by_length`. The tokens of images are patches, float32 [batch_size, T, P].

    The order and the masked tokens depend on `config.seed` alone and change in each epoch. Shard i
    of n reads the documents [i::n]. In each epoch a shard has every record once: no sequence holds
    records of two epochs, and padding completes the last sequences of an epoch.

    Args:
      encoding: how documents become examples of the model's objective.
      local: indices of the sequences of a batch that this process needs; all by default. Shards
        without any of these sequences are not read.

    Raises:
      ValueError: no token of a shard's documents counts in the loss, or `config.num_shards` does
        not divide `batch_size`.
    """
    n = config.num_shards
    if batch_size % n:
        raise ValueError(
            f"data.num_shards={n}: must divide the {batch_size} sequences of a step; use a divisor"
        )
    training = documents if isinstance(documents, Mixture) else Mixture([documents], [""], [1.0])
    reader = encoding.reader(processor, config, seq_len)
    masking = encoding.masks(processor, config)
    size, grouped = batch_size // n, config.group_by_length
    indices = range(batch_size) if local is None else local
    # For each shard that is read: epochs of each source, and an example.
    opened: dict[int, tuple[list[Epoch], Example]] = {}
    for i in sorted({index // size for index in indices}):
        sources, first = [], {}
        for number, (name, own) in enumerate(zip(training.names, training.files, strict=True)):
            settings = replace(config, seed=shard_seed(config, i, number))
            records = _records(own, reader)
            first = _first_example(records, i, n, name and f" of {name}")
            sources.append(epochs_of(records, i, settings, size, threads=_threads(reader)))
        opened[i] = sources, first

    def shard(i: int, limit: Limit | None, steps: int) -> grain.IterDataset:
        sources, first = opened[i]
        parts = []
        for number, epoch in enumerate(sources):
            divided = (limit.epoch, limit.stop[number]) if limit else None
            part = Iterated(functools.partial(Epochs, epoch, divided))
            part = part if encoding.landmarks is None else part.map(ignored)
            parts.append(_masked(part, masking, shard_seed(config, i, number)))
        several = isinstance(documents, Mixture)
        sequences = mixed(parts, training.weights) if several else parts[0]
        first = blank(first)
        batches = functools.partial(
            ShardIterator,
            size=size,
            stack=functools.partial(grouped_batch, seq_len=seq_len) if grouped else stacked,
            blank=first if grouped else sequence([first], seq_len),
            sequences=limit.sequences if limit else None,
            steps=steps,
        )
        return Iterated(batches, sequences)

    def shards(limits: Sequence[Limit] | None, steps: int) -> dict[int, grain.IterDataset]:
        return {i: shard(i, limits[i] if limits else None, steps) for i in opened}

    return Batches(shards, n)


def _masked(sequences: grain.IterDataset, masking: Masking | None, seed: int) -> grain.IterDataset:
    """Returns sequences with masked tokens. The random numbers of a sequence depend on the seed and
    on the sequence's index in the data stream."""
    return sequences if masking is None else sequences.random_map(masking, seed=seed)


def _first_example(records: AnyRecords, shard: int, shards: int, source: str) -> Example:
    """Returns the first example of a shard. `source` names the source in errors.

    Raises:
      ValueError: no token of the shard counts in the loss.
    """
    too_long = read = 0
    bad = []
    for where, record in records.each(shard, shards):
        if record.examples:
            return record.examples[0]
        read += 1
        too_long += bool(record.too_long)
        if record.error is not None:
            bad.append(f"{where}: {record.error}")
    documents = f"{plural(read, 'document')}{source} in shard {shard} of {shards}"
    if too_long:
        reader = records.reader
        truncated = " or ".join(each for each in reader.choices if each.startswith("truncate"))
        or_set = f", or set data.too_long to {truncated}"
        raise ValueError(
            f"the {documents}: all {too_long} records with tokens in the loss are longer than "
            f"train.seq_len={reader.seq_len}; raise it{truncated and or_set}"
        )
    if bad:
        raise ValueError(
            f"the {documents}: {len(bad)} records are bad, and no other record has a token that "
            f"counts in the loss; the first: {bad[0]}"
        )
    raise ValueError(
        f"the {documents}: must have a token that counts in the loss; all texts and "
        f"answers are empty, or all labels are {IGNORED}"
    )


def data_check(
    documents: Training,
    held_out: Sequence[Document],
    processor: Processor,
    config: DataConfig,
    *,
    seq_len: int,
    encoding: Encoding = Encoding(),  # noqa: B008 (frozen)
) -> DataCheck:
    """Returns a check of all records that has read none yet. Training records are counted by
    source."""
    if not isinstance(documents, Mixture):
        documents = Mixture([documents], ["training data"], [1.0])
    reader = encoding.reader(processor, config, seq_len)
    records = [_records(own, reader) for own in documents.files]
    masking = encoding.masks(processor, config)
    masked = None if masking is None else masking.probability
    held = _records(held_out, reader)
    return DataCheck(documents.names, records, held, config, masked, documents.weights)


@dataclass(frozen=True)
class Evaluation:
    """The held-out batches of each source, in fixed order. Each iteration over a source starts a
    new pass, in which the same tokens are masked.

    Attributes:
      sources: batches `[B, T]` by name of the source.
      sample: the sample in these batches; None if they hold every label once.
    """

    sources: dict[str, grain.IterDataset]
    sample: Sample | None = None

    def __iter__(self) -> Iterator[Example]:
        return itertools.chain.from_iterable(self.sources.values())


def eval_loader(
    documents: Sequence[Document],
    processor: Processor,
    config: DataConfig,
    *,
    seq_len: int,
    batch_size: int,
    encoding: Encoding = Encoding(),  # noqa: B008 (frozen)
    max_batches: int | None = None,
    sampled_batch_size: int | None = None,
) -> Evaluation:
    """Returns the batches of an evaluation. Each batch holds documents of one source, and padding
    completes each source's last batch.

    With `max_batches`, the batches hold a sample; see `sample.sample`. The sample is that of
    batches of `sampled_batch_size` sequences, by default `batch_size`.
    """
    reader = encoding.reader(processor, config, seq_len)
    names, files = [""], [documents]
    if isinstance(documents, HeldOutSources):
        names, files = documents.names, documents.files
    masking = encoding.masks(processor, config)
    found, drawn = [Records(own, reader) for own in files], None
    if max_batches is not None:
        drawn = sample(
            found,
            packing=config.packing,
            batches=max_batches,
            batch_size=sampled_batch_size or batch_size,
            loaded_batch_size=batch_size,
            seed=config.seed,
        )
        found = drawn.sources
    batches = {}
    for name, records in zip(names, found, strict=True):
        packed = pack(
            grain.MapDataset.source(records),
            packing=config.packing,
            seq_len=seq_len,
            threads=_threads(reader),
        )
        packed = packed if encoding.landmarks is None else packed.map(ignored)
        packed = _masked(packed, masking, config.seed)
        fill = functools.partial(_fill, batch_size=batch_size)
        batches[name] = packed.batch(batch_size, batch_fn=fill)
    return Evaluation(batches, drawn)


def _records(documents: Sequence[Document] | Stream, reader: RecordReader) -> AnyRecords:
    if isinstance(documents, Stream):
        if reader.pick is not operator.getitem:
            raise ValueError(
                "data.path: must be files that fit into memory with an objective that compares "
                "records; decompress them"
            )
        return StreamRecords(documents, reader)
    return Records(documents, reader)


def _threads(reader: RecordReader) -> int:
    """Returns the number of threads that read records ahead. Decoding an image takes milliseconds
    but releases Python's lock; tokenizing a text is faster."""
    return min(MOST_THREADS, os.cpu_count() or 1) if reader.images else 0


def _fill(batch: Sequence[Example], batch_size: int) -> Example:
    """Stacks sequences to a batch, and completes it with padding."""
    blank = {key: np.full_like(value, padding(key)) for key, value in batch[0].items()}
    full = [*batch, *itertools.repeat(blank, batch_size - len(batch))]
    return {key: np.stack([each[key] for each in full]) for key in blank}
