"""File formats. Each file is a sequence of documents that are read on demand."""

import functools
import io
import itertools
import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bptjax.data.changes import FileVersion, check_unchanged, file_version
from bptjax.data.chat import (
    MEDIA,
    Chat,
    check_text_alone,
    find_format,
    from_arrow,
    read_chat,
)


@dataclass(frozen=True)
class TokenIds:
    """A pre-tokenized record with labels.

    Attributes:
      ids: int32 [n].
      labels: int32 [n], not shifted, as in transformers; -100 does not count in the loss.
    """

    ids: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> "TokenIds":
        return TokenIds(self.ids[part], self.labels[part])


@dataclass(frozen=True)
class Labeled:
    """A text, or a pair of texts, and its class."""

    text: str
    label: int
    where: str
    pair: str | None = None


Document = str | np.ndarray | TokenIds | Chat | Labeled
# The record format of `Labeled`.
LABELED = "label"
PAIR = "text_pair"
# Other names of the two fields of a pair: those of GLUE's tasks.
PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
)

TABLES = (".parquet", ".arrow")
RECORDS = (".jsonl", ".json", *TABLES)
EXTENSIONS = (".txt", ".md", ".py", *RECORDS)
CODECS = {".gz": "gzip", ".zst": "zstd"}
PARQUET_CACHE_BYTES = 2**30


def extension(path: Path) -> str:
    """Returns the extension that names the format, such as `.jsonl` for `a.jsonl.zst`."""
    return Path(path.stem).suffix if path.suffix in CODECS else path.suffix


def document(row: object, where: str, *, text_key: str, format: str = "text") -> Document:
    """Returns a row's chat if it has such a `format` (`auto`: the fields of one), else its text, or
    else its token ids as int32, with labels if it has them.

    Raises:
      ValueError: the row holds none of these; the error names the fields of the row.
    """
    fields = row if isinstance(row, dict) else {}
    if format == LABELED:
        return _labeled(fields, text_key, where)
    if chat := find_format(fields, format):
        return read_chat(fields, chat, where)
    if isinstance(fields.get(text_key), str):
        check_text_alone(fields, where)
        if fields.get(PAIR) is not None:
            raise ValueError(f"{where}: {PAIR!r} must be left out; only classifiers read pairs")
        return fields[text_key]
    if "input_ids" in fields and (ids := _integers(fields["input_ids"])) is not None:
        return _token_ids(ids, fields.get("labels"), where)
    for name, kind in ((text_key, "text"), ("input_ids", "a list of integers")):
        if name in fields:
            raise ValueError(
                f"{where}: {name!r} must be {kind}, or set data.text_key to the field with the text"
            )
    raise ValueError(
        f"{where}: must have text in {text_key!r} or token ids in 'input_ids', not only "
        f"{sorted(fields)}; set data.text_key to the field with the text, or see data.format"
    )


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


def _integers(value: Any) -> np.ndarray | None:
    """Returns the integers as an array; None if the value is not a list of integers."""
    try:
        found = np.asarray(value)
    except ValueError:  # Lists of several lengths.
        return None
    return found if found.ndim == 1 and (found.dtype.kind in "iu" or not found.size) else None


def _token_ids(ids: np.ndarray, labels: Any, where: str) -> np.ndarray | TokenIds:
    if ids.size and not 0 <= ids.min() <= ids.max() < 2**31:
        raise ValueError(
            f"{where}: input_ids from {ids.min()} to {ids.max()}: must be in [0, 2^31)"
        )
    ids = ids.astype(np.int32)
    if labels is None:
        return ids
    found = _integers(labels)
    if found is None or found.shape != ids.shape:
        raise ValueError(
            f"{where}: labels must be a list of {len(ids)} integers, one for each of the input_ids"
        )
    bad = found[(found != -100) & ((found < 0) | (found >= 2**31))]
    if bad.size:
        raise ValueError(f"{where}: labels={bad[0]}: must be token ids, or -100 for no loss")
    return TokenIds(ids, found.astype(np.int32))


def _labeled(fields: dict[str, Any], text_key: str, where: str) -> Labeled:
    check_text_alone(fields, where)
    first, second = text_key, PAIR
    if text_key not in fields:
        found = (names for names in PAIRS if fields.keys() >= set(names))
        first, second = next(found, (first, second))
    text, pair, label = fields.get(first), fields.get(second), fields.get("label")
    if not isinstance(text, str) or not isinstance(label, int) or isinstance(label, bool):
        raise ValueError(
            f"{where}: must have text in {first!r} and the number of a class in 'label'; see "
            "data.text_key"
        )
    if not isinstance(pair, str | None) or (pair is None and first != text_key):
        raise ValueError(f"{where}: {second!r} must be text, the second of a pair")
    # As in transformers, an empty second text is none.
    return Labeled(text, label, where, pair or None)


def parse(data: bytes, where: str, *, json_lines: bool, first: bool) -> tuple[str, object]:
    """Returns the (text, JSON value) of a record; the value is None without `json_lines`.

    Raises:
      ValueError: the record is not UTF-8, or is not JSON, or is nested too deeply.
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
      data: the decompressed content of a compressed file of records. It stays in memory because a
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
    try:
        with pa.input_stream(path, compression=CODECS[path.suffix]) as stream:
            return io.BytesIO(stream.read())
    except OSError as error:
        raise ValueError(f"{path}: cannot be decompressed ({error})") from error


def _spans(file: Iterable[bytes], *, paragraphs: bool) -> np.ndarray:
    """Returns the byte offsets [n, 2] of the lines that are not blank, or of `paragraphs`, which
    blank lines separate."""
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


def record_columns(names: list[str], path: Path, text_key: str, format: str) -> tuple[str, ...]:
    """Returns the names of a table's columns that a record is read from.

    Raises:
      ValueError: the table has no such column, or two with the same name.
    """
    chat = find_format(names, format)
    # Read all columns of a chat, because its template may use any field.
    text = (text_key, PAIR, *MEDIA) if text_key in names else ("input_ids", "labels")
    needed = chat.fields if chat else text[:1]
    if format == LABELED:
        text = text_key, "label", PAIR, *itertools.chain(*PAIRS), *MEDIA
        needed = text_key, *(first for first, _ in PAIRS)
    columns = tuple(name for name in (names if chat else text) if name in names)
    if repeated := [name for name in columns if names.count(name) > 1]:
        raise ValueError(f"{path}: {repeated[0]!r}: must be the name of one column; rename others")
    if set(needed).isdisjoint(names):
        document(dict.fromkeys(names), str(path), text_key=text_key, format=format)
    return columns


def row_groups(paths: Sequence[Path], text_key: str, format: str) -> list[RowGroup]:
    """Opens the row groups of parquet files, with one cache of about 1 GiB of decoded groups."""
    found: list[tuple[Path, FileVersion, int, int, tuple[str, ...]]] = []
    largest = 1
    for path in paths:
        try:
            before, metadata = file_version(path), pq.read_metadata(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise ValueError(f"{path}: not a parquet file ({error})") from error
        names = metadata.schema.to_arrow_schema().names
        columns = record_columns(names, path, text_key, format)
        for group in range(metadata.num_row_groups):
            largest = max(largest, metadata.row_group(group).total_byte_size)
            found.append((path, before, group, metadata.row_group(group).num_rows, columns))
    decode = functools.lru_cache(max(2, PARQUET_CACHE_BYTES // largest))(_read_row_group)
    read = functools.partial(document, text_key=text_key, format=format)
    return [
        RowGroup(path, group, rows, functools.partial(decode, path, before, group, columns), read)
        for path, before, group, rows, columns in found
    ]


def _read_row_group(path: Path, before: FileVersion, group: int, columns: tuple[str, ...]) -> tuple:
    check_unchanged(path, before)
    with pq.ParquetFile(path, memory_map=True) as file:
        table = file.read_row_group(group, columns=list(columns))
    return columns, [table.column(name) for name in columns]
