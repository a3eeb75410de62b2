"""The root config, its defaults and its command line."""

import dataclasses
import math
import os
import re
from argparse import SUPPRESS
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from bptjax.checkpoint import CheckpointConfig
from bptjax.command_line import EXIT_CODES, Debug, Help, nearest, normalize, one_line
from bptjax.data.config import DataConfig
from bptjax.lora import AdapterConfig
from bptjax.models.config import ModelConfig
from bptjax.optimizer import OptimizerConfig
from bptjax.parallel.mesh import ParallelConfig
from bptjax.remat import ExecutionConfig
from bptjax.trackers import Name

# A run directory's copy.
FILE = "config.yaml"


@dataclass(frozen=True)
class TrainConfig:
    """Steps, batch size and evaluation.

    Attributes:
      max_steps: number of optimizer steps. If neither this nor epochs is set, 1000. A larger number
        extends a run.
      epochs: number of passes over the training data, in place of max_steps. Every record is read
        once before the run, to count the sequences of an epoch.
      seq_len: tokens per sequence.
      per_device_train_batch_size: sequences per data shard in one micro-batch. There are dp × fsdp
        data shards.
      gradient_accumulation_steps: micro-batches per optimizer step.
      compute_dtype: dtype of the computation. float16 turns on dynamic loss scaling. If not set,
        float32; bfloat16 if a checkpoint is fine-tuned on a GPU.
      param_dtype: dtype of the parameters.
      z_loss: weight of the squared log-normalizer in the gradients. train/loss leaves it out, and
        train/z_loss is its share alone.
      eval_steps: steps between evaluations. null evaluates only before and after training.
      eval_batches: largest number of batches per evaluation. null takes all held-out data.
      early_stopping_patience: ends the run after this many evaluations in a row without a lower
        eval/loss than before. 0 is off.
      num_eval_generations: number of held-out chats that the model answers at each evaluation,
        written to predictions.jsonl.
      sample_tokens: tokens of the sample printed at the end, up to seq_len. 0 prints none.
    """

    max_steps: int | None = None
    epochs: float | None = None
    seq_len: int = 1024
    per_device_train_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    z_loss: float = 0.0
    eval_steps: int | None = None
    eval_batches: int | None = 64
    early_stopping_patience: int = 0
    num_eval_generations: int = 0
    sample_tokens: int = 0

    def __post_init__(self):
        for name, least in (
            ("max_steps", 1),
            ("seq_len", 1),
            ("per_device_train_batch_size", 1),
            ("gradient_accumulation_steps", 1),
            ("eval_steps", 1),
            ("eval_batches", 1),
            ("early_stopping_patience", 0),
            ("num_eval_generations", 0),
            ("sample_tokens", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"train.{name}={value} is less than {least}")
        if self.epochs is not None and not 0.0 < self.epochs < math.inf:
            raise ValueError(f"train.epochs={self.epochs}: must be positive")
        if self.epochs is not None and self.max_steps is not None:
            raise ValueError(
                f"train.epochs={self.epochs}: must not be set beside "
                f"train.max_steps={self.max_steps}; set one of them"
            )
        if not 0.0 <= self.z_loss < math.inf:
            raise ValueError(f"train.z_loss={self.z_loss}: must not be negative; 0 is none")


@dataclass(frozen=True)
class LoggingConfig:
    """Metrics.

    Attributes:
      steps: optimizer steps between records in metrics.jsonl.
      report_to: trackers that get the numbers of metrics.jsonl too, a list of tensorboard and
        wandb. They need pip install -e ".[tensorboard]" or ".[wandb]". One that fails is
        left out with a warning.
    """

    steps: int = 1
    report_to: list[Name] = field(default_factory=list)

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"logging.steps={self.steps} is less than 1")


@dataclass(frozen=True)
class Config:
    """Run directory, seed and device.

    Attributes:
      run_dir: directory of the run. The same command again resumes a run that was stopped.
      seed: seed of parameters and dropout. data.seed is the seed of the data order.
      device: device to run on. auto refuses the CPU of a machine with an NVIDIA GPU.
    """

    run_dir: str = "runs/run"
    seed: int = 0
    device: Literal["auto", "cpu", "gpu"] = "auto"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def __post_init__(self):
        check_seed("seed", self.seed)
        check_seed("data.seed", self.data.seed)
        if os.path.expanduser(self.run_dir).startswith("~"):
            raise ValueError(f"run_dir={self.run_dir}: there is no such user; give the full path")
        train = self.train
        sequences = train.per_device_train_batch_size * train.gradient_accumulation_steps
        # Positions are int32, and every process holds its batch in memory.
        if sequences * train.seq_len >= 2**31:
            raise ValueError(
                f"train.per_device_train_batch_size={train.per_device_train_batch_size} × "
                f"gradient_accumulation_steps={train.gradient_accumulation_steps} × "
                f"seq_len={train.seq_len}: must be less than 2^31 tokens"
            )
        save, fused = set(self.execution.save), self.execution.schedule == "fused"
        if fused and (hidden := save - {"key", "value"}):
            raise ValueError(
                f"execution.save={', '.join(sorted(hidden))} needs execution.schedule=split"
            )
        hidden = save & {"attended", "gate", "up"}
        if hidden and self.execution.ffn_chunk < self.train.seq_len:
            raise ValueError(
                f"execution.save={', '.join(sorted(hidden))} needs "
                f"execution.ffn_chunk of at least train.seq_len={self.train.seq_len}"
            )
        for key in self.needs_evaluations:
            if not self.train.eval_steps:
                raise ValueError(
                    f"{key} needs evaluations while the run trains; set train.eval_steps"
                )
        self._fill(defaults(self))

    @property
    def needs_evaluations(self) -> list[str]:
        """Formats the keys that have no use without held-out data."""
        patience, best = self.train.early_stopping_patience, self.checkpoint.keep_best
        keys = [f"train.early_stopping_patience={patience}"] * bool(patience)
        return keys + ["checkpoint.keep_best=true"] * best

    def on(self, platform: str) -> "Config":
        """Returns the config with the defaults that depend on the platform: cpu, gpu."""
        config = replace(self)
        config._fill(defaults(self, platform))
        return config

    def _fill(self, values: dict[str, Any]) -> None:
        """Gives each key that is None its value of `{"group.key": value}`."""
        for name, value in values.items():
            group, key = name.split(".")
            if getattr(getattr(self, group), key) is None:
                new = replace(getattr(self, group), **{key: value})
                object.__setattr__(self, group, new)


def defaults(config: Config, platform: str | None = None) -> dict[str, Any]:
    """Returns the defaults that depend on the work, `{"group.key": value}`: those of fine-tuning if
    the model comes from a checkpoint, else those of pre-training.

    train.compute_dtype is left out as long as it depends on a platform that is not known.
    """
    optimizer = config.optimizer
    fine_tuning, adapter = config.model.name_or_path is not None, config.adapter.type != "none"
    # Chen et al. 2023, arXiv 2302.06675, Section 5: Lion takes a learning rate 3 to 10 times lower
    # than AdamW, and as many times the weight decay.
    factor = 4 if optimizer.type == "lion" else 1
    rate = (2e-4 if adapter else 2e-5) if fine_tuning else 3e-4
    found: dict[str, Any] = {
        "optimizer.learning_rate": rate / factor,
        "optimizer.weight_decay": 0.0 if fine_tuning else 0.1 * factor,
    }
    if config.train.epochs is None:
        found["train.max_steps"] = 1000
    if fine_tuning and optimizer.warmup_steps is None:
        found["optimizer.warmup_ratio"] = 0.03
    if not fine_tuning and optimizer.warmup_ratio is None:
        found["optimizer.warmup_steps"] = 0
    if not fine_tuning or platform is not None:
        found["train.compute_dtype"] = (
            "bfloat16" if fine_tuning and platform == "gpu" else "float32"
        )
    return found


def parse(
    argv: list[str],
    description: str = "",
    kind: type = Config,
    command: str = "train",
    *,
    defaults: Sequence[str] = (),
) -> Any:
    """Returns the `kind` of dataclass that `--config FILE` and `--group.key=value` make together.

    Flags win over the file, wherever `--config` stands, and over `defaults`, which are flags too.

    Raises:
      ValueError: unknown key, repeated key, wrong type, missing file or a value out of range, in
        one line.
    """
    from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace

    hints = _hints(kind)

    class Parser(ArgumentParser):
        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            raise ValueError(_one_line(one_line(message), hints))

    class Formatter(Help, DefaultHelpFormatter):
        pass

    parser = Parser(
        prog=f"bptjax {command}",
        usage="%(prog)s [--config FILE] [--KEY VALUE ...] [--debug]",
        description=description,
        epilog=EXIT_CODES,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", action="config", metavar="FILE", help="YAML file of the keys below"
    )
    parser._add_action(Debug())
    parser.add_class_arguments(kind, None)
    flags = parser._option_string_actions
    flags["--print_config"].help = "print all keys as YAML, and exit"
    for name, action in flags.items():
        if name.endswith(".help"):
            action.help = f"show the keys of {name.removesuffix('.help')}, and exit"
    for f in fields(kind):
        if dataclasses.is_dataclass(f.type):
            flags[f"--{f.name}"].help = SUPPRESS  # --group FILE, beside --config.
    for key, hint in hints.items():
        flags[f"--{key}"].metavar = _metavar(hint)
    parsed = parser.parse_args(_config_first([*defaults, *normalize(argv, parser)]))
    for f in fields(kind):
        # jsonargparse lets a number stand where a group belongs, and trips over it later.
        if dataclasses.is_dataclass(f.type) and not isinstance(parsed[f.name], Namespace):
            raise ValueError(f"{f.name}={parsed[f.name]}: must be a group of keys")
    values = parser.instantiate(parsed)
    return kind(**{f.name: values[f.name] for f in fields(kind)})


def _config_first(argv: list[str]) -> list[str]:
    """Returns `argv` with `--config` in front: jsonargparse lets the last of file and flag win.

    Raises:
      ValueError: the file has a key twice, of which YAML would take the last.
    """
    files, rest, tokens = [], [], iter(argv)
    for token in tokens:
        if token == "--config":
            files = [value for value in (next(tokens, None),) if value is not None]
            rest += [] if files else [token]
        elif token.startswith("--config="):
            files = [token.removeprefix("--config=")]
        else:
            rest.append(token)
    for file in files:
        _check_repeated(Path(os.path.expanduser(file)))
    return [f"--config={file}" for file in files] + rest


def _check_repeated(file: Path) -> None:
    import yaml

    def check(node: Any, prefix: str) -> None:
        seen = set()
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            name = prefix + str(key.value)
            if name in seen:
                raise ValueError(
                    f"{file}, line {key.start_mark.line + 1}: {name} is given twice; give it once"
                )
            seen.add(name)
            check(value, f"{name}.")

    try:
        check(yaml.compose(file.read_text()), "")
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return  # jsonargparse says what is wrong with it.


def _hints(kind: type, prefix: str = "") -> dict[str, Any]:
    """Returns the type of each key, `{"group.key": type}`."""
    found = {}
    for f in fields(kind):
        if isinstance(f.type, type) and dataclasses.is_dataclass(f.type):
            found |= _hints(f.type, f"{prefix}{f.name}.")
        else:
            found[prefix + f.name] = f.type
    return found


def _metavar(hint: Any) -> str:
    """Returns a type as help text shows it."""
    arguments = [a for a in get_args(hint) if a not in (type(None), ...)]
    origin = get_origin(hint)
    if hint is bool or origin is Literal:
        return "{" + ",".join(map(str, arguments or ("true", "false"))) + "}"
    if origin in (list, tuple):
        return f"[{_metavar(arguments[0])}, ...]"
    if origin is dict or dataclasses.is_dataclass(hint):
        return "{KEY: VALUE, ...}"
    if arguments:  # A union.
        return "|".join(map(_metavar, arguments))
    return {int: "INT", float: "NUMBER"}.get(hint, "TEXT")


def _expected(hint: Any) -> str:
    """Returns a type as errors name it."""
    arguments = [a for a in get_args(hint) if a is not ...]
    origin = get_origin(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (list, tuple):
        return f"a list, each item {_expected(arguments[0])}"
    if origin is dict or dataclasses.is_dataclass(hint):
        return "keys and values, {key: value}"
    if arguments:
        return " or ".join(map(_expected, arguments))
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    return names.get(hint, "null")


def check_seed(name: str, seed: int) -> None:
    """
    Raises:
      ValueError: it has more than 32 bits.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"{name}={seed} is not in [0, 2^32)")


def _one_line(message: str, hints: dict[str, Any]) -> str:
    """Returns jsonargparse's complaint in the form `key=value: must be …`."""
    text = " ".join(message.split())
    for pattern in (
        r"Group '(?P<group>[\w.]+)' does not accept option '(?P<key>[\w.]+)'",
        r"Option '(?P<key>[\w.]+)' is not accepted",
        r"^unknown key (?P<key>[\w.]+)",  # Of an item, named by the keys of the config.
    ):
        if found := re.search(pattern, text):
            parts = found.groupdict()
            key = ".".join(part for part in (parts.get("group"), parts["key"]) if part)
            groups = ", ".join(dict.fromkeys(name.split(".")[0] for name in hints))
            return f"unknown key {key}{nearest(key, hints) or f'; known: {groups}'}"
    found = re.match(r"Parser key \"([\w.]+)\": (.*)", text)
    if not found or found[1] not in hints:
        return text
    key, error = found.groups()
    items = [kind for kind in get_args(hints[key]) if dataclasses.is_dataclass(kind)]
    if items and re.match(r"Parser key|unknown key|\w+ must be given", error):
        return f"{key}: {_one_line(error, _hints(items[0]))}"
    error = re.sub(r".* class_path '(.*?)': .*", r"Got value: \1", error)
    value = re.search(r".*(?:Got|Given) value: (.*?)(?: Subclass types .*)?$", error)
    return f"{key}={value[1]}: must be {_expected(hints[key])}" if value else text


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """`{"group.key": value}` of nested dataclasses."""
    flat = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            flat |= flatten(value, f"{prefix}{f.name}.")
        elif isinstance(value, list):
            flat[prefix + f.name] = [
                dataclasses.asdict(x) if dataclasses.is_dataclass(x) else x for x in value
            ]
        else:
            flat[prefix + f.name] = value
    return flat


def to_yaml(config: Config) -> str:
    """The resolved config, every key."""
    import yaml

    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)
