"""Checkpoints: saved in the background, checked before use, restored on any number of devices."""

import json
import logging
import math
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from bptjax.run.checkpoint_files import (
    BEST,
    HALF_WRITTEN,
    check_step,
    clear_half_written,
    damage,
    set_aside,
    steps_in,
    watch_disk,
    write_manifest,
)
from bptjax.run.json_files import read_json
from bptjax.run.local_checkpoints import OWNER, Copies, Processes
from bptjax.run.output import explain_full_disk, write_atomically
from bptjax.run.pinned_memory import PINNED, reserve

log = logging.getLogger("bptjax")

# Seconds that a save may take. Orbax's default of 600 would end a run whose disk is slow or whose
# clock is set forward. `watch_disk` and the supervisor detect saves that hang.
SAVE_TIMEOUT_S = 365 * 86_400

# Reason in an error of tensorstore, whose text has the names of several temporary files.
OS_ERROR = re.compile(r'": ([^":]+) \[os_error_code=')


@dataclass(frozen=True)
class CheckpointConfig:
    """How often checkpoints are written and how many are kept.

    Attributes:
      save_steps: optimizer steps between checkpoints.
      save_total_limit: number of newest checkpoints to keep. With 1, a damaged checkpoint has no
        older one to fall back on.
      keep_every: also keep the checkpoints of steps that are multiples of this number, itself a
        multiple of save_steps.
      keep_best: also save and keep the checkpoint with the best value of best_metric, named in
        best.json. Other commands still use the newest checkpoint.
      best_metric: metric of evaluations that keep_best and train.early_stopping_patience follow:
        lowest for eval/loss and eval/loss/SOURCE, else highest, such as eval/tasks.
      local_dir: directory on a fast local disk. Checkpoints are written to it and then copied to
        the run directory while the run goes on. Hosts need not share it.
    """

    save_steps: int = 500
    save_total_limit: int = 2
    keep_every: int | None = None
    keep_best: bool = False
    best_metric: str = "eval/loss"
    local_dir: str | None = None

    def __post_init__(self):
        for field in ("save_steps", "save_total_limit"):
            if (value := getattr(self, field)) < 1:
                raise ValueError(f"checkpoint.{field}={value}: must be at least 1")
        every = self.keep_every
        if every is not None and (every < 1 or every % self.save_steps):
            raise ValueError(
                f"checkpoint.keep_every={every}: must be a multiple of "
                f"checkpoint.save_steps={self.save_steps}"
            )
        local = self.local_dir
        if local is not None and (not local or os.path.expanduser(local).startswith("~")):
            raise ValueError(f"checkpoint.local_dir={local}: must be a directory; give its path")


@dataclass
class Best:
    """Best value of a metric of a run after step 0.

    Attributes:
      metric: name of the metric. Losses are best at their lowest, others at their highest.
      step: step of the best value; 0 before the first evaluation.
      value: best value.
      since: number of later evaluations, all without a better value.
    """

    metric: str = "eval/loss"
    step: int = 0
    value: float | None = None
    since: int = 0

    @classmethod
    def continued(cls, metric: str, saved: Mapping[str, Any]) -> "Best":
        """Returns the best of a saved run; none yet if the run followed another metric."""
        if "loss" in saved:  # Older versions followed eval/loss only.
            saved = {("value" if key == "loss" else key): x for key, x in saved.items()}
        best = cls(**saved)
        return best if best.metric == metric else cls(metric)

    @property
    def lowest(self) -> bool:
        return self.metric.startswith("eval/loss")

    def add(self, step: int, value: float) -> None:
        """Adds an evaluation. A value that is not finite is no improvement."""
        best = self.value
        better = best is None or (value < best if self.lowest else value > best)
        if math.isfinite(value) and better:
            self.step, self.value, self.since = step, value, 0
        else:
            self.since += 1


@dataclass
class _Step:
    """Orbax preservation policy that keeps the checkpoint of `step`, which may change."""

    step: int | None = None

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        return [each.step == self.step for each in checkpoints]


class DamagedCheckpointError(RuntimeError):
    """All finished checkpoints are damaged."""


class Checkpoints:
    """The checkpoints of one run, `<run_dir>/checkpoints/<step>/`.

    A checkpoint holds `state` (arrays by leaf path), `meta` (JSON) and a manifest with its step and
    the CRC-32 of every file, because orbax does not notice a flipped byte. A directory gets its
    final name when all files are on disk; older checkpoints are deleted afterwards. Each process
    writes the arrays of its devices into one shared directory, and process 0 decides which
    checkpoint all processes restore.

    Nothing is written before the first `save`, which removes half-written directories and renames
    checkpoints newer than the restored step (damaged or superseded) to `<step>.aside<n>`.

    With a local directory, checkpoints are finished there first and then copied. `restore` makes
    the copies that a killed process has not made. Several processes have a local directory each.
    """

    def __init__(
        self,
        run_dir: Path | str,
        *,
        save_total_limit: int | None = None,
        keep_every: int | None = None,
        local: Path | None = None,
        failed: Callable[[Exception], None] | None = None,
        gather: Callable[[Any], list[Any]] | None = None,
    ):
        """Names the directories.

        Args:
          local: directory to which checkpoints, or the parts of this process, are written first.
          failed: called at once, in a thread, with the error of this process's part of a save.
            Orbax would raise the error only after a barrier at which the other processes do not
            arrive. From the first save on, also called if the disk hangs.
          gather: returns the values of all processes; for several processes with `local`.
        """
        self.directory = Path(run_dir).absolute() / "checkpoints"
        self._written_to = local or self.directory
        self._copies: Copies | None = None
        self._alone: ocp.options.MultiprocessingOptions | None = None
        if local:
            here, processes = jax.process_index(), None
            if gather and failed:
                # A process saves without the others: all of its arrays are parts.
                self._alone = ocp.options.MultiprocessingOptions(
                    primary_host=None, active_processes={here}, barrier_sync_key_prefix=f"{here}"
                )
                processes = Processes(here, jax.process_count(), gather, _merge, failed)
            self._copies = Copies(local, self.directory, save_total_limit, keep_every, processes)
        self._limit, self._every = save_total_limit, keep_every
        self._has_run = self.directory.parent.is_dir()
        self._manager: ocp.CheckpointManager | None = None
        self._step, self._best = -1, _Step()
        self._record: dict[str, Any] | None = None
        self._failed, self._closed, self._watched = failed, threading.Event(), False
        self._reserved: threading.Thread | None = None
        # Orbax logs to stderr through absl. The first failure of a save is raised as an exception;
        # asyncio would log the failures of the remaining tasks, which nobody awaits any more.
        logging.getLogger("absl").setLevel(logging.ERROR)
        logging.getLogger("absl").addFilter(self._report if failed else _is_critical)
        logging.getLogger("asyncio").addFilter(_not_of_orbax)
        warnings.filterwarnings("ignore", "coroutine 'async_serialize.* was never awaited")

    def prepare(self, state: Any) -> None:
        """Prepares to save states like this one; returns while a thread allocates host memory."""
        if jax.default_backend() == "gpu" and not self._reserved:
            self._reserved = reserve(jax.tree.leaves(state))

    def save(self, step: int, state: Any, extra: dict, best: Best | None = None) -> None:
        """Copies `state` from the devices and returns while threads write the copy; with arrays in
        pinned host memory, returns when all is written.

        The caller may donate `state` (a pytree of jax arrays, none of size 0 and none uint4) after
        the call. `extra` is JSON. Waits for the previous save and raises its error. Skips the
        state of a step that was just saved or restored. Keeps the checkpoint of `best` in addition
        to the newest ones, and names it in `best.json` in the run directory.

        Raises:
          OSError: the previous save or this save failed, or the run directory was removed;
            `DiskFull` if the disk is full.
        """
        self._wait_written()
        if self._has_run and not self.directory.parent.is_dir():
            # Orbax would create the directory again, without the run's other files.
            raise FileNotFoundError(f"{self.directory.parent}: was removed")
        self._best.step = best.step if best else None
        self._record = {"step": best.step, best.metric: best.value} if best and best.step else None
        if step == self._step:
            if jax.process_index() == 0:
                self._write_best(self.directory.parent)
            return
        self._step, restored = step, self._step
        leaves = _leaves(state)
        meta = {"extra": extra, "leaves": {name: _kind(leaf) for name, leaf in leaves.items()}}
        items = {"state": ocp.args.StandardSave(leaves), "meta": ocp.args.JsonSave(meta)}
        if self._reserved:
            self._reserved.join()
        with self._saving():
            self._manager = self._manager or self._open(restored)
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
            if any(leaf.sharding.memory_kind == PINNED for leaf in leaves.values()):
                # Orbax writes these arrays without a copy. Until then, no step may overwrite them.
                self._manager.wait_until_finished()
            if self._copies:
                is_best = self._best.step == step
                self._copies.follow(self._manager.wait_until_finished, step, is_best)

    def wait(self) -> None:
        """Blocks until the last save is finished, and raises its error."""
        self._wait_written()
        if self._copies:
            self._copies.wait()

    def close(self) -> None:
        """Finishes the last save and ends all threads."""
        with ExitStack() as stack:
            stack.callback(self._closed.set)
            stack.callback(logging.getLogger("absl").removeFilter, self._report)
            if self._copies:
                stack.callback(self._copies.close)
            if self._manager:
                stack.enter_context(self._saving())
                stack.callback(self._manager.close)
                self._wait_written()

    def restore(self, abstract_state: Any, step: int | None = None) -> tuple[int, Any, dict] | None:
        """Restores the newest intact checkpoint, or the checkpoint of `step`.

        Returns (step, state, extra), or None if no checkpoint was ever finished. `abstract_state`
        is a tree of `jax.ShapeDtypeStruct` with shardings, or of arrays, on any mesh. Skips
        half-written and damaged checkpoints with a warning.

        Raises:
          ValueError: the trees, shapes or dtypes differ, there is no checkpoint of `step`, or the
            checkpoint was renamed.
          DamagedCheckpointError: all checkpoints are damaged, or the checkpoint of `step` is.
        """
        if self._copies:
            self._copies.recover()
        newest = self.newest(step) if jax.process_index() == 0 else None
        newest = int(
            multihost_utils.broadcast_one_to_all(np.int32(-1 if newest is None else newest))
        )
        if newest < 0:
            return None
        self._step = newest
        if self._manager:
            # The next save opens a new manager, after it has set newer checkpoints aside.
            with self._saving():
                self._manager.close()
            self._manager = None
        return newest, *_load(self.directory / str(newest), abstract_state)

    def newest(self, step: int | None = None) -> int | None:
        """Returns the step of the newest intact checkpoint, or `step` if its checkpoint is intact.

        Warns about skipped checkpoints. Returns None if no checkpoint was ever finished.

        Raises:
          ValueError, DamagedCheckpointError: as `restore`.
        """
        finished, skipped = steps_in(self.directory), []
        if step is None:
            newest = max(finished, default=-1)
            half = {
                s for d in (self.directory, self._written_to) for s in steps_in(d, HALF_WRITTEN)
            }
            skipped = [f"step {s} is half-written" for s in sorted(half) if s > newest]
        elif step not in finished:
            raise ValueError(f"step {step}: must be one of {finished} in {self.directory}")
        for candidate in finished[::-1] if step is None else [step]:
            if not (fault := damage(self.directory / str(candidate))):
                check_step(self.directory / str(candidate))
                if skipped:
                    log.warning(
                        "%s: %s; using step %d", self.directory, "; ".join(skipped), candidate
                    )
                return candidate
            skipped.append(f"step {candidate} is damaged ({fault})")
        unusable = f"{self.directory}: {'; '.join(skipped)}; "
        if finished:
            remedy = "restore one from a copy, or move the directory away to start from step 0"
            raise DamagedCheckpointError(unusable + remedy)
        if skipped:
            log.warning("%sstarting from step 0", unusable)
        return None

    def specs(self, step: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns (dtype, shape) of each array of the state, by the path of its leaf.

        Raises:
          ValueError: the metadata is damaged.
        """
        path = self.directory / str(step)
        return {name: _parsed(path, name, kind) for name, kind in _meta(path)["leaves"].items()}

    def extra(self, step: int) -> dict:
        """Returns the values saved with the state."""
        return _meta(self.directory / str(step))["extra"]

    def read(self, step: int, name: str) -> np.ndarray:
        """Reads one array of the state into host memory, in this process alone.

        Raises:
          ValueError: the array is missing, or its dtype or shape is not that in the metadata.
        """
        here = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(
            primary_host=here, active_processes={here}, barrier_sync_key_prefix=f"read{here}"
        )
        handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
        args = ocp.args.PyTreeRestore(
            item={name: 0},
            restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)},
            partial_restore=True,
        )
        with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
            array = reader.restore(self.directory / str(step) / "state", args=args)[name]
        path = self.directory / str(step)
        # Orbax returns a missing array as `item`.
        found, wanted = _kind(np.asarray(array)), _meta(path)["leaves"][name]
        if found != wanted:
            raise ValueError(
                f"{path}: {name} is {found} in its file and {wanted} in the metadata: must be the "
                "same; use another checkpoint"
            )
        return array

    def _wait_written(self) -> None:
        """Waits until the last save has written its files, and raises its error."""
        if self._copies:
            with self._saving():
                self._copies.wait_written()
        elif self._manager:
            with self._saving():
                self._manager.wait_until_finished()

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Converts every failure of a save to an OSError."""
        directory = self._written_to / str(self._step)
        with explain_full_disk(directory):
            try:
                yield
            except ValueError as error:  # Orbax raises it for file errors.
                text = str(error)
                if reason := OS_ERROR.search(text):
                    text = f"{directory}: {reason[1]}; mend it, then start the same command again"
                raise OSError(text) from error

    def _report(self, record: logging.LogRecord) -> bool:
        """Filter of orbax's log that calls `failed`, and drops all but critical records."""
        error = record.exc_info[1] if record.exc_info else None
        # A barrier fails if another process is lost.
        lost = isinstance(getattr(error, "__cause__", None), jax.errors.JaxRuntimeError)
        if self._failed and error and "Commit operations" in str(record.msg) and not lost:
            try:
                with self._saving():
                    raise error
            except Exception as explained:
                self._failed(explained)
        return _is_critical(record)

    def _open(self, restored: int) -> ocp.CheckpointManager:
        """Clears the way for checkpoints after step `restored`, and opens orbax's manager."""
        if not isinstance(sys.unraisablehook, _IgnoreClosedLoops):
            sys.unraisablehook = _IgnoreClosedLoops(sys.unraisablehook)
        if jax.process_index() == 0:
            for step in steps_in(self.directory, HALF_WRITTEN):
                clear_half_written(self.directory / str(step))
            for step in steps_in(self.directory):
                if step > restored:
                    set_aside(self.directory / str(step))
            if not self._copies:
                # Checkpoints in a local directory of an earlier start are superseded.
                (self.directory / OWNER).unlink(missing_ok=True)
        if self._copies:
            self._copies.claim()
        policies = ocp.checkpoint_managers
        limit = self._limit if self._written_to == self.directory else None
        policy_list: list[Any] = [policies.LatestN(limit), self._best]
        if self._every is not None:
            policy_list.append(policies.EveryNSteps(self._every))
        handlers: dict[str, Any] | None = None
        more: dict[str, Any] = {}
        if self._alone:
            state = ocp.StandardCheckpointHandler(multiprocessing_options=self._alone)
            # Merges and checks the arrays, which are complete in the run directory only.
            state.finalize = lambda directory: None
            meta = ocp.JsonCheckpointHandler(multiprocessing_options=self._alone)
            handlers = {"state": state, "meta": meta}
            more = {"multiprocessing_options": self._alone, "create": False}
        options = ocp.CheckpointManagerOptions(
            **more,
            preservation_policy=policies.AnyPreservationPolicy(policy_list),
            # Asynchronous creation keeps a process alive for five minutes after a failed save.
            async_options=ocp.AsyncOptions(
                post_finalization_callback=self._write_manifest,
                create_directories_asynchronously=False,
                timeout_secs=SAVE_TIMEOUT_S,
            ),
        )
        # The constructor is a barrier: no process lists steps before process 0 has cleaned up.
        manager = ocp.CheckpointManager(self._written_to, options=options, item_handlers=handlers)
        if self._failed and not self._watched:
            self._watched = True
            where = self._written_to, self._closed, self._failed
            threading.Thread(target=watch_disk, args=where, daemon=True).start()
        return manager

    def _write_manifest(self) -> None:
        """Writes the manifest. Orbax calls this in a thread of process 0 when every file is written
        and the directory is not yet renamed."""
        path = self._written_to / f"{self._step}{HALF_WRITTEN}"
        write_manifest(path)
        self._write_best(path if self._copies else self.directory.parent)

    def _write_best(self, directory: Path) -> None:
        if self._record:
            write_atomically(directory / BEST, json.dumps(self._record) + "\n")


def _merge(directory: Path) -> None:
    """Completes the arrays that several processes wrote to a directory."""
    alone = ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes={0}, barrier_sync_key_prefix="merge"
    )
    # Its type wants a path of etils, a package that orbax brings.
    handler: Any = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
    handler.finalize(directory)


def _is_critical(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.CRITICAL


def _not_of_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.getMessage()


class _IgnoreClosedLoops:
    """Hook for C++ errors without a caller. Ignores errors of writes that were pending when another
    write of the same save failed, because orbax has closed the event loop that they notify."""

    def __init__(self, before: Callable[[Any], Any]):
        self._before = before

    def __call__(self, found: Any) -> None:
        if str(found.exc_value) != "Event loop is closed":
            self._before(found)


def _load(path: Path, abstract_state: Any) -> tuple[Any, dict]:
    meta = _meta(path)
    wanted, saved = _leaves(abstract_state), meta["leaves"]
    for name in dict.fromkeys([*wanted, *saved]):
        here = _kind(wanted[name]) if name in wanted else "absent"
        if (there := saved.get(name, "absent")) != here:
            raise ValueError(
                f"{path}: {name} is {there} in the checkpoint and {here} in this run: must be the "
                "same; use the config of the checkpoint, or a new run directory"
            )
        if wanted[name].sharding is None:
            raise ValueError(f"abstract_state: {name}: must have a sharding")
    with ocp.StandardCheckpointer() as reader:
        state = reader.restore(path / "state", wanted)
    leaves = [state[name] for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves), meta["extra"]


def _meta(path: Path) -> dict:
    file = path / "meta" / "metadata"
    meta = read_json(file)
    if not all(isinstance(meta.get(name), dict) for name in ("extra", "leaves")):
        raise ValueError(f"{file}: must hold the objects extra and leaves; use another checkpoint")
    return meta


def _parsed(path: Path, name: str, kind: Any) -> tuple[str, tuple[int, ...]]:
    """Parses the dtype and the shape that `_kind` formatted."""
    match = re.fullmatch(r"(\w+)\[(\d{1,9}(?:, \d{1,9})*)?\]", str(kind), re.ASCII)
    with suppress(TypeError):  # There is no such dtype.
        if match is not None:
            shape = match[2].split(", ") if match[2] else ()
            return str(jnp.dtype(match[1])), tuple(map(int, shape))
    raise ValueError(
        f"{path}: {name}={kind!r:.99} in the metadata: must be a dtype and a shape; use another "
        "checkpoint"
    )


def _leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves by path. Orbax sees this flat dict, whatever the tree's classes."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(at, simple=True, separator="/"): leaf for at, leaf in leaves}


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
