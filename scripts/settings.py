"""Plans the longest sequence that each of a table of models, methods and GPUs can train.

    python scripts/settings.py --out rows.jsonl

Needs no GPU, but `pip install -e ".[plan]"`. Each row is appended when it is planned; rows that are
already in the file are not planned again, except rows of `--estimate`. Lengths are m · 2^k with m
from 16 to 31. Each step has the settings that are estimated to need the least memory. Full
fine-tuning takes the first of `STATES`, unless others fit a longer sequence.
"""

import argparse
import bisect
import itertools
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from step import DECODERS, DEFAULTS
from tables import GPUS, LONGEST_PLANNED, SIZES

from bptjax.config_parser import parse
from bptjax.cost.auto import absent_limit
from bptjax.cost.devices import absent_devices
from bptjax.cost.estimate import Estimator
from bptjax.cost.memory import Plan, plan
from bptjax.cost.search import choose, smallest, with_execution
from bptjax.parallel.mesh import make_mesh
from bptjax.training.spec import TrainSpec

GIB = 2**30
LENGTHS = [m << k for k in range(6, 18) for m in range(16, 32)] + [LONGEST_PLANNED]
METHODS = {
    # Clipping that lets each layer be updated inside the backward pass.
    "full": ["--optimizer.clip=delayed"],
    "LoRA": ["--adapter.type=lora", "--adapter.r=16"],
    "QLoRA": ["--adapter.type=qlora", "--adapter.r=16"],
}
# Moments of full fine-tuning, in the order of preference.
STATES = {
    "bfloat16": [],
    "int8": ["--optimizer.state_dtype=int8"],
    "int8 in host memory": [
        "--optimizer.state_dtype=int8",
        "--optimizer.state_memory_kind=pinned_host",
    ],
}
# Take moments of lower preference only if a sequence longer by this factor is estimated to fit.
LONGER = 1.05
# Steps to compile for a row at most, the share of the length by which a longer one must be
# estimated to fit to be compiled too, and the share of the memory that estimates may use.
MOST_COMPILED, PRECISION, MARGIN = 4, 1 / 20, 0.995


class Case:
    """A model, a method and GPUs, at any length.

    Attributes:
      scales: compiled bytes of the workspace per estimated byte, by length.
    """

    def __init__(self, model: str, method: str, devices: str, options: list[str], scale: float):
        self.decoder, self.devices = DECODERS[SIZES[model]], devices
        self.options = [*METHODS[method], *options]
        self.scales, self.first = {}, scale
        self.known: dict[int, tuple[TrainSpec, float, float]] = {}
        self.kind, self.present = absent_devices(devices)
        self.limit = absent_limit(self.at(1024), self.kind)

    def at(self, length: int) -> TrainSpec:
        config = parse([f"--train.seq_len={length}", *self.options], defaults=DEFAULTS)
        config = replace(config, model=self.decoder).on("gpu")
        return TrainSpec(config, self.decoder, make_mesh(config.parallel, self.present))

    def least(self, length: int) -> tuple[TrainSpec, float, float]:
        """Returns the step with the settings that are estimated to need the least memory, and the
        estimated bytes of all but the workspace, and of the workspace."""
        if length not in self.known:
            spec = self.at(length)
            spec = with_execution(spec, smallest(spec, self.limit))
            self.known[length] = spec, *_parts(spec)
        return self.known[length]

    def peak(self, length: int) -> float:
        """Returns the estimated bytes of `least`, corrected by the compiled steps."""
        _, known, workspace = self.least(length)
        lengths = sorted(self.scales)
        scales = [self.scales[x] for x in lengths]
        scale = float(np.interp(length, lengths, scales)) if lengths else self.first
        return known + scale * workspace

    def longest(self) -> int:
        """Returns the number of LENGTHS that are estimated to fit."""
        return bisect.bisect(LENGTHS, MARGIN * self.limit.device, key=self.peak)

    def correct(self, length: int, found: Plan) -> None:
        """Corrects the estimates by a compiled step."""
        _, known, workspace = self.least(length)
        self.scales[length] = max((found.peak - known) / workspace, 0.25)

    def fastest(self, length: int) -> TrainSpec | None:
        """Returns the step with the fastest settings that are estimated to fit, if any fit."""

        def estimated(spec: TrainSpec) -> Plan:
            known, workspace = _parts(spec)
            sizes = 0, 0, 0, 0, int(known + workspace), 0, 0
            return Plan(self.devices, length, *sizes, self.limit.device)

        spec = self.at(length)
        choice = choose(spec, self.limit, estimated)
        return with_execution(spec, choice.execution) if choice.plan.fits else None


def _parts(spec: TrainSpec) -> tuple[float, float]:
    """Returns the estimated bytes of all but the workspace, and of the workspace."""
    estimator = Estimator(spec)
    found = estimator(spec.execution)
    return estimator.held + estimator.gradients + found.saved, found.workspace


def meshes(devices: str) -> list[str]:
    """Returns the options of each mesh, the mesh for short sequences first."""
    count = int(devices.partition(":")[2] or 1)
    sizes = [n for n in (1, 2, 4, 8) if n <= count]
    return [f"--parallel.fsdp={count // sp} --parallel.sp={sp}" for sp in sizes]


def speed(spec: TrainSpec) -> float:
    """Returns the expected tokens/s, if communication costs nothing."""
    tokens = spec.global_batch_size * spec.config.train.seq_len
    return tokens / Estimator(spec)(spec.execution).seconds


def row(
    model: str,
    method: str,
    devices: str,
    rows: list[dict[str, Any]],
    log: Path,
    most: int = MOST_COMPILED,
) -> dict[str, Any]:
    """Plans one row. Without a length, not even 1,024 tokens are estimated to fit.

    Args:
      rows: earlier rows, whose corrections of the estimates are the first ones here.
      log: file for a line about each compiled step.
      most: steps to compile at most; 0 estimates the length.
    """
    nothing: dict[str, Any] = dict(model=model, method=method, devices=devices, jax=jax.__version__)
    known = [x for x in rows if x["method"] == method and "scale" in x]
    near = [x for x in known if x["devices"] == devices] or known
    scale = near[-1]["scale"] if near else 1.0
    cases: dict[str, dict[str, Case]] = {}
    for states, given in STATES.items() if method == "full" else [("bfloat16", [])]:
        cases[states] = {
            mesh.replace("--parallel.", ""): Case(
                model, method, devices, [*given, *mesh.split()], scale
            )
            for mesh in meshes(devices)
        }
    best = {k: min(of.items(), key=lambda x: x[1].peak(131_072)) for k, of in cases.items()}
    lengths = {k: case.longest() for k, (_, case) in best.items()}
    most_tokens = LENGTHS[max(lengths.values()) - 1] if any(lengths.values()) else 0
    for states, (mesh, case) in best.items():
        number, compiled, fits, fails, seconds = lengths[states], {}, [], [], 0.0
        if not number or most_tokens >= LONGER * LENGTHS[number - 1]:
            continue
        found = nothing | dict(states=states, mesh=mesh, room_gib=case.limit.device / GIB)
        while len(compiled) < most and 0 < number and LENGTHS[number - 1] not in compiled:
            T, start = LENGTHS[number - 1], time.perf_counter()
            compiled[T] = plan(case.least(T)[0], devices, case.limit.device, case.kind.platform)
            seconds += time.perf_counter() - start
            with log.open("a") as file:
                note = found | dict(T=T, gib=compiled[T].peak / GIB, estimated=case.peak(T) / GIB)
                file.write(json.dumps(note | dict(seconds=seconds)) + "\n")
            case.correct(T, compiled[T])
            (fits if compiled[T].fits else fails).append(T)
            # Between the longest length that fits and the shortest that does not.
            number = min([case.longest(), *(LENGTHS.index(T) for T in fails)])
            number = max([number, *(LENGTHS.index(T) + 1 for T in fits)])
            if fits and LENGTHS[number - 1] <= (1 + PRECISION) * max(fits):
                break
        if fits or (number and not compiled):
            break
    else:
        return nothing
    found |= dict(compile_s=seconds, compiled={T: x.peak / GIB for T, x in compiled.items()})
    if case.scales:
        found |= dict(scale=case.scales[max(case.scales)])
    T = max(fits, default=LENGTHS[number - 1])
    spec = case.least(T)[0]
    found |= dict(T=T, execution=asdict(spec.execution), tokens_per_second=speed(spec))
    if fits:
        found |= dict(peak_gib=compiled[T].peak / GIB, host_gib=compiled[T].host / GIB)
    for states, of in cases.items():
        for mesh, case in of.items():
            if spec := case.fastest(8192):
                found |= dict(states_8k=states, mesh_8k=mesh, tokens_per_second_8k=speed(spec))
                return found | dict(execution_8k=asdict(spec.execution))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--estimate", action="store_true", help="compile nothing")
    args = parser.parse_args()
    done = args.out.read_text().splitlines() if args.out.exists() else []
    rows = [json.loads(line) for line in done]
    for case in itertools.product(SIZES, METHODS, GPUS):
        same = [x for x in rows if (x["model"], x["method"], x["devices"]) == case]
        if any(args.estimate or x.get("compiled") or "mesh" not in x for x in same):
            continue
        most = 0 if args.estimate else MOST_COMPILED
        rows.append(row(*case, rows, args.out.with_suffix(".log"), most))
        with args.out.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")


if __name__ == "__main__":
    main()
