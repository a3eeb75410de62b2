"""Checkpoints in a fast local directory, and the thread that copies them to the run directory."""

import hashlib
import json
import logging
import os
import secrets
import shutil
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from bptjax.run.checkpoint_files import (
    BEST,
    HALF_WRITTEN,
    MANIFEST,
    clear_half_written,
    damage,
    discard,
    set_aside,
    steps_in,
    write_manifest,
)
from bptjax.run.output import explain_full_disk, leftovers, write_atomically

log = logging.getLogger("bptjax")
# Has the same text in the local directory and in the run's, while they belong together.
OWNER = ".local"
# Directory of an unfinished copy by several processes: a file of each process that has copied its
# part, with the part's manifest.
PARTS = "parts"
# Seconds between two looks at the parts of other processes.
POLL_S = 0.2


def local_directory(local_dir: str, run_dir: Path, process: int | None = None) -> Path:
    """Returns the directory inside `local_dir` for the checkpoints of one run, or for the parts of
    one of its processes."""
    run_dir = run_dir.resolve()
    code = hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:12]
    name = f"{run_dir.name}-{code}" + ("" if process is None else f"-{process}")
    return Path(os.path.expanduser(local_dir)).resolve() / name


def make_local_directory(local_dir: str, run_dir: Path, process: int | None = None) -> None:
    """Makes the private local directory of a run, or of one of its processes.

    Raises:
      ValueError: `local_dir` is inside the run directory or cannot be written, or the directory
        belongs to another user.
    """
    directory = local_directory(local_dir, run_dir, process)
    rule = f"checkpoint.local_dir={local_dir}: must be"
    if directory.is_relative_to(run_dir.resolve()):
        raise ValueError(f"{rule} outside the run directory {run_dir}; choose another")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        text = f"{rule} a writable directory ({error.strerror}); choose another"
        raise ValueError(text) from error
    private = stat.S_ISDIR(status.st_mode) and not stat.S_IMODE(status.st_mode) & 0o077
    if not private or status.st_uid != os.geteuid() or not os.access(directory, os.W_OK | os.X_OK):
        raise ValueError(
            f"{rule} private to you in {directory}; remove this directory, or choose another"
        )


class Processes(NamedTuple):
    """The processes of a run, each of which copies its part of a checkpoint.

    Attributes:
      index: number of this process.
      count: number of all processes.
      gather: returns the values of all processes; all call it in the same order.
      merge: completes the arrays of a checkpoint, of which each process wrote a part.
      failed: called at once, in a thread, with an error of this process's copies.
    """

    index: int
    count: int
    gather: Callable[[Any], list[Any]]
    merge: Callable[[Path], None]
    failed: Callable[[Exception], None]


class Copies:
    """Copies finished checkpoints from a local directory to the run directory, one at a time.

    A copy gets its final name when all of its files are on disk and match the manifest's checksums;
    then the local checkpoint is removed. If a checkpoint is finished while an older one still waits
    for its copy, the older one is removed unless it must be kept.

    With several processes, each saves its part of a checkpoint to its own local directory, which
    other hosts need not see. All of them copy the same steps: none is removed before its copy, so a
    save waits while two others are not copied. Process 0 renames a checkpoint once all parts are
    there.
    """

    def __init__(
        self,
        local: Path,
        directory: Path,
        limit: int | None,
        every: int | None,
        processes: Processes | None = None,
    ):
        """Names the local and the final directory of the checkpoints.

        Args:
          limit: number of newest checkpoints to keep in the final directory; None for all.
          every: also keep checkpoints of steps that are multiples of this number.
          processes: the processes, if there are several.
        """
        self._local, self._directory, self._all = local, directory, processes
        self._first = processes is None or processes.index == 0
        self._limit, self._every = limit, every
        self._writing, self._copying = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._written: Future[None] | None = None
        self._jobs: deque[Future[None]] = deque()
        self._lock = threading.Lock()
        # Steps that wait for their copy, and whether their checkpoints must be kept.
        self._waiting: list[tuple[int, bool]] = []
        self._warned = False

    def recover(self) -> None:
        """Copies the checkpoints that a killed process has finished but not copied, including
        damaged ones, which `Checkpoints` reports; of several processes, those with all parts."""
        owned = steps_in(self._local) if self._is_owner() else []
        for step in self._common(owned):
            self._copy(step)
        for step in owned:
            discard(self._local / str(step))

    def _common(self, owned: list[int]) -> list[int]:
        """Returns the steps to copy: those in the directories of all processes."""
        if self._all is None:
            return owned
        intact = [step for step in owned if not damage(self._local / str(step))]
        found = self._all.gather(intact)
        common, steps = [], {step for each in found for step in each}
        if self._first:
            for step in sorted(steps):
                target = self._directory / str(step)
                lacking = [i for i, each in enumerate(found) if step not in each]
                if target.exists() and not damage(target):
                    continue
                if lacking:
                    log.warning(
                        "%s: step %d is not copied to it, because the part of process %d is lost "
                        "or damaged",
                        self._directory,
                        step,
                        lacking[0],
                    )
                    continue
                if target.exists():
                    set_aside(target)
                clear_half_written(target)
                common.append(step)
        return self._all.gather(common)[0]

    def claim(self) -> None:
        """Empties the local directory before the first save of a process. After `recover` it holds
        only half-written checkpoints, or checkpoints of a run that was removed."""
        finished = steps_in(self._local)
        if finished:
            text = "%s: removing steps %s, which are superseded or belong to another run than %s"
            log.warning(text, self._local, finished, self._directory.parent)
        for step in finished:
            discard(self._local / str(step))
        self._clear()
        for directory in (self._local, self._directory):
            for file in leftovers(directory / OWNER):
                file.unlink()
        owner = secrets.token_hex(8)
        if self._all is not None:
            # The parts of another number of processes do not fit.
            owner = f"{self._all.gather(owner)[0]} of {self._all.count}"
        elif self._is_owner():
            return
        for directory in (self._local, self._directory)[: 1 + self._first]:
            write_atomically(directory / OWNER, owner)
            _flush(directory / OWNER)

    def follow(self, wait: Callable[[], None], step: int, best: bool) -> None:
        """Copies the checkpoint of a step in other threads as soon as `wait` returns.

        Args:
          best: whether the checkpoint is the best one, which must be kept.
        """
        keep = best or (self._every is not None and step % self._every == 0)
        self._written = self._writing.submit(self._add, wait, step, keep)

    def wait_written(self) -> None:
        """Waits until the last local checkpoint is finished and every checkpoint that must be kept
        is copied; of several processes, until at most one is not. Raises the first error of the
        copying threads."""
        written, self._written = self._written, None
        if written is not None:
            written.result()
        while self._jobs and (self._jobs[0].done() or self._behind()):
            self._jobs.popleft().result()

    def _behind(self) -> bool:
        if self._all is not None:
            return len(self._jobs) > 1
        return any(keep for _, keep in self._waiting)

    def wait(self) -> None:
        """Waits until the last checkpoint is in the run directory. Raises the first error."""
        self.wait_written()
        while self._jobs:
            self._jobs.popleft().result()

    def close(self) -> None:
        """Waits like `wait`, then removes the local directory if it is empty."""
        try:
            self.wait()
        finally:
            self._writing.shutdown()
            self._copying.shutdown()
        self._clear()
        if {path.name for path in self._local.glob("*")} <= {OWNER}:
            (self._local / OWNER).unlink(missing_ok=True)
            with suppress(OSError):
                self._local.rmdir()

    def _clear(self) -> None:
        for step in steps_in(self._local, HALF_WRITTEN):
            clear_half_written(self._local / str(step))

    def _is_owner(self) -> bool:
        """Returns whether the local checkpoints belong to the run in the run directory."""
        with suppress(FileNotFoundError):  # Other errors must not remove anything.
            owner = (self._directory / OWNER).read_text(errors="replace")
            fits = self._all is None or owner.endswith(f" of {self._all.count}")
            return fits and (self._local / OWNER).read_text(errors="replace") == owner
        return False

    def _add(self, wait: Callable[[], None], step: int, keep: bool) -> None:
        wait()
        with self._lock:
            late = [old for old, keeps in self._waiting if not keeps and self._all is None]
            self._waiting = [each for each in self._waiting if each[0] not in late]
            self._waiting.append((step, keep))
        for old in late:
            discard(self._local / str(old))
        if late and not self._warned:
            self._warned = True
            log.warning(
                "%s: step %d is not copied to it, because step %d was saved before an earlier copy "
                "finished; this may happen again",
                self._directory,
                late[0],
                step,
            )
        self._jobs.append(self._copying.submit(self._copy_next))

    def _copy_next(self) -> None:
        with self._lock:
            if not self._waiting:  # A newer step has replaced this job's step.
                return
            step, _ = self._waiting.pop(0)
        try:
            self._copy(step)
        except Exception as error:
            if self._all is not None:  # The others would wait for this part.
                self._all.failed(error)
            raise
        best = self._local / str(step) / BEST
        preserved = {json.loads(best.read_text())["step"]} if best.exists() else set()
        discard(self._local / str(step))
        if self._first and self._limit is not None:
            steps = steps_in(self._directory)
            preserved |= {*steps[-self._limit :]}
            preserved |= {old for old in steps if self._every and old % self._every == 0}
            for old in set(steps) - preserved:
                discard(self._directory / str(old))

    def _copy(self, step: int) -> None:
        """Moves a finished local checkpoint to the run directory."""
        source, target = self._local / str(step), self._directory / str(step)
        try:
            with explain_full_disk(target):
                if self._all is not None:
                    _copy_part(source, target, self._all)
                else:
                    if target.exists() and damage(target):
                        set_aside(target)
                    if not target.exists():
                        _copy_directory(source, target)
                if self._first and (source / BEST).exists():
                    write_atomically(self._directory.parent / BEST, (source / BEST).read_text())
        except FileNotFoundError as error:
            if self._directory.parent.is_dir():
                raise
            raise FileNotFoundError(f"{self._directory.parent}: was removed") from error


def _copy_directory(source: Path, target: Path) -> None:
    """Copies a finished checkpoint, which appears complete or not at all.

    Raises:
      OSError: a file cannot be written, or the checksums of the copy differ.
    """
    hidden = clear_half_written(target)
    try:
        hidden.mkdir()
        paths = [path for path in sorted(source.rglob("*")) if path != source / BEST]
        _copy_files(source, hidden, paths)
        if (fault := damage(hidden)) and not damage(source):
            raise OSError(f"{target}: the copy of {source} is damaged ({fault})")
        hidden.rename(target)
    except OSError:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    _flush(target.parent)


def _copy_part(source: Path, target: Path, processes: Processes) -> None:
    """Copies this process's part of a checkpoint, and waits until process 0 has completed it.

    Raises:
      OSError: a file cannot be written, or the checksums of a copy differ.
    """
    hidden, first = target.with_name(target.name + HALF_WRITTEN), processes.index == 0
    parts = hidden / PARTS
    parts.mkdir(parents=True, exist_ok=True)
    # The other files describe the whole checkpoint, and are the same in all processes.
    names = (path.relative_to(source) for path in sorted(source.rglob("*")))
    own = (name for name in names if first or "process_" in str(name))
    paths = [source / name for name in own if name.name not in (BEST, MANIFEST)]
    _copy_files(source, hidden, paths)
    write_atomically(parts / str(processes.index), (source / MANIFEST).read_text())
    if not first:
        while target.name not in map(str, steps_in(target.parent)):
            target.parent.stat()  # Fails if the run directory was removed.
            time.sleep(POLL_S)
        return
    while len(steps_in(parts)) < processes.count:
        target.parent.stat()
        time.sleep(POLL_S)
    wanted: dict[str, int] = {}
    for index in reversed(range(processes.count)):
        wanted |= json.loads((parts / str(index)).read_text())
    shutil.rmtree(parts)
    processes.merge(hidden / "state")
    write_manifest(hidden)
    found = json.loads((hidden / MANIFEST).read_text())
    if changed := [name for name in found if wanted.get(name, found[name]) != found[name]]:
        raise OSError(f"{target}: the copy of {changed[0]} is damaged")
    for path in (*hidden.rglob("*"), hidden):
        _flush(path)
    hidden.rename(target)
    _flush(target.parent)


def _copy_files(source: Path, hidden: Path, paths: list[Path]) -> None:
    """Copies files and directories, and flushes them to disk."""
    for path in paths:
        copy = hidden / path.relative_to(source)
        if path.is_dir():
            copy.mkdir(parents=True, exist_ok=True)
        else:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    for path in (*paths, source):
        _flush(hidden / path.relative_to(source))


def _flush(path: Path) -> None:
    """Flushes a file or directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
