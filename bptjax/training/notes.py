"""Lines for the log about a run's devices, data and model."""

import textwrap
from collections.abc import Collection, Sequence

import jax
import numpy as np

from bptjax.config import Config, defaults
from bptjax.data.sources import count
from bptjax.models.config import ModelConfig
from bptjax.ops.attention import NOT_DETERMINISTIC
from bptjax.parallel.distributed import addresses, hosts
from bptjax.parallel.launch import is_loopback
from bptjax.parallel.mesh import num_shards
from bptjax.parsing.keys import flatten
from bptjax.run.json_files import read_json
from bptjax.run.output import plural
from bptjax.training.data import RunData
from bptjax.training.spec import TrainSpec
from bptjax.weights.hf.from_scratch import family_of
from bptjax.weights.pretrained import Pretrained


def describe_determinism(config: Config, platform: str) -> list[str]:
    """Formats the lines about what train.deterministic costs; empty where it costs nothing."""
    if not config.train.deterministic or platform != "gpu":
        return []
    text = (
        f"deterministic: without the attention kernels {' and '.join(NOT_DETERMINISTIC)}; XLA adds "
        "in a fixed order, and takes cuBLAS's default kernels instead of timing several"
    )
    return textwrap.wrap(text, 80, subsequent_indent="  ")


def describe_devices(spec: TrainSpec, data: RunData) -> list[str]:
    """Formats the lines about devices and data for the log."""
    devices, layout, model = spec.mesh.devices.reshape(-1), spec.layout, spec.model
    axes = " ".join(f"{name}={size}" for name, size in spec.mesh.shape.items())
    if num_shards(spec.mesh, "sequence") > 1:
        axes += f", the sequence by {': '.join(layout.strategy)}"
    where = f"{len(devices)} × {devices[0].device_kind}"
    where += f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    kind, size = "documents", f"vocabulary {model.vocab_size}"
    if model.encoder.image_size is not None:
        kind, size = "images", plural(model.encoder.classes, "class", "es")
    return [
        f"devices: {where}, jax {jax.__version__}, mesh {axes}",
        *describe_hosts(hosts(), addresses(), devices[0].platform),
        f"data: {count(data.train)} {kind}, {len(data.held_out):,} held out, {size}",
    ]


def describe_hosts(names: Sequence[str], at: Sequence[str], platform: str) -> list[str]:
    """Formats the line about the hosts of the processes and their addresses; none for one host.

    Args:
      names: host of each process.
      at: address of each process.
      platform: of the devices.
    """
    found: dict[str, str] = {}
    for name, address in zip(names, at, strict=True):
        # A process on the host of process 0 may know a loopback address only.
        if name not in found or is_loopback(found[name]):
            found[name] = address
    if len(found) < 2:
        return []
    text = ", ".join(f"{name} ({address})" for name, address in found.items())
    own = "" if platform == "cpu" else "; NCCL chooses its interfaces itself"
    return [f"hosts: {text}, communicate by these addresses{own}"]


def describe_model(spec: TrainSpec, data: RunData) -> list[str]:
    """Formats the lines about the model and its checkpoint for the log."""
    config, model, pretrained, notes = spec.config, spec.model, spec.pretrained, []
    if model.add_tokens:
        known = [token for token in model.add_tokens if token not in data.added]
        size = data.tokenizer.vocab_size
        text = f"model.add_tokens: {len(data.added)} new, the vocabulary has {size}"
        notes.append(text + (f"; in it already: {', '.join(map(repr, known))}" if known else ""))
    if not pretrained:
        try:
            family_of(model)
        except ValueError as error:
            notes.append(f"this model cannot be exported to Hugging Face's format: {error}")
        return notes
    notes.append(f"model: from {config.model.name_or_path}")
    if config.model.extend_to is not None:
        text = f"model.extend_to: {model.max_position_embeddings:,} positions"
        if model.position_embedding == "rope":
            text += f", rope_theta {model.rope('full_attention')['rope_theta']:,.15g}"
        notes.append(text)
        if config.train.seq_len < config.model.extend_to:
            notes.append(
                f"warning: train.seq_len={config.train.seq_len}: positions from there to "
                f"model.extend_to={config.model.extend_to} are not trained"
            )
    notes += describe_adapter(config, pretrained)
    own, used = defaults(config, spec.mesh.local_devices[0].platform), flatten(config)
    # The first default does not depend on the checkpoint; `describe_adapter` reports the second.
    for key in ("train.max_steps", "adapter.alpha"):
        own.pop(key, None)
    used_defaults = ", ".join(
        f"{key}={used[key]}"
        for key in own
        if used[key] == own[key] and not key.startswith("execution.")
    )
    if used_defaults:
        text = f"fine-tuning defaults: {used_defaults}"
        notes += textwrap.wrap(text, 80, subsequent_indent="  ")
    notes += _describe_routers(config, model, pretrained)
    notes += [pretrained.left_out] * bool(pretrained.left_out)
    if model.exceeds_positions(config.train.seq_len):
        keys = "model.rope_parameters and model.max_position_embeddings"
        if model.rope("full_attention").get("rope_type", "default") == "default":
            keys = f"model.extend_to={config.train.seq_len}, or {keys}"
        notes.append(
            f"warning: train.seq_len={config.train.seq_len} is beyond the model's "
            f"{model.max_position_embeddings} positions; set {keys}"
        )
    return notes


def describe_objective(spec: TrainSpec) -> list[str]:
    """Formats the lines about an objective with keys of its own; empty for others."""
    if not spec.objective.settings():
        return []
    rate = spec.config.optimizer.known("learning_rate")
    text = f"objective: {spec.objective.describe()}; learning rate {rate:g}"
    return textwrap.wrap(text, 80, subsequent_indent="  ")


def describe_update(spec: TrainSpec) -> list[str]:
    """Formats the lines about when parameters are updated."""
    obstacle, clipping = spec.in_backward_obstacle, spec.exact_clipping
    text = "updates follow the backward pass, "
    if spec.gradients_on_host:
        text += f"which moves gradients to host memory, because {clipping} need their norm"
    elif spec.in_backward:
        text = "each layer is updated inside the backward pass, when its gradient is known"
    elif spec.config.optimizer.in_backward is False:
        text += "because optimizer.in_backward=false"
    elif obstacle is None:
        text += f"because {clipping} need the norm of all gradients"
    else:
        text += f"because of {obstacle}"
    return textwrap.wrap(f"optimizer: {text}", 80, subsequent_indent="  ")


def describe_adapter(config: Config, pretrained: Pretrained | None) -> list[str]:
    """Formats the line about the strength of the adapters; empty without adapters."""
    adapter = config.adapter
    if adapter.type == "none":
        return []
    if pretrained is not None and pretrained.adapters is not None:
        values = pretrained.adapters.values.values()
        ranks = {a.shape[-1] for a, _, _ in values}
        # Layers without an adapter have scale 0.
        scales = {x for _, _, scale in values for x in np.unique(scale).tolist() if x}
        name = f"rank {_range(ranks)}, as in {config.model.name_or_path}"
        return [f"adapter: {adapter.type}, {name}: adapter scale {_range(scales)}"]
    alpha = adapter.unit_alpha if adapter.alpha is None else adapter.alpha
    line = f"adapter: {adapter.type}, rank {adapter.r}, alpha {alpha:g}"
    line += " with use_rslora" * adapter.use_rslora + f": adapter scale {_number(adapter.scale)}"
    if adapter.scale < 1:
        line += f"; adapter.alpha={adapter.unit_alpha:g}, the default, gives 1.0"
    return [line]


def _describe_routers(config: Config, model: ModelConfig, pretrained: Pretrained) -> list[str]:
    """Formats the line about a checkpoint whose experts train without its load-balancing loss;
    empty for other runs. With adapters, routers are frozen."""
    if (
        model.experts.aux_loss is not None
        or not pretrained.sidecars
        or config.adapter.type != "none"
    ):
        return []
    raw = read_json(pretrained.sidecars / "config.json")
    factor = raw.get("text_config", raw).get("router_aux_loss_coef")
    if not factor:
        return []
    return [
        "experts: no load-balancing loss, as in transformers without output_router_logits; "
        f"model.experts.aux_loss={factor} sets the checkpoint's router_aux_loss_coef"
    ]


def _range(values: Collection[float]) -> str:
    """Formats the minimum and the maximum of the values."""
    return " to ".join(dict.fromkeys(_number(x) for x in (min(values), max(values))))


def _number(value: float) -> str:
    """Formats a number with up to 4 digits, and whole floats like `1.0`."""
    return str(value if isinstance(value, int) else float(f"{value:.4g}"))
