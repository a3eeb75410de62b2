"""Passes over the data: every record and every kind of records, at the product's buffer sizes."""

import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from bptjax.data.config import DataConfig
from bptjax.data.files import TokenIds
from bptjax.data.loader import data_check, train_loader
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


@pytest.mark.parametrize("epochs", [1, 2, 1.5])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("seq_len", [512, 4096])
@pytest.mark.parametrize("packing", ["none", "concat", "best_fit", "group_by_length"])
def test_every_record_is_passed_as_often_as_asked(packing, seq_len, shards, epochs):
    grouped = packing == "group_by_length"
    if grouped and shards > 1:
        pytest.skip("grouped batches have one shard")
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
