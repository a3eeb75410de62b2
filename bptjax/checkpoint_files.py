"""Names, checksums and removal of the directories that hold one checkpoint each."""

import json
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from itertools import count
from pathlib import Path

MANIFEST = "manifest.json"
BEST = "best.json"
# Suffix of the names that orbax gives.
HALF_WRITTEN = ".orbax-checkpoint-tmp"


def steps_in(directory: Path, suffix: str = "") -> list[int]:
    """Returns the steps of the checkpoints in a directory, in order.

    Args:
      suffix: of the names; `HALF_WRITTEN` for checkpoints that are not finished, or half removed.
    """
    names = [path.name for path in directory.glob(f"*{suffix}")]
    return sorted(int(n) for name in names if (n := name.removesuffix(suffix)).isdecimal())


def set_aside(path: Path) -> None:
    """Renames a checkpoint to `<step>.aside<n>`."""
    names = (path.with_name(f"{path.name}.aside{n}") for n in count(1))
    path.rename(next(name for name in names if not name.exists()))


def clear_half_written(path: Path) -> Path:
    """Returns the name of a checkpoint before it is finished, and removes what has that name."""
    hidden = path.with_name(path.name + HALF_WRITTEN)
    if hidden.exists():
        shutil.rmtree(hidden)
    return hidden


def discard(path: Path) -> None:
    """Removes a checkpoint. A killed process leaves it complete or half-written."""
    shutil.rmtree(path.rename(clear_half_written(path)))


def write_manifest(path: Path) -> None:
    """Writes the CRC-32 of every file of a checkpoint."""
    files = [str(f.relative_to(path)) for f in path.glob("*/**/*") if f.is_file()]
    (path / MANIFEST).write_text(json.dumps(_checksums(path, files), indent=1))


def damage(directory: Path) -> str:
    """Returns the damage of a finished checkpoint, or an empty text."""
    try:
        wanted = json.loads((directory / MANIFEST).read_text())
        if not wanted or not isinstance(wanted, dict):
            return f"{MANIFEST} lists no files"
        if any(".." in Path(name).parts or Path(name).is_absolute() for name in wanted):
            return f"{MANIFEST} lists files elsewhere"
        found = _checksums(directory, list(wanted))
    except (OSError, ValueError) as error:
        return f"{MANIFEST}: {error}"
    changed = [file for file in wanted if found[file] != wanted[file]]
    return f"wrong checksum: {changed[0]}" if changed else ""


def _checksums(directory: Path, files: list[str]) -> dict[str, int]:
    def crc(file: str) -> int:
        with (directory / file).open("rb") as stream:
            blocks = iter(lambda: stream.read(1 << 22), b"")
            return reduce(lambda value, block: zlib.crc32(block, value), blocks, 0)

    with ThreadPoolExecutor() as threads:  # crc32 releases the interpreter lock.
        return dict(zip(files, threads.map(crc, files), strict=True))
