"""Batches: resume, order, shards, evaluation."""

import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from tiers import fast

from bptjax.data.config import DataConfig
from bptjax.data.loader import eval_loader, train_loader
from bptjax.data.packing import PACKINGS
from bptjax.data.sources import open_split
from bptjax.data.tokenizer import ByteTokenizer, make_tokenizer

# Documents of token ids that occur once, so that each label tells its document and place.
LENGTHS = (5, 1, 18, 9, 2, 0, 8, 31, 3, 10, 17)
DOCUMENTS = [np.arange(n, dtype=np.int32) + 100 * i for i, n in enumerate(LENGTHS)]
LABELS = np.sort(np.concatenate([document[1:] for document in DOCUMENTS]))
TOKENIZER = SimpleNamespace(vocab_size=2000, eos_id=None)
T, BATCH = 8, 3


@pytest.fixture
def train():
    """Returns `train_loader`, whose threads end with the test."""
    opened = []

    def make(documents=DOCUMENTS, config=None, tokenizer=TOKENIZER, **kwargs):
        kwargs = {"seq_len": T, "batch_size": BATCH} | kwargs
        opened.append(train_loader(documents, tokenizer, config or DataConfig(), **kwargs))
        return opened[-1]

    yield make
    for loader in opened:
        loader.close()


def take(loader, count):
    return [next(loader) for _ in range(count)]


def equal(a, b):
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(np.array_equal(x[key], y[key]) for key in x)
        for x, y in zip(a, b, strict=True)
    )


def labels_of(batches):
    return np.concatenate([batch["labels"][batch["segments"] > 0] for batch in batches])


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("packing", PACKINGS)
def test_resume_is_exact(train, packing, shuffle):
    """Across epochs, each of which is a window; see `test_packing.test_windows_resume_exactly`."""
    config = DataConfig(packing=packing, shuffle=shuffle, seed=5)
    loader, states, batches = train(config=config), [], []
    for _ in range(45):
        states.append(json.dumps(loader.get_state()))
        batches.append(next(loader))
    for stop in (0, 1, 2, 3, 5, 8, 11, 14, 21, 26, 33, 39):
        resumed = train(config=config)
        resumed.set_state(json.loads(states[stop]))
        assert equal(take(resumed, 5), batches[stop : stop + 5]), f"{stop=}"
        resumed.close()
    # The same iterator, its prefetch under way, set back; and a state from a resumed iterator.
    loader.set_state(json.loads(states[7]))
    assert equal(take(loader, 6), batches[7:13])
    again = train(config=config)
    again.set_state(json.loads(json.dumps(loader.get_state())))
    assert equal(take(again, 20), batches[13:33])


@pytest.mark.parametrize("packing", PACKINGS)
def test_batches(train, packing):
    for batch in take(train(config=DataConfig(packing=packing)), 8):
        assert set(batch) == {"tokens", "labels", "segments", "positions"}
        assert all(v.shape == (BATCH, T) and v.dtype == np.int32 for v in batch.values())
        real = batch["segments"] > 0
        np.testing.assert_array_equal(batch["labels"][real], batch["tokens"][real] + 1)
        assert (batch["labels"][~real] == -100).all()


def test_order_depends_on_seed(train):
    documents = [np.full(T + 1, i, np.int32) for i in range(20)]
    config = DataConfig(packing="none")

    def order(config):
        batches = take(train(documents, config, batch_size=4), 10)
        return np.concatenate([batch["tokens"][:, 0] for batch in batches]).tolist()

    first = order(config)
    assert first == order(config)
    assert first != order(dataclasses.replace(config, seed=1))
    assert order(dataclasses.replace(config, shuffle=False)) == [*range(20), *range(20)]


def test_epochs_are_shuffled_anew(train):
    documents = [np.full(T + 1, i, np.int32) for i in range(20)]
    batches = take(train(documents, DataConfig(packing="none"), batch_size=20), 3)
    orders = [tuple(batch["tokens"][:, 0].tolist()) for batch in batches]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert len({*orders, tuple(range(20))}) == 4


@pytest.mark.parametrize("packing", PACKINGS)
def test_shards_share_the_documents(train, packing):
    """Each reader of a shard gets the same sequences at the same indices; the states merge."""
    config = DataConfig(packing=packing, num_shards=2)
    sizes = dict(config=config, batch_size=4)
    full, one, other = (train(**sizes, local=local) for local in (None, [0], [2, 3]))
    for batch, upper, lower in zip(*(take(x, 12) for x in (full, one, other)), strict=True):
        for name, x in batch.items():
            np.testing.assert_array_equal(x[:2], upper[name][:2])
            np.testing.assert_array_equal(x[2:], lower[name][2:])
            assert not upper[name][2:].any() and not lower[name][:2].any()
    seen = [set(labels_of(take(x, 12)).tolist()) for x in (one, other)]
    assert not seen[0] & seen[1] and sorted(seen[0] | seen[1]) == LABELS.tolist()
    states = full.merge_states([one.get_state(), other.get_state()])
    again = train(**sizes)
    again.set_state(json.loads(json.dumps(states)))
    take(full, 12)
    assert equal(take(again, 5), take(full, 5))


def test_each_shard_is_shuffled_by_itself(train):
    """Otherwise a batch would consist of neighboring documents."""
    documents = [np.full(T + 1, i, np.int32) for i in range(40)]
    batches = take(train(documents, DataConfig(num_shards=2), batch_size=2), 10)
    assert any(abs(np.diff(batch["tokens"][:, 0])) > 1 for batch in batches)


def test_impossible_shards_are_refused(train):
    with pytest.raises(ValueError, match="data.num_shards=2: must divide the 3 sequences"):
        train(config=DataConfig(num_shards=2))
    with pytest.raises(ValueError, match="in shard 1 of 2: must have a token that counts"):
        train(DOCUMENTS[:2], DataConfig(num_shards=2), batch_size=2, seq_len=4)
    with pytest.raises(
        ValueError, match="data.num_shards=2: must be 1 with data.group_by_length=true"
    ):
        DataConfig(packing="none", group_by_length=True, num_shards=2)


@pytest.mark.parametrize("packing", PACKINGS)
def test_evaluation_is_one_fixed_pass(packing):
    config = DataConfig(packing=packing)
    loader = eval_loader(DOCUMENTS, TOKENIZER, config, seq_len=T, batch_size=BATCH)
    batches = list(loader)
    np.testing.assert_array_equal(np.sort(labels_of(batches)), LABELS)
    assert all(v.shape == (BATCH, T) and v.dtype == np.int32 for b in batches for v in b.values())
    filling = batches[-1]["segments"].max(1) == 0
    assert (batches[-1]["labels"][filling] == -100).all()
    assert equal(batches, list(loader)), "a second pass is the same"


def test_evaluation_without_documents_is_empty():
    assert not list(eval_loader([], TOKENIZER, DataConfig(), seq_len=T, batch_size=BATCH))


def test_evaluation_fills_the_last_batch():
    loader = eval_loader(
        DOCUMENTS[:1], TOKENIZER, DataConfig(packing="none"), seq_len=T, batch_size=BATCH
    )
    (batch,) = loader
    assert batch["segments"].sum(1).tolist() == [LENGTHS[0] - 1, 0, 0]
    assert (batch["labels"][1:] == -100).all() and not batch["tokens"][1:].any()


def test_one_long_text_gives_mixed_windows(train, tmp_path):
    text = "".join(chr(ord("a") + i % 26) for i in range(3000))
    (tmp_path / "text.txt").write_text(text)
    config = DataConfig(str(tmp_path / "text.txt"), tokenizer="char", packing="none")
    documents, held_out = open_split(config)
    assert ([len(d) for d in documents], [len(d) for d in held_out]) == ([2700], [300])
    tokenizer = make_tokenizer("char", documents)
    loader = train(documents, config, tokenizer, batch_size=64)
    starts = next(loader)["tokens"][:, 0]
    assert np.mean((starts[1:] - starts[:-1]) % 26 == T) < 0.2, "rows do not follow one another"
    (batch, *_) = eval_loader(held_out, tokenizer, config, seq_len=T, batch_size=64)
    np.testing.assert_array_equal(batch["tokens"][0], (np.arange(T) + 2700) % 26)


def test_split_by_path_or_fraction(tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text(str(i))
    config = DataConfig(str(tmp_path / "[123].txt"), eval_path=str(tmp_path / "0.txt"))
    assert [list(part) for part in open_split(config)] == [["1", "2", "3"], ["0"]]
    config = dataclasses.replace(config, eval_path=None, eval_fraction=0.3)
    train, (held_out,) = open_split(config)
    assert {*train, held_out} == {"1", "2", "3"} and len(train) == 2
    config = dataclasses.replace(config, eval_split="spaced")
    assert [list(part) for part in open_split(config)] == [["1", "3"], ["2"]]
    with pytest.raises(ValueError, match="data.path: must be set"):
        open_split(DataConfig())


def test_documents_without_a_label_are_refused():
    with pytest.raises(ValueError, match="must have a token"):
        train_loader([], ByteTokenizer(), DataConfig(), seq_len=8, batch_size=1)


@pytest.mark.parametrize("packing", PACKINGS)
def test_fewer_tokens_than_a_sequence_are_padded(train, packing):
    config = DataConfig(packing=packing)
    for batch in take(train(["ab", "c"], config, ByteTokenizer(), batch_size=2), 3):
        found = sorted(batch["labels"][batch["segments"] > 0].tolist())
        assert set(found) == {97, 98, 99, 256}


def test_exactly_one_sequence_is_enough(train):
    (batch,) = take(train(["abcdefg"], tokenizer=ByteTokenizer(), batch_size=1), 1)
    assert (batch["segments"] == 1).all() and batch["labels"][0, -1] == 256


def test_errors_cross_the_thread(train):
    loader = train(["a" * 50, "b" * 50], tokenizer=make_tokenizer("char", ["a"]))
    with pytest.raises(ValueError, match="character 'b'"):
        take(loader, 20)


@pytest.mark.parametrize("end", fast(["loader.close()", "pass", "raise SystemExit"], ["pass"]))
def test_exit_is_silent(end):
    code = f"""
from bptjax.data.config import DataConfig
from bptjax.data.loader import train_loader
from bptjax.data.tokenizer import ByteTokenizer
loader = train_loader(["abc" * 20], ByteTokenizer(), DataConfig(), seq_len=8, batch_size=2)
next(loader)
{end}
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
