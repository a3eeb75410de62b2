"""Samples of held-out data, for evaluations of a limited number of batches."""

from collections import Counter

import numpy as np
import pytest

from bptjax.data.config import DataConfig, SourceConfig
from bptjax.data.loader import eval_loader
from bptjax.data.packing import PACKINGS
from bptjax.data.rows import TokenIds
from bptjax.data.sources import HeldOutSources, open_split
from bptjax.data.tokenizer import ByteTokenizer

BYTE, T = ByteTokenizer(), 64


def documents(count, lengths, source, masked, seed):
    """Documents whose ids tell the source and the loss mask."""
    rng, found = np.random.default_rng(seed), []
    for length in rng.integers(*lengths, count):
        ids = np.full(length, 2 * source + masked, np.int32)
        labels = np.where(np.arange(length) < length // 2 * masked, -100, ids)
        found.append(TokenIds(ids, labels.astype(np.int32)))
    return found


def pool():
    """Two sources: long and short texts with a few chats among them at the end; and chats."""
    texts = documents(150, (20, 60), 0, False, 0) + documents(30, (200, 900), 0, False, 1)
    first = texts + documents(60, (20, 60), 0, True, 2)
    return HeldOutSources([first, documents(120, (10, 50), 1, True, 3)], ["books", "chats"])


def tokens(batches):
    """Counts the tokens by id, of source and loss mask."""
    found = Counter()
    for batch in batches:
        ids, counts = np.unique(batch["tokens"][batch["segments"] > 0], return_counts=True)
        found.update(dict(zip(ids.tolist(), counts.tolist(), strict=True)))
    return found


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("limit", [20, 40])
def test_a_sample_has_sources_and_masks_in_proportion(packing, limit):
    """Before, the first batches were of the first source, and concat held chats back."""
    how = dict(seq_len=T, batch_size=4)
    config, held_out = DataConfig(packing=packing), pool()
    every = eval_loader(held_out, BYTE, config, **how)
    found = eval_loader(held_out, BYTE, config, **how, max_batches=limit)
    batches = list(found)
    assert len(batches) == found.sample.batches <= limit < len(list(every))
    assert not found.sample.complete
    whole, part = tokens(every), tokens(batches)
    for id, count in whole.items():
        share = part[id] / part.total()
        assert share == pytest.approx(count / whole.total(), abs=0.02), (id, part)
    # The batches are nearly full: a sample is not much smaller than its limit.
    assert len(batches) >= limit - 1
    for batch in batches:
        assert len(np.unique(batch["tokens"][batch["segments"] > 0] // 2)) == 1, "one source"


def test_a_sample_has_lengths_in_proportion():
    """A part of each long text, not one of them alone."""
    long = documents(20, (2000, 2001), 0, False, 0)
    held_out = [*long, *documents(1000, (20, 60), 1, False, 1)]
    found = eval_loader(held_out, BYTE, DataConfig(), seq_len=T, batch_size=1, max_batches=160)
    part = tokens(found)
    assert part[0] / part.total() == pytest.approx(0.5, abs=0.04)
    # The pieces of long texts fill a sequence each.
    full = [batch for batch in found if (batch["segments"] == 1).all()]
    assert sum((batch["tokens"] == 0).all() for batch in full) > 70
    assert found.sample.documents > 100


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("limit", [None, 1000])
def test_an_evaluation_of_everything_has_every_label_once(packing, limit):
    held_out = pool()
    how = dict(seq_len=T, batch_size=4, max_batches=limit)
    found = eval_loader(held_out, BYTE, DataConfig(packing=packing), **how)
    for name, own in zip(held_out.names, held_out.files, strict=True):
        labels = np.concatenate([batch["labels"].reshape(-1) for batch in found.sources[name]])
        wanted = np.concatenate([document.labels[1:] for document in own])
        np.testing.assert_array_equal(np.sort(labels[labels >= 0]), np.sort(wanted[wanted >= 0]))
    assert found.sample is None or found.sample.complete


def test_a_sample_of_the_usual_size():
    """64 batches of 4,096 tokens: 262,144 of 12 million, of which 8 million are not read."""
    ids = {n: np.full(n, 0, np.int32) for n in (3000, 600, 200_000)}
    other = {n: np.full(n, 1, np.int32) for n in (3000, 600)}
    first = [ids[3000]] * 800 + [ids[600]] * 3000 + [ids[200_000]] * 8
    held_out = HeldOutSources([first, [other[3000]] * 1000 + [other[600]] * 5000], ["a", "b"])
    found = eval_loader(held_out, BYTE, DataConfig(), seq_len=4096, batch_size=1, max_batches=64)
    part = tokens(found)
    total = sum(len(document) - 1 for document in held_out)
    share = sum(len(document) - 1 for document in first) / total
    assert 60 <= found.sample.batches <= 64 and part.total() > 250_000
    assert part[0] / part.total() == pytest.approx(share, abs=0.05)


def test_a_sample_depends_on_the_seed_alone():
    def drawn(seed):
        config = DataConfig(seed=seed)
        found = eval_loader(pool(), BYTE, config, seq_len=T, batch_size=4, max_batches=9)
        return [[batch["labels"].tolist() for batch in found] for _ in range(2)]

    assert drawn(0)[0] == drawn(0)[1] == drawn(0)[0] != drawn(1)[0]


def test_a_sample_may_be_loaded_in_smaller_batches():
    """As on fewer devices: the same sequences."""
    how = dict(seq_len=T, max_batches=6)
    whole = eval_loader(pool(), BYTE, DataConfig(), batch_size=4, **how)
    parts = eval_loader(pool(), BYTE, DataConfig(), batch_size=3, sampled_batch_size=4, **how)
    assert parts.sample.batches == len(list(parts)) > whole.sample.batches
    for name in whole.sources:
        each = [
            [row for batch in found.sources[name] for row in batch["tokens"] if row.any()]
            for found in (whole, parts)
        ]
        np.testing.assert_array_equal(*each)


def test_more_sources_than_batches():
    held_out = HeldOutSources(
        [documents(9, (20, 60), n, False, n) for n in range(5)], list("abcde")
    )
    found = eval_loader(held_out, BYTE, DataConfig(), seq_len=T, batch_size=4, max_batches=2)
    assert [len(list(each)) for each in found.sources.values()] == [1] * 5


def test_sources_have_short_names(tmp_path):
    for name in ("a/x.txt", "b/x.txt", "b/y.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one\ntwo\n")
    paths = [str(tmp_path / "a/x.txt"), str(tmp_path / "b/x.txt")]
    paths.append([str(tmp_path / "a/x.txt"), str(tmp_path / "b/y.txt")])
    sources = [SourceConfig(path, sample_by="line") for path in paths]
    _, held_out = open_split(DataConfig(sources=sources, eval_fraction=0.5))
    assert held_out.names == ["x.txt (1)", "x.txt (2)", "x.txt, y.txt"]
