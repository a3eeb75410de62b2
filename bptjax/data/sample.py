"""Samples held-out data in proportion, for evaluations of a limited number of batches."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bptjax.data.account import Account
from bptjax.data.examples import Example, is_masked
from bptjax.data.packing import part, piece_edges
from bptjax.data.records import Record, Records
from bptjax.ops.labels import IGNORED
from bptjax.run.heartbeat import beat

# Documents are read in random order until they fill POOL times the sequences of the sample and have
# POOL_TOKENS tokens. Otherwise a single long document could fill the sample.
POOL, POOL_TOKENS = 4, 2**22
# Number of documents that are searched for chats to answer.
SEARCHED = 10_000


class Piece(NamedTuple):
    """A piece of up to `seq_len` tokens of an example.

    Attributes:
      source, index: number of the source, and of the record in the source.
      number: number of the piece among the pieces of the record.
      length: tokens of the piece.
      masked: whether the piece has a token that does not count in the loss.
    """

    source: int
    index: int
    number: int
    length: int
    masked: bool


@dataclass(frozen=True)
class Pieces(Sequence[list[Example]]):
    """Some pieces of records, read on demand.

    Attributes:
      chosen: index of a record and numbers of its pieces.
    """

    records: Records
    chosen: Sequence[tuple[int, Sequence[int]]]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> list[Example]:
        record, numbers = self.chosen[index]
        pieces = _pieces(self.records, record)
        return [pieces[number] for number in numbers]


@dataclass(frozen=True)
class Sample:
    """A sample of several sources.

    Attributes:
      sources: the pieces of each source.
      batches: number of batches of the sample.
      documents: number of documents of which a piece is in the sample.
      complete: whether every piece of every document is in the sample.
    """

    sources: Sequence[Sequence[list[Example]]]
    batches: int
    documents: int
    complete: bool


def random_order(count: int, seed: int) -> np.ndarray:
    """Returns the order in which samples read `count` held-out documents."""
    return np.random.default_rng(seed).permutation(count)


def sample(
    sources: Sequence[Records],
    *,
    packing: str,
    batches: int,
    batch_size: int,
    seed: int,
    loaded_batch_size: int | None = None,
) -> Sample:
    """Samples up to `batches` batches of one source each, or one per source if there are more.

    The limit holds after packing. Sources, loss masks and lengths (in powers of two) have the same
    shares of tokens in the sample as in the documents read, to within a piece. All documents are
    read if they have up to `POOL_TOKENS` tokens or fill up to `POOL` times the sample, otherwise a
    random subset. The sample depends only on the documents, the arguments and the seed.

    Args:
      loaded_batch_size: number of sequences in each of `Sample.batches`; by default `batch_size`.
    """
    most, reader = max(batches, len(sources)), sources[0].reader
    sizes = np.array([len(records) for records in sources])
    order, ends = random_order(int(sizes.sum()), seed), np.cumsum(sizes)
    numbers = np.searchsorted(ends, order, side="right")
    indices = order - (ends - sizes)[numbers]
    places = ((int(s), int(i)) for s, i in zip(numbers, indices, strict=True))
    if reader.images:
        # Each image is one sequence, and takes long to read.
        first = itertools.islice(places, most * batch_size)
        pieces = chosen = [Piece(*place, 0, reader.seq_len, False) for place in first]
        every = len(chosen) == len(order)
    else:
        pieces, every = _pool(sources, places, packing, POOL * most * batch_size)
        pieces = _in_proportion(pieces, np.random.default_rng((seed, 1)))
        chosen = _fitting(pieces, packing, reader.seq_len, most, batch_size)
    own = [[piece for piece in chosen if piece.source == s] for s in range(len(sources))]
    return Sample(
        [_packable(records, found) for records, found in zip(sources, own, strict=True)],
        _batches(chosen, packing, reader.seq_len, loaded_batch_size or batch_size),
        len({(piece.source, piece.index) for piece in chosen}),
        every and len(chosen) == len(pieces),
    )


def _pieces(records: Records, index: int) -> list[Example]:
    """Reads the pieces of a record."""
    seq_len = records.reader.seq_len
    return [
        part(one, start, stop)
        for one in records[index]
        for start, stop in piece_edges(len(one["tokens"]), seq_len)
    ]


def _pool(
    sources: Sequence[Records], places: Iterable[tuple[int, int]], packing: str, most: int
) -> tuple[list[Piece], bool]:
    """Returns the pieces of the first documents that fill `most` sequences and have `POOL_TOKENS`
    tokens, and whether these are all documents."""
    accounts = [Account("", records.reader.seq_len) for records in sources]
    pool = []
    for s, i in places:
        enough = sum(account.tokens for account in accounts) >= POOL_TOKENS
        if enough and sum(account.sequences[packing] for account in accounts) >= most:
            return pool, False
        beat("sampling held-out data")
        for number, piece in enumerate(_pieces(sources[s], i)):
            pool.append(Piece(s, i, number, len(piece["tokens"]), is_masked(piece)))
            accounts[s].add(Record([piece]))
    return pool, True


def _in_proportion(pieces: Sequence[Piece], rng: np.random.Generator) -> list[Piece]:
    """Orders pieces so that every prefix has each stratum's share of the tokens: systematic
    sampling from shuffled strata of source, loss mask and length."""
    strata: dict[tuple[int, bool, int], list[Piece]] = defaultdict(list)
    for piece in pieces:
        strata[piece.source, piece.masked, piece.length.bit_length()].append(piece)
    keyed = []
    for _, stratum in sorted(strata.items()):
        stratum = [stratum[i] for i in rng.permutation(len(stratum))]
        lengths = np.array([piece.length for piece in stratum])
        keys = (np.cumsum(lengths) - rng.random() * lengths) / lengths.sum()
        keyed += zip(keys.tolist(), stratum, strict=True)
    return [piece for _, piece in sorted(keyed)]


def _fitting(
    pieces: Sequence[Piece], packing: str, seq_len: int, most: int, batch_size: int
) -> list[Piece]:
    """Returns the longest prefix of the pieces that fills at most `most` batches."""
    accounts: dict[int, Account] = {}
    used = count = 0
    while used <= most and count < len(pieces):
        piece, count = pieces[count], count + 1
        accounts.setdefault(piece.source, Account("", seq_len)).add(_blank(piece))
        used = sum(-(-each.sequences[packing] // batch_size) for each in accounts.values())
    count -= used > most
    # Packing takes the pieces in another order, and may then need more sequences.
    while _batches(pieces[:count], packing, seq_len, batch_size) > most:
        count -= max(1, count // 200)
    return list(pieces[:count])


def _batches(pieces: Sequence[Piece], packing: str, seq_len: int, batch_size: int) -> int:
    """Counts the batches of the pieces, with one source per batch."""
    accounts: dict[int, Account] = {}
    for piece in _packing_order(pieces, seq_len):
        accounts.setdefault(piece.source, Account("", seq_len)).add(_blank(piece))
    return sum(-(-each.sequences[packing] // batch_size) for each in accounts.values())


def _blank(piece: Piece) -> Record:
    """Returns a record of the piece's length that takes no memory."""
    tokens = np.broadcast_to(np.int32(0), piece.length)
    labels = np.broadcast_to(np.int32(IGNORED if piece.masked else 0), piece.length)
    return Record([{"tokens": tokens, "labels": labels}])


def _packing_order(pieces: Sequence[Piece], seq_len: int) -> list[Piece]:
    """Sorts pieces that fill a sequence first, so that concat packing does not split them; then by
    record, which is the fastest order to read files in."""
    return sorted(pieces, key=lambda piece: (piece.masked or piece.length < seq_len, piece))


def _packable(records: Records, pieces: Sequence[Piece]) -> Pieces:
    ordered = _packing_order(pieces, records.reader.seq_len)
    groups = itertools.groupby(ordered, key=lambda piece: piece.index)
    return Pieces(records, [(i, [piece.number for piece in group]) for i, group in groups])
