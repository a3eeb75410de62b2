"""`bptjax plan --config FILE`: predicts the memory of a run's step, on any devices."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax

from bptjax.cli.run_command import run_command
from bptjax.config import DEFAULT_STEPS, Config
from bptjax.config_parser import parse
from bptjax.cost.auto import absent_limit, describe, present_limit
from bptjax.cost.devices import GIB, absent_devices, parse_devices
from bptjax.cost.estimate import Estimator
from bptjax.cost.memory import QLORA_REMEDY, Plan, longest_context, plan, remedies
from bptjax.cost.search import choose, smallest, with_execution
from bptjax.data.tokenizer import make_tokenizer
from bptjax.models.attention_pattern import find_tokens
from bptjax.models.config import ModelConfig
from bptjax.parallel.mesh import make_mesh, select_devices
from bptjax.parsing.keys import replace_keys
from bptjax.run.output import plural
from bptjax.run.progress import Compilations, Progress
from bptjax.training.checks import check_model, check_objective, check_spec
from bptjax.training.notes import describe_update
from bptjax.training.spec import TrainSpec, fit_to_images
from bptjax.training.state import parameter_counts
from bptjax.weights.pretrained import Pretrained, open_config

DESCRIPTION = """Compiles the step of a run and prints its memory per device, whether it fits, and
which keys to change if it does not. The devices need not be on this machine, and the weights need
not be there either: config.json is enough. Takes the keys of bptjax train."""
EXECUTION_KEYS = "remat", "save", "ffn_chunk", "ce_chunk", "offload", "head_groups"


@dataclass(frozen=True)
class PlanConfig(Config):
    """A training config, and the devices to plan for.

    Attributes:
      devices: devices to plan for, which need not be on this machine: KIND, KIND:GPUS or
        KIND:HOSTSxGPUS, with a kind such as a100-40gb, a100, h100, h200, b200, l40s or rtx4090; or
        a slice of TPUs, such as v5p:2x2x2. Separate several by commas to plan for each. If not set,
        this machine's.
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
        """The devices to plan for, one after the other; empty for this machine's."""
        return [text.strip() for text in self.devices.split(",")] if self.devices else []


def open_model(config: Config) -> tuple[ModelConfig, Pretrained | None]:
    """Returns the architecture of a run, and the checkpoint that it starts from, if any. A run from
    scratch without model.vocab_size gets the size of the tokenizer's vocabulary.

    Raises:
      ValueError: one line about the error in the checkpoint or the tokenizer.
    """
    if config.model.name_or_path:
        pretrained = open_config(config.model)
        encoder = pretrained.config.encoder
        if encoder.image_size is not None and not encoder.classes:
            # The data, which are not read, would tell the number of classes. Assume 2, because the
            # number hardly changes the plan.
            pretrained = open_config(replace_keys(config.model, {"encoder.classes": 2}))
        model = pretrained.config
        if model.add_tokens:
            # Assume that every added token needs a new entry; most vocabularies have unused ones.
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
    good, each = False, config.each or [None]
    say = (lambda line: None) if config.json else partial(print, file=sys.stderr, flush=True)
    with Progress("planning", len(each), say) as progress:
        for text in each:
            good |= _run_on(plain, text, config, say)
            progress.advance()
    return 0 if good else 1


def _run_on(
    plain: Config, text: str | None, options: PlanConfig, say: Callable[[str], None]
) -> bool:
    """Prints the plan for the devices `text`, or for this machine's. Returns whether it fits."""
    if text is None:
        devices, platform = select_devices(plain.device), None
        name = f"{len(devices)} x {devices[0].device_kind}"
        spec = open_spec(plain, devices)
        memory = present_limit(spec)
    else:
        kind, devices = absent_devices(text)
        name, platform, spec = text, kind.platform, open_spec(plain, devices)
        memory = absent_limit(spec, kind)

    compilations = Compilations(say)

    def measure(spec: TrainSpec) -> Plan:
        keys = plain.execution.unset
        line = f"compiling for {name}" + (f": {describe(spec.execution, keys)}" if keys else "")
        with compilations.announce(line):
            memory_plan = plan(spec, name, memory.device if memory else None, platform)
        say(f"  {memory_plan.seq_len:,} tokens: {memory_plan.peak / GIB:.2f} GiB")
        return memory_plan

    def measure_smallest(spec: TrainSpec) -> Plan:
        assert memory is not None
        return measure(with_execution(spec, smallest(spec, memory)))

    if memory is not None and spec.config.execution.unset:
        choice = choose(spec, memory, measure)
        chosen, predicted = with_execution(spec, choice.execution), choice.plan
    else:
        chosen, predicted = spec, measure(spec)
    longest = None
    if options.max_context:
        if memory is None:
            raise ValueError(f"max_context=true: the memory of {name} is not known; set devices")
        say("max_context: searching the longest train.seq_len, in up to about ten compilations")
        if spec.config.execution.unset:
            longest = longest_context(spec, measure_smallest, measure_smallest(spec))
        else:
            longest = longest_context(spec, measure, predicted)
    lines = _json if options.json else partial(_lines, plain)
    for line in lines(chosen, predicted, longest, options.max_context):
        print(line, flush=True)
    return predicted.fits is not False


def open_spec(config: Config, devices: list[jax.Device]) -> TrainSpec:
    """Returns the fixed parts of a run, after checks of the config; loads no weights.

    Raises:
      ValueError, NotImplementedError: one line about the wrong key.
    """
    platform = {"cuda": "gpu"}.get(devices[0].platform, devices[0].platform)
    config = config.on(platform)
    model, pretrained = open_model(config)
    # Marker ids do not change the plan, and there may be no tokenizer.
    pattern = find_tokens(model.attention_pattern, lambda text: 0)
    model = replace(model, attention_pattern=pattern)
    check_model(model, None)
    check_objective(model, config)
    config = fit_to_images(config, model)
    # The data are not read, and the memory does not depend on their number of steps.
    steps = None if config.train.epochs is None else DEFAULT_STEPS
    spec = TrainSpec(config, model, make_mesh(config.parallel, devices), pretrained, steps)
    check_spec(spec)
    return spec


def _lines(
    plain: Config, spec: TrainSpec, predicted: Plan, longest: Plan | None, searched: bool
) -> Iterator[str]:
    """Formats a plan. `plain` is the config before defaults are filled in."""
    total, trained = parameter_counts(spec)
    axes = " ".join(f"{name}={size}" for name, size in spec.mesh.shape.items() if size > 1)
    yield f"{predicted.devices}{', ' * bool(axes)}{axes}: {total:,} parameters, {trained:,} trained"
    yield f"{plural(spec.global_batch_size, 'sequence')} of {predicted.seq_len:,} tokens per step"
    yield f"execution: {describe(spec.execution, EXECUTION_KEYS)}"
    yield from describe_update(spec)
    saved = _saved(spec, predicted)
    for name, size in (
        ("parameters", predicted.parameters),
        ("optimizer state", predicted.optimizer),
        ("batch", predicted.batch),
        ("gradients", predicted.gradients),
        ("saved activations", saved),
        ("workspace", predicted.activations - saved),
        ("peak", predicted.peak),
    ):
        yield f"  {name:<28}{size / GIB:>10.2f} GiB per device"
    if predicted.host:
        yield f"  {'host memory':<28}{predicted.host / GIB:>10.2f} GiB per device"
    if predicted.link:
        yield f"  {'from other devices':<28}{predicted.link / GIB:>10.2f} GiB per device and step"
    yield _duration(spec)
    if predicted.available is None:
        yield (
            f"the memory of {predicted.devices} is not known: a run would start, and fail if its "
            "step does not fit"
        )
    elif predicted.fits:
        spare = (predicted.available - predicted.peak) / GIB
        yield f"fits: {predicted.available / GIB:.2f} GiB are available, {spare:.2f} GiB are left"
    else:
        over = (predicted.peak - predicted.available) / GIB
        yield (
            f"does not fit: {predicted.available / GIB:.2f} GiB are available, {over:.2f} GiB too "
            "few"
        )
        for key, saved in remedies(spec):
            yield f"  {key} saves {saved / GIB:.2f} GiB"
        yield from (f"  {line}" for line in _other_remedies(plain))
    if searched:
        text = "not even 1,024 tokens fit" if longest is None else f"{longest.seq_len:,} tokens fit"
        yield f"longest context: {text}"
    model, length = spec.model, longest.seq_len if longest else 0
    learned = model.position_embedding == "learned"
    if model.exceeds_positions(length) or (
        learned and length > (model.max_position_embeddings or length)
    ):
        yield (
            f"warning: model.max_position_embeddings={model.max_position_embeddings}: longer "
            "sequences fit in memory, but the model was not trained on them"
        )


def _saved(spec: TrainSpec, predicted: Plan) -> int:
    """Returns the bytes of saved activations, counted from shapes."""
    return min(Estimator(spec)(spec.execution).saved, predicted.activations)


def _duration(spec: TrainSpec) -> str:
    """Formats the predicted duration of a step."""
    estimator = Estimator(spec)
    estimate = estimator(spec.execution)
    flops = f"{estimate.flops:.3g} FLOPs per device and step, with recomputation"
    if not estimator.measured:
        return f"{flops}; duration: no measurement of these devices"
    tokens = spec.global_batch_size * spec.config.train.seq_len
    text = f"{flops}: about {estimate.seconds:.3g} s, {tokens / estimate.seconds:,.0f} tokens/s"
    return text + (", if communication costs nothing" if spec.mesh.size > 1 else "")


def _other_remedies(plain: Config) -> Iterator[str]:
    """Formats changes whose savings only a compilation could tell."""
    if plain.train.per_device_train_batch_size > 1:
        yield "train.per_device_train_batch_size=1 divides the activations"
    if keys := [key for key in EXECUTION_KEYS if key not in plain.execution.unset]:
        names = ", ".join(f"execution.{key}" for key in keys)
        yield f"without {names}, bptjax chooses values that need less memory if it has to"
    if plain.adapter.type == "none":
        yield QLORA_REMEDY


def _json(spec: TrainSpec, predicted: Plan, longest: Plan | None, searched: bool) -> Iterator[str]:
    row: dict[str, Any] = {f.name: getattr(predicted, f.name) for f in fields(Plan)}
    estimator = Estimator(spec)
    estimate = estimator(spec.execution)
    row |= dict(
        peak=predicted.peak,
        saved=_saved(spec, predicted),
        fits=predicted.fits,
        flops=estimate.flops,
    )
    row |= dict(execution=dataclasses.asdict(spec.execution))
    row |= dict(seconds=estimate.seconds if estimator.measured else None)
    if searched:
        row["longest_seq_len"] = None if longest is None else longest.seq_len
    if predicted.fits is False:
        row["remedies"] = dict(remedies(spec))
    yield json.dumps(row)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""

    def command(argv: list[str]) -> int:
        # These flags need no value on the command line.
        switches = "--json", "--max-context", "--max_context"
        argv = [f"{token}=true" if token in switches else token for token in argv]
        return run(parse(argv, DESCRIPTION, PlanConfig, "plan"))

    return run_command(command, argv)
