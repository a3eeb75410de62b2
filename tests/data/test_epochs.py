"""Passes over the data: every record and every kind of records, at the product's buffer sizes."""

import json
import math
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import grain
import numpy as np
import pytest
from tiers import fast

from bptjax.data.account import Account
from bptjax.data.config import DataConfig
from bptjax.data.loader import data_check, train_loader
from bptjax.data.packing import pack
from bptjax.data.records import Record
from bptjax.data.rows import TokenIds
from bptjax.data.sources import Mixture

TOKENIZER = SimpleNamespace(vocab_size=10**6, eos_id=None)


def pool(texts, chats, seed=0, first=0):
    """Returns a mixed pool of texts and chats. Every token of a record is its number from `first`
    on."""
    rng = np.random.default_rng(seed)
    found = []
    for number, masked in enumerate(rng.permutation([False] * texts + [True] * chats), first):
        ids = np.full(int(rng.integers(20, 500 if masked else 3000)), number, np.int32)
        labels = ids.copy()
        labels[: 10 * masked] = -100
        found.append(TokenIds(ids, labels) if masked else ids)
    return found


def is_chat(record):
    return isinstance(record, TokenIds)


def passes_of(records, config, epochs, *, seq_len, batch_size):
    """Returns the number of times that a run over `epochs` trains the first token of each record,
    and its batches."""
    check = data_check(records, [], TOKENIZER, config, seq_len=seq_len)
    check.run(math.inf)
    limits = check.limits(epochs, batch_size)
    size = batch_size // config.num_shards
    steps = max(-(-limit.sequences // size) for limit in limits)
    loader = train_loader(records, TOKENIZER, config, seq_len=seq_len, batch_size=batch_size)
    loader.limit(limits, steps)
    seen, batches = Counter(), []
    for _ in range(steps):
        batches.append(next(loader))
        # A record longer than a sequence is split, so count its tokens.
        seen.update(batches[-1]["tokens"][batches[-1]["segments"] > 0].tolist())
    loader.close()
    files = records.files if isinstance(records, Mixture) else [records]
    lengths = {int(one[0] if not is_chat(one) else one.ids[0]): one for f in files for one in f}
    return {n: seen[n] / (len(one) - 1) for n, one in lengths.items()}, batches


# Grouped batches have one shard.
WAYS = [(p, shards) for p in ("none", "concat", "best_fit") for shards in (1, 3)]


@pytest.mark.parametrize("epochs", fast([1, 2, 1.5], [1.5]))
@pytest.mark.parametrize("seq_len", fast([512, 4096], [512]))
@pytest.mark.parametrize("packing, shards", [*WAYS, ("group_by_length", 1)])
def test_every_record_is_passed_as_often_as_asked(packing, seq_len, shards, epochs):
    grouped = packing == "group_by_length"
    config = DataConfig(
        packing="none" if grouped else packing, group_by_length=grouped, num_shards=shards
    )
    records = pool(255, 45)
    seen, batches = passes_of(records, config, epochs, seq_len=seq_len, batch_size=2 * shards)
    assert set(seen.values()) <= {math.floor(epochs), math.ceil(epochs)}
    for kind in (True, False):
        found = np.mean([seen[n] for n, one in enumerate(records) if is_chat(one) == kind])
        assert found == pytest.approx(epochs, rel=0.02), kind
    # No step trains nothing, and only the last sequences of a shard are blank.
    assert all((batch["labels"] != -100).any() for batch in batches)


def test_few_chats_among_texts_are_trained_on_in_an_epoch():
    """400 texts and 60 chats, one epoch at the default packing; also a run of half of its steps."""
    records, config = pool(400, 60), DataConfig()
    chats = [n for n, one in enumerate(records) if is_chat(one)]
    lengths = [len(one) - 1 for one in records]
    share, found = sum(lengths[n] for n in chats) / sum(lengths), []
    for seed in range(4):  # The chats fill few sequences, so one order has many or few of them.
        own = replace(config, seed=seed)
        seen, batches = passes_of(records, own, 1, seq_len=4096, batch_size=2)
        assert set(seen.values()) == {1}
        half = [b["tokens"][b["segments"] > 0] for b in batches[: len(batches) // 2]]
        found.append(np.isin(np.concatenate(half), chats).mean())
    assert np.mean(found) == pytest.approx(share, rel=0.5)


def sources(sizes, weights, chats=0.2):
    files = [
        pool(n - int(chats * n), int(chats * n), seed=k, first=10_000 * k)
        for k, n in enumerate(sizes)
    ]
    return Mixture(files, [f"source {k}" for k in range(len(sizes))], weights)


@pytest.mark.parametrize("epochs", [1, 2.5])
@pytest.mark.parametrize("packing", ["none", "concat", "best_fit"])
def test_weighted_sources_pass_the_one_that_runs_out_first(packing, epochs):
    """The passes that are told are those of the run; the others keep their weights."""
    mixture, config = sources([40, 400], [0.5, 0.5]), DataConfig(packing=packing)
    seen, _ = passes_of(mixture, config, epochs, seq_len=1024, batch_size=4)
    check = data_check(mixture, [], TOKENIZER, config, seq_len=1024)
    check.run(math.inf)
    told = check.passes(epochs=epochs)
    assert told[0] == epochs and told[1] < 0.2 * epochs
    for k, passes in enumerate(told):
        own = [x for n, x in seen.items() if n // 10_000 == k]
        weights = [len(one) - 1 for one in mixture.files[k]]
        assert np.average(own, weights=weights) == pytest.approx(passes, rel=0.05), k
    first = [x for n, x in seen.items() if n < 10_000]
    assert set(first) <= {math.floor(epochs), math.ceil(epochs)}
    assert np.mean(first) == pytest.approx(epochs, rel=0.02)
    sequences = 100 * check.sequences_per_epoch
    assert check.passes(sequences=sequences)[0] == pytest.approx(100, rel=0.03)
    line, warning, *_ = check.describe_passes(sequences=sequences)
    assert line.startswith(f"passes over the data in {sequences:,} sequences: source 0 ")
    assert warning.startswith("warning: ") and "passes over source 0, more than 4: " in warning


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("packing", ["none", "concat", "best_fit"])
def test_sequences_of_an_epoch_are_exact(packing, shards):
    records, config = pool(255, 45, seed=3), DataConfig(packing=packing, num_shards=shards)
    check = data_check(records, [], TOKENIZER, config, seq_len=1024)
    check.run(math.inf)
    _, batches = passes_of(records, config, 1, seq_len=1024, batch_size=shards)
    used = sum(int((batch["segments"].max(1) > 0).sum()) for batch in batches)
    assert check.sequences_per_epoch == used
    estimate = check.accounts[0].epoch(packing)
    assert estimate == pytest.approx(used, rel=0.02)


@pytest.mark.parametrize("grouped", [False, True])
def test_limited_runs_resume_exactly(grouped):
    """Through the blank sequences at the end, and into the batches that replace left-out ones."""
    packing = "none" if grouped else "concat"
    config = DataConfig(packing=packing, group_by_length=grouped, num_shards=1 if grouped else 3)
    records, how = pool(30, 17), dict(seq_len=512, batch_size=9)
    check = data_check(records, [], TOKENIZER, config, seq_len=512)
    check.run(math.inf)

    def loader(epochs):
        found = train_loader(records, TOKENIZER, config, **how)
        limits = check.limits(epochs, 9)
        steps = max(-(-limit.sequences * config.num_shards // 9) for limit in limits)
        found.limit(limits, steps)
        return found, steps

    one, steps = loader(1.5)
    states, batches = [], []
    for _ in range(steps + 2):
        states.append(json.dumps(one.get_state()))
        batches.append(next(one))
    one.close()
    assert (batches[steps - 1]["segments"].max(1) == 0).any()
    assert (batches[steps]["segments"].max(1) > 0).all()
    for stop in range(0, steps + 2, 3):
        again, _ = loader(1.5)
        again.set_state(json.loads(states[stop]))
        for wanted in batches[stop : stop + 3]:
            found = next(again)
            assert all(np.array_equal(found[name], wanted[name]) for name in wanted), stop
        again.close()
    # A longer run continues with the other records of the epoch. It may leave out two sequences of
    # each shard, because the parts of the epoch were packed by themselves.
    longer, more = loader(2)
    longer.set_state(json.loads(states[steps]))
    batches = [*batches[:steps], *(next(longer) for _ in range(more - steps))]
    longer.close()
    tokens = np.concatenate([b["tokens"][b["segments"] > 0] for b in batches])
    counts = np.bincount(tokens, minlength=len(records))
    wanted = np.array([2 * (len(one) - 1) for one in records])
    left = wanted - counts
    assert (left >= 0).all() and left.sum() <= config.num_shards * 2 * 512


def test_a_process_continues_from_its_own_states():
    """After a spike, a process that reads one of two shards returns to its own states."""
    config = DataConfig(num_shards=2)
    how = dict(seq_len=64, batch_size=2, local=[1])
    loader = train_loader(pool(9, 2), TOKENIZER, config, **how)
    state = loader.get_state()
    assert state[0] is None
    wanted = next(loader)
    loader.set_state(state)
    found = next(loader)
    loader.close()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_states_of_other_versions_are_refused():
    loader = train_loader(pool(9, 1), TOKENIZER, DataConfig(), seq_len=64, batch_size=1)
    with pytest.raises(ValueError, match="^saved by a version of bptjax that packs the data in an"):
        loader.set_state([{"parent_window_start_state": {}, "window_index": 0}])
    loader.close()


def test_images_do_not_wait_for_others_in_memory():
    """A window of images would take gigabytes: in the loader, the evaluation and the check."""
    read, arrays = [], []

    class Images(Sequence):
        def __len__(self):
            return 5000

        def __getitem__(self, index):
            read.append(index)
            tokens = np.zeros((17, 3), np.float32)
            arrays.append(weakref.ref(tokens))
            return [{"tokens": tokens, "labels": np.array([1] + [-100] * 16, np.int32)}]

    sequences = pack(grain.MapDataset.source(Images()), packing="none", seq_len=17, threads=2)
    next(iter(sequences))
    assert len(read) < 100
    account = Account("images", 17, images=True)
    for index in range(100):
        account.add(Record(Images()[index]))
    assert account.sequences["none"] == 100
    assert sum(one() is not None for one in arrays[-99:]) <= 1


def test_epochs_of_many_records_are_counted_in_time():
    """Grain's default of reading ahead took 50 times as long as the rest."""
    records = [np.zeros(20, np.int32)] * 20_000
    check = data_check(records, [], TOKENIZER, DataConfig(), seq_len=1024)
    start = time.process_time()
    check.run(math.inf)
    read, start = time.process_time() - start, time.process_time()
    assert check.sequences_per_epoch == -(-20_000 * 19 // 1024)
    assert time.process_time() - start < 6 * read
