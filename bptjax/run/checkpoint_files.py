"""Names, checksums and removal of checkpoint directories."""

import json
import re
import shutil
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import reduce
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile

MANIFEST = "manifest.json"
# Key of the step in the manifest. All other keys are file names, which contain a slash.
STEP = "step"
BEST = "best.json"
# Suffix that orbax gives.
HALF_WRITTEN = ".orbax-checkpoint-tmp"
# Seconds between looks at a disk, and seconds without an answer after which it hangs.
PROBE_S, HANG_S = 60, 300


def steps_in(directory: Path, suffix: str = "") -> list[int]:
    """Returns the steps of the checkpoints in a directory, in order.

    Args:
      suffix: end of the names; `HALF_WRITTEN` for checkpoints that are unfinished or half removed.
    """
    names = [path.name.removesuffix(suffix) for path in directory.glob(f"*{suffix}")]
    # At most 9 digits, because steps are int32.
    return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]{,8}", name))


def set_aside(path: Path) -> None:
    """Renames a checkpoint to `<step>.aside<n>`."""
    names = (path.with_name(f"{path.name}.aside{n}") for n in count(1))
    path.rename(next(name for name in names if not name.exists()))


def clear_half_written(path: Path) -> Path:
    """Removes what is left of a half-written checkpoint, and returns its path."""
    hidden = path.with_name(path.name + HALF_WRITTEN)
    if hidden.is_dir():
        shutil.rmtree(hidden)
    hidden.unlink(missing_ok=True)
    return hidden


def discard(path: Path) -> None:
    """Removes a checkpoint, which is complete or half-written if the process is killed."""
    shutil.rmtree(path.rename(clear_half_written(path)))


def write_manifest(path: Path) -> None:
    """Writes the manifest of an unfinished checkpoint: its step, and the CRC-32 of every file."""
    files = [str(f.relative_to(path)) for f in path.glob("*/**/*") if f.is_file()]
    wanted = {STEP: int(path.name.removesuffix(HALF_WRITTEN))} | _checksums(path, files)
    (path / MANIFEST).write_text(json.dumps(wanted, indent=1))


def check_step(directory: Path) -> None:
    """Checks that an intact checkpoint has the name of its step.

    Raises:
      ValueError: the checkpoint was renamed.
    """
    step, saved = directory.name, json.loads((directory / MANIFEST).read_text()).get(STEP)
    if str(saved) != step:
        raise ValueError(
            f"{directory}: must hold the checkpoint of step {step}, not of step {saved}; rename it"
        )


def damage(directory: Path) -> str:
    """Returns the damage of a finished checkpoint; empty if there is none."""
    try:
        wanted = json.loads((directory / MANIFEST).read_text())
        if not isinstance(wanted, dict) or not wanted.keys() - {STEP}:
            return f"{MANIFEST} lists no files"
        wanted.pop(STEP, None)
        if any(".." in Path(name).parts or Path(name).is_absolute() for name in wanted):
            return f"{MANIFEST} lists files elsewhere"
        if strange := [name for name in wanted if not (directory / name).is_file()]:
            return f"no file: {strange[0]}"
        actual = _checksums(directory, list(wanted))
    except (OSError, ValueError, RecursionError) as error:
        return f"{MANIFEST}: {error}"
    changed = [file for file in wanted if actual[file] != wanted[file]]
    return f"wrong checksum: {changed[0]}" if changed else ""


def watch_disk(
    directory: Path,
    done: threading.Event,
    failed: Callable[[Exception], None],
    *,
    every_s: float = PROBE_S,
    limit_s: float = HANG_S,
) -> None:
    """Writes an empty file now and then until `done` is set. If the disk hangs, calls `failed` with
    the error, from another thread, as the threads that wait for the disk may wait for ever.

    Args:
      every_s: seconds between two files.
      limit_s: seconds without an answer after which the disk hangs.
    """
    error = OSError(
        f"{directory}: the disk has not answered for {limit_s:g} s; mend it, then start the same "
        "command again"
    )
    while not done.wait(every_s):
        timer = threading.Timer(limit_s, failed, (error,))
        timer.daemon = True
        timer.start()
        with suppress(OSError), TemporaryFile(dir=directory):  # A save reports other errors.
            pass
        timer.cancel()


def _checksums(directory: Path, files: list[str]) -> dict[str, int]:
    def crc(file: str) -> int:
        with (directory / file).open("rb") as stream:
            blocks = iter(lambda: stream.read(1 << 22), b"")
            return reduce(lambda value, block: zlib.crc32(block, value), blocks, 0)

    with ThreadPoolExecutor() as threads:  # crc32 releases the interpreter lock.
        return dict(zip(files, threads.map(crc, files), strict=True))
