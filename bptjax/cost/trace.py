"""Time of a step by part, from a trace of `jax.profiler`."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax

from bptjax.cost.devices import DeviceKind
from bptjax.cost.hlo import Program

Label = tuple[int, int]
Row = dict[str, Any]

# Parts of a step. Time in which several parts run counts for the first part in this order.
PARTS = (
    "attention",
    "matrix products",
    "loss",
    "optimizer",
    "norms and pointwise",
    "communication",
    "host copies",
    "idle",
)
PASSES = ("forward", "recomputation", "backward", "update", "other")
# Named scopes of the step that are parts. Matrix products count only outside of these.
SCOPES = {"attention_kernel": "attention", "loss": "loss", "optimizer": "optimizer"}
_COLLECTIVES = re.compile(r"all-|reduce-scatter|collective|ragged-all")


class Event(NamedTuple):
    """An operation that ran on a device, in nanoseconds.

    Attributes:
      kernel: name of the kernel or of the copy.
      instruction: name of the instruction that launched it.
    """

    kernel: str
    instruction: str
    start: float
    end: float


def read_events(directory: Path) -> list[Event]:
    """Reads the operations of the first device from the newest trace in a directory, in order."""
    files = sorted(directory.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    planes = list(jax.profiler.ProfileData.from_file(str(files[-1])).planes) if files else []
    devices = sorted((p for p in planes if p.name.startswith("/device:")), key=lambda p: p.name)
    # A CPU's operations are in the host's plane; libtpu adds an empty device plane even there.
    for plane in (*devices, *(p for p in planes if p.name == "/host:CPU")):
        if events := sorted(_events(plane), key=lambda event: event.start):
            return events
    return []


def _events(plane: Any) -> Iterator[Event]:
    for line in plane.lines:
        for event in line.events:
            stats: dict[str, Any] = {k: v for k, v in event.stats if k}
            instruction = stats.get("hlo_op")
            if instruction is not None and str(stats.get("device_ordinal", 0)) == "0":
                yield Event(event.name, str(instruction), event.start_ns, event.end_ns)


def time_by_part(program: Program, events: list[Event], kind: DeviceKind | None) -> list[Row]:
    """Divides the time from the first to the last operation of a step.

    Returns:
      A row for each part and pass: seconds, which add up to the total time, and the floor (the
        least seconds at the data sheet's rates; None if unknown).

    Args:
      kind: the device, whose rates determine the floors; None if unknown.
    """
    # A CPU also reports loops and calls, whose time includes the operations inside.
    events = [e for e in events if e.kernel != e.instruction or not program.is_free(e.instruction)]
    kernels = [(e.kernel, e.instruction) for e in events]
    labels = _labels(program, kernels)
    seconds = _exclusive(events, [labels[kernel] for kernel in kernels])
    floors: dict[Label, float] = defaultdict(float)
    if kind is not None:
        counts = Counter(kernels)
        for instruction in {instruction for _, instruction in kernels}:
            own = [kernel for kernel in counts if kernel[1] == instruction]
            # An instruction may run several kernels, or one kernel several times.
            main = min(own, key=lambda kernel: counts[kernel])
            floors[labels[main]] += counts[main] * _least(program, instruction, labels[main], kind)
    return [
        {
            "part": PARTS[part],
            "pass": PASSES[direction],
            "seconds": seconds[part, direction] / 1e9,
            "floor": None if kind is None or PARTS[part] == "idle" else floors[part, direction],
        }
        for part, direction in sorted(seconds)
    ]


def _least(program: Program, instruction: str, label: Label, kind: DeviceKind) -> float:
    """Returns the least seconds of an execution."""
    part = PARTS[label[0]]
    if part == "communication":
        return program.received(instruction) / kind.peers
    if part == "host copies":
        return program.copied(instruction) / kind.host
    return kind.seconds(*program.cost(instruction))


def _labels(program: Program, kernels: list[tuple[str, str]]) -> dict[tuple[str, str], Label]:
    """Returns the part and the pass of each kernel, as indices in `PARTS` and `PASSES`."""
    labels, previous = {}, "other"
    for kernel in kernels:
        if kernel not in labels:
            name = program.op_name(kernel[1])
            part = _part(program, *kernel, set(re.split(r"[/()]", name)))
            # XLA's own copies have no operation name: count them with the preceding work.
            now = "update" if part == "optimizer" else _pass(name) or previous
            labels[kernel] = PARTS.index(part), PASSES.index(now)
        previous = PASSES[labels[kernel][1]]
    return labels


def _part(program: Program, kernel: str, instruction: str, scopes: set[str]) -> str:
    opcode = program.opcode(instruction)
    if _COLLECTIVES.match(opcode) or kernel.startswith("nccl"):
        return "communication"
    if re.match("MemcpyD2H|MemcpyH2D", kernel):
        return "host copies"
    for scope, part in SCOPES.items():
        if scope in scopes:
            return part
    inside = program.inside(instruction) if opcode else []
    return "matrix products" if any(x.is_matmul for x in inside) else "norms and pointwise"


def _pass(op_name: str) -> str | None:
    """Returns the pass of an operation; None if its name does not tell."""
    marks = re.findall(r"(?:^|/)(transpose\(|jvp\(|rematted_computation)", op_name)
    if not marks:
        return None if not op_name or "/while/" in op_name else "other"
    if "transpose(" not in marks:
        return "forward"
    # The backward pass repeats parts of the forward pass.
    return "backward" if marks[-1] == "transpose(" else "recomputation"


def _exclusive(events: list[Event], labels: list[Label]) -> dict[Label, float]:
    """Returns the nanoseconds of each label. Where events overlap, the smallest label counts."""
    edges = sorted(
        (time, step, label)
        for e, label in zip(events, labels, strict=True)
        for time, step in ((e.start, 1), (e.end, -1))
    )
    idle = PARTS.index("idle"), PASSES.index("other")
    spent: dict[Label, float] = defaultdict(float)
    active: Counter[Label] = Counter()
    for (time, step, label), (after, _, _) in pairwise(edges):
        active[label] += step
        spent[min((x for x in active if active[x]), default=idle)] += after - time
    return spent
