"""Reads PEFT's adapter_config.json, and the config of an adapter's base model."""

import math
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from bptjax.models.config import ModelConfig
from bptjax.parsing.keys import replace_keys
from bptjax.run.json_files import read_json

ADAPTER_CONFIG = "adapter_config.json"
# Changed keys of the base model's config, which PEFT has no file for.
BASE_CONFIG = "bptjax_base_config.json"
# Keys that are read, and keys that change no result of a trained adapter. All others must be unset.
KNOWN = {
    *("peft_type", "r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern"),
    *("use_rslora", "base_model_name_or_path", "bias", "init_lora_weights", "modules_to_save"),
}
NEUTRAL = {
    *("task_type", "inference_mode", "revision", "peft_version", "auto_mapping", "runtime_config"),
    *(
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
    ),
    *("fan_in_fan_out", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
}
# Module names, which PEFT writes as patterns. Maximum number and length of other patterns.
_NAME = re.compile(r"[\w.]+")
PATTERNS, PATTERN_LENGTH = 100, 1000
# Initializations of A and B that do not change the base model.
INITIALIZATIONS = (True, False, None, "gaussian", "orthogonal")


def read_base(directory: Path) -> ModelConfig:
    """Returns the base model of the adapter in `directory`: its name, and the keys changed for
    training.

    Raises:
      ValueError: the adapter's config names no base, or the file of changed keys is damaged.
    """
    name = read_json(directory / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not name or not isinstance(name, str):
        raise ValueError(f"{directory / ADAPTER_CONFIG}: must have base_model_name_or_path")
    file = directory / BASE_CONFIG
    changed = read_json(file) if file.exists() else {}
    try:
        if not isinstance(changed.get("rope_parameters", {}), dict):
            raise TypeError(f"rope_parameters={changed['rope_parameters']!r}")
        return replace_keys(ModelConfig(name_or_path=name), changed)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def adapter_settings(raw: dict[str, Any], file: Path) -> dict[str, Any]:
    """Returns keywords of AdapterConfig.

    Raises:
      ValueError: `raw`, the content of `file`, is not LoRA, or is an unsupported variant.
    """
    # Check the type first, because other types have other keys.
    for key in ("peft_type", *raw):
        if not _is_supported(key, raw.get(key)):
            raise ValueError(f"{file}: {key}={raw.get(key)!r} is not supported")
    missing = {"r", "lora_alpha", "target_modules"} - raw.keys()
    if missing:
        raise ValueError(f"{file}: must have {', '.join(sorted(missing))}")
    return dict(
        r=raw["r"],
        alpha=float(raw["lora_alpha"]),
        dropout=float(raw.get("lora_dropout", 0.0)),
        use_rslora=bool(raw.get("use_rslora", False)),
    )


def _is_supported(key: str, value: Any) -> bool:
    """Returns whether adapters with this setting are supported."""
    match key:
        case "peft_type":
            return value == "LORA"
        case "bias":
            return value == "none"
        case "init_lora_weights":
            return value in INITIALIZATIONS
        case "r":
            return type(value) is int and value > 0
        case "lora_alpha" | "lora_dropout":
            return type(value) in (int, float)
        case "modules_to_save":
            return not value or type(value) is list and all(type(name) is str for name in value)
        case "rank_pattern" | "alpha_pattern":
            own = "r" if key == "rank_pattern" else "lora_alpha"
            return (
                not value
                or type(value) is dict
                and sum(not _NAME.fullmatch(name) for name in value) <= PATTERNS
                and all(_is_pattern(name) and _is_supported(own, x) for name, x in value.items())
            )
    return not value or key in NEUTRAL | KNOWN


def _is_pattern(text: str) -> bool:
    try:
        _matches(text, "")
    except ValueError:
        return False
    return True


@lru_cache(2**16)
def _matches(pattern: str, module: str) -> bool:
    """Returns whether a pattern matches a module's name, or the end of the name after a dot.

    Raises:
      ValueError: the pattern is too long, or RE2 does not accept it.
    """
    if _NAME.fullmatch(pattern):
        return f".{module}".endswith(f".{pattern}")
    import pyarrow as pa
    import pyarrow.compute as pc

    if len(pattern) > PATTERN_LENGTH:
        raise ValueError(f"must have at most {PATTERN_LENGTH} characters")
    # RE2 takes linear time; Python's `re` may take exponential time. Check the pattern alone first:
    # its parentheses must balance without the surrounding ones.
    for text in (pattern, rf"\A(?:.*\.)?(?:{pattern})\z"):
        options = pc.MatchSubstringOptions(text)
        (matched,) = pc.call_function("match_substring_regex", [pa.array([module])], options)
    return matched.as_py()


def is_target(raw: dict[str, Any], module: str) -> bool:
    """Returns whether the config certainly targets the module; False if the config selects layers
    or patterns."""
    if raw.get("layers_to_transform") not in (None, []) or raw.get("exclude_modules"):
        return False
    names = raw["target_modules"]
    return isinstance(names, list) and any(f".{module}".endswith(f".{n}") for n in names)


def rank_and_scale(raw: dict[str, Any], module: str) -> tuple[int, float]:
    """Returns a module's rank and scale. As in PEFT, the first pattern that matches the end of the
    module's name applies."""

    def first_match(patterns, default):
        values = (v for k, v in (patterns or {}).items() if _matches(k, module))
        return next(values, default)

    r = first_match(raw.get("rank_pattern"), raw["r"])
    alpha = first_match(raw.get("alpha_pattern"), raw["lora_alpha"])
    return r, alpha / (math.sqrt(r) if raw.get("use_rslora") else r)
