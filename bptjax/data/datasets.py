"""Hugging Face datasets: Arrow files saved by `datasets`, and parquet files of the hub."""

import functools
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path

import pyarrow as pa

from bptjax.data.changes import FileVersion, check_unchanged, file_version
from bptjax.data.files import RowGroup
from bptjax.data.rows import RowReader
from bptjax.run.json_files import read_json

HUB = "hf://"


def arrow_batches(paths: Sequence[Path], read: RowReader) -> list[RowGroup]:
    """Opens the record batches of memory-mapped Arrow files, IPC streams or files."""
    batches = []
    for path in paths:
        try:
            before, table = file_version(path), _table(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise ValueError(f"{path}: not an Arrow file ({error})") from error
        columns = read.columns(table.schema.names, path)
        for number, batch in enumerate(table.select(list(columns)).to_batches()):
            # Values stay in the mapped file until a record is read.
            check = functools.cache(functools.partial(_check, f"{path}, row group {number}", batch))
            decoded = columns, [batch.column(name) for name in columns]
            decode = functools.partial(_unchanged, path, before, check, decoded)
            batches.append(RowGroup(path, number, batch.num_rows, decode, read))
    return batches


def _unchanged(path: Path, before: FileVersion, check: Callable, decoded: tuple) -> tuple:
    # If a file is shorter than its mapping, reading would end the process by SIGBUS.
    check_unchanged(path, before)
    check()
    return decoded


def _check(where: str, batch: pa.RecordBatch) -> None:
    """Checks the offsets and indices of a record batch, which pyarrow would follow out of the file.

    Raises:
      OSError: the record batch is damaged.
    """
    # Text that is not UTF-8 is a bad record, not a bad record batch.
    binary = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
    try:
        for column in batch.columns:
            column.view(binary.get(column.type, column.type)).validate(full=True)
    except pa.ArrowInvalid as error:
        # Not a ValueError: `data.bad_records=skip` would check the batch again for each record.
        raise OSError(f"{where}: must be valid Arrow data ({error}); write it again") from error


def _table(path: Path) -> pa.Table:
    source = pa.memory_map(str(path))
    try:
        return pa.ipc.open_stream(source).read_all()
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.open_file(source).read_all()


def saved_files(directory: Path, files: Sequence[Path]) -> list[Path]:
    """Returns `files` without the Arrow files that only cache transformations of a saved dataset.

    Raises:
      ValueError: the directory holds several splits.
    """
    for splits in sorted(directory.rglob("dataset_dict.json")):
        names = read_json(splits).get("splits", [])
        raise ValueError(
            f"{splits.parent}: must be a single split of {', '.join(names)}; give "
            f"{splits.parent / (names or ['train'])[0]}, for example"
        )
    listed: dict[Path, set[str]] = {}
    for state in directory.rglob("state.json"):
        names = [file.get("filename") for file in read_json(state).get("_data_files", [])]
        listed[state.parent] = {str(name) for name in names}
    return [
        file
        for file in files
        if file.suffix != ".arrow" or file.name in listed.get(file.parent, {file.name})
    ]


def download(path: str) -> list[Path]:
    """Downloads parquet files of a dataset from the hub, or finds them in its local cache.

    Args:
      path: `hf://owner/name` for the files with `train` in their path, or `hf://owner/name/PATTERN`
        for the files whose path in the repository matches the pattern.

    Raises:
      ValueError: a malformed path, no network, an unknown dataset, or no matching file in it.
    """
    owner, name, *rest = *path.removeprefix(HUB).strip("/").split("/", 2), ""
    if not owner or not name:
        raise ValueError(f"{path}: must be {HUB}owner/name or {HUB}owner/name/PATTERN")
    pattern = rest[0] or "*train*.parquet"
    from huggingface_hub import snapshot_download

    try:
        root = Path(
            snapshot_download(f"{owner}/{name}", repo_type="dataset", allow_patterns=pattern)
        )
    except Exception as error:
        # The hub's client lets every exception of its transport through.
        raise ValueError(f"{path}: cannot download: {str(error).splitlines()[0]}") from error
    # The cache may hold files of an earlier run.
    files = [p for p in Path(root).rglob("*") if p.is_file()]
    files = [p for p in files if fnmatch(p.relative_to(root).as_posix(), pattern)]
    if not files:
        raise ValueError(f"{path}: must match a file of the dataset; change the pattern {pattern}")
    return files
