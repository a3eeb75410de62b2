"""Profiles a step: memory and time by part, as tables, plots and CSV files."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax

from bptjax.cost.devices import GIB, KINDS, DeviceKind, kind_of
from bptjax.cost.profile_report import (
    memory_table,
    plot_memory,
    plot_time,
    table_lines,
    time_table,
    write_csv,
)
from bptjax.cost.timeline import compile_with_timeline
from bptjax.cost.trace import PASSES, read_events, time_by_part
from bptjax.parallel.distributed import all_gather_json
from bptjax.run.heartbeat import beat
from bptjax.training.spec import TrainSpec
from bptjax.training.state import TrainState, parameter_counts
from bptjax.training.step import Batch

# Number of the traced call. A program's first calls are slower.
TRACED = 3
# Directory of profiles in a run directory.
DIRECTORY = "profile"


class StepProfile:
    """Compiles a step and profiles it.

    Attributes:
      step: the compiled step, which runs without CUDA graphs; see `compile_with_timeline`.
    """

    def __init__(
        self,
        spec: TrainSpec,
        state: TrainState,
        batch: Batch,
        directory: Path,
        *,
        devices: str | None = None,
        kind: DeviceKind | None = None,
    ):
        """Compiles the step for a state and a batch, which may be abstract.

        Args:
          directory: directory of the profile.
          devices, kind: name and kind of the devices; by default the mesh's.
        """
        device = spec.mesh.devices.reshape(-1)[0].device_kind
        devices = devices or f"{spec.mesh.size} x {device}"
        self._kind = kind or KINDS.get(kind_of(device) or "")
        self._title = f"{_model_name(spec)}, {spec.config.train.seq_len:,} tokens, {devices}"
        self._directory = directory
        # A CPU can use any rates, because only shares of time are shown.
        self.step, self._program, self._timeline = compile_with_timeline(
            spec, state, batch, self._kind or KINDS["h200"]
        )

    def write_memory(self) -> list[str]:
        """Writes and plots the memory over the step. Returns the lines of a table."""
        rows, reserved = self._timeline.rows(), self._timeline.reserved / GIB
        self._directory.mkdir(parents=True, exist_ok=True)
        write_csv(rows, self._directory / "memory.csv")
        plot_memory({self._title: rows}, self._directory / "memory.png")
        text = f"the step needs {reserved:.3g} GiB with the gaps between its buffers"
        return [*table_lines(memory_table(rows)), text]

    def trace(self) -> AbstractContextManager[None]:
        """Returns a context that traces one call of the step, which must finish in the context."""
        options = jax.profiler.ProfileOptions()
        # Tracing Python calls would delay kernel launches.
        options.python_tracer_level = 0
        return jax.profiler.trace(self._directory / "trace", profiler_options=options)

    def write_time(self) -> list[str]:
        """Writes and plots the time by part of the traced call. Returns the lines of a table."""
        rows = time_by_part(self._program, read_events(self._directory / "trace"), self._kind)
        if not rows:
            return ["no time by part: the trace of this device has no operations"]
        write_csv(rows, self._directory / "time.csv")
        plot_time(rows, PASSES, self._directory / "time.png", self._title)
        return table_lines(time_table(rows, PASSES))


class ProfiledStep:
    """The compiled step of a run, which profiles one call. All processes run this call; the first
    traces it and writes the profile. If profiling fails, the error is logged and the run
    continues."""

    def __init__(
        self,
        step: Callable[[TrainState, Batch], Any],
        spec: TrainSpec,
        state: TrainState,
        batch: Batch,
        directory: Path,
        call: int,
        log: Callable[[str], None],
    ):
        """Compiles the step again for the calls up to number `call`, which is profiled."""
        self._step, self._left, self._log = step, call, log
        self._profile: StepProfile | None = None
        self._directory, error = directory, None
        try:
            self._profile = StepProfile(spec, state, batch, directory)
        except Exception as found:
            error = _describe(found)
        # All devices must run the same program.
        errors = [text for text in all_gather_json(error) if text]
        if errors:
            self._profile = None
            log(errors[0])

    def __call__(self, state: TrainState, batch: Batch) -> Any:
        """Returns the results of the step."""
        if self._profile is None:
            return self._step(state, batch)
        profile, self._left = self._profile, self._left - 1
        if not self._left:
            self._profile = None
            if jax.process_index() == 0:
                return self._traced(profile, state, batch)
        return profile.step(state, batch)

    def _traced(self, profile: StepProfile, state: TrainState, batch: Batch) -> Any:
        beat("profiling a step")
        jax.block_until_ready((state, batch))
        traces = False
        with ExitStack() as stack:
            with self._errors_logged():
                stack.enter_context(profile.trace())
                traces = True
            results = jax.block_until_ready(profile.step(state, batch))
            with self._errors_logged():
                stack.close()
                if traces:
                    lines = [*profile.write_memory(), *profile.write_time()]
                    for line in (f"profile: {self._directory}", *lines):
                        self._log(line)
        return results

    @contextmanager
    def _errors_logged(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._log(_describe(error))


def _describe(error: Exception) -> str:
    # Compiler errors may have hundreds of lines.
    text = " ".join(str(error).split())[:300] or type(error).__name__
    return f"warning: no profile: {text}; the run continues"


def _model_name(spec: TrainSpec) -> str:
    """Returns the name of the checkpoint, or the number of parameters."""
    path = spec.config.model.name_or_path
    if path:
        return Path(path).name
    count = parameter_counts(spec).total
    return f"{count / 1e9:.3g}B parameters" if count > 1e8 else f"{count:,} parameters"
