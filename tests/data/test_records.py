"""Records with a loss mask: too long, never split, never without a label, and exact resume."""

import json
from types import SimpleNamespace

import grain
import numpy as np
import pytest
from grain import experimental as gx
from tiers import fast

from bptjax.data.config import DataConfig
from bptjax.data.loader import eval_loader, train_loader
from bptjax.data.packing import PACKINGS, pack
from bptjax.data.records import RecordReader, Records
from bptjax.data.sources import open_split
from bptjax.data.tokenizer import ByteTokenizer

T = 32
TOKENIZER = SimpleNamespace(vocab_size=10**6, eos_id=None)


def chat(number, prompt, answer):
    """Returns a record whose tokens are 100 × its number + their index."""
    tokens = 100 * number + np.arange(prompt + answer, dtype=np.int32)
    labels = np.r_[np.full(prompt, -100, np.int32), tokens[prompt:] + 1]
    return {"tokens": tokens, "labels": labels.astype(np.int32)}


def text(number, length):
    tokens = 100 * number + np.arange(length, dtype=np.int32)
    return {"tokens": tokens, "labels": tokens + 1}


def mixed(count=60, seed=0):
    """Returns records with and without a mask, with several examples or none."""
    rng = np.random.default_rng(seed)
    return [
        [
            chat(number, int(rng.integers(1, 20)), int(rng.integers(1, 12)))
            if rng.random() < 0.5
            else text(number, int(rng.integers(0, 99)))
        ]
        * int(rng.integers(0, 3))
        for number in range(count)
    ]


def pieces(rows):
    """(tokens, labels) of each document in each sequence."""
    for row in rows:
        for segment in range(1, row["segments"].max() + 1):
            at = row["segments"] == segment
            yield row["tokens"][at], row["labels"][at]


def flat(records):
    direct = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    source = grain.MapDataset.source(records).to_iter_dataset(direct)

    class Flat(gx.FlatMapTransform):
        max_fan_out = 0

        def flat_map(self, element):
            return element

    return gx.FlatMapIterDataset(source, Flat())


@pytest.mark.parametrize("window", [1, 3, 100, None])
def test_concat_does_not_split_masked_records(window):
    records = mixed()
    source = grain.MapDataset.source(records)
    rows = list(pack(source, packing="concat", seq_len=T, window=window))
    found = sorted(tuple(labels) for tokens, labels in pieces(rows) if (labels == -100).any())
    wanted = [one for record in records for one in record if (one["labels"] == -100).any()]
    assert found == sorted(tuple(one["labels"]) for one in wanted)
    every = np.concatenate([tokens for tokens, _ in pieces(rows)])
    given = [one["tokens"] for record in records for one in record]
    np.testing.assert_array_equal(np.sort(every), np.sort(np.concatenate(given)))
    assert all((row["labels"] != -100).any() for row in rows)


def test_concat_of_text_is_that_of_grain():
    records = [[text(number, length)] for number, length in enumerate((5, 31, 32, 33, 1, 99, 64))]
    lengths = {"tokens": T, "labels": T}
    theirs = list(gx.ConcatThenSplitIterDataset(flat(records), length_struct=lengths))
    ours = list(pack(grain.MapDataset.source(records), packing="concat", seq_len=T))
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a["tokens"], b["tokens"])
        np.testing.assert_array_equal(a["segments"], b["tokens_segment_ids"])
        np.testing.assert_array_equal(a["positions"], b["tokens_positions"])


@pytest.mark.parametrize("window", fast([1, 2, 3, 20, 100, None], [1, 3, None]))
@pytest.mark.parametrize("packing", PACKINGS)
def test_every_packing_resumes_exactly(packing, window):
    source = grain.MapDataset.source(mixed())
    dataset = pack(source, packing=packing, seq_len=T, window=window)
    iterator, states, rows = iter(dataset), [], []
    while True:
        states.append(json.dumps(iterator.get_state()))
        try:
            rows.append(next(iterator))
        except StopIteration:
            break
    for stop, state in enumerate(states):
        resumed = iter(dataset)
        resumed.set_state(json.loads(state))
        rest = list(resumed)
        assert len(rest) == len(rows) - stop, stop
        for a, b in zip(rest, rows[stop:], strict=True):
            np.testing.assert_array_equal(a["tokens"], b["tokens"])
            np.testing.assert_array_equal(a["segments"], b["segments"])


def write(path, sizes):
    with path.open("w") as file:
        for number, (prompt, answer) in enumerate(sizes):
            letter = chr(ord("a") + number % 26)
            file.write(json.dumps({"prompt": letter * prompt, "answer": "!" * answer}) + "\n")
    return path


@pytest.mark.parametrize("packing", PACKINGS)
def test_answers_keep_their_questions(tmp_path, packing):
    """A record longer than a sequence is dropped, not split into an answer without its prompt."""
    sizes = [(10, 5), (40, 60), (100, 4), (3, 3), (20, 0), (12, 9), (25, 40)] * 4
    path = write(tmp_path / "a.jsonl", sizes)
    config = DataConfig(str(path), packing=packing, eval_path=str(path))
    documents, held_out = open_split(config)
    loader = train_loader(documents, ByteTokenizer(), config, seq_len=T, batch_size=2)
    rows = [
        {name: value[i] for name, value in batch.items()}
        for batch in [next(loader) for _ in range(20)]
        for i in range(2)
    ]
    loader.close()
    evaluated = eval_loader(held_out, ByteTokenizer(), config, seq_len=T, batch_size=1)
    held = [{name: value[0] for name, value in batch.items()} for batch in evaluated]
    for row in (*rows, *held):
        assert (row["labels"] != -100).any(), "a sequence that trains nothing"
    for tokens, _ in pieces([*rows, *held]):
        assert tokens[0] == 256 and tokens[1] < 256, "a piece without the start of its record"
    assert len({len(tokens) for tokens, _ in pieces(rows)}) == 4
    assert sum(len(t) for t, _ in pieces(held)) == 4 * sum(p + a + 1 for p, a in sizes[::3][:1]) + (
        4 * sum(p + a + 1 for p, a in ((3, 3), (20, 0), (12, 9)))
    )


def test_records_that_are_too_long():
    records = [[chat(1, 10, 5)], [chat(2, 40, 10), chat(3, 5, 5)], [text(4, 99)], [chat(5, 50, 0)]]

    def read(too_long):
        reader = RecordReader(lambda record: record, T, too_long)
        return [Records(records, reader).inspect(i) for i in range(len(records))]

    found = read("drop")
    assert [len(r.examples) for r in found] == [1, 1, 1, 0]
    assert [(r.too_long, r.removed_tokens) for r in found] == [
        ((), 0),
        ((50,), 50),
        ((), 0),
        ((50,), 50),
    ]
    found = read("truncate_left")
    assert [len(r.examples) for r in found] == [1, 2, 1, 0]
    truncated = found[1].examples[0]
    np.testing.assert_array_equal(truncated["tokens"], 200 + np.arange(18, 50))
    assert (truncated["labels"] != -100).sum() == 10 and found[1].removed_tokens == 18
    assert found[3].unlabeled == 1, "none of its tokens is in the loss"
    message = r"document 2: 50 tokens: must be at most train.seq_len=32; .*drop"
    with pytest.raises(ValueError, match=message):
        read("error")


def test_only_records_that_are_too_long_are_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", [(50, 50)] * 9)
    config = DataConfig(str(path), eval_fraction=0)
    with pytest.raises(ValueError, match="all 9 records .* longer than train.seq_len=32; .*too_lo"):
        train_loader(open_split(config)[0], ByteTokenizer(), config, seq_len=T, batch_size=1)


def test_pack_takes_several_examples_of_a_record():
    records = [[chat(1, 3, 4), chat(2, 2, 9)], [], [text(3, 40)]]
    for packing in PACKINGS:
        rows = list(pack(grain.MapDataset.source(records), packing=packing, seq_len=T))
        assert sum(int((row["segments"] > 0).sum()) for row in rows) == 7 + 11 + 40
