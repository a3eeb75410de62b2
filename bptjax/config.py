"""The root config and its defaults."""

import dataclasses
import math
import os
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin

from bptjax.data.config import DataConfig
from bptjax.models.config import ModelConfig
from bptjax.models.execution import UNCHUNKED, ExecutionConfig, MemoryConfig
from bptjax.objectives import OBJECTIVES, ObjectiveConfig, check_formats
from bptjax.objectives.objective import Objective
from bptjax.ops.attention import NOT_DETERMINISTIC
from bptjax.optim.optimizer import OPTIMIZERS, OptimizerConfig
from bptjax.parallel.mesh import ParallelConfig
from bptjax.parsing.keys import check_seed, flatten, nest
from bptjax.run.checkpoint import CheckpointConfig
from bptjax.run.trackers import Name
from bptjax.tasks import task_names
from bptjax.weights.lora import AdapterConfig

# Value of train.max_steps if neither train.max_steps nor train.epochs is set.
DEFAULT_STEPS = 1000


@dataclass(frozen=True)
class SpikeConfig:
    """Rollbacks after spikes: losses or gradient norms not finite, or far above a running median.

    The run restores its last checkpoint and skips the batches up to and including the spike.

    Attributes:
      max_rollbacks: maximum number of rollbacks in a run; the next spike ends the run. With 0, a
        value that is not finite ends the run, and finite values never do.
      factor: a value above this multiple of the running median is a spike.
      window: number of steps in the running median. Before that many steps, only values that are
        not finite are spikes.
    """

    max_rollbacks: int = 0
    factor: float = 10.0
    window: int = 100

    def __post_init__(self):
        if self.max_rollbacks < 0:
            raise ValueError(
                f"train.on_spike.max_rollbacks={self.max_rollbacks}: must not be negative; 0 turns "
                "it off"
            )
        if not 1.0 < self.factor < math.inf:
            raise ValueError(f"train.on_spike.factor={self.factor}: must be above 1, and finite")
        if self.window < 1:
            raise ValueError(f"train.on_spike.window={self.window}: must be at least 1")


@dataclass(frozen=True)
class TrainConfig:
    """Steps, batch size and evaluation.

    Attributes:
      max_steps: number of optimizer steps; 1000 if neither this nor epochs is set. A larger number
        extends a run.
      epochs: passes over the training data, instead of max_steps; with several sources, over the
        source that runs out first. All records are read once before the run to count sequences.
      seq_len: tokens per sequence. For a model of images, it follows from the model.
      per_device_train_batch_size: sequences per data shard in one micro-batch. There are dp × fsdp
        × ep data shards.
      gradient_accumulation_steps: micro-batches per optimizer step.
      compute_dtype: dtype of the computation. float16 turns on dynamic loss scaling. If not set,
        float32; bfloat16 if a checkpoint is fine-tuned on a GPU.
      param_dtype: dtype of the parameters.
      linear: float8 trains the linear layers of attention and feed-forward networks, but not of
        experts, with 8-bit operands; needs GPUs of compute capability 8.9 or newer. If not set,
        operands have compute_dtype.
      deterministic: two runs of the same config on the same GPUs give the same losses and weights
        to the bit, and so does a resumed run. Takes more time; attention runs without fa4 and
        cudnn. On CPUs every run is deterministic.
      z_loss: weight of the squared log-normalizer in the loss. train/loss does not include it;
        train/z_loss is the weighted term alone.
      eval_steps: steps between evaluations. Every run also evaluates before and after training;
        null evaluates only then.
      eval_batches: maximum number of batches per evaluation, but at least one per source. If there
        are more held-out data, all evaluations use the same sample, in proportion to sources, loss
        masks and lengths. null evaluates all held-out data.
      eval_tasks: tasks that tell whether the model uses its context, measured at each evaluation;
        names of evaluate --tasks, or all. Scores are eval/tasks/TASK/LENGTH, and eval/tasks their
        mean; tasks.jsonl has them with their intervals.
      eval_task_lengths: tokens of the tasks' prompts and answers; seq_len if not set.
      eval_task_samples: number of prompts for each task and length.
      early_stopping_patience: end the run after this many evaluations in a row without a new best
        checkpoint.best_metric. 0 is off.
      num_eval_generations: number of random held-out chats that the model answers at each
        evaluation. The answers go to predictions.jsonl.
      sample_tokens: tokens of the sample printed at the end, up to seq_len. 0 prints none.
      on_spike: rollbacks after spikes of the loss or of the gradient norm.
    """

    max_steps: int | None = None
    epochs: float | None = None
    seq_len: int = 1024
    per_device_train_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    linear: Literal["float8"] | None = None
    deterministic: bool = False
    z_loss: float = 0.0
    eval_steps: int | None = None
    eval_batches: int | None = 64
    eval_tasks: list[str] = field(default_factory=list)
    eval_task_lengths: list[int] = field(default_factory=list)
    eval_task_samples: int = 20
    early_stopping_patience: int = 0
    num_eval_generations: int = 0
    sample_tokens: int = 0
    on_spike: SpikeConfig = field(default_factory=SpikeConfig)

    def __post_init__(self):
        for name, least in (
            ("max_steps", 1),
            ("seq_len", 1),
            ("per_device_train_batch_size", 1),
            ("gradient_accumulation_steps", 1),
            ("eval_steps", 1),
            ("eval_batches", 1),
            ("eval_task_samples", 1),
            ("early_stopping_patience", 0),
            ("num_eval_generations", 0),
            ("sample_tokens", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"train.{name}={value}: must be at least {least}")
        task_names(self.eval_tasks, "train.eval_tasks")
        for length in self.eval_task_lengths:
            if length < 1:
                raise ValueError(f"train.eval_task_lengths={length}: must be at least 1")
        if self.eval_task_lengths and not self.eval_tasks:
            raise ValueError("train.eval_task_lengths: requires train.eval_tasks; leave it out")
        if self.epochs is not None and not 0.0 < self.epochs < math.inf:
            raise ValueError(f"train.epochs={self.epochs}: must be finite and positive")
        if self.epochs is not None and self.max_steps is not None:
            raise ValueError(
                f"train.epochs={self.epochs}: must not be set together with "
                f"train.max_steps={self.max_steps}; set one of them"
            )
        if not 0.0 <= self.z_loss < math.inf:
            raise ValueError(
                f"train.z_loss={self.z_loss}: must be finite and not negative; 0 turns it off"
            )


@dataclass(frozen=True)
class LoggingConfig:
    """Metrics.

    Attributes:
      steps: optimizer steps between records in metrics.jsonl.
      report_to: trackers to send the metrics to, a list of tensorboard and wandb. They need pip
        install -e ".[tensorboard]" or ".[wandb]". A tracker that fails is turned off with a
        warning.
    """

    steps: int = 1
    report_to: list[Name] = field(default_factory=list)

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"logging.steps={self.steps}: must be at least 1")


@dataclass(frozen=True)
class Config:
    """Run directory, seed and device.

    Attributes:
      run_dir: directory of the run. The same command resumes a run that was stopped.
      seed: seed of parameters and dropout. data.seed is the seed of the data order.
      device: device to run on. auto refuses the CPU of a machine with an NVIDIA GPU.
    """

    run_dir: str = "runs/run"
    seed: int = 0
    device: Literal["auto", "cpu", "gpu"] = "auto"
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def __post_init__(self):
        _check_literals(self)
        check_seed("seed", self.seed)
        check_seed("data.seed", self.data.seed)
        check_formats(self.data)
        if os.path.expanduser(self.run_dir).startswith("~"):
            raise ValueError(
                f"run_dir={self.run_dir}: must not name an unknown user; give the full path"
            )
        for key, path in (
            ("run_dir", self.run_dir),
            ("checkpoint.local_dir", self.checkpoint.local_dir),
        ):
            if path and "://" in path:
                raise ValueError(
                    f"{key}={path}: must be a directory, not an object store; copy finished "
                    "checkpoints to the object store by its own tools"
                )
        train = self.train
        sequences = train.per_device_train_batch_size * train.gradient_accumulation_steps
        # Positions are int32, and every process holds its batch in memory.
        if sequences * train.seq_len >= 2**31:
            raise ValueError(
                f"train.per_device_train_batch_size={train.per_device_train_batch_size} × "
                f"gradient_accumulation_steps={train.gradient_accumulation_steps} × "
                f"seq_len={train.seq_len}: must be less than 2^31 tokens"
            )
        execution = self.execution
        save, fused = set(execution.save or ()), execution.schedule == "fused"
        if fused and (hidden := save - {"key", "value"}):
            raise ValueError(
                f"execution.save={', '.join(sorted(hidden))}: requires execution.schedule=split"
            )
        hidden = save & UNCHUNKED
        if hidden and (execution.ffn_chunk or train.seq_len) < train.seq_len:
            raise ValueError(
                f"execution.save={', '.join(sorted(hidden))}: requires an "
                f"execution.ffn_chunk of at least train.seq_len={train.seq_len}"
            )
        kernel = execution.attention_implementation
        if train.deterministic and (reason := NOT_DETERMINISTIC.get(kernel)):
            raise ValueError(
                f"execution.attention_implementation={kernel}: must be auto, or another kernel, "
                f"with train.deterministic=true, because {reason}"
            )
        for key in self.needs_evaluations:
            if not self.train.eval_steps:
                raise ValueError(
                    f"{key}: requires evaluations during the run; set train.eval_steps"
                )
        self._fill(defaults(self))

    @property
    def needs_evaluations(self) -> list[str]:
        """Formats the keys of this config that need held-out data."""
        patience, best = self.train.early_stopping_patience, self.checkpoint.keep_best
        keys = [f"train.early_stopping_patience={patience}"] * bool(patience)
        return keys + ["checkpoint.keep_best=true"] * best

    def on(self, platform: str) -> "Config":
        """Returns the config with the defaults for the platform, `cpu` or `gpu`."""
        config = replace(self)
        config._fill(defaults(self, platform))
        return config

    def _fill(self, values: dict[str, Any]) -> None:
        """Sets each key that is None to its value in `{"group.key": value}`."""
        for name, value in values.items():
            group, key = name.split(".")
            if getattr(getattr(self, group), key) is None:
                new = replace(getattr(self, group), **{key: value})
                object.__setattr__(self, group, new)


def defaults(config: Config, platform: str | None = None) -> dict[str, Any]:
    """Returns the defaults that depend on other keys, `{"group.key": value}`.

    They are for fine-tuning if the model comes from a checkpoint, else for pre-training. Without a
    platform, leaves out train.compute_dtype if it depends on the platform, and adapter.alpha, which
    a resumed run keeps.
    """
    optimizer = config.optimizer
    fine_tuning, adapter = config.model.name_or_path is not None, config.adapter.type != "none"
    factor = OPTIMIZERS[optimizer.type].rate_divisor
    objective = OBJECTIVES.get(config.objective.type)
    rates = (objective or Objective).learning_rates
    rate = rates[adapter] if fine_tuning else 3e-4
    own = objective.settings() if objective else {}
    found: dict[str, Any] = {
        **{f"objective.{key}": getattr(objective, name) for key, name in own.items()},
        "optimizer.learning_rate": rate / factor,
        "optimizer.weight_decay": 0.0 if fine_tuning else 0.1 * factor,
    }
    if config.train.epochs is None:
        found["train.max_steps"] = DEFAULT_STEPS
    if fine_tuning and optimizer.warmup_steps is None:
        found["optimizer.warmup_ratio"] = 0.03
    if not fine_tuning and optimizer.warmup_ratio is None:
        found["optimizer.warmup_steps"] = 0
    if set(config.execution.save or ()) & UNCHUNKED:
        found["execution.ffn_chunk"] = config.train.seq_len
    if platform == "cpu":
        plain = config.execution.complete()
        found = {f"execution.{key}": getattr(plain, key) for key in config.execution.unset} | found
    if not fine_tuning or platform is not None:
        found["train.compute_dtype"] = (
            "bfloat16" if fine_tuning and platform == "gpu" else "float32"
        )
    if adapter and platform is not None:
        found["adapter.alpha"] = config.adapter.unit_alpha
    return found


def _check_literals(config: Any, prefix: str = "") -> None:
    """Checks keys that allow only certain values, because a config made in Python skips the parser.

    Raises:
      ValueError: a key has another value.
    """
    for f in fields(config):
        key, value = prefix + f.name, getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            _check_literals(value, f"{key}.")
            continue
        choices = _choices(f.type)
        for item in value if isinstance(value, list) else [value]:
            if choices and item not in choices:
                names = ", ".join("null" if x is None else str(x) for x in choices)
                raise ValueError(f"{key}={item}: must be one of {names}")


def _choices(hint: Any) -> list[Any]:
    """Returns the values that a type with a `Literal` allows; empty for other types."""
    arguments = get_args(hint)
    if get_origin(hint) is Literal:
        return list(arguments)
    found = [x for argument in arguments for x in _choices(argument)]
    return found + [None] * bool(found and type(None) in arguments)


def to_yaml(config: Config) -> str:
    """Formats the config as YAML. With a checkpoint, leaves out the model's keys that have their
    defaults or are empty, because the checkpoint determines these values."""
    import yaml

    tree = dataclasses.asdict(config)
    if config.model.name_or_path is not None:
        each, defaults = flatten(config.model), flatten(ModelConfig())
        tree["model"] = nest({k: x for k, x in each.items() if x not in (defaults[k], {})})
    return yaml.safe_dump(tree, sort_keys=False)
