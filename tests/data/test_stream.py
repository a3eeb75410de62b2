"""Streams: compressed files beyond memory are read in order, shuffled, and resumed by offset."""

import functools
import json

import numpy as np
import pyarrow as pa
import pytest

from bptjax.data import sources as data_sources
from bptjax.data import text as data_text
from bptjax.data.config import DataConfig, SourceConfig
from bptjax.data.loader import data_check, train_loader
from bptjax.data.stream import Stream, StreamSizes
from bptjax.data.tokenizer import ByteTokenizer

T = 16
SIZES = StreamSizes(memory=400, held_out=8, window=500, block=64)
open_documents = functools.partial(data_text.open_documents, sizes=SIZES)
open_split = functools.partial(data_sources.open_split, sizes=SIZES)


def write(path, text):
    codec = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
    data = text.encode()
    if codec is None:
        path.write_bytes(data)
    else:
        with pa.output_stream(path, compression=codec) as stream:
            stream.write(data)
    return str(path)


def texts(count, first=0):
    return [f"text {first + n} {'é' * (n % 7)}" for n in range(count)]


def lines(found):
    return "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in found)


@pytest.mark.parametrize("end", [".gz", ".zst"])
@pytest.mark.parametrize("kind", ["jsonl", "line", "paragraph"])
def test_a_stream_has_the_documents_of_the_file(tmp_path, kind, end):
    if kind == "jsonl":
        content = "\ufeff" + lines(texts(40)).replace("\n", "\r\n\n", 5)
        name, by = "a.jsonl", "document"
    elif kind == "line":
        content, name, by = "\n\n".join(texts(40)) + "\n \n", "a.txt", "line"
    else:
        content = "\n\n\n".join(f"{a}\n{b}" for a, b in zip(texts(40), texts(40, 100), strict=True))
        name, by = "a.txt", "paragraph"
    plain = open_documents(write(tmp_path / name, content), sample_by=by)
    stream = open_documents(write(tmp_path / (name + end), content), sample_by=by)
    assert isinstance(stream, Stream) and not isinstance(plain, Stream)
    assert list(stream) == list(plain) and len(plain) == 40
    entries = list(stream.entries(0))
    for entry in entries[::7]:
        rest = [one.read() for one in stream.entries(0, entry.after)]
        assert rest == list(plain)[entry.number + 1 :]
        numbers = [one.number for one in stream.entries(0, entry.after)]
        assert numbers == list(range(entry.number + 1, 40))
    assert entries[3].where.record == plain.location(3).record


def test_small_files_stay_in_memory(tmp_path):
    write(tmp_path / "a.jsonl.zst", lines(texts(5)))
    write(tmp_path / "b.jsonl.gz", lines(texts(5)))
    assert len(open_documents(tmp_path)) == 10
    write(tmp_path / "c.jsonl.gz", lines(texts(50)))
    assert isinstance(open_documents(tmp_path), Stream)
    with pytest.raises(ValueError, match="data.eval_path: .*must fit into memory"):
        open_split(DataConfig(str(tmp_path / "a.jsonl.zst"), eval_path=str(tmp_path)))


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "a.jsonl.zst", lines(texts(60)))
    write(tmp_path / "b.jsonl.gz", lines(texts(30, 100)))
    write(tmp_path / "c.jsonl", lines(texts(12, 200)))
    return tmp_path


def test_held_out_records_are_not_trained_on(folder):
    for split in ("random", "spaced"):
        config = DataConfig(str(folder), eval_fraction=0.25, eval_split=split)
        train, held_out = open_split(config)
        # 8 of three files, 3 of each, one in four.
        numbers = [int(text.split()[1]) for text in held_out]
        if split == "spaced":
            assert numbers == [2, 6, 10, 102, 106, 110, 202, 206, 210]
            assert held_out.location(1).record == "record 7"
        assert 6 <= len(numbers) <= 12 and all(number % 100 < 12 for number in numbers)
        assert sorted(map(str, [*train, *held_out])) == sorted(
            texts(60) + texts(30, 100) + texts(12, 200)
        )
    assert list(open_split(DataConfig(str(folder), eval_fraction=0))[1]) == []


def documents_of(batches):
    found = []
    for batch in batches:
        for row in range(batch["tokens"].shape[0]):
            ids = batch["tokens"][row][batch["segments"][row] > 0]
            found.append(bytes(ids[ids < 256].tolist()).decode(errors="replace"))
    return found


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("packing", ["none", "concat", "best_fit"])
def test_streams_resume_exactly(folder, packing, shards):
    config = DataConfig(str(folder), packing=packing, num_shards=shards)
    train, _ = open_split(config)
    loaders = [
        train_loader(train, ByteTokenizer(), config, seq_len=T, batch_size=4) for _ in range(2)
    ]
    states, batches = [], []
    for _ in range(90):
        states.append(json.dumps(loaders[0].get_state()))
        batches.append(next(loaders[0]))
    for stop in (0, 1, 13, 40, 71):
        loaders[1].set_state(json.loads(states[stop]))
        for wanted in batches[stop : stop + 4]:
            found = next(loaders[1])
            assert all(np.array_equal(found[name], wanted[name]) for name in wanted), stop
    for loader in loaders:
        loader.close()


def test_an_epoch_has_every_record_once_shuffled_anew(tmp_path):
    names = [f"{n:05d}" for n in range(200)]
    write(tmp_path / "a.txt.zst", "\n".join(names))
    config = DataConfig(str(tmp_path), packing="none", sample_by="line", eval_fraction=0)
    for shards in (1, 2):
        own = DataConfig(**vars(config) | {"num_shards": shards})
        loader = train_loader(open_split(own)[0], ByteTokenizer(), own, seq_len=8, batch_size=4)
        epochs = [documents_of(next(loader) for _ in range(50)) for _ in range(2)]
        loader.close()
        assert sorted(epochs[0]) == sorted(epochs[1]) == names and epochs[0] != epochs[1]
        assert sorted(epochs[0])[:9] != epochs[0][:9]
    plain = DataConfig(**vars(config) | {"shuffle": False})
    loader = train_loader(open_split(plain)[0], ByteTokenizer(), plain, seq_len=8, batch_size=4)
    assert documents_of(next(loader) for _ in range(100)) == names * 2
    loader.close()


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("packing", ["none", "concat", "best_fit"])
def test_epochs_of_streams_are_counted(folder, packing, shards):
    config = DataConfig(str(folder), packing=packing, num_shards=shards, eval_fraction=0.25)
    train, held_out = open_split(config)
    check = data_check(train, held_out, ByteTokenizer(), config, seq_len=T)
    check.run(float("inf"))
    limits = check.limits(2, 4)
    steps = max(-(-limit.sequences * shards // 4) for limit in limits)
    loader = train_loader(train, ByteTokenizer(), config, seq_len=T, batch_size=4)
    loader.limit(limits, steps)
    batches = [next(loader) for _ in range(steps)]
    loader.close()
    labels = np.concatenate([batch["labels"].ravel() for batch in batches])
    wanted = [byte for text in train for byte in (*text.encode(), 256)] * 2
    np.testing.assert_array_equal(np.sort(labels[labels >= 0]), np.sort(wanted))


def test_streams_mix_and_are_checked(folder, tmp_path):
    sources = [SourceConfig(str(folder / "a.jsonl.zst")), SourceConfig(str(folder / "c.jsonl"))]
    config = DataConfig(sources=sources, eval_fraction=0.1)
    train, held_out = open_split(config)
    check = data_check(train, held_out, ByteTokenizer(), config, seq_len=T)
    held = len(held_out.files[0])
    assert [account.total for account in check.accounts] == [None, 11]
    assert check.sequences_per_epoch is None
    check.run()
    assert (
        check.sequences_per_epoch
        and check.complete
        and [account.records for account in check.accounts] == [60 - held, 11]
    )
    loader = train_loader(train, ByteTokenizer(), config, seq_len=T, batch_size=2)
    for _ in range(60):
        next(loader)
    assert loader.token_shares() == pytest.approx([0.5, 0.5], abs=0.02)
    loader.close()


def test_damaged_streams_are_named(folder):
    path = folder / "a.jsonl.zst"
    write(path, lines([str(np.random.default_rng(n).random(50)) for n in range(99)]))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data[:-40])
    with pytest.raises(ValueError, match="a.jsonl.zst"):
        list(open_documents(path))
