"""Chooses the keys of `execution` that are not set: on a GPU the fastest settings that fit, which
are cached for later runs."""

import dataclasses
import hashlib
import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from bptjax.cost.devices import GIB, DeviceKind
from bptjax.cost.memory import Plan, absent_host_bytes, plan, shortage, tree_bytes
from bptjax.cost.search import MemoryLimit, choose, with_execution
from bptjax.models.execution import Execution
from bptjax.ops.target import misreads_host_memory
from bptjax.parallel.distributed import all_gather_json
from bptjax.parallel.mesh import (
    MEMORY_FRACTION,
    cache_directory,
    host_memory,
    make_cache_directory,
)
from bptjax.parsing.keys import flatten
from bptjax.run.output import plural, write_atomically
from bptjax.run.progress import Compilations
from bptjax.training.spec import TrainSpec
from bptjax.training.state import abstract_state

# Share of the device memory that a step may take, because parameters may leave gaps; and share of
# the host memory that activations may take.
SAFE, HOST_SHARE = 0.985, 0.6
# Bytes of host memory per device, assumed for devices that are not on this machine.
HOST_MEMORY = 128 * GIB
# Config keys, other than the model's, that a compiled step depends on.
COMPILED_KEYS = (
    "train.seq_len",
    "train.per_device_train_batch_size",
    "train.gradient_accumulation_steps",
    "train.compute_dtype",
    "train.param_dtype",
    "train.linear",
    "train.deterministic",
    "train.z_loss",
    "optimizer.type",
    "optimizer.weight_decay",
    "optimizer.max_grad_norm",
    "optimizer.clip",
    "optimizer.in_backward",
    "optimizer.muon_dtype",
    "optimizer.state_",
    "objective.",
    "adapter.",
    "parallel.zero_stage",
    "parallel.sequence_strategy",
    "execution.",
)


def complete_execution(
    spec: TrainSpec,
    say: Callable[[str], None],
    *,
    first: Execution | None = None,
    absent: DeviceKind | None = None,
) -> tuple[TrainSpec, list[str]]:
    """Returns the spec with all keys of `execution` set, and lines for the log. Compiles steps if
    keys are missing, or to check the memory budget. All processes must call it.

    Args:
      say: prints a line while settings are compiled.
      first: settings that a resumed run started with; used again if they fit.
      absent: kind of the devices if they are not on this machine.

    Raises:
      ValueError: no settings fit.
    """
    unset, start = spec.config.execution.unset, time.perf_counter()
    if not unset and spec.config.memory.budget_gib is None:
        return spec, []
    unset = unset or tuple(f.name for f in dataclasses.fields(Execution))
    memory = absent_limit(spec, absent) if absent else present_limit(spec)
    if memory is None:
        return spec, []
    device = spec.mesh.devices.reshape(-1)[0]
    kind = device.device_kind
    if first and first.offload and not absent and misreads_host_memory(device.platform):
        first = None

    compilations = Compilations(say)

    def measure(spec: TrainSpec) -> Plan:
        with compilations.announce(f"execution: compiling {describe(spec.execution, unset)}"):
            return plan(spec, kind, memory.device, absent.platform if absent else None)

    file = _cache_file(spec, memory)
    # Every process must compile the same steps.
    saved, cached = all_gather_json([first and dataclasses.asdict(first), _read(file)])[0]
    first = _execution(saved) if saved else None
    if first is None and cached:
        execution = _execution(cached)
        note = f"execution: {describe(execution, unset)}, found by an earlier run"
        return with_execution(spec, execution), [note]
    choice = choose(spec, memory, measure, first=first)
    chosen = with_execution(spec, choice.execution)
    if not choice.plan.fits:
        raise ValueError(shortage(chosen, choice.plan))
    _write(file, choice.execution)
    source = f"{plural(choice.compiled, 'setting')} compiled in {time.perf_counter() - start:.0f} s"
    if choice.execution == first:
        source = "as before"
    note = f"execution: {describe(choice.execution, unset)}, {source}; a step needs "
    note += f"{choice.plan.peak / GIB:.2f} of {memory.device / GIB:.2f} GiB"
    # The seconds in the note differ between processes.
    return chosen, all_gather_json([note])[0]


def describe(execution: Execution, keys: tuple[str, ...]) -> str:
    """Formats keys of the execution as YAML."""

    def text(value):
        return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)

    return "{" + ", ".join(f"{key}: {text(getattr(execution, key))}" for key in keys) + "}"


def memory_limit(spec: TrainSpec, device: int, host: int) -> MemoryLimit:
    """Returns the memory that a step may take.

    Args:
      device: bytes of device memory that JAX may use.
      host: bytes of host memory per device.
    """
    config, most = spec.config, int(SAFE * device)
    if budget := config.memory.budget_gib:
        most = min(int(budget * GIB), most)
    host -= tree_bytes(abstract_state(spec), host=True) + absent_host_bytes(spec)
    return MemoryLimit(most, max(int(HOST_SHARE * host), 0))


def absent_limit(spec: TrainSpec, kind: DeviceKind) -> MemoryLimit:
    """Returns the memory that a step may take on devices that are not on this machine."""
    return memory_limit(spec, int(kind.memory * float(MEMORY_FRACTION)), HOST_MEMORY)


def present_limit(spec: TrainSpec) -> MemoryLimit | None:
    """Returns the memory that a step may take on this run's devices, the minimum over processes;
    None if the size of device memory is unknown."""
    local = spec.mesh.local_devices
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in local]
    every = all_gather_json([socket.gethostname(), len(local), host_memory(), min(limits)])
    # A host may run several processes.
    shares = [size // sum(n for x, n, *_ in every if x == name) for name, _, size, _ in every]
    device = min(limit for *_, limit in every)
    host = 0 if misreads_host_memory(local[0].platform) else min(shares)
    return memory_limit(spec, device, host) if device else None


def _cache_file(spec: TrainSpec, memory: MemoryLimit) -> Path:
    """Returns the cache file of chosen settings, named by a hash of their inputs."""
    flat = flatten(spec.config)
    keys = {key: value for key, value in flat.items() if key.startswith(COMPILED_KEYS)}
    source = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        source.update(file.read_bytes())
    devices = [x.device_kind for x in spec.mesh.devices.reshape(-1)]
    model, shape = replace(spec.model, name_or_path=None), dict(spec.mesh.shape)
    text = repr((keys, model, shape, devices, memory, jax.__version__, source.hexdigest()))
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    return cache_directory() / "execution" / f"{name}.json"


def _execution(values: dict[str, Any]) -> Execution:
    # JSON has no tuples.
    return Execution(**values | {"save": tuple(values["save"])})


def _read(file: Path) -> dict[str, Any] | None:
    """Returns the settings in the file; None if it is missing or damaged."""
    try:
        return dataclasses.asdict(_execution(json.loads(file.read_text())))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write(file: Path, execution: Execution) -> None:
    # If the cache is not writable, the next run searches again.
    with suppress(OSError):
        make_cache_directory()
        write_atomically(file, json.dumps(dataclasses.asdict(execution)))
