"""Conversion of checkpoints and adapters from and to Hugging Face's format."""

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bptjax.data.hf_tokenizer import read_generation_config
from bptjax.data.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from bptjax.models.architecture import new_model
from bptjax.models.config import ModelConfig
from bptjax.models.params import Index, resize_param
from bptjax.parsing.flags import DTYPES
from bptjax.run.json_files import read_json
from bptjax.run.output import atomic_directory
from bptjax.weights.adapter_export import open_adapter
from bptjax.weights.hf import mxfp4
from bptjax.weights.hf.checkpoint import SIDECARS, copy_sidecar_files, write_hf
from bptjax.weights.hf.config import is_bare
from bptjax.weights.hf.config_export import exported
from bptjax.weights.hf.families.family import Family, Layout
from bptjax.weights.hf.from_scratch import from_scratch
from bptjax.weights.hf.other_tensors import OTHERS
from bptjax.weights.hf.peft_experts import expert_parameters
from bptjax.weights.hf.tensors import Writer
from bptjax.weights.lora import merged, product_dot, product_square
from bptjax.weights.model_card import write_card
from bptjax.weights.pretrained import Pretrained, open_pretrained, resolve_checkpoint
from bptjax.weights.quantized_kernels import linear_kernels
from bptjax.weights.saved_parameters import RunCheckpoint

log = logging.getLogger("bptjax")
# A tokenizer's files in a Hugging Face directory. `save` writes the other fields of
# generation_config.json as well.
TOKENIZER = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "*.model",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.*",
    "generation_config.json",
)
# Quantization of gpt-oss in config.json, as OpenAI publishes it.
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
# transformers' keys for the dtype of the weights, since version 5 and before.
DTYPE_KEYS = "dtype", "torch_dtype"


def to_bptjax(source: str, out: Path) -> Pretrained:
    """Writes the checkpoint with bptjax's parameter names, stacked layers and the same dtypes.

    Raises:
      ValueError: one line about the error in the checkpoint; `out` is not created.
    """
    model = open_pretrained(ModelConfig(name_or_path=source))
    if model.sidecars != resolve_checkpoint(source):
        raise ValueError(f"{source}: must be a Hugging Face checkpoint")
    with atomic_directory(out) as directory:
        copy_sidecar_files(resolve_checkpoint(source), directory / SIDECARS)
        if model.others is not None:
            model.others.save(directory / SIDECARS)
        with Writer(directory, model.source.specs, max_shard_size="1000TB") as writer:
            for path, index, array in model.source.slices():
                writer.write(path, array, index)
    return model


def to_hf(
    source: str,
    out: Path,
    *,
    dtype: str | None,
    max_shard_size: str,
    experts: str | None = None,
    warn: Callable[[str], None] = log.warning,
) -> Pretrained:
    """Writes a run's newest checkpoint, or a converted directory, in Hugging Face's format, with
    the other files of the original model and the run's tokenizer. Only bptjax reads the tokenizers
    `byte` and `char`. With `experts="mxfp4"`, experts are quantized, and their error is a warning.

    Raises:
      ValueError: one line about the error in the checkpoint; `out` is not created.
    """
    model = open_pretrained(ModelConfig(name_or_path=source))
    if model.adapters is not None:
        raise ValueError(f"{source}: must not be an adapter; use merge-adapter or export-adapter")
    if model.sidecars == resolve_checkpoint(source):
        raise ValueError(f"{source}: must not be a Hugging Face checkpoint already")
    encoded = _encoded(model, experts)
    write(model, source, out, model.source.read, dtype, max_shard_size, encoded, warn)
    return model


def merge_adapter(
    source: str,
    out: Path,
    *,
    dtype: str | None,
    max_shard_size: str,
    experts: str | None = None,
    warn: Callable[[str], None] = log.warning,
) -> Pretrained:
    """Merges the adapter of a run or of PEFT into its base model, and writes the result in Hugging
    Face's format. Quantized kernels are dequantized, and the sum is computed in float32. Warns how
    much of the adapter's change is lost by rounding to a 16-bit dtype, measured along the change;
    other rounding errors largely average out in products with many weights.

    Raises:
      ValueError: one line about the error in the adapter; `out` is not created.
    """
    model = open_adapter(source)
    merge, dtypes = merging(model), written_dtypes(model, dtype)
    encoded = _encoded(model, experts)
    # Sums of squares of the rounding error and of the adapter's change, and of their product.
    rounding, changed, along = 0.0, 0.0, 0.0
    values = model.adapters.values if model.adapters else {}

    def read(path, index):
        nonlocal rounding, changed, along
        w = merge(path, index)
        if path in values and (path in encoded or dtypes[path] != "float32"):
            new = mxfp4.rounded(w) if path in encoded else w.astype(dtypes[path])
            error = new.astype(np.float32) - w
            a, b, scale = (np.asarray(x[index]) for x in values[path])
            rounding += float(np.square(error).sum())
            changed += product_square((a, b, scale))
            along += product_dot((a, b, scale), error)
        return w

    write(model, source, out, read, dtype, max_shard_size, encoded, warn)
    if changed:
        name = (dtype or "the base model's dtype") + " and MXFP4" * bool(encoded)
        warn(
            f"rounding to {name} loses {max(-along / changed, 0.0):.1%} of the adapter's change of "
            f"the weights, and its errors are {(rounding / changed) ** 0.5:.3g} times as large as "
            "the change (root mean square); "
            f"{'without --experts mxfp4, ' * bool(encoded)}--dtype float32 does not round"
        )
    return model


def merging(model: Pretrained) -> Callable[[str, Index], np.ndarray]:
    """Returns a function that reads a parameter, or a slice of it, with its adapter merged."""
    assert model.adapters is not None
    config, values = model.adapters.config, model.adapters.values
    kernels = linear_kernels(
        jax.eval_shape(lambda key: new_model(model.config, key), jax.random.key(0))
    )
    merge = jax.jit(partial(merged, config=config), static_argnames="kernel_axes")

    def read(path, index):
        w = model.adapters.modules.get(path) if model.adapters else None
        w = resize_param(path, model.source.read(path, index), model.config) if w is None else w
        if path not in kernels or (path not in values and config.type != "qlora"):
            return w
        adapter = tuple(x[index] for x in values[path]) if path in values else None
        axes = kernels[path]._replace(stacked=kernels[path].stacked - len(index))
        return np.asarray(merge(jnp.asarray(w), adapter, kernel_axes=axes))

    return read


def _tokenizer(source: str, model: Pretrained) -> Tokenizer | None:
    """Returns the tokenizer of a run or an adapter; None if the original model has the same
    tokenizer, chat template and stop ids."""
    here = resolve_checkpoint(source)
    if here == model.sidecars or not has_tokenizer(here):
        return None
    own = load_tokenizer(here, model.config.V)
    if model.sidecars is None:
        return own
    own.generation_config = read_generation_config(model.sidecars)
    try:
        other = load_tokenizer(model.sidecars, model.config.V)
    except ValueError:
        return own
    same = type(own) is type(other) and own.vocabulary() == other.vocabulary()
    chat = (own.chat_template, own.stop_ids) == (other.chat_template, other.stop_ids)
    return None if same and chat else own


def _encoded(model: Pretrained, experts: str | None) -> tuple[str, ...]:
    """Returns the paths of the experts' kernels if they are to be written in MXFP4.

    Raises:
      ValueError: the family's files have no MXFP4, or blocks do not divide the inputs.
    """
    if experts is None:
        return ()
    if model.family is None or not model.family.mxfp4:
        raise ValueError(f"--experts={experts}: must not be set; only files of gpt_oss have it")
    parameters = expert_parameters(model.family, model.config)
    for parameter in parameters:
        mxfp4.blocks_shape((parameter.inputs, parameter.size))
    return tuple(path for parameter in parameters for path in parameter.paths)


def write(
    model: Pretrained,
    source: str,
    out: Path,
    read: Callable[[str, Index], np.ndarray],
    dtype: str | None,
    max_shard_size: str,
    encoded: tuple[str, ...] = (),
    warn: Callable[[str], None] = log.warning,
) -> None:
    """Writes the model to `out` in Hugging Face's format, with the tokenizer of `source`. `read`
    returns a parameter by path and index into its stacked axes. The parameters `encoded` are
    written in MXFP4.
    """
    raw, family, layout = described(model, source, dtype)
    dtypes = written_dtypes(model, dtype) | dict.fromkeys(encoded, "float32")
    if encoded:
        original = read_json(model.sidecars / "config.json") if model.sidecars else {}
        raw["quantization_config"] = original.get("quantization_config") or QUANTIZATION
    with atomic_directory(out) as directory:
        if model.sidecars is not None:
            copy_sidecar_files(model.sidecars, directory)
        if (tokenizer := _tokenizer(source, model)) is not None:
            for file in (file for name in TOKENIZER for file in directory.glob(name)):
                file.unlink()
            tokenizer.save(directory)
        if (
            model.read_as is None
            or model.config.max_position_embeddings != model.read_as.max_position_embeddings
        ):
            _raise_model_max_length(directory, model.config.max_position_embeddings or 0)
        (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        error = write_hf(
            directory,
            family.names(model.config, layout),
            lambda path, index: read(path, index).astype(dtypes[path], copy=False),
            dtypes.__getitem__,
            max_shard_size,
            model.others,
            encoded,
        )
        base = str(model.config.name_or_path) if model.adapters else ""
        if base or isinstance(model.source, RunCheckpoint):  # The model was trained.
            write_card(directory, resolve_checkpoint(source), out.name, adapter=False, base=base)
    if encoded:
        warn(
            f"MXFP4 changes the experts' weights by {error:.2%} of their size (root mean square); "
            "bptjax evaluate --model measures the perplexity of the result"
        )


def described(
    model: Pretrained, source: str, dtype: str | None = None
) -> tuple[dict[str, Any], Family, Layout]:
    """Returns the config.json, the family and the names of the model in Hugging Face's format.

    Args:
      dtype: dtype of the weights; None keeps the checkpoint's.
    """
    dtype, fixed = dtype or trained_dtype(model), _fixed_dtypes(model)
    own = {spec.dtype for path, spec in model.source.specs.items() if path not in fixed}
    name = dtype or max(own, key=lambda name: jnp.dtype(name).itemsize)
    if model.sidecars is None:
        raw, family = from_scratch(model.config)
    else:
        raw, family = read_json(model.sidecars / "config.json"), model.family
    assert family is not None
    layout = Layout("") if is_bare(raw) else family.layouts[0]
    if model.others is not None:
        layout = model.others.layout
    elif family.wrapped:
        raise ValueError(
            f"{source}: must hold the tensors outside its text model in {SIDECARS}/{OTHERS}; "
            "restore the directory"
        )
    if model.read_as is not None:
        raw = exported(raw, model.read_as, model.config, name)
    if model.config.attention_pattern is not None:
        raw = raw | {"attention_pattern": model.config.attention_pattern}
    # Tensors are written dequantized.
    raw.pop("quantization_config", None)
    return raw, family, layout


def _raise_model_max_length(directory: Path, length: int) -> None:
    """Raises the length limit of the directory's tokenizer, if there is one, to the model's."""
    file = directory / "tokenizer_config.json"
    config = read_json(file) if file.exists() else {}
    if config.get("model_max_length", length) < length:
        config["model_max_length"] = length
        file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def written_dtypes(model: Pretrained, dtype: str | None) -> dict[str, str]:
    """Returns the dtype of each parameter in Hugging Face files with weights in `dtype`; None keeps
    the checkpoint's dtype."""
    fixed, specs = _fixed_dtypes(model), model.source.specs.items()
    dtype = dtype or trained_dtype(model)
    return {path: fixed.get(path) or dtype or spec.dtype for path, spec in specs}


def trained_dtype(model: Pretrained) -> str | None:
    """Returns the dtype of the checkpoint that a run trained in full, from its config.json. None if
    the run's parameters are not wider, and for other models, whose files have their own dtypes."""
    if not isinstance(model.source, RunCheckpoint) or model.sidecars is None:
        return None
    raw = read_json(model.sidecars / "config.json")
    dtypes = (x.get(key) for x in (raw, raw.get("text_config", {})) for key in DTYPE_KEYS)
    name = next((name for name in dtypes if name in DTYPES), None)
    widest = max(jnp.dtype(spec.dtype).itemsize for spec in model.source.specs.values())
    return name if name and jnp.dtype(name).itemsize < widest else None


def _fixed_dtypes(model: Pretrained) -> dict[str, str]:
    """Returns the dtypes of parameters whose dtype is the same in all files of the family."""
    rules = model.family.tensor_rules(model.config) if model.family else ()
    return {path: rule.dtype for rule in rules if rule.dtype for path in rule.ours}
