"""Writes adapters for PEFT or vLLM, with the base model's config if training changed it."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

from bptjax.data.tokenizer import add_tokens, has_tokenizer, load_tokenizer
from bptjax.models.config import ModelConfig
from bptjax.run.json_files import read_json
from bptjax.run.output import atomic_directory
from bptjax.weights.hf.config import changes
from bptjax.weights.hf.config_export import exported
from bptjax.weights.hf.peft import write_peft
from bptjax.weights.hf.peft_config import ADAPTER_CONFIG, BASE_CONFIG
from bptjax.weights.hf.vllm import DEFAULT_RANK, MERGE, max_lora_rank, write_vllm
from bptjax.weights.model_card import write_card
from bptjax.weights.pretrained import Pretrained, open_pretrained, resolve_checkpoint

FORMATS = {"peft": write_peft, "vllm": write_vllm}


def export_adapter(source: str, out: Path, *, format: str = "peft") -> Pretrained:
    """Writes the adapters of a run's newest checkpoint, or of a PEFT directory, in a format of
    `FORMATS`.

    Raises:
      ValueError: one line about the error in the run; `out` is not created.
    """
    model = open_adapter(source)
    with atomic_directory(out) as directory:
        write_adapter(model, directory, format)
        here, added = resolve_checkpoint(source), model.config.add_tokens
        if has_tokenizer(here) or added and model.sidecars:
            # Use the chat template and stop tokens that the adapter was trained with.
            own = here if has_tokenizer(here) else model.sidecars
            tokenizer = load_tokenizer(str(own), model.config.V)
            add_tokens(tokenizer, added)
            tokenizer.save(directory)
        base = str(model.config.name_or_path)
        write_card(directory, here, out.name, adapter=True, base=base)
    return model


def write_adapter(model: Pretrained, directory: Path, format: str = "peft") -> None:
    """Writes the adapter's files to `directory`, in a format of `FORMATS`. If training changed the
    base model's config, also writes the changed keys for `open_pretrained`, and a config.json for
    transformers and vLLM.
    """
    assert model.adapters and model.family and model.read_as and model.sidecars
    base = str(model.config.name_or_path)
    FORMATS[format](directory, model.adapters, model.family, model.config, base)
    if changed := changes(model.read_as, model.config):
        (directory / BASE_CONFIG).write_text(json.dumps(changed, indent=2) + "\n")
    if _needs_config(model):
        raw = read_json(model.sidecars / "config.json")
        # Leave out added tokens: transformers reads the base model's embeddings with this config.
        config = replace(model.config, vocab_size=model.read_as.vocab_size)
        raw = exported(raw, model.read_as, config)
        (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


def export_note(model: Pretrained, out: Path, format: str = "peft") -> str:
    """Returns lines about the use of the adapter in `out`; may be empty."""
    return remedy_for_peft(model, out) if format == "peft" else _serving(model, out)


def _serving(model: Pretrained, out: Path) -> str:
    """Returns the largest rank of the adapter in `out`, and the command line that serves it."""
    assert model.adapters is not None and model.read_as is not None
    r = read_json(out / ADAPTER_CONFIG)["r"]
    beside = "above" if r > DEFAULT_RANK else "within"
    lines = [f"largest rank {r}, {beside} vLLM's default maximum of {DEFAULT_RANK}"]
    if model.adapters.config.type == "qlora":
        lines.append(f"trained on a quantized base model; for the run's results, {MERGE}")
    new, old = model.config, model.read_as
    if new.position_embedding == "learned" and new.max_position_embeddings != (
        old.max_position_embeddings
    ):
        lines.append(f"trained with positions that the base model lacks; {MERGE}")
    command = ["vllm", "serve", str(model.config.name_or_path), "--enable-lora"]
    command += ["--lora-modules", f"{out.resolve().name}={out}"]
    command += ["--max-lora-rank", str(max_lora_rank(r))]
    if (out / "config.json").exists():
        command += ["--hf-config-path", str(out)]
    return "\n".join([*lines, shlex.join(command)])


def remedy_for_peft(model: Pretrained, out: Path) -> str:
    """Returns a line about the step that makes PEFT compute the same with the adapter in `out`;
    empty if none is needed.
    """
    # As of PEFT 0.21, _convert_peft_config_moe in utils/transformers_weight_conversion.py.
    adapted = model.adapters.values if model.adapters else ()
    beside = any(path.startswith(("layers.dense.", "layers.mlp.shared.")) for path in adapted)
    assert model.read_as is not None and model.family is not None
    if beside and not model.family.peft_keeps_mlps:
        return (
            "PEFT ignores the adapters of MLPs next to experts, because it takes their names for "
            "names of experts; merge base model and adapter with merge-adapter"
        )
    base, new, old = model.config.name_or_path, model.config, model.read_as
    steps = []
    if _needs_config(model):
        steps.append(
            f"load it with the training config, {model.family.auto_class}.from_pretrained("
            f"{str(base)!r}, config=AutoConfig.from_pretrained({str(out)!r}))"
        )
    if new.V > old.V:
        steps.append(f"add the new tokens with model.resize_token_embeddings({new.V})")
    if new.position_embedding == "learned" and (new.max_position_embeddings or 0) > (
        old.max_position_embeddings or 0
    ):
        steps.append(
            f"use only the base model's {old.max_position_embeddings} positions, although the "
            f"adapter was trained on {new.max_position_embeddings}"
        )
    if not steps:
        return ""
    return (
        f"the adapter was trained with a changed base model; in PEFT, {', then '.join(steps)}; or "
        "merge both with merge-adapter"
    )


def _needs_config(model: Pretrained) -> bool:
    """Returns whether config keys alone change the base model's function. A config cannot extend a
    table of learned positions: transformers would reject the shape of the base model's table.
    """
    assert model.read_as is not None
    changed = changes(model.read_as, model.config)
    return model.config.position_embedding != "learned" and bool(
        changed.keys() & {"rope_parameters", "max_position_embeddings"}
    )


def open_adapter(source: str) -> Pretrained:
    """Opens a run's or PEFT's adapter with its base model, which must be of a Hugging Face family.

    Raises:
      ValueError: the source is not such an adapter.
    """
    model = open_pretrained(ModelConfig(name_or_path=source))
    if model.adapters is None:
        raise ValueError(f"{source}: must be an adapter, of PEFT or of a run with adapter.type")
    if model.family is None:
        raise ValueError(f"{source}: the base model must be of a Hugging Face family")
    return model
