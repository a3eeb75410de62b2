"""File formats: each file is a sequence of documents, read when asked for."""

import functools
import io
import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Document = str | np.ndarray

EXTENSIONS = (".txt", ".md", ".py", ".jsonl", ".parquet")
CODECS = {".gz": "gzip", ".zst": "zstd"}
PARQUET_CACHE_BYTES = 2**30


def extension(path: Path) -> str:
    """The extension that names the format: `.jsonl` of `a.jsonl.zst`."""
    return Path(path.stem).suffix if path.suffix in CODECS else path.suffix


def document(row: object, text_key: str, where: str) -> Document:
    """The text of a row, or else its token ids as int32.

    Raises:
      ValueError: the row holds neither; names the keys that it does hold.
    """
    fields = row if isinstance(row, dict) else {}
    if isinstance(fields.get(text_key), str):
        return fields[text_key]
    if "input_ids" in fields:
        ids = np.asarray(fields["input_ids"])
        if ids.ndim == 1 and (ids.dtype.kind in "iu" or not ids.size):
            return ids.astype(np.int32)
    raise ValueError(
        f"{where}: no text in {text_key!r} and no token ids in 'input_ids', only {sorted(fields)}; "
        "set data.text_key to the field with the text (chat formats are not read)"
    )


class TextFile(Sequence[Document]):
    """A text file, whole or by records; `spans` [n, 2] are the records' byte offsets."""

    def __init__(self, path: Path, sample_by: str, text_key: str):
        self.path, self.text_key, self.data = path, text_key, None
        self.json = extension(path) == ".jsonl"
        self.whole = sample_by == "document" and not self.json
        if self.whole:
            self.spans = np.array([[0, -1]] if path.stat().st_size else []).reshape(-1, 2)
        else:
            with self._open() as file:
                self.spans = _spans(file, paragraphs=sample_by == "paragraph" and not self.json)
                # A compressed stream cannot be entered in the middle.
                self.data = file.getvalue() if isinstance(file, io.BytesIO) else None

    def _open(self):
        if self.data is not None:
            return io.BytesIO(self.data)
        if self.path.suffix not in CODECS:
            return open(self.path, "rb")
        try:
            with pa.input_stream(self.path, compression=CODECS[self.path.suffix]) as stream:
                return io.BytesIO(stream.read())
        except OSError as error:
            raise ValueError(f"{self.path}: cannot be decompressed ({error})") from error

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> Document:
        start, stop = self.spans[index].tolist()
        where = str(self.path) if self.whole else f"{self.path}, record {index + 1}"
        with self._open() as file:
            file.seek(start)
            data = file.read(-1 if self.whole else stop - start)
        try:
            text = data.decode() if self.whole else data.decode().rstrip("\r\n")
            row = json.loads(text) if self.json else {self.text_key: text}
        except ValueError as error:  # Not UTF-8, or not JSON.
            raise ValueError(f"{where}: {error}") from error
        return document(row, self.text_key, where)


def _spans(file: Iterable[bytes], *, paragraphs: bool) -> np.ndarray:
    """Byte offsets [n, 2] of the lines that are not blank, or of the runs of such lines."""
    spans, stop, within = array("q"), 0, False
    for line in file:
        start, stop = stop, stop + len(line)
        if line.isspace():
            within = False
        elif paragraphs and within:
            spans[-1] = stop
        else:
            spans.extend((start, stop))
            within = True
    return np.array(spans, np.int64).reshape(-1, 2)


class RowGroup(Sequence[Document]):
    """One row group of a parquet file; `read(path, group, column)` decodes it."""

    def __init__(self, path: Path, group: int, rows: int, column: str, read: Callable):
        self.path, self.group, self.rows, self.column, self.read = path, group, rows, column, read

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Document:
        cell = self.read(self.path, self.group, self.column)[index]
        value = cell.as_py() if self.column != "input_ids" or not cell.is_valid else cell.values
        where = f"{self.path}, row group {self.group}, row {index + 1}"
        return document({self.column: value}, self.column, where)


def row_groups(paths: Sequence[Path], text_key: str) -> list[RowGroup]:
    """The row groups of parquet files, with one cache of about 1 GiB of decoded groups."""
    found: list[tuple[Path, int, int, str]] = []
    largest = 1
    for path in paths:
        try:
            metadata = pq.read_metadata(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise ValueError(f"{path}: not a parquet file ({error})") from error
        names = set(metadata.schema.to_arrow_schema().names)
        column = text_key if text_key in names else "input_ids"
        if column not in names:
            document(dict.fromkeys(names), text_key, str(path))
        for group in range(metadata.num_row_groups):
            largest = max(largest, metadata.row_group(group).total_byte_size)
            found.append((path, group, metadata.row_group(group).num_rows, column))
    read = functools.lru_cache(max(2, PARQUET_CACHE_BYTES // largest))(_read_row_group)
    return [RowGroup(path, group, rows, column, read) for path, group, rows, column in found]


def _read_row_group(path: Path, group: int, column: str) -> pa.ChunkedArray:
    with pq.ParquetFile(path, memory_map=True) as file:
        return file.read_row_group(group, columns=[column]).column(0)
