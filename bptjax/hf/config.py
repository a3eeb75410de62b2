"""A Hugging Face config.json as a ModelConfig, and back with what changed."""

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from bptjax.data.tokenizer import transformers
from bptjax.hf.families import FAMILIES, Family
from bptjax.models.config import ModelConfig

# Keys of every config that change no result.
NEUTRAL = {
    "_name_or_path",
    "_sliding_window_pattern",
    "architectures",
    "bos_token_id",
    "chunk_size_feed_forward",
    "classifier_dropout",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "init_std",
    "label2id",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}

# What a training config may set beside model.name_or_path.
FREE = (
    "name_or_path",
    "rope_parameters",
    "max_positions",
    "embedding_dropout",
    "attention_dropout",
    "residual_dropout",
    "init_std",
    "add_tokens",
)


def read_config(directory: Path) -> tuple[Family, ModelConfig]:
    """The family, and the architecture, of the checkpoint in `directory`.

    Raises:
      ValueError: no config.json, a family that is not supported, or a key that is not.
    """
    raw = read_json(directory / "config.json")
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(f"{directory}: model_type={kind!r} is not supported; there are {known}")
    try:
        config = transformers().AutoConfig.from_pretrained(str(directory), local_files_only=True)
        default = type(config)().to_dict()
        seen = _Seen(config)
        values = FAMILIES[kind].read(seen)
        _refuse_others(config, default, seen.keys, FAMILIES[kind].neutral)
        return FAMILIES[kind], FAMILIES[kind].config(**values)
    except Exception as error:
        # transformers' validators raise classes of their own.
        text = " ".join(str(error).split())
        raise ValueError(f"{directory / 'config.json'} ({kind}): {text}") from error


def merge(pretrained: ModelConfig, wanted: ModelConfig) -> ModelConfig:
    """The checkpoint's architecture with what the training config sets beside it.

    Raises:
      ValueError: it sets what the checkpoint decides.
    """
    default = ModelConfig()
    changes: dict[str, Any] = {"name_or_path": wanted.name_or_path}
    for f in fields(ModelConfig):
        value = getattr(wanted, f.name)
        if value == getattr(default, f.name) or f.name == "name_or_path":
            continue
        if f.name not in FREE:
            raise ValueError(
                f"model.{f.name}={value} beside model.name_or_path={wanted.name_or_path}: the "
                f"checkpoint decides it ({getattr(pretrained, f.name)}); leave it out"
            )
        changes[f.name] = value
    # Added tokens have the ids that follow those of tokens that were added before.
    changes["add_tokens"] = [*dict.fromkeys([*pretrained.add_tokens, *wanted.add_tokens])]
    if "rope_parameters" in changes:
        if pretrained.position != "rope":
            raise ValueError(
                f"model.rope_parameters: {wanted.name_or_path} has position={pretrained.position}"
            )
        changes["rope_parameters"] = _merge_rope(pretrained, changes["rope_parameters"])
    return replace(pretrained, **changes)


def _merge_rope(pretrained: ModelConfig, wanted: dict[str, Any]) -> dict[str, Any]:
    """The wanted scaling on the checkpoint's base. Where layer types have their own and the wanted
    one names none, it is that of full attention, which reads far.
    """
    old = pretrained.rope_parameters
    if isinstance(old.get("full_attention"), dict):
        if not any(isinstance(value, dict) for value in wanted.values()):
            wanted = {"full_attention": wanted}
        unknown = wanted.keys() - old.keys()
        if unknown:
            raise ValueError(f"model.rope_parameters: no layer of type {sorted(unknown)}")
        return old | {t: _scale(old[t], p, pretrained) for t, p in wanted.items()}
    return _scale(old, wanted, pretrained)


def _scale(old: dict, wanted: dict, pretrained: ModelConfig) -> dict[str, Any]:
    kept = {k: old[k] for k in ("rope_theta", "partial_rotary_factor") if k in old}
    kind = wanted.get("rope_type", wanted.get("type", old.get("rope_type", "default")))
    if kind == old.get("rope_type", "default"):
        kept = old
    elif kind in ("yarn", "llama3", "longrope"):
        known = old.get("original_max_position_embeddings", pretrained.max_positions)
        kept |= {"original_max_position_embeddings": known}
    return kept | wanted | {"rope_type": kind}


def exported(raw: dict[str, Any], read: ModelConfig, now: ModelConfig, dtype: str) -> dict:
    """The config.json of the checkpoint that was read, with what has changed since; unknown keys
    stay.
    """
    new = dict(raw)
    if now.rope_parameters != read.rope_parameters:
        new = {k: v for k, v in new.items() if k not in ("rope_scaling", "rope_theta")}
        new["rope_parameters"] = now.rope_parameters
    if now.max_positions != read.max_positions:
        new[FAMILIES[raw["model_type"]].positions] = now.max_positions
    if now.vocab_size != read.vocab_size:
        new["vocab_size"] = now.vocab_size
    key = "torch_dtype" if "torch_dtype" in raw else "dtype"
    return new if raw.get(key) == dtype else new | {key: dtype}


def changes(read: ModelConfig, now: ModelConfig) -> dict[str, Any]:
    """The keys, and their values, that a training config has set beside the checkpoint's."""
    keys = (key for key in FREE if key != "name_or_path")
    return {key: getattr(now, key) for key in keys if getattr(now, key) != getattr(read, key)}


def from_scratch(config: ModelConfig) -> tuple[dict[str, Any], Family]:
    """A config.json for a model that never was a Hugging Face one.

    Raises:
      ValueError: no family is like it.
    """
    raw: dict[str, Any] = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=config.V,
        hidden_size=config.hidden_size,
        intermediate_size=config.F,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.K,
        head_dim=config.H,
        hidden_act=config.activation,
        max_position_embeddings=config.max_positions or 2048,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default"} | config.rope_parameters,
        attention_bias=config.qkv_bias,
        mlp_bias=config.mlp_bias,
        tie_word_embeddings=config.tied_head,
    )
    family = FAMILIES["llama"]
    keys: dict[str, Any] = {
        k: v for k, v in raw.items() if k not in ("architectures", "model_type")
    }
    read = asdict(ModelConfig(**family.read(transformers().LlamaConfig(**keys))))
    # Named here, and left to their defaults there.
    kept = {"num_kv_heads": config.K, "head_dim": config.H, "intermediate_size": config.F}
    for key, value in (asdict(config) | kept).items():
        if key not in FREE and value != read[key]:
            raise ValueError(f"no Hugging Face family has model.{key}={value} with the rest of it")
    return raw, family


def is_bare(raw: dict[str, Any]) -> bool:
    """Whether the class that config.json names has no head: its files' names lack the prefix."""
    name = (raw.get("architectures") or [""])[0]
    return name.endswith("Model") and not name.endswith("LMHeadModel")


def read_json(file: Path) -> dict[str, Any]:
    """
    Raises:
      ValueError: there is no such file, or it holds no JSON object.
    """
    try:
        value = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds no JSON object")
    return value


class _Seen:
    """A config that remembers which of its keys were read."""

    def __init__(self, config: Any):
        self._config, self.keys = config, set()

    def __getattr__(self, key: str) -> Any:
        self.keys.add(self._config.attribute_map.get(key, key))
        return getattr(self._config, key)


def _refuse_others(config: Any, default: dict, seen: set[str], neutral: tuple[str, ...]) -> None:
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("quantization_config: quantised weights are not supported")
    for key, value in config.to_dict().items():
        if key in default and value != default[key] and key not in NEUTRAL.union(seen, neutral):
            raise ValueError(f"{key}={value!r} is not supported, only {default[key]!r}")
