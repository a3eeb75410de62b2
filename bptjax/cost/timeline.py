"""Memory of a compiled step over its progress, from XLA's buffer assignment."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from bptjax.cost.devices import DeviceKind
from bptjax.cost.hlo import Program
from bptjax.ops.target import is_absent, platform
from bptjax.training.spec import TrainSpec
from bptjax.training.state import TrainState
from bptjax.training.step import Batch, compile_step

# Kinds of memory on the device, in the order in which plots stack them.
KINDS = (
    "parameters",
    "optimizer state",
    "batch",
    "gradients",
    "saved activations",
    "loss and logits",
    "workspace",
)
# An XLA option, and JAX's name for its directory in the cache.
AUTOTUNING = "xla_gpu_per_fusion_autotune_cache_dir"
PHASES = ("forward", "backward", "update")
_LASTING = (KINDS.index("gradients"), KINDS.index("saved activations"))


@dataclass(frozen=True)
class Timeline:
    """Memory of a step on each device.

    A step has one position per instruction of its schedule. The instructions of a loop body occur
    once, where the loop stands, because all iterations use the same buffers. A loop holds its
    arrays from its start, so activations that it saves layer by layer appear all at once.

    Attributes:
      progress: share of the step's least time before each position: arithmetic and memory traffic
        of all iterations at the data sheet's rates. Not measured.
      phases: the phase of each position, as an index in `PHASES`.
      device: bytes at each position `[kinds, positions]`, in the order of `KINDS`.
      host: bytes of host memory at each position.
      reserved: bytes of device memory that the step needs, as `memory_analysis` counts them.
    """

    progress: np.ndarray
    phases: np.ndarray
    device: np.ndarray
    host: np.ndarray
    reserved: int

    def rows(self) -> list[dict[str, Any]]:
        """Returns the progress, the phase and the bytes of each kind at each position."""
        return [
            dict(progress=float(progress), phase=PHASES[phase])
            | {kind: int(n) for kind, n in zip(KINDS, device, strict=True)}
            | dict(host=int(host))
            for progress, phase, device, host in zip(
                self.progress, self.phases, self.device.T, self.host, strict=True
            )
        ]


def dump_options(directory: Path) -> dict[str, bool | str]:
    """Returns the XLA options that write the files for `read_timeline`."""
    return {"xla_dump_to": str(directory), "xla_dump_hlo_as_text": True}


def compile_with_timeline(
    spec: TrainSpec, state: TrainState, batch: Batch, kind: DeviceKind
) -> tuple[jax.stages.Compiled, Program, Timeline]:
    """Compiles a step, and reads its memory; see `compile_step`.

    A GPU runs the operations one by one, because a trace does not name the kernels in CUDA graphs.

    Args:
      kind: the device, whose rates determine `Timeline.progress`.
    """
    with TemporaryDirectory() as directory:
        options = dump_options(Path(directory))
        if platform() == "gpu":
            options["xla_gpu_enable_command_buffer"] = ""
            if (cache := _cache_directory()) and not is_absent():
                # Use the kernels that XLA found fastest in other compilations of the step.
                options[AUTOTUNING] = str(Path(cache) / AUTOTUNING)
        # XLA writes nothing about a program that is in the cache.
        with without_cache():
            compiled = compile_step(spec, state, batch, options)
        text = compiled.as_text()
        assert text is not None
        program = Program(text)
        return compiled, program, read_timeline(compiled, program, Path(directory), kind)


def _cache_directory() -> str | None:
    return jax.config.jax_compilation_cache_dir  # pyrefly: ignore[missing-attribute]


@contextmanager
def without_cache() -> Iterator[None]:
    """Compiles without the cache of compiled programs."""
    before = jax.config.jax_enable_compilation_cache  # pyrefly: ignore[missing-attribute]
    jax.config.update("jax_enable_compilation_cache", False)
    # JAX reads this setting only once, until a reset.
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def read_timeline(
    compiled: jax.stages.Compiled, program: Program, directory: Path, kind: DeviceKind
) -> Timeline:
    """Reads the memory of a step that was compiled with `dump_options(directory)`.

    A buffer's lifetime decides its kind. Gradients live until the update. Of the other buffers,
    buffers of the scope `loss` belong to the loss, saved activations live from the forward to the
    backward pass, and the rest are workspace.

    Raises:
      RuntimeError: XLA has written no buffer assignment.
    """
    schedule, lives = _live_ranges(_dumped(directory, "live-range"))

    def op_name(value: str) -> str:
        instruction = program.instructions.get(value.partition("{")[0])
        return instruction.op_name if instruction else ""

    seconds = _least_seconds(program, schedule, kind)
    phases = _phases([op_name(name) for name in schedule], seconds)
    # A value may live one position beyond the schedule.
    device = np.zeros((len(KINDS), len(schedule) + 1))
    host = np.zeros(len(schedule) + 1)
    for header, values in _allocations(_dumped(directory, "buffer-assignment")):
        size = int(header.partition(",")[0])
        used = np.zeros_like(device)
        if "preallocated-temp" in header:
            buffers = [
                _Buffer(v.offset, v.bytes, *lives[v.name], op_name(v.name), v.is_carried)
                for v in values
            ]
            used = _occupied(buffers, phases)
        elif "parameter" in header:
            used[_argument_kind([op_name(v.name) for v in values])] = size
        elif "live-out" in header:
            used[KINDS.index("workspace")] = size
        # XLA's memory space 5 is host memory.
        if "color 5," in header:
            host += used.sum(0)
        else:
            device += used
    needs = compiled.memory_analysis()
    assert needs is not None
    results = needs.output_size_in_bytes - needs.alias_size_in_bytes
    return Timeline(
        progress=np.append(0.0, np.cumsum(seconds)[:-1]) / seconds.sum(),
        phases=phases,
        device=device[:, :-1],
        host=host[:-1],
        reserved=needs.argument_size_in_bytes + needs.temp_size_in_bytes + results,
    )


class _Value(NamedTuple):
    """A buffer in an allocation. `name` is the instruction and, in braces, the index of the result.
    `is_carried` marks arrays that a loop carries."""

    name: str
    bytes: int
    offset: int
    is_carried: bool


class _Buffer(NamedTuple):
    """Bytes of an allocation that are in use from one position of the schedule to another.

    `is_carried` marks arrays that a loop carries, which are the arrays before the loop.
    """

    offset: int
    bytes: int
    start: int
    end: int
    op_name: str
    is_carried: bool


def _dumped(directory: Path, name: str) -> str:
    """Returns the text of the largest dumped file of this name; the others are of small modules."""
    files = list(directory.glob(f"*after_optimizations-{name}.txt"))
    if not files:
        raise RuntimeError(f"XLA has not written *-{name}.txt, which holds the memory of a step")
    return max(files, key=lambda file: file.stat().st_size).read_text()


def _live_ranges(text: str) -> tuple[list[str], dict[str, tuple[int, int]]]:
    """Parses the schedule, and the first and last position of each value."""
    schedule, _, ranges = text.partition("BufferLiveRange:")
    names = re.findall(r"^ +\d+:(\S+)$", schedule, re.M)
    lives = re.findall(r"^ +(\S+?\{[\d,]*\}):(\d+)-(\d+)$", ranges, re.M)
    return names, {name: (int(start), int(end)) for name, start, end in lives}


def _allocations(text: str) -> Iterator[tuple[str, list[_Value]]]:
    """Yields the description of each allocation, which starts with its size, and its values."""
    for part in re.split(r"^allocation \d+: size ", text, flags=re.M)[1:]:
        header, _, lines = part.partition("\n")
        values = re.findall(
            r"^ value: <\d+ (\S+?)(\{[\d,]*\})?( \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)",
            lines,
            re.M,
        )
        yield (
            header,
            [
                _Value(name + (index or "{}"), int(size), int(offset), bool(phi))
                for name, index, phi, size, offset in values
            ],
        )


def _argument_kind(op_names: list[str]) -> int:
    """Returns the kind of an argument of the step, whose allocation the results share."""
    prefixes = {"state.opt_state": "optimizer state", "state": "parameters", "batch": "batch"}
    for prefix, kind in prefixes.items():
        if any(name.startswith(prefix) for name in op_names):
            return KINDS.index(kind)
    return KINDS.index("workspace")


def _phases(op_names: list[str], seconds: np.ndarray) -> np.ndarray:
    """Returns the phase of each position. Chooses the two boundaries with the least time of
    operations on the wrong side."""
    marks = np.array([_phase(name) for name in op_names])
    result, start = np.zeros(len(marks), int), 0
    for phase in range(1, len(PHASES)):
        early = np.cumsum(seconds * (marks >= phase))
        late = np.cumsum((seconds * ((marks >= 0) & (marks < phase)))[::-1])[::-1]
        wrong = np.append(0, early) + np.append(late, 0)
        # Take the last of equal boundaries, because the end of a loop takes no time.
        start = len(marks) - int(np.argmin(wrong[start:][::-1]))
        result[start:] = phase
    return result


def _phase(op_name: str) -> int:
    """Returns the index in `PHASES`; -1 if the name does not tell."""
    if "/optimizer/" in op_name:
        return 2
    return 1 if "transpose(" in op_name else 0 if "jvp(" in op_name else -1


def _occupied(buffers: list[_Buffer], phases: np.ndarray) -> np.ndarray:
    """Returns the bytes of an allocation in use `[kinds, positions + 1]`. Buffers that share bytes
    at the same time, such as the input and output of a loop, count once."""
    buffers = sorted(buffers)
    edges = np.unique([edge for b in buffers for edge in (b.offset, b.offset + b.bytes)])
    owner = np.full((len(edges) - 1, len(phases) + 1), -1, np.int8)
    kinds = zip(buffers, _buffer_kinds(buffers, phases), strict=True)
    # If buffers share bytes, the kind of the longest-lived buffer counts.
    for b, kind in sorted(kinds, key=lambda pair: pair[0].end - pair[0].start):
        low, high = np.searchsorted(edges, (b.offset, b.offset + b.bytes))
        owner[low:high, b.start : b.end + 1] = kind
    widths = np.diff(edges).astype(float)
    return np.stack([widths @ (owner == kind) for kind in range(len(KINDS))])


def _buffer_kinds(buffers: list[_Buffer], phases: np.ndarray) -> list[int]:
    """Returns the kind of each buffer, in the order of the sorted buffers."""
    backward, update = (int(np.searchsorted(phases, phase)) for phase in (1, 2))
    kinds: list[int] = []
    after = buffers[-1]
    for b in reversed(buffers):
        continues = b[:2] == after[:2] and b.start < after.start <= b.end and kinds[-1] in _LASTING
        if continues and after.is_carried:
            # The same array as after the loop, before or inside it.
            kind = kinds[-1]
        elif b.start < update <= b.end:
            kind = KINDS.index("gradients")
        elif "loss" in re.split(r"[/()]", b.op_name):
            kind = KINDS.index("loss and logits")
        elif b.start < backward <= b.end:
            kind = KINDS.index("saved activations")
        elif continues:
            # An array that is updated in place.
            kind = kinds[-1]
        else:
            kind = KINDS.index("workspace")
        kinds.append(kind)
        after = b
    return kinds[::-1]


def _least_seconds(program: Program, schedule: list[str], kind: DeviceKind) -> np.ndarray:
    """Returns the least time of each position, summed over its executions."""
    executions = program.executions()
    return np.array([executions.get(x, 0) * kind.seconds(*program.cost(x)) for x in schedule])
