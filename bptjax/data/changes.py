"""Detects data files that change during a run, or between two starts of a run."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Size in bytes, and time of the last modification in nanoseconds.
FileVersion = tuple[int, int]


class ChangedFile(OSError):
    """A data file has changed since the run opened it."""


class ChangedRecord(OSError):
    """A record is not one of those that the run began with.

    Not a ValueError: `data.bad_records=skip` must not skip it.
    """


def file_version(path: Path) -> FileVersion:
    """Returns the size of a file and the time of its last modification.

    Raises:
      OSError: the file cannot be found.
    """
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def check_unchanged(path: Path, before: FileVersion) -> None:
    """Checks a file that has just been read, or is about to be.

    Raises:
      OSError: the file is not the one that the run opened, or cannot be found.
    """
    if file_version(path) != before:
        raise ChangedFile(
            f"{path}: must not change during the run; restore it, then start the same command again"
        )


def count_and_size(documents: Any) -> list[int]:
    """Returns the number of files of training documents or images, and their total size in
    bytes."""
    sizes = [_size(path) for path in dict.fromkeys(paths(documents))]
    return [len(sizes), sum(sizes)]


def _size(path: str | Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # A broken link among images is a bad record.
        return 0


def paths(documents: Any) -> Iterator[str | Path]:
    """Yields the paths of the files that documents are read from."""
    if (path := getattr(documents, "path", None)) is not None:
        yield path
    yield from getattr(documents, "paths", ())  # Files of images.
    for part in getattr(documents, "files", [getattr(documents, "documents", None)]):
        yield from paths(part) if part is not None else ()
