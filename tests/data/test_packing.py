"""Packing: every label once, segments and positions, documents rebuilt."""

import itertools
import json
from types import SimpleNamespace

import grain
import numpy as np
import pytest

from bptjax.data.encode import encode
from bptjax.data.packing import PACKINGS, pack, piece_edges
from bptjax.data.tokenizer import ByteTokenizer, CharTokenizer

# Documents of token ids that occur once, so that each label tells its document and place.
LENGTHS = (5, 1, 18, 9, 2, 0, 8, 31, 3, 10, 17)
DOCUMENTS = [np.arange(n, dtype=np.int32) + 100 * i for i, n in enumerate(LENGTHS)]
LABELS = np.sort(np.concatenate([document[1:] for document in DOCUMENTS]))
TOKENIZER = SimpleNamespace(vocab_size=2000, eos_id=None)
T = 8


def packed_of(documents=DOCUMENTS, seq_len=T, epochs=1, **kwargs):
    source = grain.MapDataset.source(documents).repeat(epochs)
    examples = source.map(lambda document: encode(document, TOKENIZER))
    return pack(examples, seq_len=seq_len, **kwargs)


def rows_of(*args, **kwargs):
    return list(packed_of(*args, **kwargs))


def pieces_of(rows):
    for row in rows:
        for segment in range(1, row["segments"].max() + 1):
            yield row["tokens"][row["segments"] == segment]


def check_rows(rows, seq_len=T):
    for row in rows:
        assert set(row) == {"tokens", "labels", "segments", "positions"}
        assert all(value.shape == (seq_len,) and value.dtype == np.int32 for value in row.values())
        padding = row["segments"] == 0
        assert not padding[: np.count_nonzero(~padding)].any(), "padding is at the end"
        assert (row["labels"][padding] == -100).all() and not row["positions"][padding].any()
        np.testing.assert_array_equal(row["labels"][~padding], row["tokens"][~padding] + 1)
        starts = np.diff(row["segments"][~padding], prepend=0)
        assert set(starts) <= {0, 1}, "segments count up from 1"
        expected = np.arange(starts.size) - np.maximum.accumulate(
            np.where(starts, np.arange(starts.size), 0)
        )
        np.testing.assert_array_equal(row["positions"][~padding], expected)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("packing", PACKINGS)
def test_every_label_once(packing, window):
    rows = rows_of(packing=packing, window=window)
    check_rows(rows)
    labels = np.concatenate([row["labels"][row["segments"] > 0] for row in rows])
    np.testing.assert_array_equal(np.sort(labels), LABELS)


@pytest.mark.parametrize("seq_len", [1, 4, 100])
@pytest.mark.parametrize("packing", PACKINGS)
def test_other_lengths(packing, seq_len):
    rows = rows_of(packing=packing, seq_len=seq_len)
    check_rows(rows, seq_len)
    assert sum((row["segments"] > 0).sum() for row in rows) == LABELS.size


@pytest.mark.parametrize("packing", PACKINGS)
def test_windows_resume_exactly(packing):
    """States lie in, between and across small windows."""
    packed = packed_of(epochs=4, packing=packing, window=5, seed=5)
    iterator, states = iter(packed), []
    rows = []
    for row in iterator:
        rows.append(row)
        states.append(json.dumps(iterator.get_state()))
    assert json.loads(states[-1])["window"] > 3
    for stop, state in enumerate(states, 1):
        resumed = iter(packed)
        resumed.set_state(json.loads(state))
        found = list(itertools.islice(resumed, 7))
        assert len(found) == len(rows[stop : stop + 7])
        for got, wanted in zip(found, rows[stop:], strict=False):
            assert all(np.array_equal(got[name], wanted[name]) for name in wanted), f"{stop=}"


def test_small_windows_are_shuffled_anew_in_each_epoch():
    documents = [np.full(T + 1, i, np.int32) for i in range(20)]
    how = dict(packing="none", window=4, seed=5)
    epochs = [rows_of(documents, epoch=n, **how) for n in range(3)]
    orders = [tuple(int(row["tokens"][0]) for row in rows) for rows in epochs]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert len({*orders, tuple(range(20))}) == 4


def test_concat_runs_on_in_order():
    rows = rows_of(packing="concat")
    tokens = np.concatenate([row["tokens"][row["segments"] > 0] for row in rows])
    np.testing.assert_array_equal(tokens, np.concatenate([d[:-1] for d in DOCUMENTS]))
    assert all((row["segments"] > 0).all() for row in rows[:-1])


def test_best_fit_does_not_split_documents_that_fit():
    rows = rows_of(packing="best_fit")
    pieces = {tuple(piece) for piece in pieces_of(rows)}
    assert pieces >= {tuple(d[:-1]) for d in DOCUMENTS if 1 < len(d) <= T + 1}
    assert len(rows) < len(rows_of(packing="none"))


def test_none_has_one_document_per_sequence_in_order():
    rows = rows_of(packing="none")
    assert {row["segments"].max() for row in rows} == {1}
    starts = [0, 200, 208, 216, 300, 400, 600, 700, 708, 716, 724, 800, 900, 908, 1000, 1008]
    assert [row["tokens"][0] for row in rows] == starts


def test_none_splits_at_other_tokens_in_each_epoch():
    document = [np.arange(200, dtype=np.int32)]
    epochs = [rows_of(document, packing="none", epochs=n, window=30) for n in (1, 2)]
    starts = [[int(row["tokens"][0]) for row in rows if row["tokens"][0]] for rows in epochs]
    offsets = [np.bincount([start % T for start in s], minlength=T) for s in starts]
    assert np.count_nonzero(offsets[0]) == 1 and np.count_nonzero(offsets[1]) == 2
    assert starts[0] != sorted(starts[0]), "windows of one document are shuffled"
    assert (
        rows_of(document, packing="none", epochs=2, window=30, seed=4)[0]["tokens"][0]
        != starts[1][0]
    )


def test_sizes_of_pieces():
    assert piece_edges(20, T) == [(0, 8), (8, 16), (16, 20)]
    firsts = {piece_edges(20, T, np.random.default_rng(i))[0] for i in range(100)}
    assert firsts == {(0, stop) for stop in range(1, T + 1)}
    assert piece_edges(20, 20, np.random.default_rng(0)) == [(0, 20)], "what fits stays whole"


def test_example_adds_separators_and_shifts():
    (pair,) = encode("ab", ByteTokenizer())
    np.testing.assert_array_equal(pair["tokens"], np.array([256, 97, 98], np.int32), strict=True)
    np.testing.assert_array_equal(pair["labels"], np.array([97, 98, 256], np.int32), strict=True)
    np.testing.assert_array_equal(encode("ab", CharTokenizer("ab"))[0]["labels"], [1])
    assert encode("", CharTokenizer("ab"))[0]["tokens"].shape == (0,)


def test_bad_input():
    with pytest.raises(ValueError, match="data.packing='tight'"):
        rows_of(packing="tight")
    with pytest.raises(ValueError, match=r"from 3 to 257: must be in \[0, 257\)"):
        encode(np.array([3, 257], np.int32), ByteTokenizer())
