"""Packs documents of any length into sequences of fixed length."""

import functools
from collections.abc import Sequence

import grain
import numpy as np
from grain import experimental as gx

from bptjax.data.concat import FIELDS, ConcatIterDataset, Example, sequence

PACKINGS = ("none", "concat", "best_fit")
BUFFER_TOKENS = 2**22
# With data.group_by_length: number of different batch widths, each of which is compiled once, and
# number of batches that are sorted together.
WIDTHS = 8
GROUPED_BATCHES = 50


def split_example(
    example: Example, seq_len: int, rng: np.random.Generator | None = None, unit: int = 1
) -> list[Example]:
    """Splits an example into consecutive pieces of up to `seq_len` tokens.

    With `rng`, the first piece has a random length, a multiple of `unit`. An example that fits is
    one piece; an empty example has none.
    """
    length = len(example["tokens"])
    first = seq_len
    if rng and length > seq_len:
        first = unit * int(rng.integers(1, seq_len // unit + 1))
    edges = [0, *range(first, length, seq_len), length]
    return [
        {key: value[start:stop] for key, value in example.items()}
        for start, stop in zip(edges, edges[1:], strict=False)
        if stop > start
    ]


def buffer_sequences(seq_len: int) -> int:
    """Returns the largest number of sequences to hold for shuffling and best-fit packing."""
    return max(4, min(4096, BUFFER_TOKENS // seq_len))


def open_sequences(seq_len: int) -> int:
    """Returns the number of sequences that best-fit packing fills at a time."""
    return min(128, buffer_sequences(seq_len))


def pack(
    examples: grain.MapDataset | grain.IterDataset,
    *,
    packing: str,
    seq_len: int,
    window: int | None = None,
    seed: int = 0,
    fields: Sequence[str] = FIELDS,
    threads: int = 0,
    unit: int = 1,
) -> grain.IterDataset:
    """Packs each record's list of examples into sequences: dicts of int32 [T] `segments`,
    `positions` and the examples' `fields`.

    `labels` are -100 where no token is predicted. `segments` number the documents in a sequence
    from 1; 0 is padding. `positions` restart at 0 in each document, and also in each piece of a
    document split over several sequences. Every token of `examples` is in exactly one sequence.

    - `none`: one document, or one piece of a document, per sequence.
    - `concat`: documents one after the other, split wherever a sequence is full. Only examples with
      a loss mask are never split; see `concat.ConcatIterDataset`.
    - `best_fit`: complete documents, each in the fullest open sequence that has room; documents
      longer than `seq_len` are split first.

    `window` is the number of sequences (`concat`) or pieces (`none`, `best_fit`) that are shuffled
    together, so that a batch does not hold consecutive pieces of one long document. With a window,
    `none` also splits long documents at other tokens in each epoch. Without a window, sequences
    follow the order of the examples. Examples whose lengths are multiples of `unit`, a divisor of
    `seq_len`, are split at multiples of it.

    `threads` read the examples of a `MapDataset` ahead. Without threads, the caller's reads them.
    """
    if packing not in PACKINGS:
        raise ValueError(f"data.packing={packing!r}: must be one of {', '.join(PACKINGS)}")
    bins = min(open_sequences(seq_len), window or buffer_sequences(seq_len))
    if packing == "concat":
        pieces = examples.map(lambda record: [one for one in record if len(one["tokens"])])
    elif packing == "none" and window:
        pieces = examples.random_map(
            lambda record, rng: [
                p for one in record for p in split_example(one, seq_len, rng, unit)
            ],
            seed=seed,
        )
    else:
        pieces = examples.map(
            lambda record: [p for one in record for p in split_example(one, seq_len)]
        )
    # No prefetch of text: the loader has one thread for all of its work.
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=4 * threads)
    if isinstance(pieces, grain.MapDataset):
        pieces = pieces.to_iter_dataset(options)
    pieces = gx.FlatMapIterDataset(pieces, _Flatten())

    def shuffled(dataset):
        if not window:
            return dataset
        return gx.WindowShuffleIterDataset(dataset, window_size=window, seed=seed)

    if packing == "none":
        return shuffled(pieces).map(lambda piece: sequence([piece], seq_len))
    if packing == "concat":
        return shuffled(ConcatIterDataset(pieces, seq_len=seq_len, bins=bins))
    sequences = gx.BestFitPackIterDataset(
        shuffled(pieces),
        length_struct=dict.fromkeys(fields, seq_len),
        num_packing_bins=bins,
        shuffle_bins=False,
    )
    return sequences.map(functools.partial(_packed_sequence, fields=fields))


def group_by_length(
    examples: grain.MapDataset, *, seq_len: int, batch_size: int, shuffle: bool, seed: int
) -> grain.IterDataset:
    """Returns endless batches `[batch_size, T]` of sequences of similar length, packed as by `pack`
    with `none`. T is the least of `WIDTHS` widths up to `seq_len` that fits the longest sequence.

    In every epoch the sequences are shuffled, and each group of `GROUPED_BATCHES` batches is sorted
    by length, longest first, as in Hugging Face's Trainer. The longest sequence of all is in the
    first batch, so that a run which needs too much memory fails at once. Every example is read once
    before the first batch.
    """
    pieces = [
        (index, number, start, min(start + seq_len, len(one["tokens"])))
        for index in range(len(examples))
        for number, one in enumerate(examples[index] or [])
        for start in range(0, len(one["tokens"]), seq_len)
    ]
    sizes, n = np.array([stop - start for _, _, start, stop in pieces]), len(pieces)
    # Make several groups even of few batches: a single group would not be shuffled.
    group = batch_size * max(1, min(n // (4 * batch_size), GROUPED_BATCHES))
    width = -(-seq_len // WIDTHS)

    @functools.lru_cache(2)
    def order(epoch):
        found = np.arange(n)
        if shuffle:
            np.random.default_rng((seed, epoch)).shuffle(found)
        # The sequences that complete the previous epoch's last batch are a group of their own.
        parts = np.split(found, range(-epoch * n % batch_size, n, group))
        found = np.concatenate([part[np.argsort(-sizes[part], kind="stable")] for part in parts])
        if epoch == 0:
            longest = int(sizes[found].argmax())
            found[[0, longest]] = found[[longest, 0]]
        return found

    def piece(i, _):
        index, number, start, stop = pieces[order(i // n)[i % n]]
        return {key: value[start:stop] for key, value in (examples[index] or [])[number].items()}

    def batch(found):
        longest = max(len(each["tokens"]) for each in found)
        T = min(-(-longest // width) * width, seq_len)
        each = [sequence([one], T) for one in found]
        return {key: np.stack([one[key] for one in each]) for key in each[0]}

    direct = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    endless = grain.MapDataset.range(n).repeat().map_with_index(piece)
    return endless.to_iter_dataset(direct).batch(batch_size, batch_fn=batch)


class _Flatten(gx.FlatMapTransform):
    max_fan_out = 0  # Only grain's random-access variant reads it.

    def flat_map(self, element):
        return element


def _packed_sequence(packed: Example, fields: Sequence[str]) -> Example:
    segments = packed["tokens_segment_ids"]
    return {name: packed[name] for name in fields} | {
        "labels": np.where(segments == 0, np.int32(-100), packed["labels"]),
        "segments": segments,
        "positions": packed["tokens_positions"],
    }
