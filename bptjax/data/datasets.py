"""Hugging Face data sets: Arrow files as `datasets` saves them, and parquet files of the hub."""

import functools
import json
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import pyarrow as pa

from bptjax.data.files import RowGroup, document, record_columns

HUB = "hf://"


def arrow_batches(paths: Sequence[Path], text_key: str, format: str) -> list[RowGroup]:
    """Opens the record batches of Arrow files, IPC streams or files, mapped into memory."""
    read = functools.partial(document, text_key=text_key, format=format)
    found = []
    for path in paths:
        try:
            table = _table(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise ValueError(f"{path}: not an Arrow file ({error})") from error
        columns = record_columns(table.schema.names, path, text_key, format)
        for number, batch in enumerate(table.select(list(columns)).to_batches()):
            decoded = columns, [batch.column(name) for name in columns]
            # The values stay in the mapped file until a record is read.
            decode = functools.partial(tuple, decoded)
            found.append(RowGroup(path, number, batch.num_rows, decode, read))
    return found


def _table(path: Path) -> pa.Table:
    source = pa.memory_map(str(path))
    try:
        return pa.ipc.open_stream(source).read_all()
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.open_file(source).read_all()


def saved_files(directory: Path, files: Sequence[Path]) -> list[Path]:
    """Returns `files` without the Arrow files that are no part of a saved data set: the caches of
    its transformations.

    Raises:
      ValueError: the directory holds several splits.
    """
    for splits in sorted(directory.rglob("dataset_dict.json")):
        names = _json(splits).get("splits", [])
        raise ValueError(
            f"{splits.parent} holds the splits {', '.join(names)}; name one, as in "
            f"{splits.parent / (names or ['train'])[0]}"
        )
    listed: dict[Path, set[str]] = {}
    for state in directory.rglob("state.json"):
        names = [file.get("filename") for file in _json(state).get("_data_files", [])]
        listed[state.parent] = {str(name) for name in names}
    return [
        file
        for file in files
        if file.suffix != ".arrow" or file.name in listed.get(file.parent, {file.name})
    ]


def _json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def download(path: str) -> list[Path]:
    """Fetches parquet files of a data set on the hub, or finds them in its local cache.

    Args:
      path: `hf://owner/name`, which takes the files with `train` in their path, or
        `hf://owner/name/PATTERN` with a pattern of their path in the repository.

    Raises:
      ValueError: a malformed path, no network, no such data set, or no such file in it.
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
        # The hub's client raises what its transport raises.
        raise ValueError(
            f"{path}: the hub does not give it: {str(error).splitlines()[0]}"
        ) from error
    # The cache may hold files that an earlier run asked for.
    found = [p for p in Path(root).rglob("*") if p.is_file()]
    found = [p for p in found if fnmatch(p.relative_to(root).as_posix(), pattern)]
    if not found:
        raise ValueError(f"{path}: no file of the data set matches {pattern}; give another pattern")
    return found
