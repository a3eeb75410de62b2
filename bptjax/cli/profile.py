"""`bptjax profile --config FILE`: measures the time of a step by part, and shows its memory."""

import sys
import time
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import jax

from bptjax.cli.plan import open_spec
from bptjax.cli.run_command import run_command
from bptjax.config import Config
from bptjax.config_parser import parse
from bptjax.cost.auto import complete_execution
from bptjax.cost.devices import KINDS, absent_devices, kind_of, parse_devices
from bptjax.cost.memory import tracing_for
from bptjax.cost.step_profile import DIRECTORY, TRACED, StepProfile
from bptjax.parallel.mesh import select_devices
from bptjax.training.spec import TrainSpec
from bptjax.training.state import abstract_state, init_state
from bptjax.training.step import abstract_batch, random_batch

DESCRIPTION = """Runs a step of a training config on random tokens and random weights, and shows its
time by part of the work and its memory over the step, as tables, plots and CSV files. Takes the
keys of bptjax train."""


@dataclass(frozen=True)
class ProfileConfig(Config):
    """A training config, and the devices to profile on.

    Attributes:
      devices: as in bptjax plan, devices that need not be on this machine; shows the memory alone.
        If not set, this machine's.
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
    out = Path(config.out or Path(config.run_dir).expanduser() / DIRECTORY)
    print(f"compiling for {name}", file=sys.stderr, flush=True)
    with tracing_for(spec, platform):
        state, batch = abstract_state(spec), abstract_batch(spec)
        profile = StepProfile(spec, state, batch, out, devices=name, kind=kind)
    print(*profile.write_memory(), sep="\n", flush=True)
    if platform:
        print(f"no time by part: {name} is not on this machine")
        return 0
    seconds = _trace(spec, profile)
    print(*profile.write_time(), sep="\n")
    print(f"a step takes {seconds:.4g} s without the trace")
    return 0


def _trace(spec: TrainSpec, profile: StepProfile) -> float:
    """Traces a step. Returns the seconds of the step before the traced one."""
    state, batch, seconds = init_state(spec, load=False), random_batch(spec), 0.0
    for _ in range(TRACED - 1):
        start = time.perf_counter()
        state, metrics = profile.step(state, batch)
        jax.block_until_ready(metrics)
        seconds = time.perf_counter() - start
    with profile.trace():
        jax.block_until_ready(profile.step(state, batch))
    return seconds


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return run_command(lambda argv: run(parse(argv, DESCRIPTION, ProfileConfig, "profile")), argv)
