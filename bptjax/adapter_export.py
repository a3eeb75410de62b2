"""Adapters written for PEFT, with the config of the base model where training changed it."""

import json
from dataclasses import replace
from pathlib import Path

from bptjax.data.tokenizer import add_tokens, has_tokenizer, load_tokenizer
from bptjax.hf.config import changes, read_json
from bptjax.hf.config_export import exported
from bptjax.hf.output import atomic_directory
from bptjax.hf.peft import write_peft
from bptjax.hf.peft_config import BASE_CONFIG
from bptjax.models.config import ModelConfig
from bptjax.pretrained import Pretrained, open_pretrained, resolve_checkpoint


def export_adapter(source: str, out: Path) -> Pretrained:
    """Writes the adapters of a run's newest checkpoint as PEFT reads them.

    Raises:
      ValueError: what is wrong with it, in one line; nothing is left of `out`.
    """
    model = open_adapter(source)
    with atomic_directory(out) as directory:
        write_adapter(model, directory)
        here, added = resolve_checkpoint(source), model.config.add_tokens
        if has_tokenizer(here) or added and model.sidecars:
            # With the chat template and the stop tokens that the adapter was trained with.
            own = here if has_tokenizer(here) else model.sidecars
            tokenizer = load_tokenizer(str(own), model.config.V)
            add_tokens(tokenizer, added)
            tokenizer.save(directory)
    return model


def write_adapter(model: Pretrained, directory: Path) -> None:
    """Writes PEFT's files into `directory`, and beside them the base's config where training
    changed it: the changed keys for `open_pretrained`, and a config.json for transformers.
    """
    assert model.adapters and model.family and model.read_as and model.sidecars
    base = str(model.config.name_or_path)
    write_peft(directory, model.adapters, model.family, model.config, base)
    if changed := changes(model.read_as, model.config):
        (directory / BASE_CONFIG).write_text(json.dumps(changed, indent=2) + "\n")
    if _needs_config(model):
        raw = read_json(model.sidecars / "config.json")
        # Without added tokens: transformers reads the base's embeddings with this config.
        config = replace(model.config, vocab_size=model.read_as.vocab_size)
        raw = exported(raw, model.read_as, config)
        (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


def remedy_for_peft(model: Pretrained, out: Path) -> str:
    """One line on how PEFT gets the base model that the adapter in `out` was trained beside; empty
    where the base is as it was.
    """
    assert model.read_as is not None
    base, new, old = model.config.name_or_path, model.config, model.read_as
    steps = []
    if _needs_config(model):
        steps.append(
            "load it with the config of training, AutoModelForCausalLM.from_pretrained("
            f"{str(base)!r}, config=AutoConfig.from_pretrained({str(out)!r}))"
        )
    if new.V > old.V:
        steps.append(f"give it rows for the added tokens, model.resize_token_embeddings({new.V})")
    if new.position_embedding == "learned" and (new.max_position_embeddings or 0) > (
        old.max_position_embeddings or 0
    ):
        steps.append(
            f"keep to the {old.max_position_embeddings} positions that it has, of "
            f"{new.max_position_embeddings} that the adapter was trained on"
        )
    if not steps:
        return ""
    return (
        f"the adapter was trained beside a changed base; in PEFT, {', then '.join(steps)}; or "
        "write one model of both by merge-adapter"
    )


def _needs_config(model: Pretrained) -> bool:
    """Whether config keys alone change what the base model computes. A longer table of learned
    positions is beyond a config: transformers would refuse the base's table by its shape.
    """
    assert model.read_as is not None
    changed = changes(model.read_as, model.config)
    return model.config.position_embedding != "learned" and bool(
        changed.keys() & {"rope_parameters", "max_position_embeddings"}
    )


def open_adapter(source: str) -> Pretrained:
    """The adapter, a run's or PEFT's, with the model of a Hugging Face family that it is for.

    Raises:
      ValueError: it is none.
    """
    model = open_pretrained(ModelConfig(name_or_path=source))
    if model.adapters is None:
        raise ValueError(f"{source} is not an adapter")
    if model.family is None:
        raise ValueError(f"{source} is an adapter of a model of no Hugging Face family")
    return model
