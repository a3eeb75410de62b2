"""Data files that change during a run are noticed, in every format."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bptjax.data.changes import ChangedFile, count_and_size
from bptjax.data.config import DataConfig, SourceConfig
from bptjax.data.files import location
from bptjax.data.images import open_images
from bptjax.data.records import RecordReader, reads
from bptjax.data.sources import open_split
from bptjax.data.stream import StreamSizes
from bptjax.data.text import open_documents

TEXTS = ["one text", "another text", "a third"]


def write(file):
    """Writes the texts in the format of the file's name."""
    table = pa.table({"text": TEXTS})
    if file.suffix == ".parquet":
        pq.write_table(table, file)
    elif file.suffix == ".arrow":
        with pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    elif file.suffix == ".zst":
        with pa.output_stream(file, compression="zstd") as stream:
            stream.write("".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode())
    else:
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))


@pytest.mark.parametrize("way", ["rewritten", "replaced", "removed"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.arrow", "a.jsonl.zst"])
def test_a_file_that_changes_is_noticed(name, way, tmp_path):
    """Even if its content, and thus its size, stays the same."""
    file = tmp_path / name
    write(file)
    os.utime(file, ns=(1, 1))
    sizes = StreamSizes(memory=10)
    documents = open_documents(file, sizes=sizes)
    assert next(reads(documents))()
    # A row group that is decoded stays in memory.
    documents = open_documents(file, check_first=False, sizes=sizes)
    if way == "rewritten":
        write(file)
    elif way == "replaced":
        write(tmp_path / f"b{name}")
        (tmp_path / f"b{name}").replace(file)
    else:
        file.unlink()
    wanted = FileNotFoundError if way == "removed" else ChangedFile
    reader = RecordReader(lambda document: [], 8, bad_records="skip")
    with pytest.raises(wanted, match=str(file)):
        for read in reads(documents):
            reader(read, location([], 0))


def test_the_sizes_of_training_files(tmp_path):
    names = ["a.jsonl", "b.parquet", "c.arrow"]
    for name in names:
        write(tmp_path / name)
    sizes = [(tmp_path / name).stat().st_size for name in names]
    whole = DataConfig(str(tmp_path))
    one = DataConfig(str(tmp_path / "d" / "d.txt"))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "d.txt").write_text("a text of one document")
    mixed = DataConfig(
        sources=[SourceConfig(str(tmp_path / "a.jsonl")), SourceConfig(str(tmp_path / "d"))]
    )
    for config, wanted in (
        (whole, [4, sum(sizes) + 22]),
        (one, [1, 22]),
        (mixed, [2, sizes[0] + 22]),
    ):
        for fraction in (0, 0.3):
            train, _ = open_split(DataConfig(**vars(config) | {"eval_fraction": fraction}))
            assert count_and_size(train) == wanted


def test_the_sizes_of_training_images(tmp_path):
    """A broken link is a bad record of no size."""
    for name in ("blue", "red"):
        (tmp_path / name).mkdir()
        for size in (10, 20):
            (tmp_path / name / f"{size}.png").write_bytes(bytes(size))
    (tmp_path / "red" / "link.png").symlink_to("nowhere.png")
    for fraction in (0, 0.3):
        _, train, _ = open_images(DataConfig(str(tmp_path), eval_fraction=fraction))
        assert count_and_size(train) == [5, 60]
