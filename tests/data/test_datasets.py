"""Hugging Face datasets: Arrow files, saved datasets, and datasets of the hub."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bptjax.data.text import open_documents

TEXTS = ["one", "", "drei – vier", "five"]


def save(directory, texts, name="data-00000-of-00001.arrow", batch=2):
    """Writes an IPC stream, as `Dataset.save_to_disk` does."""
    directory.mkdir(parents=True, exist_ok=True)
    table = pa.table({"text": texts, "n": range(len(texts))})
    with pa.ipc.new_stream(str(directory / name), table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)
    (directory / "dataset_info.json").write_text("{}")
    files = [{"filename": path.name} for path in sorted(directory.glob("data-*.arrow"))]
    (directory / "state.json").write_text(json.dumps({"_data_files": files}))


def test_a_saved_data_set(tmp_path):
    save(tmp_path / "set", TEXTS[:2], "data-00000-of-00002.arrow")
    save(tmp_path / "set", TEXTS[2:], "data-00001-of-00002.arrow", batch=1)
    # The cache of a transformation is no part of it.
    with pa.ipc.new_stream(str(tmp_path / "set/cache-1.arrow"), pa.schema({"text": "string"})) as w:
        w.write_table(pa.table({"text": ["cached"]}))
    documents = open_documents(tmp_path / "set")
    assert list(documents) == TEXTS
    assert documents.location(3).file.endswith("data-00001-of-00002.arrow")
    assert list(open_documents(tmp_path / "set" / "data-00001-of-00002.arrow")) == TEXTS[2:]


def test_splits_are_named(tmp_path):
    for split in ("train", "test"):
        save(tmp_path / "set" / split, [split])
    (tmp_path / "set/dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    for path in (tmp_path, tmp_path / "set"):
        with pytest.raises(ValueError, match="must be a single split of train, test; give "):
            open_documents(path)
    assert list(open_documents(tmp_path / "set" / "train")) == ["train"]


def test_text_with_images_in_a_table(tmp_path):
    table = pa.table({"text": ["a", "b"], "image": [None, b"x"], "id": [1, 2]})
    pq.write_table(table, tmp_path / "a.parquet")
    documents = open_documents(tmp_path)
    assert documents[0] == "a"
    with pytest.raises(ValueError, match="a.parquet, row group 0, row 2: 'image' must be empty"):
        documents[1]


def test_ipc_files_and_token_ids(tmp_path):
    ids = [[1, 2, 3], [4]]
    table = pa.table({"input_ids": ids, "image": [b"x" * 99] * 2})
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    for found, wanted in zip(open_documents(tmp_path), ids, strict=True):
        np.testing.assert_array_equal(found, np.array(wanted, np.int32), strict=True)
    with pytest.raises(ValueError, match="a.arrow: must have 'instruction'"):
        open_documents(tmp_path / "a.arrow", format="alpaca")
    (tmp_path / "bad.arrow").write_text("text")
    with pytest.raises(ValueError, match="bad.arrow: not an Arrow file"):
        open_documents(tmp_path / "bad.arrow")


def test_text_that_is_not_utf8_is_one_bad_record(tmp_path):
    texts = pa.array([b"ab", b"\xff\xfe", b"cd"]).view(pa.string())
    table = pa.table({"text": texts})
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    documents = open_documents(tmp_path / "a.arrow")
    assert [documents[0], documents[2]] == ["ab", "cd"]
    with pytest.raises(ValueError, match="utf-8"):
        documents[1]


def test_a_directory_of_every_format(tmp_path):
    (tmp_path / "a.txt").write_text("txt")
    (tmp_path / "b.jsonl").write_text('{"text": "jsonl"}')
    pq.write_table(pa.table({"text": ["parquet"]}), tmp_path / "c.parquet")
    save(tmp_path / "d", ["arrow"])
    assert list(open_documents(tmp_path)) == ["txt", "jsonl", "parquet", "arrow"]


def test_data_sets_of_the_hub(tmp_path, monkeypatch):
    asked = []

    def snapshot(name, *, repo_type, allow_patterns):
        asked.append((name, repo_type, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    for split in ("train", "test"):
        (tmp_path / "data").mkdir(exist_ok=True)
        pq.write_table(pa.table({"text": [split]}), tmp_path / f"data/{split}-0.parquet")
    assert list(open_documents("hf://owner/name")) == ["train"]
    assert list(open_documents("hf://owner/name/data/test*")) == ["test"]
    assert asked == [
        ("owner/name", "dataset", "*train*.parquet"),
        ("owner/name", "dataset", "data/test*"),
    ]
    with pytest.raises(ValueError, match="hf://owner/name/x: must match a file of the dataset"):
        open_documents("hf://owner/name/x")
    with pytest.raises(ValueError, match="hf://name: must be hf://owner/name"):
        open_documents("hf://name")


def test_no_network_is_one_line(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="hf://owner/none: cannot download: [^\n]*$"):
        open_documents("hf://owner/none")
