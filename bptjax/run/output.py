"""Atomic writes: files and directories appear complete or not at all, even if the process is
killed. Also formats errors."""

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Full disk, exceeded quota, and exceeded file size.
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFull(OSError):
    """The disk is full. The message names the file or directory and the remedy."""


def full_disk(error: Exception) -> str:
    """Returns the reason if an error says that the disk is full; else an empty string. Libraries
    raise many kinds of exceptions for a full disk."""
    return next((text for n in FULL_DISK if (text := os.strerror(n)) in str(error)), "")


def describe(error: Exception) -> str:
    """Formats an error in one line; a file error as the file's name and the reason, without the
    errno."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return " ".join(str(error).split())


def plural(number: int, noun: str, ending: str = "s") -> str:
    """Formats a number and its noun, with `ending` unless the number is 1."""
    return f"{number:,} {noun}{ending * (number != 1)}"


@contextmanager
def explain_full_disk(directory: Path) -> Iterator[None]:
    """Raises `DiskFull` instead of other errors of a full disk while `directory` is written."""
    try:
        yield
    except Exception as error:
        if isinstance(error, DiskFull) or not (reason := full_disk(error)):
            raise
        text = f"{directory}: {reason}; free some space, then start the same command again"
        raise DiskFull(text) from error


def write_atomically(file: Path, text: str) -> None:
    """Writes a file, and creates its directory if necessary. Replaces characters that UTF-8 cannot
    encode with question marks. A killed process may leave a temporary file; see `leftovers`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may write the same file.
    fresh = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        # An existing file of this name may be a link that another user planted.
        fresh.unlink(missing_ok=True)
        with fresh.open("x", encoding="utf-8", errors="replace") as stream:
            stream.write(text)
        fresh.replace(file)
    finally:
        fresh.unlink(missing_ok=True)


def leftovers(file: Path) -> set[Path]:
    """Returns the temporary files that killed processes left while writing `file`."""
    return set(file.parent.glob(f".{file.name}.*.tmp"))


@contextmanager
def replaced_files(directory: Path) -> Iterator[Path]:
    """Yields an empty hidden directory in `directory`. When the block ends, each file in it
    atomically replaces the file of the same path in `directory`. Only one process at a time may use
    it; the next call removes the leftovers of a killed one."""
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
    """Yields a hidden directory that becomes `out` when the block ends, or is removed if it fails.

    The next call for `out` removes the directory of a killed process.

    Args:
      replace: whether `out` may hold an earlier output, which is removed at the end.

    Raises:
      ValueError: `out` exists and is not empty, or cannot be written.
    """
    if out.exists() and not replace and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: must be new or empty; choose another directory")
    with _hidden_directory(out) as hidden:
        yield hidden
        if out.exists():
            out.rename(hidden.with_suffix(".old.tmp"))
        hidden.rename(out)


@contextmanager
def atomic_file(out: Path) -> Iterator[Path]:
    """Yields the path of a file to write in a hidden directory. When the block ends, it moves next
    to `out`, as do other files in that directory; they are removed if the block fails.

    The next call for `out` removes the files of a killed process.

    Raises:
      ValueError: `out` or another of the files exists, or cannot be written.
    """

    def check(file: Path) -> None:
        if file.exists() or file.is_symlink():
            raise ValueError(f"{file}: must be new; choose another file")

    check(out)
    with _hidden_directory(out) as hidden:
        yield hidden / out.name
        targets = {file: out.with_name(file.name) for file in sorted(hidden.iterdir())}
        for target in targets.values():
            check(target)
        for file, target in targets.items():
            file.rename(target)


@contextmanager
def _hidden_directory(out: Path) -> Iterator[Path]:
    """Yields a hidden directory next to `out`, which is removed when the block ends."""
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
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
        shutil.rmtree(hidden.with_suffix(".old.tmp"), ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _remove_leftovers(out: Path) -> None:
    """Removes hidden directories that killed processes left, which no process has locked."""
    pattern = re.compile(rf"\.{re.escape(out.name)}\.\d+(\.old)?\.tmp")
    for path in out.parent.glob(".*.tmp"):
        if pattern.fullmatch(path.name) and (lock := _locked(path)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _locked(directory: Path) -> int | None:
    """Locks a directory for this process. Returns None if it is locked or cannot be locked.

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
