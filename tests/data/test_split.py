"""Held-out documents chosen at random: the same for every way to read them."""

import json
from collections import Counter

import numpy as np
import pytest
from data.test_stream import write

from bptjax.data.config import DataConfig, SourceConfig
from bptjax.data.images import open_images
from bptjax.data.loader import train_loader
from bptjax.data.sources import open_split
from bptjax.data.split import draw
from bptjax.data.stream import Stream, StreamSizes
from bptjax.data.tokenizer import ByteTokenizer

ALL_STREAMED = StreamSizes(memory=0, held_out=3000)


def lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def test_alternating_classes_are_both_held_out(tmp_path):
    path = write(
        tmp_path / "a.jsonl", lines(f"{'ham' if n % 2 else 'spam'} {n}" for n in range(200))
    )
    kinds = [
        Counter(text.split()[0] for text in open_split(DataConfig(path, eval_split=split))[1])
        for split in ("random", "spaced")
    ]
    assert kinds[0].total() == 20 and min(kinds[0]["ham"], kinds[0]["spam"]) >= 4
    assert kinds[1] == {"ham": 20}


@pytest.mark.parametrize("fraction", [0.03, 0.1, 0.3, 0.7])
def test_each_document_is_equally_likely(fraction):
    """Also over files of one document each, and without the same choice in all of them."""
    for sizes in ([60], [1] * 60):
        found = [draw(sizes, fraction, seed) for seed in range(1000)]
        held = np.array([np.isin(np.arange(60), one) for one in found])
        # At least one of 60 is held out.
        expected = max(fraction, 0.031)
        assert np.abs(held.mean(0) - expected).max() < 0.06
        assert abs(held.mean() - expected) < 0.004
        counts = held.sum(1)
        assert np.ptp(counts) <= 2 or len(sizes) > 1
        if fraction < 0.5:
            # Nearly independent, apart from neighbors.
            together = np.corrcoef(held[:, ::20].T)
            assert np.abs(together - np.eye(len(together))).max() < 0.15
        # Of single documents, the numbers have the variance of independent choices.
        if len(sizes) > 1:
            assert abs(counts.std() / np.sqrt(60 * fraction * (1 - fraction)) - 1) < 0.15


def test_the_split_does_not_change(tmp_path):
    """A run must find the same held-out documents in every version."""
    path = write(tmp_path / "a.jsonl", lines(map(str, range(60))))
    held = [list(open_split(DataConfig(path, seed=seed))[1]) for seed in (0, 1)]
    assert held == [["1", "16", "23", "34", "44", "53"], ["4", "11", "28", "34", "41", "55"]]


@pytest.mark.parametrize("sizes", [[60, 25, 7], [2], [1, 1, 1], [1]])
def test_streams_hold_out_what_files_in_memory_do(tmp_path, sizes):
    texts = [[f"{file} {n}" for n in range(size)] for file, size in enumerate(sizes)]
    # Text files are one group, of which a stream reads as many.
    texts += [[f"text {n}"] for n in range(20) if len(sizes) > 1]
    for kind, end in (("plain", ""), ("streamed", ".gz")):
        (tmp_path / kind).mkdir()
        for file, own in enumerate(texts):
            if own[0].startswith("text"):
                write(tmp_path / kind / f"{file:02}.txt", own[0])
            else:
                write(tmp_path / kind / f"{file}.jsonl{end}", lines(own))
    for fraction in (0.05, 0.3, 0.95):
        for seed in range(5):
            how = dict(eval_fraction=fraction, seed=seed)
            train, held_out = open_split(
                DataConfig(str(tmp_path / "streamed"), **how), None, ALL_STREAMED
            )
            assert isinstance(train, Stream)
            if sum(sizes) == 1:
                assert (list(train), list(held_out)) == (["0 0"], [])
                continue
            plain = open_split(DataConfig(str(tmp_path / "plain"), **how))
            assert [list(train), list(held_out)] == [list(part) for part in plain]
            assert len(held_out) and sorted(map(str, [*train, *held_out])) == sorted(sum(texts, []))
            # A stream holds out only records near the beginnings of files: some of the same.
            limited = StreamSizes(memory=0, held_out=3)
            _, few = open_split(DataConfig(str(tmp_path / "streamed"), **how), None, limited)
            assert {*few} <= {*held_out} or len(few) == 1


def test_sources_and_shards_do_not_change_the_split(tmp_path):
    paths = [
        write(tmp_path / f"{name}.jsonl", lines(f"{name}{n}" for n in range(40))) for name in "ab"
    ]
    alone = [list(open_split(DataConfig(path, packing="none"))[1]) for path in paths]
    sources = [SourceConfig(path) for path in paths]
    for shards, packing in ((1, "none"), (2, "best_fit"), (4, "best_fit")):
        config = DataConfig(sources=sources, num_shards=shards, packing=packing)
        train, held_out = open_split(config)
        assert list(held_out) == sum(alone, []) and [len(own) for own in alone] == [4, 4]
        loader = train_loader(train, ByteTokenizer(), config, seq_len=16, batch_size=4)
        batches = [next(loader) for _ in range(20)]
        loader.close()
        tokens = np.concatenate([np.append(batch["tokens"], 0) for batch in batches])
        words = bytes(np.where(tokens == 256, 32, tokens).tolist()).replace(b"\0", b" ").split()
        assert {word.decode() for word in words} == {*train.files[0], *train.files[1]}


def test_the_share_of_each_class_of_images(tmp_path):
    for name, count in (("cat", 30), ("dog", 10), ("owl", 10)):
        (tmp_path / name).mkdir()
        for n in range(count):
            (tmp_path / name / f"{n:02}.png").touch()
    for seed in range(5):
        _, train, held_out = open_images(DataConfig(str(tmp_path), seed=seed))
        assert Counter(image.name for image in held_out) == {"cat": 3, "dog": 1, "owl": 1}
        assert len(train) == 45
