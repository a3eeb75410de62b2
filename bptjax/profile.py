"""`bptjax profile --config FILE`: the time of a step by part, and its memory over the step."""

import sys
import time
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import jax
from rich.console import Console

from bptjax.command_line import run_command
from bptjax.config import Config
from bptjax.config_parser import parse
from bptjax.devices import KINDS, absent_devices, kind_of, parse_devices
from bptjax.parallel.mesh import select_devices
from bptjax.plan import open_spec
from bptjax.profile_report import (
    memory_table,
    plot_memory,
    plot_time,
    time_table,
    write_csv,
)
from bptjax.training.auto import complete_execution
from bptjax.training.prediction import tracing_for
from bptjax.training.spec import TrainSpec
from bptjax.training.state import init_state, parameter_counts
from bptjax.training.step import random_batch
from bptjax.training.timeline import compile_with_timeline
from bptjax.training.trace import PASSES, read_events, time_by_part

DESCRIPTION = """Runs a step of a training config on random tokens and random weights, and shows its
time by part of the work and its memory over the step, as tables, plots and CSV files. Takes the
keys of bptjax train."""
# Before the step that is traced: the first run of a step is slower.
WARMUP = 2


@dataclass(frozen=True)
class ProfileConfig(Config):
    """A training config, and the devices to profile on.

    Attributes:
      devices: devices that need not be there, as in bptjax plan; shows the memory alone. If not
        set, this machine's.
      out: directory of plots, CSV files and the trace. If not set, profile in run_dir.
    """

    devices: str | None = None
    out: str | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.devices:
            parse_devices(self.devices)


def run(config: ProfileConfig) -> int:
    """Profiles a step, prints tables and writes files. Returns 0."""
    plain = Config(**{f.name: getattr(config, f.name) for f in fields(Config)})
    platform = None
    if config.devices:
        kind, devices = absent_devices(config.devices)
        name, platform = config.devices, kind.platform
    else:
        devices = select_devices(config.device)
        name = f"{len(devices)} x {devices[0].device_kind}"
        kind = KINDS.get(kind_of(devices[0].device_kind) or "")
    spec = open_spec(plain, devices)
    spec, notes = complete_execution(
        spec, partial(print, file=sys.stderr), absent=kind if platform else None
    )
    for note in notes:
        print(note)
    out = Path(config.out or Path(config.run_dir).expanduser() / "profile")
    out.mkdir(parents=True, exist_ok=True)
    title = f"{_model_name(spec)}, {spec.config.train.seq_len:,} tokens, {name}"
    print(f"compiling for {name}", file=sys.stderr, flush=True)
    with tracing_for(spec, platform):
        # Shares of time need no rates of a CPU.
        compiled, program, timeline = compile_with_timeline(spec, kind or KINDS["h200"])
    console = Console(width=100)
    memory = timeline.rows()
    console.print(memory_table(memory))
    print(f"the step needs {timeline.reserved / 2**30:.3g} GiB with the gaps between its buffers")
    write_csv(memory, out / "memory.csv")
    plot_memory({title: memory}, out / "memory.png")
    if platform:
        print(f"no time by part: {name} is not on this machine")
        return 0
    seconds = _trace(spec, compiled, out / "trace")
    rows = time_by_part(program, read_events(out / "trace"), kind)
    if not rows:
        print("no time by part: the trace of this device has no operations")
        return 0
    console.print(time_table(rows, PASSES))
    print(f"a step takes {seconds:.4g} s without the trace")
    write_csv(rows, out / "time.csv")
    plot_time(rows, PASSES, out / "time.png", title)
    return 0


def _trace(spec: TrainSpec, step: jax.stages.Compiled, directory: Path) -> float:
    """Traces a step. Returns the seconds of the step before it."""
    state, batch, seconds = init_state(spec, load=False), random_batch(spec), 0.0
    for _ in range(WARMUP):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        seconds = time.perf_counter() - start
    options = jax.profiler.ProfileOptions()
    # Calls of Python functions would delay the launches of kernels.
    options.python_tracer_level = 0
    with jax.profiler.trace(directory, profiler_options=options):
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
    return seconds


def _model_name(spec: TrainSpec) -> str:
    """Returns the name of the checkpoint, or the number of parameters."""
    path = spec.config.model.name_or_path
    if path:
        return Path(path).name
    count = parameter_counts(spec).total
    return f"{count / 1e9:.3g}B parameters" if count > 1e8 else f"{count:,} parameters"


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return run_command(lambda argv: run(parse(argv, DESCRIPTION, ProfileConfig, "profile")), argv)


if __name__ == "__main__":
    sys.exit(main())
