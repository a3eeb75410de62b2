"""Sources of text: files as documents with random access, held-out split, baselines."""

import bisect
import glob
import os
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bptjax.data.chat import FORMATS, Chat
from bptjax.data.datasets import HUB, arrow_batches, download, saved_files
from bptjax.data.files import (
    CODECS,
    EXTENSIONS,
    RECORDS,
    TABLES,
    JsonList,
    Location,
    TextFile,
    extension,
    location,
    row_groups,
)
from bptjax.data.rows import Compound, Document, RecordFormat, RowReader
from bptjax.data.split import draw, group_sizes
from bptjax.data.stream import SIZES, Lines, Stream, StreamSizes, decompress
from bptjax.data.tokenizer import utf8
from bptjax.run.output import plural

STDLIB = "python-stdlib"
# No data have 10¹² documents. Much smaller numbers would overflow.
LEAST_FRACTION = 1e-12
# Third-party packages, and test files, some of which are invalid on purpose.
STDLIB_SKIPS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Documents(Sequence[Document]):
    """The documents of several files as one sequence."""

    def __init__(self, files: Sequence[Sequence[Document]]):
        self.files = files
        self.ends = np.cumsum([len(file) for file in files]).tolist()

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def _find(self, index: int) -> tuple[Sequence[Document], int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        file = bisect.bisect_right(self.ends, index)
        return self.files[file], index - (self.ends[file - 1] if file else 0)

    def __getitem__(self, index: int) -> Document:
        file, index = self._find(index)
        return file[index]

    def location(self, index: int) -> Location:
        return location(*self._find(index))


class Subset(Sequence[Document]):
    """The documents at given indices."""

    def __init__(self, documents: Sequence[Document], indices: Sequence[int] | np.ndarray):
        self.documents, self.indices = documents, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Document:
        return self.documents[int(self.indices[index])]

    def location(self, index: int) -> Location:
        return location(self.documents, int(self.indices[index]))


class Part(list[Document]):
    """A part of a single document, in memory."""

    def __init__(self, documents: Sequence[Document], part: Document):
        super().__init__([part])
        self.documents = documents


def open_documents(
    path: str | Path | Sequence[str],
    *,
    sample_by: str = "document",
    text_key: str = "text",
    format: str | RecordFormat = "text",
    fields: Mapping[str, str] | None = None,
    check_first: bool = True,
    sizes: StreamSizes = SIZES,
) -> Documents | Stream:
    """Opens the documents at `path`, in a fixed order: text files by name, then parquet files, then
    Arrow files.

    `path` is a file, a glob, a directory (searched recursively), `python-stdlib` (the source files
    of Python's standard library), `hf://owner/name` (see `datasets.download`), or a list of these.
    Extensions: `.txt`, `.md`, `.py`, `.jsonl`, `.json` (a list of records; skipped in directories),
    each also with `.gz` or `.zst`; `.parquet`, `.arrow`. `sample_by` divides plain text: one
    document per `line`, `paragraph` (separated by blank lines) or `document` (the complete file). A
    record holds text in `text_key`, or else token ids in `input_ids`, or is a chat in a `format` of
    `chat.FORMATS`; `auto` detects the format from the fields. A `RecordFormat` reads other records.
    `fields` are `RowReader.fields`.

    Memory holds two offsets per record, up to `sizes.memory` of decompressed files of records, and
    about 1 GiB of decoded parquet row groups. If compressed files of records exceed `sizes.memory`,
    the result is a `Stream`, which is read in order.

    Raises:
      ValueError: no file at `path`, an unknown extension, no documents, or, with `check_first`, a
        first record without text.
    """
    if sample_by not in ("line", "paragraph", "document"):
        raise ValueError(f"sample_by={sample_by!r}: must be line, paragraph or document")
    given = [path] if isinstance(path, str | Path) else path
    # A file that matches several paths is read once.
    paths = list(dict.fromkeys(p for source in given for p in _paths(source)))
    plain = [p for p in paths if extension(p) not in RECORDS]
    if plain and (format in FORMATS or isinstance(format, RecordFormat) or fields):
        key = "data.fields" if fields else f"data.format={format}"
        raise ValueError(f"{plain[0]}: with {key}, must be {', '.join(RECORDS)}")
    read = RowReader(text_key, format, fields or {})
    files, budget = [], sizes.memory
    for p in paths:
        if p.suffix in TABLES:
            continue
        records = extension(p) == ".jsonl" or sample_by != "document"
        if extension(p) == ".json":
            files.append(JsonList(p, read))
        elif p.suffix not in CODECS or not records:
            files.append(TextFile(p, sample_by, read))
        elif (data := decompress(p, budget)) is not None:
            budget -= len(data)
            files.append(TextFile(p, sample_by, read, data))
        else:
            files.append(Lines(p, sample_by, read, sizes))
    files += row_groups([p for p in paths if p.suffix == ".parquet"], read)
    files += arrow_batches([p for p in paths if p.suffix == ".arrow"], read)
    streamed = any(isinstance(file, Lines) for file in files)
    documents = Stream(tuple(files), sizes) if streamed else Documents(files)
    if isinstance(documents, Documents) and not len(documents):
        empty = plural(len(paths), "empty file")
        raise ValueError(f"{str(path)!r}: must hold documents, not only {empty}")
    if check_first:
        next(iter(documents))  # Fails on a wrong text_key now rather than during the run.
    return documents


def split_documents(
    documents: Sequence[Document] | Stream,
    eval_fraction: float,
    seed: int | None,
    sizes: Sequence[int] | None = None,
) -> tuple[Sequence[Document] | Stream, Sequence[Document]]:
    """Splits documents into training and held-out documents, in their order. Held-out documents are
    chosen as `draw` does, or evenly spaced without a seed; for a stream, see `Stream.split`.

    `sizes` are the numbers of documents of the groups of `draw`, by default `group_sizes`. If there
    is only one document, its tail is held out, measured in characters, or in tokens if it holds
    token ids.
    """
    if not 0 <= eval_fraction < 1:
        raise ValueError(f"data.eval_fraction={eval_fraction}: must be at least 0 and below 1")
    if eval_fraction == 0:
        return documents, []
    eval_fraction = max(eval_fraction, LEAST_FRACTION)
    if isinstance(documents, Stream):
        return documents.split(eval_fraction, seed)
    if len(documents) == 1:
        only = documents[0]
        if isinstance(only, Chat | Compound):
            raise ValueError(
                f"{only.where}: must not be the only record with data.eval_fraction > 0; set "
                "data.eval_path or data.eval_fraction=0"
            )
        end = int(len(only) * (1 - eval_fraction))
        return Part(documents, only[:end]), Part(documents, only[end:])
    if seed is None:
        count = min(max(1, round(len(documents) * eval_fraction)), len(documents) - 1)
        held_out = [(2 * i + 1) * len(documents) // (2 * count) for i in range(count)]
    else:
        files = getattr(documents, "files", [documents])
        sizes = sizes or group_sizes(files, [len(file) for file in files])
        held_out = draw(sizes, eval_fraction, seed)
    training = np.setdiff1d(np.arange(len(documents)), held_out)
    return Subset(documents, training), Subset(documents, held_out)


def byte_baselines(documents: Sequence[str]) -> dict[str, float]:
    """Returns the bits per byte of three simple models of the documents, for a trained model to
    beat.

    `uniform` is 8, `unigram` is the entropy H(b_i), `bigram` is the conditional entropy
    H(b_i | b_i-1) within documents. Unigram and bigram are fitted to the same bytes that they are
    measured on, so no other model of their kind does better.
    """
    unigrams, bigrams = np.zeros(256, np.int64), np.zeros(256 * 256, np.int64)
    for text in documents:
        codes = np.frombuffer(utf8(text), np.uint8).astype(np.int64)
        unigrams += np.bincount(codes, minlength=256)
        bigrams += np.bincount(codes[:-1] * 256 + codes[1:], minlength=256 * 256)
    conditional = _entropy(bigrams) - _entropy(bigrams.reshape(256, 256).sum(1))
    return {"uniform": 8.0, "unigram": _entropy(unigrams), "bigram": conditional}


def _entropy(counts: np.ndarray) -> float:
    p = counts[counts > 0] / max(1, counts.sum())
    return float(-(p * np.log2(p)).sum())


def _paths(path: str | Path) -> list[Path]:
    if str(path) == STDLIB:
        return _stdlib_paths()
    if not str(path):  # Path("") would be the current directory.
        raise ValueError("'': must name a file, directory or glob")
    root = Path(os.path.expanduser(path))
    # A .json file in a directory usually describes the data or a model: it must be named.
    searched = [name for name in EXTENSIONS if name != ".json"]
    if root.is_dir():
        paths = [p for p in root.rglob("*") if p.is_file() and extension(p) in searched]
        paths = saved_files(root, paths)
    elif str(path).startswith(HUB):
        paths = download(str(path))
    else:
        paths = [root] if root.exists() else map(Path, glob.glob(str(root), recursive=True))
        paths = [p for p in paths if p.is_file()]
    known = f"{', '.join(EXTENSIONS)}; text also with {' or '.join(CODECS)}"
    if not paths and root.is_dir():
        raise ValueError(
            f"{str(path)!r}: the directory must hold {', '.join(searched)} files; .json files are "
            f"read only if named: {str(path).rstrip('/')}/*.json"
        )
    if not paths:
        raise ValueError(
            f"{str(path)!r}: no such file; give a file, directory or glob ({known}), or {STDLIB}"
        )
    for p in paths:
        if extension(p) not in EXTENSIONS or p.suffix in CODECS and extension(p) in TABLES:
            raise ValueError(f"{p}: extension {''.join(p.suffixes)!r}: must be one of {known}")
    return sorted(paths)


def _stdlib_paths() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for path in sorted(root.rglob("*.py")):
        if STDLIB_SKIPS.isdisjoint(path.relative_to(root).parts):
            try:
                path.read_bytes().decode()
            except (OSError, UnicodeDecodeError):
                continue
            paths.append(path)
    if not paths:
        raise ValueError(f"{STDLIB}: no source files in {root}; give a text file instead")
    return paths
