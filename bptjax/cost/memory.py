"""The memory of a training step, predicted by compiling it for devices of any machine."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from bptjax.cost.devices import GIB
from bptjax.cost.hlo import Program
from bptjax.models.execution import UNCHUNKED
from bptjax.ops.target import absent
from bptjax.optim.optimizer import init_opt_state
from bptjax.training.spec import TrainSpec
from bptjax.training.state import HOST, TrainState, abstract_state, split_trained
from bptjax.training.step import abstract_batch, compile_step

# Smallest relative difference in length that `longest_context` resolves.
PRECISION = 1 / 64
QLORA_REMEDY = "adapter.type=qlora trains adapters on a base model in 4 bits"


@dataclass(frozen=True)
class Plan:
    """Predicted memory of a step per device, in bytes.

    Attributes:
      devices: name and number of the devices.
      seq_len: train.seq_len.
      parameters, optimizer, batch: held between steps.
      gradients: gradients of the trained parameters.
      activations: all else at the peak: saved activations, logits, workspaces.
      host: host memory.
      link: bytes that a device receives from other devices in a step.
      available: memory of a device that a run may use; None if unknown.
    """

    devices: str
    seq_len: int
    parameters: int
    optimizer: int
    batch: int
    gradients: int
    activations: int
    host: int
    link: int
    available: int | None

    @property
    def peak(self) -> int:
        held = self.parameters + self.optimizer + self.batch
        return held + self.gradients + self.activations

    @property
    def fits(self) -> bool | None:
        """Whether the step fits; None if the memory of the devices is unknown."""
        return None if self.available is None else self.peak <= self.available


def tracing_for(spec: TrainSpec, platform: str | None) -> AbstractContextManager[None]:
    """Returns a context that traces functions for the devices of the mesh.

    Args:
      platform: gpu or tpu if the devices are not on this machine.

    Raises:
      NotImplementedError: gradients are in host memory, which jax does not describe for devices
        that are not on this machine.
    """
    if platform and spec.gradients_on_host:
        raise NotImplementedError(
            "optimizer.in_backward=true with optimizer.clip=exact: can only be planned on the "
            "devices of this machine; leave out devices"
        )
    return absent(spec.mesh.devices.flat[0]) if platform else nullcontext()


def plan(
    spec: TrainSpec, name: str, available: int | None = None, platform: str | None = None
) -> Plan:
    """Compiles the step and returns its memory.

    Args:
      available: see `Plan`.
      platform: gpu or tpu if the devices of the mesh are not on this machine.

    Raises:
      NotImplementedError: see `tracing_for`.
    """
    with tracing_for(spec, platform):
        state = abstract_state(spec)
        compiled = compile_step(spec, state, abstract_batch(spec))
    return predict(spec, state, compiled, name, available)


def predict(
    spec: TrainSpec,
    state: TrainState,
    compiled: jax.stages.Compiled,
    name: str,
    available: int | None,
) -> Plan:
    """Returns the memory of a compiled step; see `Plan`."""
    needs = compiled.memory_analysis()
    assert needs is not None
    # The new state reuses the donated state's memory; the only other results are metrics.
    more = needs.temp_size_in_bytes + needs.output_size_in_bytes - needs.alias_size_in_bytes
    gradients, on_host = min(gradient_bytes(spec), more), absent_host_bytes(spec)
    parameters, optimizer = tree_bytes(state.model), tree_bytes(state.opt_state) - on_host
    return Plan(
        devices=name,
        seq_len=spec.config.train.seq_len,
        parameters=parameters,
        optimizer=optimizer,
        batch=needs.argument_size_in_bytes - parameters - optimizer - on_host,
        gradients=gradients,
        activations=more - gradients,
        host=needs.host_argument_size_in_bytes + needs.host_temp_size_in_bytes + on_host,
        link=int(Program(compiled.as_text() or "").link_bytes()) if spec.mesh.size > 1 else 0,
        available=available,
    )


def absent_host_bytes(spec: TrainSpec) -> int:
    """Returns the bytes per device of the optimizer state in the host memory of devices that are
    not on this machine. Their steps are compiled with this state in device memory."""
    described = spec.mesh.devices.flat[0].addressable_memories()
    if spec.config.optimizer.state_memory_kind == "device" or described:
        return 0
    return tree_bytes(abstract_state(spec).opt_state.slots)


def gradient_bytes(spec: TrainSpec, in_backward: bool | None = None) -> int:
    """Returns the bytes per device of the gradients that exist at once.

    Args:
      in_backward: whether layers are updated inside the backward pass; defaults to the spec's.
    """
    trained, _ = split_trained(spec, abstract_state(spec).model)
    total, layers = tree_bytes(trained), tree_bytes(trained.layers)
    if spec.in_backward if in_backward is None else in_backward:
        total -= layers - layers // spec.model.num_layers
    if spec.config.train.gradient_accumulation_steps == 1:
        return total
    # Gradients of several micro-batches are summed in float32.
    size = jnp.dtype(spec.config.train.param_dtype).itemsize
    return int(total * (1 + 4 / size))


def longest_context(
    spec: TrainSpec, plan_length: Callable[[TrainSpec], Plan], first: Plan
) -> Plan | None:
    """Returns the plan of the longest train.seq_len that fits, to within `PRECISION`, or None if
    1,024 tokens do not fit. Needs few compilations, because memory is close to linear in the
    length."""
    fits, fails = (first, None) if first.fits else (None, first)
    assert first.available is not None
    while fits is None or fails is None or _apart(fits, fails):
        known = [p for p in (fits, fails) if p is not None]
        if len(known) == 2:
            (a, b), limit = known, first.available
            share = (limit - a.peak) / max(b.peak - a.peak, 1)
            # Stay off the ends, so that each compilation narrows the interval.
            length = a.seq_len + (b.seq_len - a.seq_len) * min(max(share, 0.1), 0.9)
        elif fits is not None:
            spare = first.available - fits.peak
            length = fits.seq_len * min(8.0, max(1.25, 1 + 1.05 * spare / fits.activations))
        else:
            length = fails.seq_len / 4 if fails is not None else 0
        step = 1024 if length > 16384 else 128
        length = int(length) // step * step
        # Rounding must not return to a known length.
        if fits is not None:
            length = max(length, fits.seq_len + step)
        if fails is not None:
            length = min(length, fails.seq_len - step)
        if length < 1024:
            return None
        train = replace(spec.config.train, seq_len=length)
        execution = spec.config.execution
        if set(execution.save or ()) & UNCHUNKED:
            execution = replace(execution, ffn_chunk=None)  # `Config` sets it to the new length.
        config = replace(spec.config, train=train, execution=execution)
        predicted = plan_length(replace(spec, config=config))
        fits, fails = (predicted, fails) if predicted.fits else (fits, predicted)
    return fits


def _apart(fits: Plan, fails: Plan) -> bool:
    return fails.seq_len - fits.seq_len > max(1024, PRECISION * fits.seq_len)


def shortage(spec: TrainSpec, predicted: Plan) -> str:
    """Formats the error for a step that does not fit: the missing memory, and the smallest change
    that suffices, or else all changes that help."""
    assert predicted.available is not None
    over, train = predicted.peak - predicted.available, spec.config.train
    limit, budget = f"the {predicted.available / GIB:.2f} GiB that it may take", spec.config.memory
    if budget.budget_gib and int(budget.budget_gib * GIB) == predicted.available:
        limit = f"memory.budget_gib={budget.budget_gib}"
    keys = [(key, saved) for key, saved in remedies(spec) if saved]
    # The smallest change that suffices alone.
    enough = sorted((k for k in keys if k[1] >= over), key=lambda k: k[1])[:1]
    texts = [f"{key} saves {saved / GIB:.2f} GiB" for key, saved in enough or keys]
    # Activations are close to linear in the length.
    length = int(train.seq_len * (1 - 1.1 * over / max(predicted.activations, 1))) // 1024 * 1024
    texts += [f"train.seq_len={length} may fit"] * (length > 0)
    if spec.config.adapter.type == "none":
        texts.append(QLORA_REMEDY)
    return (
        f"memory: a step on {predicted.devices} needs at least {predicted.peak / GIB:.2f} GiB per "
        f"device, {over / GIB:.2f} GiB more than {limit}" + "; " * bool(texts) + ", ".join(texts)
    )


def remedies(spec: TrainSpec) -> Iterator[tuple[str, int]]:
    """Yields keys of the optimizer and the parameters, and the bytes per device that each saves."""
    config, state = spec.config, abstract_state(spec)
    optimizer = config.optimizer
    held = tree_bytes(state.opt_state)
    if optimizer.state_memory_kind == "device":
        trained, _ = split_trained(spec, state.model)
        if optimizer.state_dtype != "int8":
            smaller = replace(optimizer, state_dtype="int8")
            slots = jax.eval_shape(lambda model: init_opt_state(smaller, model), trained)
            share = _total(slots) / max(_total(state.opt_state), 1)
            yield "optimizer.state_dtype=int8", int(held * (1 - share))
        yield "optimizer.state_memory_kind=pinned_host", held
    if spec.in_backward_obstacle is None and not spec.in_backward:
        saved = gradient_bytes(spec, in_backward=False) - gradient_bytes(spec, in_backward=True)
        if spec.exact_clipping:
            yield "optimizer.clip=delayed", saved
        yield "optimizer.in_backward=true", saved
    if config.train.param_dtype == "float32":
        # Parameters, their gradients, and moments in the parameters' dtype.
        yield "train.param_dtype=bfloat16", tree_bytes(state.model) // 2


def tree_bytes(tree: Any, host: bool = False) -> int:
    """Returns the bytes per device that the arrays of a tree take, in device memory or host
    memory."""
    return sum(
        jnp.dtype(x.dtype).itemsize * math.prod(x.sharding.shard_shape(x.shape))
        for x in jax.tree.leaves(tree)
        if (x.sharding.memory_kind == HOST) == host
    )


def _total(tree: Any) -> int:
    return sum(jnp.dtype(x.dtype).itemsize * math.prod(x.shape) for x in jax.tree.leaves(tree))
