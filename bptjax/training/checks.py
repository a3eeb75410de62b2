"""Checks of a model and of a run's config before weights are loaded."""

from typing import get_args

from bptjax.config import Config
from bptjax.data.config import DataConfig, Format
from bptjax.data.files import LABELED
from bptjax.hf.config_export import exported
from bptjax.json_files import read_json
from bptjax.lora import AdapterConfig
from bptjax.models.config import ModelConfig
from bptjax.models.feed_forwards import FEED_FORWARDS
from bptjax.models.layers import rotary
from bptjax.ops.target import capability
from bptjax.pretrained import Pretrained
from bptjax.training.spec import TrainSpec
from bptjax.training.state import adapted_kernels, embeddings_in_full, kernel_sizes


def check_model(model: ModelConfig, pretrained: Pretrained | None) -> None:
    """Checks the scaling of rotary positions.

    Raises:
      ValueError: an unknown feed-forward network; a scaling that is not valid, or that
        transformers could not read from an export.
    """
    if model.feed_forward not in FEED_FORWARDS:
        names = ", ".join(FEED_FORWARDS)
        raise ValueError(f"model.feed_forward={model.feed_forward}: must be one of {names}")
    if model.position_embedding == "rope":
        for parameters in model.ropes:
            rotary(model, parameters, None)
    if pretrained and pretrained.sidecars and pretrained.read_as:
        exported(read_json(pretrained.sidecars / "config.json"), pretrained.read_as, model)


def check_adapter(spec: TrainSpec) -> None:
    """Checks the adapter against the checkpoint.

    Raises:
      ValueError: an adapter without a checkpoint, or for layers that the model lacks; a checkpoint
        that is an adapter, with adapter.type=none or with other settings of the adapter.
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
            f"adapter.type={adapter.type}: must go with a checkpoint; set model.name_or_path"
        )
    for key in ("r", "alpha", "use_rslora", "target_modules", "modules_to_save"):
        value = getattr(adapter, key)
        if pretrained.adapters and value != getattr(AdapterConfig(), key):
            raise ValueError(
                f"adapter.{key}={value}: must not be set, because model.name_or_path={name} is an "
                f"adapter, which decides {key}"
            )
    adapted_kernels(spec)
    embeddings_in_full(spec)


def check_float8(spec: TrainSpec) -> None:
    """Checks train.linear=float8 against the devices and the sizes of the linear layers.

    Raises:
      ValueError: devices that multiply no 8-bit floats, or sizes that cuBLAS does not take.
    """
    if spec.config.train.linear is None:
        return
    device = spec.mesh.devices.flat[0]
    if device.platform != "cpu" and capability(device) < (8, 9):
        raise ValueError(
            "train.linear=float8: must go with GPUs of compute capability 8.9 or newer, not "
            f"{device.device_kind}; leave it out"
        )
    for path, (_, *sizes) in kernel_sizes(spec, sharded=False).items():
        if any(size % 16 for size in sizes):
            raise ValueError(
                "train.linear=float8: must go with linear layers whose sizes are multiples of 16; "
                f"{path} has {sizes[0]} inputs and {sizes[1]} outputs per device; leave it out, or "
                "change model or parallel.tp"
            )


def check_objective(model: ModelConfig, config: Config) -> str:
    """Returns the model's objective.

    Raises:
      ValueError: the model has no head to train, or the config sets a key that only decoders, or
        only masked language models, have.
    """
    objective = model.objective
    if objective is None:
        name = config.model.name_or_path
        raise ValueError(
            f"model.name_or_path={name}: must have a head that bptjax trains: a decoder, or an "
            "encoder of text for masked language modeling (…ForMaskedLM) or classification "
            "(…ForSequenceClassification); model.classes gives a BERT, RoBERTa or ModernBERT new "
            "classes"
            if name
            else "model.causal=false: must go with model.masked_head=true or model.classes"
        )
    probability = config.data.mlm_probability
    if objective != "masked_tokens" and probability != DataConfig().mlm_probability:
        raise ValueError(
            f"data.mlm_probability={probability}: must go with an encoder that has "
            "model.masked_head; leave it out"
        )
    own = ("auto", LABELED) if objective == "class" else set(get_args(Format)) - {LABELED}
    if config.data.format not in own:
        raise ValueError(
            f"data.format={config.data.format}: must be label for a classifier, and for no other "
            "model; leave it out"
        )
    if objective == "class" and config.data.too_long == "truncate_left":
        raise ValueError(
            "data.too_long=truncate_left: must keep the first token, which a classifier reads; set "
            "truncate_right"
        )
    if not model.causal:
        for key, value, unset in (
            ("train.sample_tokens", config.train.sample_tokens, 0),
            ("train.num_eval_generations", config.train.num_eval_generations, 0),
            ("adapter.type", config.adapter.type, "none"),
        ):
            if value != unset:
                raise ValueError(f"{key}={value}: must be {unset} for an encoder; leave it out")
    return objective
