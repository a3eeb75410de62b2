"""Fingerprints of weights on disk, which identify the base model of an adapter."""

import hashlib
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from bptjax.parallel.mesh import cache_directory, make_cache_directory
from bptjax.run.output import write_atomically

# Threads hash pieces, so that a single large file is hashed on all cores.
PIECE, BUFFER = 1 << 26, 1 << 22
# A file modified twice within the file system's time step keeps its mtime. So a digest is cached
# only if the last modification is at least this number of seconds ago.
SETTLED = 2.0


def fingerprint(files: Sequence[Path]) -> str:
    """Returns the SHA-256 of every byte of the files, in this order. Names do not count.

    Digests are cached in `$XDG_CACHE_HOME/bptjax` (`~/.cache/bptjax`) by path, size, inode and
    times of modification, one small file per weights file.

    Raises:
      OSError: a file cannot be read, or changes while it is hashed.
    """
    digests = [_cached(file) or _hashed(file) for file in files]
    return "sha256:" + hashlib.sha256("".join(digests).encode()).hexdigest()


def _hashed(file: Path, piece_size: int = PIECE) -> str:
    """Hashes a file in pieces of `piece_size` bytes, and caches the digest."""
    start, before = time.time(), _identity(file)
    size = before[0]
    with ThreadPoolExecutor() as threads:  # hashlib releases the interpreter lock.
        pieces = threads.map(
            lambda at: _piece(file, at, min(piece_size, size - at)),
            range(0, max(size, 1), piece_size),
        )
        digest = hashlib.sha256(b"".join(pieces)).hexdigest()
    if _identity(file) != before:
        raise OSError(f"{file} changed while it was read")
    if start - max(before[2:]) / 1e9 > SETTLED:
        _store(file, before, digest)
    return digest


def _piece(file: Path, start: int, size: int) -> bytes:
    """Hashes `size` bytes from `start`."""
    value, left = hashlib.sha256(), size
    buffer = memoryview(bytearray(min(BUFFER, left)))
    with file.open("rb", buffering=0) as stream:
        stream.seek(start)
        while left and (n := stream.readinto(buffer[: min(left, BUFFER)])):
            value.update(buffer[:n])
            left -= n
    if left:
        raise OSError(f"{file} changed while it was read")
    return value.digest()


def _identity(file: Path) -> list[int]:
    """Returns size, inode, and modification times of content and inode, in nanoseconds."""
    stat = file.stat()
    return [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]


def _entry(file: Path) -> Path:
    """Returns the cache file for a weights file."""
    name = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:32]
    return cache_directory() / "fingerprints" / name


def _cached(file: Path) -> str | None:
    """Returns the cached digest; None if it is missing, damaged or outdated."""
    try:
        content, check = _entry(file).read_text().splitlines()
        if hashlib.sha256(content.encode()).hexdigest() != check:
            return None
        identity, digest = json.loads(content)
    except (OSError, ValueError):
        return None
    return digest if identity == _identity(file) else None


def _store(file: Path, identity: list[int], digest: str) -> None:
    """Caches a digest. If the cache cannot be written, the next start hashes again."""
    content = json.dumps([identity, digest])
    check = hashlib.sha256(content.encode()).hexdigest()
    with suppress(OSError):
        make_cache_directory()
        write_atomically(_entry(file), f"{content}\n{check}\n")
