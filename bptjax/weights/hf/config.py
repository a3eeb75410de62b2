"""Reads a Hugging Face config.json as a ModelConfig, and applies a training config's overrides."""

from pathlib import Path
from typing import Any

from bptjax.models.config import ModelConfig
from bptjax.models.config_checks import OVERRIDABLE
from bptjax.ops.position import LONG
from bptjax.parsing.keys import flatten, replace_keys
from bptjax.run.json_files import read_json
from bptjax.run.lazy_imports import transformers
from bptjax.weights.hf.families import find_family
from bptjax.weights.hf.families.encoders import with_classes
from bptjax.weights.hf.families.family import Family

# Key that only an encoder without classes takes from a training config.
CLASSES = "encoder.classes"
# ProLong (arXiv 2410.02660) extends Llama 3 from 8,192 positions and theta 5e5 to 65,536 with theta
# 8e6, and to 524,288 with theta 1.28e8: 16 and 256 times, for 8 and 64 times the length.
THETA_POWER = 4 / 3
# Least theta for these positions. The power alone gives SmolLM2, whose theta is 1e5, 1.6e6 there,
# with which it missed most pass keys; with the value of older runs it missed some in one of two
# runs, and now hardly one (docs/recipes.md).
LEAST_THETA, OLD_LEAST_THETA, AT_LENGTH = 2.56e7, 6.4e6, 65_536
# Keys that change no result in any family.
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


def read_config(directory: Path, classes: int = 0) -> tuple[Family, ModelConfig]:
    """Returns the family and the architecture of the checkpoint in `directory`.

    Args:
      classes: reads an encoder without classes as a classifier with this number of classes.

    Raises:
      ValueError: config.json is missing, or its family or one of its keys is not supported.
    """
    raw = read_json(directory / "config.json")
    kind = raw.get("model_type")
    try:
        family = find_family(raw)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error
    try:
        config: Any = transformers().AutoConfig.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
        if (changed := with_classes(raw, classes)) is not raw:
            raw, config = changed, type(config).from_dict(changed)
        return family, read_keys(config, raw, family)
    except Exception as error:
        # transformers' validators raise their own exception classes.
        text = " ".join(str(error).split())
        raise ValueError(f"{directory / 'config.json'} ({kind}): {text}") from error


def read_keys(config: Any, raw: dict[str, Any], family: Family) -> ModelConfig:
    """Returns the architecture of `config`, which transformers read from `raw`.

    Raises:
      ValueError: a key is not supported.
    """
    quantized = getattr(config, "quantization_config", None) is not None
    if quantized and "quantization_config" not in family.neutral:
        raise ValueError(
            "quantization_config: must not be set; quantized weights are not supported"
        )
    text = config.text_config if family.wrapped else config
    if getattr(text, "is_causal", True) is False:
        raise ValueError("is_causal=False: must be true; decoders are causal")
    seen = _Seen(text)
    values = family.read(seen)
    _refuse_others(text, type(text)().to_dict(), seen.keys, family.neutral)
    if family.wrapped and "tie_word_embeddings" in raw:
        # transformers prefers this key of the outer config to the text model's.
        values["tied_head"] = config.tie_word_embeddings
    if family.rope_kept:
        rope = values["rope_parameters"]
        values["rope_parameters"] = {k: v for k, v in rope.items() if k not in family.rope_kept}
    # Key that bptjax adds to its exports.
    return ModelConfig(**values, attention_pattern=raw.get("attention_pattern"))


def merge(pretrained: ModelConfig, wanted: ModelConfig) -> ModelConfig:
    """Returns the checkpoint's architecture with the keys that the training config sets.

    Raises:
      ValueError: the training config sets a key that the checkpoint determines.
    """
    own, default = flatten(pretrained), flatten(ModelConfig())
    changes: dict[str, Any] = {}
    for key, value in flatten(wanted).items():
        # Earlier versions wrote the defaults of a new model for empty keys. A config may repeat the
        # number of classes, as in the run that created them.
        unset = value in (default[key], {})
        if unset or key == CLASSES and value == pretrained.encoder.classes:
            continue
        if key == CLASSES and not pretrained.encoder.classes:
            raise ValueError(
                f"model.{key}={value}: must not be set for {wanted.name_or_path}, because only a "
                "Hugging Face directory of a BERT, RoBERTa, ModernBERT or ViT without a head, or "
                "with the head of a masked language model, can get new classes; start from such a "
                f"directory, or leave model.{key} out"
            )
        if key not in OVERRIDABLE:
            raise ValueError(
                f"model.{key}={value}: must not be set, because the checkpoint "
                f"model.name_or_path={wanted.name_or_path} determines it "
                f"({own[key]}); leave it out"
            )
        group = pretrained.groups.get(key.partition(".")[0])
        if group is not None and not group.on:
            raise ValueError(
                f"model.{key}={value}: must not be set, because {wanted.name_or_path} has no "
                f"{key.partition('.')[0]}; leave it out"
            )
        changes[key] = value
    changes["name_or_path"] = wanted.name_or_path
    changes.pop("extend_theta", None)
    if (length := changes.pop("extend_to", None)) is not None:
        changes |= _extended(pretrained, length, wanted.extend_theta or LEAST_THETA, changes)
    # Ids of new tokens follow the ids of previously added tokens.
    changes["add_tokens"] = [*dict.fromkeys([*pretrained.add_tokens, *wanted.add_tokens])]
    if "rope_parameters" in changes:
        if pretrained.position_embedding != "rope":
            raise ValueError(
                f"model.rope_parameters: must not be set, because {wanted.name_or_path} has "
                f"position_embedding={pretrained.position_embedding}; leave it out"
            )
        length = changes.get("max_position_embeddings", pretrained.max_position_embeddings)
        changes["rope_parameters"] = _merge_rope(pretrained, changes["rope_parameters"], length)
    merged = replace_keys(pretrained, changes)
    if (
        merged.max_position_embeddings != pretrained.max_position_embeddings
        and "dynamic" in merged.rope_types
    ):
        raise ValueError(
            f"model.max_position_embeddings={merged.max_position_embeddings}: must stay "
            f"{pretrained.max_position_embeddings} with rope_type=dynamic, which scales longer "
            "texts itself; leave it out"
        )
    return merged


def _extended(
    pretrained: ModelConfig, length: int, least: float, changes: dict[str, Any]
) -> dict[str, Any]:
    """Returns the keys that extend the checkpoint to `length` positions.

    The theta of rotary positions grows by the power `THETA_POWER` of the ratio of lengths, to at
    least `least` times that power of the ratio to `AT_LENGTH`.

    Raises:
      ValueError: the checkpoint has no unscaled rotary positions and no learned ones, has as many
        already, or `changes` sets the same keys.
    """
    key, trained = f"model.extend_to={length}", pretrained.max_position_embeddings
    for other in ("rope_parameters", "max_position_embeddings"):
        if other in changes:
            raise ValueError(f"{key}: sets model.{other}; leave one of them out")
    if trained is None or length <= trained:
        raise ValueError(
            f"{key}: must exceed the {trained} positions of the checkpoint; leave it out"
        )
    keys: dict[str, Any] = {"max_position_embeddings": length}
    if pretrained.position_embedding == "learned":
        return keys
    kind = pretrained.position_embedding
    full = pretrained.rope("full_attention")
    if kind == "rope":
        kind = full.get("rope_type", "default")
    if kind != "default":
        raise ValueError(
            f"{key}: must be left out with {kind} positions; a checkpoint with scaled rotary "
            "positions takes model.rope_parameters and model.max_position_embeddings"
        )
    starts = (full["rope_theta"], trained), (least, AT_LENGTH)
    theta = max(x * (length / at) ** THETA_POWER for x, at in starts)
    return keys | {"rope_parameters": {"rope_theta": float(f"{theta:.3g}")}}


def _merge_rope(
    pretrained: ModelConfig, wanted: dict, max_position_embeddings: int
) -> dict[str, Any]:
    """Returns the checkpoint's rotary parameters with the wanted scaling.

    If each layer type has its own parameters and `wanted` names no type, `wanted` applies to full
    attention, because other layers attend only within a window.
    """
    old, trained = pretrained.rope_parameters, pretrained.max_position_embeddings
    if isinstance(old.get("full_attention"), dict):
        if not any(isinstance(value, dict) for value in wanted.values()):
            wanted = {"full_attention": wanted}
        unknown = wanted.keys() - old.keys()
        if unknown:
            raise ValueError(
                f"model.rope_parameters: {sorted(unknown)}: must be layer types of the model, "
                f"{sorted(old)}"
            )
        each = {
            t: complete_rope(old[t], p, trained, max_position_embeddings) for t, p in wanted.items()
        }
        return old | each
    return complete_rope(old, wanted, trained, max_position_embeddings)


def complete_rope(
    old: dict, wanted: dict, trained: int | None, max_position_embeddings: int | None
) -> dict[str, Any]:
    """Returns the wanted rotary parameters, completed from the checkpoint's `old` parameters and
    the length `trained` on, so that readers of a run or an export need no defaults.

    Raises:
      ValueError: a factor is missing and cannot be derived.
    """
    kind = wanted.get("rope_type", wanted.get("type", old.get("rope_type", "default")))
    inherited = old
    if kind != old.get("rope_type", "default"):
        inherited = {k: old[k] for k in ("rope_theta", "partial_rotary_factor") if k in old}
    new = {k: v for k, v in (inherited | wanted).items() if k != "type"} | {"rope_type": kind}
    (original,) = LONG
    if kind in ("yarn", "llama3", "longrope") and new.get(original) is None:
        new[original] = old.get(original, trained)
    if kind == "yarn" and new.get("factor") is None:
        if (max_position_embeddings or 0) <= new[original]:
            raise ValueError(
                "model.rope_parameters: rope_type=yarn needs a factor; set factor, or "
                f"model.max_position_embeddings above the original {new[original]}"
            )
        new["factor"] = max_position_embeddings / new[original]
    return new


def changes(read: ModelConfig, now: ModelConfig) -> dict[str, Any]:
    """Returns the keys whose values in `now` differ from the checkpoint's config `read`."""
    before, after = flatten(read), flatten(now)
    keys = (key for key in OVERRIDABLE if key != "name_or_path")
    return {key: after[key] for key in keys if after[key] != before[key]}


def is_bare(raw: dict[str, Any]) -> bool:
    """Returns whether the class named in config.json has no head. Files of such a class leave out
    the prefix."""
    name = (raw.get("architectures") or [""])[0]
    return name.endswith("Model") and not name.endswith("LMHeadModel")


class _Seen:
    """A wrapper of a config that records which keys were read."""

    def __init__(self, config: Any):
        self._config, self.keys = config, set()

    def __getattr__(self, key: str) -> Any:
        self.keys.add(self._config.attribute_map.get(key, key))
        return getattr(self._config, key)


def _refuse_others(config: Any, default: dict, seen: set[str], neutral: tuple[str, ...]) -> None:
    """Refuses keys that were not read.

    Raises:
      ValueError: a key was not read, is not neutral and does not have its default value.
    """
    for key, value in config.to_dict().items():
        if key in default and value != default[key] and key not in NEUTRAL.union(seen, neutral):
            raise ValueError(
                f"{key}={value!r}: must be {default[key]!r}; no other value is supported"
            )
