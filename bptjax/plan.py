"""`bptjax plan --config FILE`: the memory of a run's step on devices that need not be there."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp

from bptjax.command_line import run_command
from bptjax.config import Config
from bptjax.config_parser import parse
from bptjax.data.tokenizer import make_tokenizer
from bptjax.devices import absent_devices, parse_devices
from bptjax.models.config import ModelConfig
from bptjax.ops.target import absent
from bptjax.optimizer import init_opt_state
from bptjax.parallel.mesh import MEMORY_FRACTION, make_mesh, select_devices
from bptjax.pretrained import Pretrained, open_config
from bptjax.training.setup import check_adapter, check_model
from bptjax.training.spec import TrainSpec
from bptjax.training.state import HOST, abstract_state, parameter_counts, split_trained
from bptjax.training.step import abstract_batch, compile_step

DESCRIPTION = """Compiles the step of a run and prints its memory per device, whether it fits, and
which keys to change if it does not. The devices need not be on this machine, and the weights need
not be there either: config.json is enough. Takes the keys of bptjax train."""
GIB = 2**30
# Lengths that `max_context` tells apart, as a share of the length.
PRECISION = 1 / 64


@dataclass(frozen=True)
class PlanConfig(Config):
    """A training config, and the devices to plan for.

    Attributes:
      devices: devices to plan for, which need not be on this machine: KIND, KIND:GPUS or
        KIND:HOSTSxGPUS, with a kind such as a100-40gb, a100, h100, h200, b200, l40s or rtx4090; or
        a slice of TPUs, such as v5p:2x2x2. Several, separated by commas, are planned for one after
        the other. If not set, this machine's.
      max_context: search the longest train.seq_len that fits.
      json: print a JSON object for each of the devices.
    """

    devices: str | None = None
    max_context: bool = False
    json: bool = False

    def __post_init__(self):
        super().__post_init__()
        for text in self.each:
            parse_devices(text)

    @property
    def each(self) -> list[str]:
        """The devices to plan for one after the other; empty for this machine's."""
        return [text.strip() for text in self.devices.split(",")] if self.devices else []


@dataclass(frozen=True)
class Plan:
    """Predicted memory of a step per device, in bytes.

    Attributes:
      devices: name and number of the devices.
      seq_len: train.seq_len.
      parameters, optimizer, batch: held between steps.
      gradients: gradients of the trained parameters.
      activations: all else that exists at the peak: saved activations, logits, workspaces.
      host: host memory.
      available: memory of a device that a run may use; None if it is not known.
    """

    devices: str
    seq_len: int
    parameters: int
    optimizer: int
    batch: int
    gradients: int
    activations: int
    host: int
    available: int | None

    @property
    def peak(self) -> int:
        held = self.parameters + self.optimizer + self.batch
        return held + self.gradients + self.activations

    @property
    def fits(self) -> bool | None:
        """Whether the step fits; None if the memory of the devices is not known."""
        return None if self.available is None else self.peak <= self.available


def plan(
    spec: TrainSpec, name: str, available: int | None = None, platform: str | None = None
) -> Plan:
    """Compiles the step and returns its memory.

    Args:
      available: see `Plan`.
      platform: gpu or tpu if the devices of the mesh are not on this machine.

    Raises:
      NotImplementedError: the optimizer state is in the host memory of absent devices, which jax
        does not describe.
    """
    optimizer = spec.config.optimizer
    if platform and optimizer.state_memory_kind != "device":
        raise NotImplementedError(
            f"optimizer.state_memory_kind={optimizer.state_memory_kind}: can only be planned on "
            "the devices of this machine; leave out devices"
        )
    with absent(platform) if platform else nullcontext():
        state = abstract_state(spec)
        compiled = compile_step(spec, state, abstract_batch(spec))
    needs = compiled.memory_analysis()
    assert needs is not None
    # The results take the place of the donated state; what is left are the metrics.
    more = needs.temp_size_in_bytes + needs.output_size_in_bytes - needs.alias_size_in_bytes
    trained, _ = split_trained(spec, state.model)
    gradients = min(_bytes(trained), more)
    parameters, optimizer = _bytes(state.model), _bytes(state.opt_state)
    return Plan(
        devices=name,
        seq_len=spec.config.train.seq_len,
        parameters=parameters,
        optimizer=optimizer,
        batch=needs.argument_size_in_bytes - parameters - optimizer,
        gradients=gradients,
        activations=more - gradients,
        host=needs.host_argument_size_in_bytes + needs.host_temp_size_in_bytes,
        available=available,
    )


def longest_context(
    spec: TrainSpec, plan_length: Callable[[TrainSpec], Plan], first: Plan
) -> Plan | None:
    """Returns the plan of the longest train.seq_len that fits, to within `PRECISION`, or None if
    not even 1,024 tokens fit. Memory is close to linear in the length, so few compilations find it.
    """
    fits, fails = (first, None) if first.fits else (None, first)
    assert first.available is not None
    while fits is None or fails is None or _apart(fits, fails):
        known = [p for p in (fits, fails) if p is not None]
        if len(known) == 2:
            (a, b), room = known, first.available
            share = (room - a.peak) / max(b.peak - a.peak, 1)
            # Stay off the ends, so that each compilation narrows the interval.
            length = a.seq_len + (b.seq_len - a.seq_len) * min(max(share, 0.1), 0.9)
        elif fits is not None:
            spare = first.available - fits.peak
            length = fits.seq_len * min(8.0, max(1.25, 1 + 1.05 * spare / fits.activations))
        else:
            length = fails.seq_len / 4 if fails is not None else 0
        step = 1024 if length > 16384 else 128
        length = int(length) // step * step
        # Rounding must not lead back to a length that is known.
        if fits is not None:
            length = max(length, fits.seq_len + step)
        if fails is not None:
            length = min(length, fails.seq_len - step)
        if length < 1024:
            return None
        train = replace(spec.config.train, seq_len=length)
        found = plan_length(replace(spec, config=replace(spec.config, train=train)))
        fits, fails = (found, fails) if found.fits else (fits, found)
    return fits


def _apart(fits: Plan, fails: Plan) -> bool:
    return fails.seq_len - fits.seq_len > max(1024, PRECISION * fits.seq_len)


def remedies(spec: TrainSpec) -> Iterator[tuple[str, int]]:
    """Yields keys to change, and the bytes per device that the state then takes less."""
    config, state = spec.config, abstract_state(spec)
    optimizer = config.optimizer
    held = _bytes(state.opt_state)
    if optimizer.state_memory_kind == "device":
        trained, _ = split_trained(spec, state.model)
        if optimizer.state_dtype != "int8":
            smaller = replace(optimizer, state_dtype="int8")
            slots = jax.eval_shape(lambda model: init_opt_state(smaller, model), trained)
            share = _total(slots) / max(_total(state.opt_state), 1)
            yield "optimizer.state_dtype=int8", int(held * (1 - share))
        yield "optimizer.state_memory_kind=pinned_host", held
    if config.train.param_dtype == "float32":
        # Parameters, their gradients, and the moments in the dtype of the parameters.
        yield "train.param_dtype=bfloat16", _bytes(state.model) // 2


def _bytes(tree: Any) -> int:
    """Returns the bytes of device memory that the arrays of a tree take on each device."""
    return sum(
        jnp.dtype(x.dtype).itemsize * _size(x.sharding.shard_shape(x.shape))
        for x in jax.tree.leaves(tree)
        if x.sharding.memory_kind != HOST
    )


def _total(tree: Any) -> int:
    return sum(jnp.dtype(x.dtype).itemsize * _size(x.shape) for x in jax.tree.leaves(tree))


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def open_model(config: Config) -> tuple[ModelConfig, Pretrained | None]:
    """Returns the architecture of a run, from config.json or from the config and the tokenizer.

    Raises:
      ValueError: one line about the error in the checkpoint or the tokenizer.
    """
    if config.model.name_or_path:
        pretrained = open_config(config.model)
        model = pretrained.config
        if model.add_tokens:
            # The vocabulary of most checkpoints has room for a few tokens; assume that it has none.
            model = replace(model, vocab_size=model.V + len(model.add_tokens))
        return model, replace(pretrained, config=model)
    model = config.model
    if model.vocab_size is None:
        name = config.data.tokenizer or "byte"
        if name == "char":
            raise ValueError(
                "model.vocab_size: must be set with data.tokenizer=char, because the data are not "
                "read"
            )
        model = replace(model, vocab_size=make_tokenizer(name).vocab_size)
    return model, None


def run(config: PlanConfig) -> int:
    """Plans for each of the devices, and prints the plans. Returns 0 if a plan fits, else 1."""
    plain = Config(**{f.name: getattr(config, f.name) for f in fields(Config)})
    good = False
    for text in config.each or [None]:
        platform, available = None, None
        if text is None:
            devices = select_devices(config.device)
            name = f"{len(devices)} x {devices[0].device_kind}"
            available = (devices[0].memory_stats() or {}).get("bytes_limit")
        else:
            kind, devices = absent_devices(text)
            name, platform = text, kind.platform
            available = int(kind.memory * float(MEMORY_FRACTION))
        spec = _spec(plain, devices)
        if not config.json:
            print(f"compiling for {name}", file=sys.stderr, flush=True)

        def plan_length(spec: TrainSpec, name=name, available=available, platform=platform) -> Plan:
            found = plan(spec, name, available, platform)
            if not config.json:
                print(f"  {found.seq_len:,} tokens: {found.peak / GIB:.2f} GiB", file=sys.stderr)
            return found

        found, longest = plan_length(spec), None
        if config.max_context:
            if found.available is None:
                raise ValueError(
                    f"max_context=true: the memory of {name} is not known; set devices"
                )
            longest = longest_context(spec, plan_length, found)
        good |= found.fits is not False
        lines = _json if config.json else _lines
        for line in lines(spec, found, longest, config.max_context):
            print(line, flush=True)
    return 0 if good else 1


def _spec(config: Config, devices: list[jax.Device]) -> TrainSpec:
    """Checks the config against the model and the devices.

    Raises:
      ValueError, NotImplementedError: one line about the wrong key.
    """
    platform = {"cuda": "gpu"}.get(devices[0].platform, devices[0].platform)
    config = config.on(platform)
    model, pretrained = open_model(config)
    check_model(model, None)
    config.execution.check(model)
    spec = TrainSpec(config, model, make_mesh(config.parallel, devices), pretrained)
    check_adapter(spec)
    _ = spec.layout
    return spec


def _lines(spec: TrainSpec, found: Plan, longest: Plan | None, searched: bool) -> Iterator[str]:
    """Formats a plan."""
    total, trained = parameter_counts(spec)
    axes = " ".join(f"{name}={size}" for name, size in spec.mesh.shape.items() if size > 1)
    yield f"{found.devices}{', ' * bool(axes)}{axes}: {total:,} parameters, {trained:,} trained"
    yield f"{spec.global_batch_size} sequences of {found.seq_len:,} tokens per step"
    for name, size in (
        ("parameters", found.parameters),
        ("optimizer state", found.optimizer),
        ("batch", found.batch),
        ("gradients", found.gradients),
        ("activations and workspace", found.activations),
        ("peak", found.peak),
    ):
        yield f"  {name:<28}{size / GIB:>10.2f} GiB per device"
    if found.host:
        yield f"  {'host memory':<28}{found.host / GIB:>10.2f} GiB per device"
    if found.available is None:
        yield f"the memory of {found.devices} is not known"
    elif found.fits:
        spare = (found.available - found.peak) / GIB
        yield f"fits: {found.available / GIB:.2f} GiB are available, {spare:.2f} GiB are left"
    else:
        over = (found.peak - found.available) / GIB
        yield (
            f"does not fit: {found.available / GIB:.2f} GiB are available, {over:.2f} GiB too few"
        )
        for key, saved in remedies(spec):
            yield f"  {key} saves {saved / GIB:.2f} GiB"
        yield from (f"  {line}" for line in _execution_remedies(spec.config))
    if searched:
        text = "not even 1,024 tokens fit" if longest is None else f"{longest.seq_len:,} tokens fit"
        yield f"longest context: {text}"


def _execution_remedies(config: Config) -> Iterator[str]:
    """Formats keys that reduce activations."""
    execution, train = config.execution, config.train
    if train.per_device_train_batch_size > 1:
        yield "train.per_device_train_batch_size=1 divides the activations"
    if execution.save or execution.remat in ("none", "dots"):
        yield "execution.remat=save_attention without execution.save saves fewer activations"
    if not execution.offload:
        yield "execution.offload=1.0 moves saved activations to host memory"
    if execution.ffn_chunk > 2048 or execution.ce_chunk > 1024:
        yield "execution.ffn_chunk=2048 and execution.ce_chunk=1024 need less workspace"
    if config.adapter.type == "none":
        yield "adapter.type=qlora trains adapters beside a base model in 4 bits"


def _json(spec: TrainSpec, found: Plan, longest: Plan | None, searched: bool) -> Iterator[str]:
    row: dict[str, Any] = {f.name: getattr(found, f.name) for f in fields(Plan)}
    row |= dict(peak=found.peak, fits=found.fits)
    if searched:
        row["longest_seq_len"] = None if longest is None else longest.seq_len
    if found.fits is False:
        row["remedies"] = dict(remedies(spec))
    yield json.dumps(row)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""

    def command(argv: list[str]) -> int:
        # Flags without a value, as a shell user writes them.
        switches = "--json", "--max-context", "--max_context"
        argv = [f"{token}=true" if token in switches else token for token in argv]
        return run(parse(argv, DESCRIPTION, PlanConfig, "plan"))

    return run_command(command, argv)


if __name__ == "__main__":
    sys.exit(main())
