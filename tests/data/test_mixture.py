"""Weighted sources: shares of tokens in every window, order, exact resume, shards, held-out."""

import json
from types import SimpleNamespace

import grain
import numpy as np
import pytest

from bptjax.config import to_yaml
from bptjax.config_parser import parse
from bptjax.data.config import DataConfig, SourceConfig
from bptjax.data.loader import eval_loader, train_loader
from bptjax.data.mixture import mixed
from bptjax.data.packing import PACKINGS
from bptjax.data.sources import open_split
from bptjax.parsing.keys import flatten

TOKENIZER = SimpleNamespace(vocab_size=10**6, eos_id=None)
T = 16


@pytest.mark.parametrize(
    "weights, least",
    [((0.7, 0.3), 16), ((5, 3, 1.5, 0.5), 12), ((0.9, 0.05, 0.05), 16), ((1, 1, 1, 1, 1, 1), 10)],
)
def test_shares_hold_in_every_window(weights, least):
    """2,000 sequences from any offset have shares within 0.5 % of the weights."""
    rng = np.random.default_rng(0)
    sequences = []
    for number in range(len(weights)):
        lengths = rng.integers(least, T + 1, 997)
        tokens = np.full((997, T), number)
        sequences.append(
            [
                dict(segments=(np.arange(T) < n) * 1, tokens=t)
                for n, t in zip(lengths, tokens, strict=True)
            ]
        )
    # Threads that read ahead would mostly wait for one another.
    direct = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    parents = [grain.MapDataset.source(each).repeat().to_iter_dataset(direct) for each in sequences]
    iterator = iter(mixed(parents, weights))
    found = [next(iterator) for _ in range(6000)]
    of = np.array([one["tokens"][0] for one in found])
    size = np.array([one["segments"].sum() for one in found])
    sums = np.cumsum([np.r_[0, size * (of == number)] for number in range(len(weights))], axis=1)
    windows = sums[:, 2000:] - sums[:, :-2000]
    shares = windows / windows.sum(0)
    wanted = np.array(weights)[:, None] / sum(weights)
    assert np.abs(shares - wanted).max() < 0.005


def write(folder, name, documents):
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in documents))
    return str(path)


def documents(start, lengths):
    """Token ids that occur once, from `start` on."""
    ends = np.cumsum(lengths)
    return [
        list(range(start + end - n, start + end))
        for end, n in zip(ends.tolist(), lengths, strict=True)
    ]


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(1)
    write(tmp_path, "small", documents(0, [18, 20, 3, 33]))
    write(tmp_path, "large", documents(10_000, rng.integers(2, 60, 150).tolist()))
    return tmp_path


def config(folder, **more):
    sources = [
        SourceConfig(str(folder / "small.jsonl"), weight=0.25),
        SourceConfig(str(folder / "large.jsonl"), weight=0.75),
    ]
    return DataConfig(**{"sources": sources, "eval_fraction": 0.0} | more)


def equal(a, b):
    return all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("packing", PACKINGS)
def test_mixtures_resume_exactly(folder, packing, shards):
    """Several epochs of the small source beside one of the large; any point, through JSON."""
    own = config(folder, packing=packing, num_shards=shards)
    train, _ = open_split(own)
    loaders = [train_loader(train, TOKENIZER, own, seq_len=T, batch_size=4) for _ in range(2)]
    states, batches = [], []
    for _ in range(60):
        states.append(json.dumps(loaders[0].get_state()))
        batches.append(next(loaders[0]))
    for stop in (0, 1, 7, 23, 45):
        loaders[1].set_state(json.loads(states[stop]))
        for wanted in batches[stop : stop + 6]:
            assert equal(next(loaders[1]), wanted), stop
    shares = loaders[0].token_shares()
    for loader in loaders:
        loader.close()
    tokens = np.concatenate([batch["tokens"][batch["segments"] > 0] for batch in batches])
    assert shares == pytest.approx([np.mean(tokens < 10_000), np.mean(tokens >= 10_000)])
    assert shares == pytest.approx([0.25, 0.75], abs=0.02)
    counts = np.unique(tokens[tokens < 10_000], return_counts=True)[1]
    assert counts.min() >= 3 and np.unique(tokens[tokens >= 10_000]).size > 1000
    for batch in batches:
        for row in range(4):
            of = batch["tokens"][row][batch["segments"][row] > 0] >= 10_000
            assert of.all() or not of.any(), "a sequence holds documents of one source"


def test_sources_have_keys_of_their_own(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "x1"}\n{"body": "x2"}\n')
    (tmp_path / "b.txt").write_text("y1\ny2\n")
    own = DataConfig(
        sources=[
            SourceConfig(str(tmp_path / "a.jsonl"), text_key="body"),
            SourceConfig([str(tmp_path / "b.txt")], sample_by="line"),
        ],
        eval_fraction=0.5,
        eval_split="spaced",
    )
    train, held_out = open_split(own)
    assert ([list(each) for each in train.files], list(held_out)) == (
        [["x1"], ["y1"]],
        ["x2", "y2"],
    )
    assert train.names == [str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")]
    evaluated = list(eval_loader([np.arange(9)], TOKENIZER, own, seq_len=8, batch_size=1))
    assert len(evaluated) == 1


def test_a_list_of_paths_is_one_pool(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name)
    paths = [str(tmp_path / "c.txt"), str(tmp_path / "[abc].txt")]
    train, held_out = open_split(DataConfig(paths, eval_fraction=0))
    assert (list(train), list(held_out)) == (["c", "a", "b"], [])


def test_sources_from_the_command_line(tmp_path):
    text = "[{path: a.txt, weight: 0.7}, {path: [b.txt, c.txt], weight: 0.3, sample_by: line}]"
    parsed = parse([f"--data.sources={text}"], "")
    assert parsed.data.sources == [
        SourceConfig("a.txt", weight=0.7),
        SourceConfig(["b.txt", "c.txt"], weight=0.3, sample_by="line"),
    ]
    (tmp_path / "saved.yaml").write_text(to_yaml(parsed))
    again = parse([f"--config={tmp_path / 'saved.yaml'}"], "")
    assert again == parsed and flatten(again)["data.sources"][0]["weight"] == 0.7
    assert parse(["--data.path=[a.txt, b.txt]"], "").data.path == ["a.txt", "b.txt"]
    assert parse(["--data.path=x/*.txt"], "").data.path == "x/*.txt"


@pytest.mark.parametrize(
    "text, message",
    [
        ("a.txt", "data.sources=a.txt: must be a list, each item keys"),
        ("[a.txt]", "data.sources=a.txt: must be a list, each item keys"),
        ("[[a.txt]]", r"data.sources=\['a.txt'\]: must be a list, each item keys"),
        ("{path: a.txt}", "data.sources={'path': 'a.txt'}: must be a list"),
        ("[{path: a.txt, weigth: 1}]", "data.sources: unknown key weigth; nearest: weight"),
        ("[{path: a.txt, weight: x}]", "data.sources: weight=x: must be a number"),
        ("[{path: a.txt, weight: null}]", "data.sources: weight=None: must be finite and positive"),
        ("[{path: a.txt, format: chat}]", "data.sources: format=chat: must be one of auto, text"),
        ("[{weight: 1}]", "data.sources: path must be given"),
    ],
)
def test_errors_name_the_key_of_a_source(text, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        parse([f"--data.sources={text}"], "")


def test_impossible_sources_are_refused(folder):
    with pytest.raises(ValueError, match="data.sources.*weight=0: must be finite and positive"):
        SourceConfig("a", weight=0)
    with pytest.raises(ValueError, match="data.path and data.sources"):
        config(folder, path="a")
    with pytest.raises(ValueError, match="group_by_length"):
        config(folder, group_by_length=True, packing="none")
    with pytest.raises(ValueError, match=r"data.sources\[1\].path: .*no such file"):
        open_split(DataConfig(sources=[config(folder).sources[0], SourceConfig("/none.txt")]))
    (folder / "small.jsonl").write_text('{"input_ids": [1]}\n' * 3)
    own = config(folder)
    with pytest.raises(ValueError, match=r"small.jsonl .*must have a token that counts in the l"):
        train_loader(open_split(own)[0], TOKENIZER, own, seq_len=99, batch_size=1)
