"""File formats. Each file is a sequence of documents, read on demand."""

import functools
import io
import json
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bptjax.data.changes import FileVersion, check_unchanged, file_version
from bptjax.data.chat import from_arrow
from bptjax.data.rows import Document, RowReader

TABLES = (".parquet", ".arrow")
RECORDS = (".jsonl", ".json", *TABLES)
EXTENSIONS = (".txt", ".md", ".py", *RECORDS)
CODECS = {".gz": "gzip", ".zst": "zstd"}
PARQUET_CACHE_BYTES = 2**30
# A compressed file may expand to the larger of EXPANSION times its size and this number of bytes:
# for a text file, and for a row group of a parquet file.
EXPANSION, TEXT_BYTES, GROUP_BYTES = 100, 2**26, 2**30
# Bytes of text, and rows of parquet files, that are read at a time.
BLOCK, BATCH = 2**22, 2**16
# Bytes per value. Texts are read as indices into a dictionary.
WIDTHS = {"BOOLEAN": 1, "INT64": 8, "DOUBLE": 8, "INT96": 12, "FIXED_LEN_BYTE_ARRAY": 64}


def extension(path: Path) -> str:
    """Returns the extension that names the format, such as `.jsonl` for `a.jsonl.zst`."""
    return Path(path.stem).suffix if path.suffix in CODECS else path.suffix


class Location(NamedTuple):
    """File and number of a record, for messages; no number if the file is a single document."""

    file: str
    record: str = ""

    def __str__(self) -> str:
        return f"{self.file}, {self.record}" if self.record else self.file


def location(documents: Sequence[Document], index: int) -> Location:
    """Returns the location of a record."""
    where = getattr(documents, "location", None)
    return where(index) if where else Location(f"document {index + 1}")


def parse(data: bytes, where: str, *, json_lines: bool, first: bool) -> tuple[str, object]:
    """Returns the (text, JSON value) of a record; the value is None without `json_lines`.

    Raises:
      ValueError: the record is not UTF-8, is not JSON, or is nested too deeply.
    """
    try:
        # A file of records may start with a byte order mark.
        text = data.decode("utf-8-sig" if json_lines and first else "utf-8")
        return text, json.loads(text) if json_lines else None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {error}") from error


class TextFile(Sequence[Document]):
    """A text file as one document or as records; `spans` [n, 2] are the records' byte offsets.

    Args:
      data: decompressed content of a compressed file of records, which stays in memory because a
        compressed file has no random access.
    """

    def __init__(
        self,
        path: Path,
        sample_by: str,
        read: Callable[[object, str], Document],
        data: bytes | None = None,
    ):
        self.path, self.read, self.data = path, read, data
        self.version = file_version(path)
        self.json = extension(path) == ".jsonl"
        self.single = sample_by == "document" and not self.json
        if self.single:
            self.spans = np.array([[0, -1]] if path.stat().st_size else []).reshape(-1, 2)
        else:
            with self._open() as file:
                self.spans = _spans(file, paragraphs=sample_by == "paragraph" and not self.json)

    def _open(self) -> BinaryIO:
        return _opened(self.path) if self.data is None else io.BytesIO(self.data)

    def __len__(self) -> int:
        return len(self.spans)

    def location(self, index: int) -> Location:
        return Location(str(self.path), "" if self.single else f"record {index + 1}")

    def __getitem__(self, index: int) -> Document:
        start, stop = self.spans[index].tolist()
        where = str(self.location(index))
        with self._open() as file:
            file.seek(start)
            data = file.read(-1 if self.single else stop - start)
        if self.data is None:
            check_unchanged(self.path, self.version)
        text, row = parse(data, where, json_lines=self.json, first=not start)
        if self.json:
            return self.read(row, where)
        return text if self.single else text.rstrip("\r\n")


class JsonList(Sequence[Document]):
    """A JSON list of records, which stay in memory."""

    def __init__(self, path: Path, read: Callable[[object, str], Document]):
        self.path, self.read = path, read
        remedy = "rename a file with one record per line to .jsonl"
        with _opened(path) as file:
            try:
                self.rows = json.load(file)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}: {error}; {remedy}") from error
        if not isinstance(self.rows, list):
            raise ValueError(f"{path}: must be a list of records; {remedy}")

    def __len__(self) -> int:
        return len(self.rows)

    def location(self, index: int) -> Location:
        return Location(str(self.path), f"record {index + 1}")

    def __getitem__(self, index: int) -> Document:
        return self.read(self.rows[index], str(self.location(index)))


def _opened(path: Path) -> BinaryIO:
    if path.suffix not in CODECS:
        return open(path, "rb")
    with decompressed(path) as stream:
        return io.BytesIO(stream.read())


@contextmanager
def decompressed(path: Path) -> Iterator[BinaryIO]:
    """Opens a compressed file, and decompresses it while it is read.

    Raises:
      ValueError: the file cannot be decompressed, or expands beyond its limit.
    """
    try:
        with pa.input_stream(path, compression=CODECS[path.suffix]) as stream:
            yield io.BufferedReader(_Bounded(stream, path), BLOCK)
    except OSError as error:
        raise ValueError(f"{path}: cannot be decompressed ({error})") from error


class _Bounded(io.RawIOBase):
    """The bytes of a stream, up to the limit of a compressed file."""

    def __init__(self, stream: Any, path: Path):
        self._stream, self._path, self._left = stream, path, allowed_bytes(path, TEXT_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise ValueError(
                f"{self._path}: must expand to at most the larger of {EXPANSION} times its size "
                f"and {TEXT_BYTES:,} bytes; decompress it"
            )
        buffer[: len(data)] = data
        return len(data)


def allowed_bytes(path: Path, least: int) -> int:
    """Returns the largest number of bytes that a file may expand to."""
    return max(least, EXPANSION * path.stat().st_size)


def _spans(file: Iterable[bytes], *, paragraphs: bool) -> np.ndarray:
    """Returns the byte offsets [n, 2] of the lines that are not blank, or of `paragraphs`, which
    are separated by blank lines."""
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
    """One row group of a parquet file.

    Attributes:
      group: number of the row group in the file.
      decode: returns the names and the columns of the row group.
      read: converts a row and its location to a document.
    """

    def __init__(self, path: Path, group: int, rows: int, decode: Callable, read: Callable):
        self.path, self.group, self.rows = path, group, rows
        self.decode, self.read = decode, read

    def __len__(self) -> int:
        return self.rows

    def location(self, index: int) -> Location:
        return Location(str(self.path), f"row group {self.group}, row {index + 1}")

    def __getitem__(self, index: int) -> Document:
        row = {}
        for column, values in zip(*self.decode(), strict=True):
            cell = values[index]
            arrays = column in ("input_ids", "labels") and isinstance(cell, pa.ListScalar)
            arrays = arrays and cell.is_valid
            row[column] = cell.values if arrays else from_arrow(cell.as_py())
        return self.read(row, str(self.location(index)))


def row_groups(paths: Sequence[Path], read: RowReader) -> list[RowGroup]:
    """Opens the row groups of parquet files, with one cache of about 1 GiB of decoded groups."""
    groups: list[RowGroup] = []
    cache = _Cache(PARQUET_CACHE_BYTES)
    for path in paths:
        try:
            before, metadata = file_version(path), pq.read_metadata(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise ValueError(f"{path}: not a parquet file ({error})") from error
        names = metadata.schema.to_arrow_schema().names
        columns = read.columns(names, path)
        for group in range(metadata.num_row_groups):
            decode = functools.partial(cache.get, path, before, group, columns)
            groups.append(RowGroup(path, group, metadata.row_group(group).num_rows, decode, read))
    return groups


class _Cache:
    """The most recently used row groups, decoded: up to a number of bytes, but at least two."""

    def __init__(self, limit: int):
        self._limit, self._lock = limit, threading.Lock()
        self._groups: dict[tuple, tuple] = {}

    def get(self, path: Path, before: FileVersion, group: int, columns: tuple[str, ...]) -> tuple:
        key = path, before, group, columns
        with self._lock:
            decoded = self._groups.pop(key, None)
        if decoded is None:
            check_unchanged(path, before)
            decoded = columns, _read_row_group(path, group, columns)
        with self._lock:
            self._groups[key] = decoded
            total = sum(column.nbytes for _, each in self._groups.values() for column in each)
            while total > self._limit and len(self._groups) > 2:
                _, oldest = self._groups.pop(next(iter(self._groups)))
                total -= sum(column.nbytes for column in oldest)
        return decoded


def _read_row_group(path: Path, group: int, columns: tuple[str, ...]) -> list[pa.ChunkedArray]:
    """Reads a row group. Texts stay dictionary-encoded, as in the file.

    Raises:
      OSError: the row group expands beyond its limit.
    """
    metadata = pq.read_metadata(path).row_group(group)
    leaves = [metadata.column(n) for n in range(metadata.num_columns)]
    leaves = [leaf for leaf in leaves if leaf.path_in_schema.split(".")[0] in columns]
    text_columns = [leaf.path_in_schema for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    limit = allowed_bytes(path, GROUP_BYTES)
    size = sum(leaf.num_values * WIDTHS.get(leaf.physical_type, 4) for leaf in leaves)
    batches: list[pa.RecordBatch] = []
    if size <= limit:
        with pq.ParquetFile(path, memory_map=True, read_dictionary=text_columns) as file:
            for batch in file.iter_batches(BATCH, row_groups=[group], columns=list(columns)):
                batches.append(batch)
                size += sum(_text_bytes(column) for column in batch.columns)
                if size > limit:
                    break
    if size > limit:
        # Not a ValueError, which marks one bad record: with data.bad_records=skip, the next record
        # would read the row group again.
        raise OSError(
            f"{path}, row group {group}: must expand to at most {limit:,} bytes; write smaller row "
            "groups"
        )
    table = pa.Table.from_batches(batches)
    return [table.column(name) for name in columns]


def _text_bytes(array: pa.Array) -> int:
    """Returns the bytes of the texts in an array, counted as often as they occur."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        lengths = pc.call_function("binary_length", [array.dictionary]).take(array.indices)
        return pc.call_function("sum", [lengths.cast(pa.int64())]).as_py() or 0
    if pa.types.is_struct(kind):
        return sum(_text_bytes(field) for field in array.flatten())
    if pa.types.is_map(kind):
        return _text_bytes(array.keys) + _text_bytes(array.items)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _text_bytes(array.flatten())
    return 0
