"""Searches for the fastest values of the keys of `execution` that are not set."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from bptjax.cost.estimate import Estimate, Estimator
from bptjax.cost.memory import Plan
from bptjax.models.execution import UNCHUNKED, Execution, ExecutionConfig
from bptjax.models.head_groups import check_head_groups, max_head_groups
from bptjax.parallel.mesh import num_shards
from bptjax.training.spec import TrainSpec

# Maximum number of settings to compile: after one fits, and while none fits.
MOST_COMPILED, MOST_FAILED = 3, 8
# Compile another setting only if its estimated time is below this share of the best setting's.
WORTHWHILE = 0.993
# If settings with offload fit, compile them also without, unless their estimate exceeds the memory
# by more than this share: estimates that a compiled step has corrected err by as much.
NEARLY_FITS = 0.01
FFN_CHUNKS = 32768, 16384, 8192, 4096, 2048, 1024
CE_CHUNKS = 8192, 2048, 512
GROUPS = 2, 4, 8


class MemoryLimit(NamedTuple):
    """Bytes per device that a step may take in device memory and in host memory."""

    device: int
    host: int


@dataclass(frozen=True)
class Choice:
    """Settings and their plan.

    Attributes:
      plan: memory of the compiled step.
      compiled: number of settings that were compiled.
    """

    execution: Execution
    plan: Plan
    compiled: int


def with_execution(spec: TrainSpec, execution: Execution) -> TrainSpec:
    """Returns the spec with all keys of `execution` set."""
    group = ExecutionConfig(**dataclasses.asdict(execution))
    return replace(spec, config=replace(spec.config, execution=group))


def choose(
    spec: TrainSpec,
    memory: MemoryLimit,
    measure: Callable[[TrainSpec], Plan],
    *,
    first: Execution | None = None,
) -> Choice:
    """Chooses values for the keys of `execution` that are not set.

    Compiles settings in the order of their estimated time, until one fits into memory and no faster
    one may fit, or until `MOST_COMPILED` settings (`MOST_FAILED` while none fits) have been
    compiled.

    Args:
      measure: compiles a step; see `plan`.
      first: settings that are taken if they fit, such as the settings of a resumed run.

    Returns:
      A choice. If nothing fits, the choice has the settings that need the least memory.
    """
    estimator = Estimator(spec)
    tried: dict[Execution, Plan] = {}
    scales: dict[bool, float] = {}
    options = [] if first is None else [first]
    best: Execution | None = None
    while True:
        if options:
            tried[options[0]] = measured = measure(with_execution(spec, options[0]))
            estimate = estimator(options[0])
            known = estimator.held + estimator.gradients + estimate.saved
            scale = (measured.peak - known) / estimate.workspace
            scales[_in_chunks(estimator, options[0])] = min(max(scale, 0.25), 8.0)
            if measured.peak <= memory.device:
                best = min((x for x in (best, options[0]) if x), key=lambda x: estimator(x).seconds)
                if best == first:
                    break
        options = _options(spec, estimator, memory, scales, tried, best)
        if best is None and len(tried) >= MOST_FAILED:
            options = [x for x in [smallest(spec, memory)] if x not in tried]
        if not options or (best is not None and len(tried) >= MOST_COMPILED):
            break
    chosen = best or min(tried, key=lambda x: tried[x].peak)
    return Choice(chosen, tried[chosen], len(tried))


def smallest(spec: TrainSpec, memory: MemoryLimit) -> Execution:
    """Returns the settings with the least estimated memory, with as much offload as host memory
    allows."""
    estimator, memory = Estimator(spec), memory._replace(device=0)
    options = [_estimated(estimator, x, {}) for x in _settings(spec, estimator, memory, {})]
    return min(options, key=lambda x: (x.peak, x.seconds)).execution


@dataclass(frozen=True)
class _Option:
    execution: Execution
    seconds: float
    peak: float
    host: int


def _options(
    spec: TrainSpec,
    estimator: Estimator,
    memory: MemoryLimit,
    scales: dict[bool, float],
    tried: dict[Execution, Plan],
    best: Execution | None,
) -> list[Execution]:
    """Returns the settings to compile next, best first."""
    options = [_estimated(estimator, x, scales) for x in _settings(spec, estimator, memory, scales)]
    # With a given offload, all settings may exceed the host memory.
    options = [x for x in options if x.host <= memory.host] or options
    options = [x for x in options if x.execution not in tried]
    fitting = sorted((x for x in options if x.peak <= memory.device), key=lambda x: x.seconds)
    if best is not None:
        plain, most = replace(best, offload=0.0), (1 + NEARLY_FITS) * memory.device
        fitting += [x for x in options if x.execution == plain and memory.device < x.peak <= most]
        limit = WORTHWHILE * estimator(best).seconds
        fitting = [x for x in fitting if x.seconds < limit]
    elif not fitting and options:
        # The estimate may be too high: compile the smallest, unless a smaller one did not fit.
        least = min(options, key=lambda x: (x.peak, x.seconds))
        known = (_estimated(estimator, x, scales).peak for x in tried)
        fitting = [least] if least.peak < min(known, default=float("inf")) else []
    return [x.execution for x in fitting]


def _estimated(estimator: Estimator, execution: Execution, scales: dict[bool, float]) -> _Option:
    estimate = estimator(execution)
    peak = _peak(estimator, execution, estimate, scales)
    return _Option(execution, estimate.seconds, peak, estimate.host)


def _in_chunks(estimator: Estimator, execution: Execution) -> bool:
    return execution.ffn_chunk < estimator.sequence


def _peak(
    estimator: Estimator,
    execution: Execution,
    estimate: Estimate,
    scales: dict[bool, float],
) -> float:
    """Returns the estimated peak in bytes; `scales` correct the workspace."""
    scale = scales.get(_in_chunks(estimator, execution), max(scales.values(), default=1.0))
    return estimator.held + estimator.gradients + estimate.saved + scale * estimate.workspace


def _settings(
    spec: TrainSpec, estimator: Estimator, memory: MemoryLimit, scales: dict[bool, float]
) -> Iterator[Execution]:
    """Yields the settings that agree with the keys that are set; if saved activations exceed the
    memory, also with the least offload that fits and with all offloaded."""
    group, T = spec.config.execution, estimator.sequence
    if group.schedule == "fused":
        # Algorithm 1 has no other settings.
        yield group.complete()
        return
    seq_len = spec.config.train.seq_len
    ffn_chunks = [seq_len, *(size for size in FFN_CHUNKS if size < T)]
    head_groups = [group.head_groups] if group.head_groups else _head_groups(spec)
    ce_chunks = [x for x in CE_CHUNKS if x < 2 * estimator.tokens] or [estimator.tokens]
    for ffn_chunk in [group.ffn_chunk] if group.ffn_chunk else ffn_chunks:
        for remat, save in _policies(spec, estimator, ffn_chunk < seq_len):
            groups = [1] if remat == "none" else head_groups
            sizes = itertools.product([group.ce_chunk] if group.ce_chunk else ce_chunks, groups)
            for ce_chunk, count in sizes:
                values = dict(remat=remat, save=save, ffn_chunk=ffn_chunk, ce_chunk=ce_chunk)
                plain = group.complete(**values, head_groups=count)
                yield plain
                if group.offload is None and plain.remat != "none":
                    for share in _offloads(estimator, plain, memory, scales):
                        yield replace(plain, offload=share)


def _head_groups(spec: TrainSpec) -> list[int]:
    """Returns the numbers of groups of heads to consider: 1, 2 and the largest, if the model allows
    them and the tokens stay in the same order on the devices."""
    model, found = spec.model, [1]
    for count in sorted({2, max_head_groups(model, num_shards(spec.mesh, "heads"))} - {1}):
        with suppress(ValueError, NotImplementedError):
            groups = replace(spec.config.execution, head_groups=count)
            grouped = replace(spec, config=replace(spec.config, execution=groups))
            check_head_groups(count, model, num_shards(spec.mesh, "heads"))
            if grouped.layout.strategy[0] == spec.layout.strategy[0]:
                found.append(count)
    return found


def _policies(
    spec: TrainSpec, estimator: Estimator, chunked: bool
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields values of remat and save, without `none`, which was slower than `dots` on an H200."""
    group, model = spec.config.execution, spec.model
    if group.remat is not None or group.save is not None:
        plain = group.complete()
        yield plain.remat, plain.save
        return
    # Keys and values have the same size, and saving them saves the same time.
    parts = [("query",), ("key", "value"), ("attended",), ("up",), ("gate",)]
    if chunked:
        parts = [part for part in parts if not UNCHUNKED & set(part)]
    parts = [part for part in parts if part[0] in estimator.widths]
    for size in range(len(parts) + 1):
        for subset in itertools.combinations(parts, size):
            saved = tuple(name for part in subset for name in part)
            everything = size == len(parts) and not chunked
            yield ("dots", ()) if everything else ("save_attention", saved)
            yield "full", saved
    layers = math.gcd(model.num_layers, model.later_layers)
    for size in GROUPS:
        if size < model.num_layers and layers % size == 0:
            yield f"nested({size})", ()
            yield f"nested_full({size})", ()


def _offloads(
    estimator: Estimator, plain: Execution, memory: MemoryLimit, scales: dict[bool, float]
) -> list[float]:
    """Returns values of execution.offload for settings that do not fit without: the smallest, in
    steps of 0.05, with which they fit, or else the largest that host memory allows; and 1 if host
    memory allows it, which moves more but copies less."""
    estimate = estimator(plain)
    over = _peak(estimator, plain, estimate, scales) - memory.device
    if over <= 0:
        return []
    largest = estimator(replace(plain, offload=1.0))
    less = estimate.saved - largest.saved
    most = min(20, 20 * memory.host // largest.host)
    steps = min(-(-20 * over // less), most)
    return sorted({steps / 20, float(most // 20)} - {0.0})
