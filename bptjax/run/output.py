"""Files and directories that appear complete or not at all, even if the process is killed; texts of
errors."""

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# A full disk, a spent quota, and the largest size of a file.
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFull(OSError):
    """The disk is full. The message names the file or directory and the remedy."""


def full_disk(error: Exception) -> str:
    """Returns the reason if an error says that the disk is full, else an empty text. Libraries
    report a full disk by exceptions of many kinds."""
    return next((text for n in FULL_DISK if (text := os.strerror(n)) in str(error)), "")


def describe(error: Exception) -> str:
    """Formats an error in one line: one of a file by its name and the reason, without the number of
    the reason."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return " ".join(str(error).split())


def plural(number: int, noun: str, ending: str = "s") -> str:
    """Formats a number and its noun, with the ending of the plural unless the number is 1."""
    return f"{number:,} {noun}{ending * (number != 1)}"


@contextmanager
def explain_full_disk(directory: Path) -> Iterator[None]:
    """Raises `DiskFull` in place of an error of a full disk while `directory` is written."""
    try:
        yield
    except Exception as error:
        if isinstance(error, DiskFull) or not (reason := full_disk(error)):
            raise
        text = f"{directory}: {reason}; make room, then start the same command again"
        raise DiskFull(text) from error


def write_atomically(file: Path, text: str) -> None:
    """Writes a file, and creates its directory if there is none. Characters that UTF-8 does not
    have become question marks. A killed process may leave a temporary file; see `leftovers`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may write the same file.
    fresh = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        # A file of this name that exists may be a link, planted in a directory of several users.
        fresh.unlink(missing_ok=True)
        with fresh.open("x", encoding="utf-8", errors="replace") as stream:
            stream.write(text)
        fresh.replace(file)
    finally:
        fresh.unlink(missing_ok=True)


def leftovers(file: Path) -> set[Path]:
    """Returns the temporary files of processes that were killed while they wrote `file`."""
    return set(file.parent.glob(f".{file.name}.*.tmp"))


@contextmanager
def replaced_files(directory: Path) -> Iterator[Path]:
    """Yields an empty hidden directory inside `directory`. When the block ends, its files replace
    those of the same paths in `directory`, each complete. One process at a time may do so; what it
    leaves behind if it is killed, the next call removes."""
    hidden = directory / ".replaced.tmp"
    shutil.rmtree(hidden, ignore_errors=True)
    try:
        hidden.mkdir()
        yield hidden
        for file in hidden.rglob("*"):
            if file.is_file():
                target = directory / file.relative_to(hidden)
                target.parent.mkdir(parents=True, exist_ok=True)
                file.replace(target)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


@contextmanager
def atomic_directory(out: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yields a hidden directory beside `out`, renames it to `out` when the block ends, and removes
    it when the block raises. A killed process leaves it behind; the next call for `out` removes it.

    Args:
      replace: whether `out` may hold an earlier output, which is removed at the end.

    Raises:
      ValueError: `out` exists and is not empty, or cannot be written.
    """
    if out.exists() and not replace and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: must be new or empty; choose another directory")
    _remove_leftovers(out)
    hidden = out.parent / f".{out.name}.{os.getpid()}.tmp"
    try:
        hidden.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"{out}: must be writable ({error.strerror}); choose another") from error
    lock = _locked(hidden)
    try:
        with explain_full_disk(out):
            yield hidden
        if out.exists():
            out.rename(hidden.with_suffix(".old.tmp"))
        hidden.rename(out)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
        shutil.rmtree(hidden.with_suffix(".old.tmp"), ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _remove_leftovers(out: Path) -> None:
    """Removes hidden directories of killed processes, which no process has locked."""
    pattern = re.compile(rf"\.{re.escape(out.name)}\.\d+(\.old)?\.tmp")
    for path in out.parent.glob(".*.tmp"):
        if pattern.fullmatch(path.name) and (lock := _locked(path)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _locked(directory: Path) -> int | None:
    """Locks a directory for this process. Returns None if another process has locked it, or if it
    cannot be locked.

    A lock ends with its process. Unlike a process id, it is valid on every host that shares the
    file system.
    """
    handle = None
    with suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return handle
    if handle is not None:
        os.close(handle)
    return None
