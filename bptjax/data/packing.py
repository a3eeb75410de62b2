"""Rows of fixed length from documents of any length."""

import functools

import grain
import numpy as np
from grain import experimental as gx

from bptjax.data.concat import ConcatIterDataset, Example, sequence

PACKINGS = ("none", "concat", "best_fit")
BUFFER_TOKENS = 2**22
# Of batches grouped by length. Each width is compiled once.
WIDTHS = 8
GROUPED_BATCHES = 50


def cut(whole: Example, seq_len: int, rng: np.random.Generator | None = None) -> list[Example]:
    """Consecutive pieces of at most `seq_len` tokens; with `rng`, the first is of random length.

    What fits stays whole. No tokens, no pieces.
    """
    length = len(whole["tokens"])
    first = int(rng.integers(1, seq_len + 1)) if rng and length > seq_len else seq_len
    edges = [0, *range(first, length, seq_len), length]
    return [
        {key: value[start:stop] for key, value in whole.items()}
        for start, stop in zip(edges, edges[1:], strict=False)
        if stop > start
    ]


def buffer_rows(seq_len: int) -> int:
    """How many rows of `seq_len` tokens to hold at most for shuffling and best-fit packing."""
    return max(4, min(4096, BUFFER_TOKENS // seq_len))


def open_sequences(seq_len: int) -> int:
    """Returns the number of sequences that best-fit packing fills at a time."""
    return min(128, buffer_rows(seq_len))


def pack(
    examples: grain.MapDataset | grain.IterDataset,
    *,
    packing: str,
    seq_len: int,
    window: int | None = None,
    seed: int = 0,
) -> grain.IterDataset:
    """Packs the lists of examples of records into sequences: dicts of int32 [T] `tokens`, `labels`,
    `segments`, `positions`.

    `labels` are -100 where no token is to be predicted. `segments` count the documents in a
    sequence from 1; 0 is padding. `positions` restart at 0 in each document, and also in each piece
    of a document split over several sequences. Every token of `examples` is in exactly one
    sequence.

    - `none`: one document, or piece of one, per sequence.
    - `concat`: documents one after the other, split wherever a sequence is full. Only examples with
      a loss mask stay whole; see `concat.ConcatIterDataset`.
    - `best_fit`: whole documents, each in the fullest open sequence that has room; documents longer
      than `seq_len` are split first.

    With a `window`, that many sequences (`concat`) or pieces (the others) at a time are shuffled:
    a batch is not one stretch of a long document, and `none` splits a long document elsewhere in
    each epoch. Without a window, the order is that of the examples.
    """
    if packing not in PACKINGS:
        raise ValueError(f"data.packing={packing!r}; use one of {', '.join(PACKINGS)}")
    bins = min(open_sequences(seq_len), window or buffer_rows(seq_len))
    if packing == "concat":
        pieces = examples.map(lambda record: [one for one in record if len(one["tokens"])])
    elif packing == "none" and window:
        pieces = examples.random_map(
            lambda record, rng: [piece for one in record for piece in cut(one, seq_len, rng)],
            seed=seed,
        )
    else:
        pieces = examples.map(lambda record: [p for one in record for p in cut(one, seq_len)])
    # No read-ahead here: the loader has one thread for everything.
    direct = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    if isinstance(pieces, grain.MapDataset):
        pieces = pieces.to_iter_dataset(direct)
    pieces = gx.FlatMapIterDataset(pieces, _Flatten())

    def shuffled(dataset):
        if not window:
            return dataset
        return gx.WindowShuffleIterDataset(dataset, window_size=window, seed=seed)

    if packing == "none":
        return shuffled(pieces).map(lambda piece: sequence([piece], seq_len))
    if packing == "concat":
        return shuffled(ConcatIterDataset(pieces, seq_len=seq_len, bins=bins))
    rows = gx.BestFitPackIterDataset(
        shuffled(pieces),
        length_struct={"tokens": seq_len, "labels": seq_len},
        num_packing_bins=bins,
        shuffle_bins=False,
    )
    return rows.map(_packed_row)


def grouped(
    examples: grain.MapDataset, *, seq_len: int, rows: int, shuffle: bool, seed: int
) -> grain.IterDataset:
    """Batches without end of rows of similar length, as `pack` makes them with `none`: [rows, T],
    with T the least of `WIDTHS` widths up to `seq_len` that the longest row fits into.

    Every epoch the rows are shuffled and each `GROUPED_BATCHES` batches of them sorted, longest
    first, as Hugging Face's Trainer does. The longest of all is in the very first batch: if memory
    does not suffice, it shows at once. Every example is read once beforehand.
    """
    pieces = [
        (index, number, start, min(start + seq_len, len(one["tokens"])))
        for index in range(len(examples))
        for number, one in enumerate(examples[index] or [])
        for start in range(0, len(one["tokens"]), seq_len)
    ]
    sizes, n = np.array([stop - start for _, _, start, stop in pieces]), len(pieces)
    # Several groups even where there are few batches: one alone would not be shuffled.
    group = rows * max(1, min(n // (4 * rows), GROUPED_BATCHES))
    width = -(-seq_len // WIDTHS)

    @functools.lru_cache(2)
    def order(epoch):
        found = np.arange(n)
        if shuffle:
            np.random.default_rng((seed, epoch)).shuffle(found)
        # The rows that fill the last batch of the epoch before are a group of their own.
        parts = np.split(found, range(-epoch * n % rows, n, group))
        found = np.concatenate([part[np.argsort(-sizes[part], kind="stable")] for part in parts])
        if epoch == 0:
            longest = int(sizes[found].argmax())
            found[[0, longest]] = found[[longest, 0]]
        return found

    def piece(place, _):
        index, number, start, stop = pieces[order(place // n)[place % n]]
        return {key: value[start:stop] for key, value in (examples[index] or [])[number].items()}

    def batch(found):
        longest = max(len(each["tokens"]) for each in found)
        T = min(-(-longest // width) * width, seq_len)
        each = [sequence([one], T) for one in found]
        return {key: np.stack([row[key] for row in each]) for key in each[0]}

    direct = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    endless = grain.MapDataset.range(n).repeat().map_with_index(piece)
    return endless.to_iter_dataset(direct).batch(rows, batch_fn=batch)


class _Flatten(gx.FlatMapTransform):
    max_fan_out = 0  # Read by grain's random-access variant only.

    def flat_map(self, element):
        return element


def _packed_row(packed: Example) -> Example:
    segments = packed["tokens_segment_ids"]
    return {
        "tokens": packed["tokens"],
        "labels": np.where(segments == 0, np.int32(-100), packed["labels"]),
        "segments": segments,
        "positions": packed["tokens_positions"],
    }
