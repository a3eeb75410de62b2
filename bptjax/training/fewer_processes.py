"""A run that goes on without some of its processes, with the same global batches."""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import jax

from bptjax.config import Config
from bptjax.parallel.distributed import hosts
from bptjax.parallel.launch import ProcessInfo
from bptjax.parallel.members import Complete, Members, choose_members
from bptjax.parallel.mesh import axis_sizes, shards_on
from bptjax.run.heartbeat import DIRECTORY
from bptjax.run.output import plural
from bptjax.training.spec import TrainSpec


def join(config: Config, process: ProcessInfo | None) -> tuple[ProcessInfo | None, Members | None]:
    """Returns the identity of this process in this start, and the members of a run that may go on
    with fewer: a supervised run of several processes with an axis of -1.

    Raises:
      ValueError, SystemExit: as `Members.join`.
    """
    wait_s, open_axis = config.parallel.host_wait_s, -1 in axis_sizes(config.parallel).values()
    if process is None or process.count == 1 or wait_s is None:
        return process, None
    if not open_axis or DIRECTORY not in os.environ:
        return process, None

    def choose(complete: Complete, present: Sequence[int]) -> list[int]:
        def fits(devices: int) -> bool:
            return _accumulation(config, devices, complete.global_batch) is not None

        return choose_members(complete, present, fits)

    members = Members(Path(config.run_dir).expanduser(), process, choose, wait_s)
    if members.complete is not None:
        process = members.join(partial(print, file=sys.stderr, flush=True))
    return process, members


def keep_global_batch(config: Config, members: Members | None) -> Config:
    """Returns the config with as much gradient accumulation as keeps the global batch size of the
    run with all its processes.

    Raises:
      ValueError: the devices cannot keep the global batch size.
    """
    if members is None or members.complete is None or not members.missing:
        return config
    size, devices = members.complete.global_batch, jax.device_count()
    steps = _accumulation(config, devices, size)
    if steps is None:
        raise ValueError(
            f"{plural(devices, 'device')} without {' and '.join(members.missing)}: must divide the "
            f"{size} sequences of a step; start all processes"
        )
    return replace(config, train=replace(config.train, gradient_accumulation_steps=steps))


def describe_missing(given: Config, spec: TrainSpec, members: Members | None) -> list[str]:
    """Formats the line about missing processes for the log.

    Args:
      given: the config of the run with all processes.
    """
    if members is None or members.complete is None or not members.missing:
        return []
    count, own = members.process.count, spec.config.train.gradient_accumulation_steps
    text = f"without {' and '.join(members.missing)}: {jax.process_count()} of {count} processes, "
    before = given.train.gradient_accumulation_steps
    if own != before:
        text += f"gradient_accumulation_steps={own} in place of {before} keeps "
    else:
        text += "with "
    text += f"the {plural(spec.global_batch_size, 'sequence')} of a step"
    if members.spare:
        text += f"; {members.spare} can only wait, as more processes do not divide them"
    text += "; results are equal up to rounding"
    rates = [getattr(spec.model, f.name) for f in fields(spec.model) if f.name.endswith("dropout")]
    if own != before and (any(rates) or spec.config.adapter.dropout):
        text += ", but dropout draws other random numbers"
    return [text]


def begin(spec: TrainSpec, members: Members | None) -> None:
    """Keeps the facts of a start with all processes, after all checks."""
    if members is not None:
        counts = Counter(device.process_index for device in jax.devices())
        devices = [counts[index] for index in range(jax.process_count())]
        complete = Complete(hosts(), devices, spec.global_batch_size, spec.micro_batch_size)
        members.begin(complete)


def _accumulation(config: Config, devices: int, global_batch: int) -> int | None:
    """Returns the number of micro-batches of a global batch; None if there is none."""
    shards = shards_on(config.parallel, devices)
    if not shards:
        return None
    steps, rest = divmod(global_batch, shards * config.train.per_device_train_batch_size)
    return steps if steps and not rest else None
