"""Counts of a data source compared with packed sequences, and the check of all records."""

import json
import time

import grain
import numpy as np
import pytest

from bptjax.data.account import Account, describe, summary
from bptjax.data.check import DataCheck
from bptjax.data.config import DataConfig
from bptjax.data.loader import data_check
from bptjax.data.packing import PACKINGS, pack
from bptjax.data.records import RecordReader, Records
from bptjax.data.sources import open_split
from bptjax.data.tokenizer import CharTokenizer

T = 32


def records(count=300, seed=0):
    """Lists of examples: texts of 1 to 90 tokens, masked ones of up to 40."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        masked = rng.random() < 0.5
        labels = np.ones(rng.integers(1, 40 if masked else 90), np.int32)
        if masked:
            labels[: rng.integers(1, len(labels) + 1)] = -100
        found.append([{"tokens": np.ones_like(labels), "labels": labels}] * int(rng.integers(1, 3)))
    return found


def joined(lines):
    assert max(map(len, lines)) <= 80
    return " ".join(" ".join(lines).split())


def test_account_is_that_of_the_packed_sequences():
    own = Records(records(), RecordReader(lambda record: record, T))
    account = Account("data", T, len(own))
    for _, record in own.each():
        account.add(record)
    assert account.complete and account.records == 300
    kept = [example for index in range(len(own)) for example in own[index]]
    assert account.examples == len(kept) == account.lengths.total()
    assert account.longest == max(len(one["tokens"]) for record in records() for one in record)
    for packing in PACKINGS:
        rows = list(pack(grain.MapDataset.source(own), packing=packing, seq_len=T))
        assert account.sequences[packing] == pytest.approx(len(rows), abs=1), packing
        tokens = sum(int((row["segments"] > 0).sum()) for row in rows)
        assert account.tokens == tokens
        assert account.loss_tokens == sum(int((row["labels"] != -100).sum()) for row in rows)
        assert account.padding(packing) == pytest.approx(1 - tokens / len(rows) / T, abs=0.01)
    text = joined(describe(account, packing="concat", too_long="drop"))
    long = sum(
        len(one["labels"]) > T and (one["labels"] == -100).any() for r in records() for one in r[:1]
    )
    assert f"{long} of 300 records ({long / 300:.1%}, " in text and "were dropped" in text
    assert f"{account.epoch('concat'):,} sequences per epoch with packing=concat" in text
    assert f"{account.unlabeled:,} examples without a token in the loss" in text


@pytest.mark.parametrize("unit", [1, 8])
def test_random_splits_of_long_texts_make_more_sequences(unit):
    """With packing=none and a shuffle window, on average over epochs."""
    text = {name: np.ones(2 * T, np.int32) for name in ("tokens", "labels")}
    account, epochs = Account("data", T, 40, random_unit=unit), 20
    reader = RecordReader(lambda record: record, T, unit=unit)
    for _, record in Records([[text]] * 40, reader).each():
        account.add(record)
    source = grain.MapDataset.source([[text]] * 40).repeat(epochs)
    rows = list(pack(source, packing="none", seq_len=T, window=30, unit=unit))
    assert 80 < account.sequences["none"] <= 120
    assert account.sequences["none"] == pytest.approx(len(rows) / epochs, rel=0.02)


def test_part_of_the_records_is_extrapolated():
    own = Records(records(), RecordReader(lambda record: record, T))
    whole, part = Account("a", T, 300), Account("a", T, 300)
    for number, (_, record) in enumerate(own.each()):
        whole.add(record)
        if number < 150:
            part.add(record)
    assert not part.complete
    assert part.epoch("best_fit") == pytest.approx(whole.epoch("best_fit"), rel=0.1)
    lines = describe(part, packing="best_fit", too_long="drop")
    assert "first 150 of 300 records" in lines[0]
    assert f"about {part.epoch('best_fit')} sequences per epoch" in joined(lines)
    assert f"lengths in tokens: {part.lengths[1] / part.examples:.1%} to 1, " in joined(lines)
    assert joined(lines).startswith(joined(summary(part, "drop")))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.jsonl"
    texts = [json.dumps({"text": "abc" * 9})] * 200
    texts[120], texts[150], texts[170] = "{", '{"other": 1}', '{"text": "xyz"}'
    path.write_text("\n".join(texts))
    return path


def check(file, **more):
    config = DataConfig(str(file), **{"eval_fraction": 0.1} | more)
    train, held_out = open_split(config)
    return data_check(train, held_out, CharTokenizer("abc"), config, seq_len=T)


@pytest.mark.parametrize(
    "more, sequences",
    [({}, 119), ({"shuffle": False}, 80), ({"group_by_length": True}, 80)],
    ids=["shuffled", "in order", "grouped"],
)
def test_an_epoch_counts_random_splits_of_shuffled_texts(more, sequences, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps({"text": "a" * (2 * T + 1)})] * 40))
    found = check(tmp_path / "a.jsonl", packing="none", eval_fraction=0, **more)
    found.run()
    assert found.sequences_per_epoch == sequences


def test_bad_records_are_refused_or_listed(file, tmp_path):
    with pytest.raises(ValueError, match="a.jsonl, record 121: .*data.bad_records=skip"):
        check(file).run()
    found = check(file, bad_records="skip")
    found.run()
    assert found.complete and found.error is None
    found.start(tmp_path)
    found.stop()
    lines = [json.loads(line) for line in (tmp_path / "bad_records.jsonl").read_text().splitlines()]
    assert {line["file"] for line in lines} == {str(file)}
    assert sorted(line["record"] for line in lines) == ["record 121", "record 151", "record 171"]
    assert any("must have text in 'text'" in line["reason"] for line in lines)
    assert sum(account.bad for account in (*found.accounts, found.held_out)) == 3


def test_the_rest_is_checked_on_a_thread(file, tmp_path):
    found = check(file)
    found.run(seconds=0)
    assert not found.complete and found.error is None
    found.start(tmp_path)
    while found.error is None:
        time.sleep(0.01)
    assert "record 121" in found.error
    skipping = check(file, bad_records="skip")
    skipping.run(seconds=0)
    skipping.start(tmp_path)
    while not skipping.complete:
        time.sleep(0.01)
    skipping.stop()
    assert len((tmp_path / "bad_records.jsonl").read_text().splitlines()) == 3
    # An error of the disk is an error of the run too.
    lost = check(file, bad_records="skip")
    lost.run(seconds=0)
    lost.start(tmp_path / "gone")
    while lost.error is None:
        time.sleep(0.01)
    assert "bad_records.jsonl" in lost.error


def test_sources_are_read_in_turn():
    reader = RecordReader(lambda document: [], T)
    own = [Records(["text"] * count, reader) for count in (50, 10)]
    found = DataCheck("ab", own, Records([], reader), DataConfig())
    for _ in range(12):
        next(found._rest)
    assert [account.records for account in found.accounts] == [6, 6]
