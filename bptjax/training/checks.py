"""Checks of a model and of a run's config before weights are loaded."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import jax.numpy as jnp

from bptjax.config import Config, TrainConfig
from bptjax.cost.devices import GIB
from bptjax.cost.memory import tree_bytes
from bptjax.data.config import DataConfig
from bptjax.data.sources import HeldOutSources
from bptjax.models.config import ModelConfig
from bptjax.models.config_checks import sizes_of
from bptjax.models.feed_forwards import FEED_FORWARDS
from bptjax.models.head_groups import check_head_groups
from bptjax.models.layers import rotary
from bptjax.objectives import OBJECTIVES, check, choose
from bptjax.objectives.objective import Objective
from bptjax.ops.target import capability, misreads_host_memory
from bptjax.parallel.mesh import host_memory, num_shards
from bptjax.parsing.keys import flatten
from bptjax.run.json_files import read_json
from bptjax.tasks.sample import Sampler
from bptjax.training.eval_tasks import task_metrics
from bptjax.training.spec import TrainSpec
from bptjax.training.state import (
    abstract_state,
    adapted_kernels,
    fully_trained_embeddings,
    kernel_sizes,
)
from bptjax.weights.hf.config_export import exported
from bptjax.weights.hf.vllm import MERGE, refusal
from bptjax.weights.lora import AdapterConfig
from bptjax.weights.pretrained import Pretrained

# Keys of the group data that apply to runs on images.
IMAGE_KEYS = {
    f"data.{key}"
    for key in (
        "path",
        "eval_path",
        "eval_fraction",
        "eval_split",
        "bad_records",
        "num_shards",
        "shuffle",
        "seed",
    )
}
# Keys that do not work for encoders, with the only allowed value.
ENCODER_KEYS = {
    "train.sample_tokens": 0,
    "train.num_eval_generations": 0,
    "train.eval_tasks": [],
    "adapter.type": "none",
}
# Keys of `train` that make a run generate text, with the values that turn them off.
GENERATION = {"sample_tokens": 0, "num_eval_generations": 0, "eval_tasks": []}


def check_model(model: ModelConfig, pretrained: Pretrained | None) -> None:
    """Checks the feed-forward network, the rotary scaling and the export.

    Raises:
      ValueError: an unknown feed-forward network, or a scaling that is invalid or that transformers
        could not read from an export.
    """
    if model.feed_forward not in FEED_FORWARDS:
        names = ", ".join(FEED_FORWARDS)
        raise ValueError(f"model.feed_forward={model.feed_forward}: must be one of {names}")
    if model.position_embedding == "rope":
        for kind in model.layer_kinds:
            if kind.rope is not None:
                rotary(model, kind.rope, None, model.heads(kind.full)[1])
    if pretrained and pretrained.sidecars and pretrained.read_as:
        exported(read_json(pretrained.sidecars / "config.json"), pretrained.read_as, model)


def check_spec(spec: TrainSpec) -> None:
    """Checks the settings of a run against its model, checkpoint and devices, except their memory.

    Raises:
      ValueError, NotImplementedError: one line about the wrong key.
    """
    spec.execution.check(spec.model)
    groups, tp = spec.execution.head_groups, num_shards(spec.mesh, "heads")
    check_head_groups(groups, spec.model, tp)
    check_landmarks(spec)
    check_adapter(spec)
    check_float8(spec)
    check_in_backward(spec)
    least, size = spec.objective.least_batch, spec.global_batch_size
    if size < least and spec.config.data.packing == "none":
        raise ValueError(
            f"global batch size: {size} with data.packing=none: must be at least {least} with "
            f"objective.type={spec.objective.name}, whose loss compares records; raise "
            "train.per_device_train_batch_size or train.gradient_accumulation_steps"
        )
    _ = spec.layout


def check_best_metric(spec: TrainSpec, held_out: Sequence[Any], tasks: Sequence[Sampler]) -> None:
    """Checks checkpoint.best_metric, and that a run that follows it measures it.

    Raises:
      ValueError: the metric is unknown, or needs held-out data that the run does not have.
    """
    config = spec.config
    metric, of_tasks = config.checkpoint.best_metric, task_metrics(tasks)
    names = ["eval/loss", *(f"eval/{name}" for name in spec.objective.metrics)]
    if isinstance(held_out, HeldOutSources) and len(held_out.names) > 1:
        names += [f"eval/loss/{name}" for name in held_out.names]
    names += ["eval/exact_match"] * bool(config.train.num_eval_generations) + of_tasks
    if metric not in names:
        known = ", ".join(names)
        raise ValueError(f"checkpoint.best_metric={metric}: must be one of {known}")
    for key in config.needs_evaluations:
        if not len(held_out) and metric not in of_tasks:
            raise ValueError(
                f"{key}: requires held-out data; set data.eval_fraction or data.eval_path"
            )


def check_in_backward(spec: TrainSpec) -> None:
    """Checks optimizer.in_backward and optimizer.clip against other keys.

    Raises:
      ValueError: another key excludes it.
    """
    optimizer, obstacle = spec.config.optimizer, spec.in_backward_obstacle
    if optimizer.in_backward and obstacle:
        raise ValueError(f"optimizer.in_backward=true: must be false with {obstacle}")
    obstacle = obstacle or "optimizer.in_backward=false"
    if optimizer.clip == "per_layer" and not spec.in_backward:
        raise ValueError(f"optimizer.clip=per_layer: must be exact with {obstacle}")
    if optimizer.clip == "delayed" and spec.compute_dtype == jnp.float16:
        raise ValueError(f"optimizer.clip=delayed: must be exact with {obstacle}")


def check_arrays_on_host(spec: TrainSpec) -> None:
    """Checks that the run keeps no arrays in host memory if XLA would misread them.

    Raises:
      ValueError: it does.
    """
    optimizer, device = spec.config.optimizer, spec.mesh.devices.reshape(-1)[0]
    if not misreads_host_memory(device.platform):
        return
    for key, value, only in (
        ("execution.offload", spec.config.execution.offload or 0.0, 0.0),
        ("optimizer.state_memory_kind", optimizer.state_memory_kind, "device"),
        ("optimizer.clip=exact with optimizer.in_backward", spec.gradients_on_host, False),
    ):
        if value != only:
            raise ValueError(
                f"{key}={value}: must be {only} on a GPU with jaxlib {version('jaxlib')}, which "
                "reads arrays in host memory at wrong indices; install Python 3.12 and jax 0.11.1, "
                "or newer ones"
            )


def check_landmarks(spec: TrainSpec) -> None:
    """Checks landmark attention against the settings of the run.

    Raises:
      ValueError: a setting does not work with landmark attention.
    """
    landmarks, config = spec.model.landmarks, spec.config
    if landmarks is None:
        return
    name, train = "model.attention_pattern.type=landmark", config.train
    sp, tokens = num_shards(spec.mesh, "sequence"), spec.layout.split.tokens
    keys = [("execution.schedule", config.execution.schedule, "split")]
    if sp > 1:
        # The cache of a sharded sequence distributes its tokens one by one, not in blocks.
        name += f" and parallel.sp={sp}"
        keys += [(f"train.{key}", getattr(train, key), none) for key, none in GENERATION.items()]
        # Other batch widths would divide blocks.
        keys += [("data.group_by_length", config.data.group_by_length, False)]
    for key, value, only in keys:
        if value != only:
            raise ValueError(f"{key}={value}: must be {only} with {name}")
    # Shards hold complete blocks. In zigzag order, each shard holds two ranges of a sequence.
    unit = landmarks.block_size * (1 if tokens == 1 else 2 * tokens)
    if train.seq_len % unit:
        raise ValueError(
            f"train.seq_len={train.seq_len}: must be a multiple of {unit} with {name} and "
            f"block_size={landmarks.block_size}"
        )


def check_adapter(spec: TrainSpec) -> None:
    """Checks the adapter against the checkpoint.

    Raises:
      ValueError: an adapter without a checkpoint, or for layers that the model lacks; a checkpoint
        of an adapter with adapter.type=none or other adapter settings; an adapter that
        adapter.serve refuses.
    """
    config, pretrained = spec.config, spec.pretrained
    adapter, name = config.adapter, config.model.name_or_path
    if adapter.type == "none":
        if pretrained and pretrained.adapters:
            raise ValueError(
                f"model.name_or_path={name}: must not be an adapter with adapter.type=none; set "
                "adapter.type to lora or qlora to continue training it, or merge it first"
            )
        return
    if pretrained is None:
        raise ValueError(
            f"adapter.type={adapter.type}: requires a checkpoint; set model.name_or_path"
        )
    plain = AdapterConfig()
    for key in ("r", "alpha", "use_rslora", "target_modules", "modules_to_save"):
        value = getattr(adapter, key)
        usual = [getattr(plain, key)] + [plain.unit_alpha] * (key == "alpha")
        if pretrained.adapters and value not in usual:
            raise ValueError(
                f"adapter.{key}={value}: must not be set, because model.name_or_path={name} is an "
                f"adapter, which decides {key}"
            )
    kernels, in_full = adapted_kernels(spec), fully_trained_embeddings(spec)
    if adapter.serve is None:
        return
    if pretrained.family is None:
        raise ValueError(
            f"adapter.serve={adapter.serve}: must be null without a Hugging Face model"
        )
    ranks = dict.fromkeys(kernels, adapter.r)
    if pretrained.adapters:
        values = pretrained.adapters.values.items()
        ranks = {path: a.shape[-1] for path, (a, _, _) in values}
    if reason := refusal(pretrained.family, spec.model, ranks, in_full):
        raise ValueError(
            f"adapter.serve={adapter.serve}: must be null, because vLLM {reason}; {MERGE}"
        )


def check_host_memory(spec: TrainSpec) -> None:
    """Checks that the state of a run on a CPU fits into memory. On other devices, compiling the
    step checks this first.

    Raises:
      ValueError: the state is larger.
    """
    devices = spec.mesh.local_devices
    if devices[0].platform != "cpu":
        return
    state, most = abstract_state(spec), host_memory()
    needed = len(devices) * (tree_bytes(state.model) + tree_bytes(state.opt_state))
    if needed > most:
        raise ValueError(
            f"{sizes_of(spec.model)}: must fit into the {most / GIB:.2f} GiB of this host, but "
            f"parameters and optimizer state take {needed / GIB:.2f} GiB; choose smaller sizes, "
            "or a host with more memory"
        )


def check_float8(spec: TrainSpec) -> None:
    """Checks train.linear=float8 against the devices and the sizes of the linear layers.

    Raises:
      ValueError: the devices cannot multiply 8-bit floats, or cuBLAS does not support the sizes.
    """
    if spec.config.train.linear is None:
        return
    device = spec.mesh.devices.flat[0]
    if device.platform != "cpu" and capability(device) < (8, 9):
        raise ValueError(
            "train.linear=float8: requires GPUs of compute capability 8.9 or newer, not "
            f"{device.device_kind}; leave it out"
        )
    for path, (_, *sizes) in kernel_sizes(spec, sharded=False).items():
        if any(size % 16 for size in sizes):
            raise ValueError(
                "train.linear=float8: requires linear layers whose sizes are multiples of 16; "
                f"{path} has {sizes[0]} inputs and {sizes[1]} outputs per device; leave it out, or "
                "change model or parallel.tp"
            )


def check_objective(model: ModelConfig, config: Config) -> Objective:
    """Returns the objective of a run.

    Raises:
      ValueError: the model has no head for it, or the config sets a key of other models or
        objectives.
    """
    name, keys = config.model.name_or_path, flatten(config)
    if name and not any(row.fits(model) for row in OBJECTIVES.values()):
        raise ValueError(
            f"model.name_or_path={name}: must have a head that bptjax trains: a decoder, or an "
            "encoder of text for masked language modeling (…ForMaskedLM) or classification "
            "(…ForSequenceClassification), or one of images for classification "
            "(ViTForImageClassification); model.encoder.classes gives a BERT, RoBERTa, ModernBERT "
            "or ViT new classes"
        )
    objective = choose(config.objective, model)
    if not model.causal:
        for key, unset in ENCODER_KEYS.items():
            if keys[key] != unset:
                raise ValueError(f"{key}={keys[key]}: must be {unset} for an encoder; leave it out")
    if model.encoder.image_size is not None:
        _check_images(model, config)
    check(objective, model, keys, flatten(Config()))
    return objective


def _check_images(model: ModelConfig, config: Config) -> None:
    """Checks the config of a model of images.

    Raises:
      ValueError: the model is not from a checkpoint, or the config sets a key of models of text.
    """
    name, tokens = config.model.name_or_path, model.encoder.patches + 1
    if name is None:
        raise ValueError(
            f"model.encoder.image_size={model.encoder.image_size}: must come from a checkpoint; "
            "set model.name_or_path"
        )
    if model.max_position_embeddings != tokens or model.add_tokens:
        raise ValueError(
            "model.max_position_embeddings, model.add_tokens: must not be set for a model of "
            "images; leave them out"
        )
    text = f"must be left out for the images of {name}"
    allowed: dict[str, Any] = {
        "train.seq_len": (TrainConfig().seq_len, tokens),
        "data.packing": (DataConfig().packing, "none"),
    }
    plain = flatten(DataConfig(), "data.")
    allowed |= {key: (plain[key],) for key in plain.keys() - IMAGE_KEYS - allowed.keys()}
    keys = flatten(config)
    for key, values in allowed.items():
        if keys[key] not in values:
            raise ValueError(f"{key}={keys[key]}: {text}")
