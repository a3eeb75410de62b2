"""Exports a config.json with the keys that training changed, so that transformers computes the
same function."""

import json
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from bptjax.models.config import ModelConfig
from bptjax.ops.position import LONG, rope_frequencies, rotated_features
from bptjax.run.lazy_imports import transformers
from bptjax.weights.hf.config import read_keys
from bptjax.weights.hf.families import FAMILIES, find_family
from bptjax.weights.hf.families.family import Family

# Keys of rope_parameters that transformers 4 keeps outside its rope_scaling.
BESIDE = ("rope_theta", "partial_rotary_factor", "rope_type", "type")


def exported(
    raw: dict[str, Any], read: ModelConfig, now: ModelConfig, dtype: str | None = None
) -> dict[str, Any]:
    """Returns the config.json `raw` of architecture `read`, with the keys that differ in `now`.
    Unknown keys stay.

    Changed rotary positions are written under the keys of transformers 5 (rope_parameters) and the
    keys of version 4, which other programs also read (rope_theta, rope_scaling).

    Args:
      dtype: dtype of the tensors, if it has changed.

    Raises:
      ValueError: transformers cannot read the changed rotary positions, or reads them differently.
    """
    new, family = dict(raw), find_family(raw)
    keys = new
    if family.wrapped and "text_config" in raw:
        keys = new["text_config"] = dict(raw["text_config"])
    rope, length = now.rope_parameters != read.rope_parameters, now.max_position_embeddings
    if length != read.max_position_embeddings:
        # The key may also count entries before position 0.
        before = read.max_position_embeddings or 0
        keys[family.positions] = (length or 0) + keys.get(family.positions, before) - before
    if now.position_embedding == "rope" and (rope or length != read.max_position_embeddings):
        # Write all keys: the default of a missing key may depend on the number of positions.
        old_rope = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
        keys |= rope_keys(now, family, {k: v for k, v in old_rope.items() if k in family.rope_kept})
        new["transformers_version"] = transformers().__version__
        check_rope(new, now)
    if now.vocab_size != read.vocab_size:
        keys["vocab_size"] = now.vocab_size
    for each in (new, keys) if dtype else ():
        key = "torch_dtype" if "torch_dtype" in each else "dtype"
        if each is new or each.get(key):
            each[key] = dtype
    return new


def rope_keys(
    config: ModelConfig, family: Family, others: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Returns a family's config keys for rotary positions, for transformers 5 and 4.

    Args:
      others: other keys of rope_parameters; see `Family.rope_kept`.
    """
    parameters = {**config.rope_parameters, **others}
    if not family.rope_names:
        return {"rope_parameters": parameters}
    theta, partial = family.rope_names
    # Version 4 has a single scaling, which Gemma 3 uses in full-attention layers.
    full = parameters.get("full_attention", parameters)
    keys = {"rope_parameters": parameters, theta: full["rope_theta"], "rope_scaling": None}
    if "sliding_attention" in parameters:
        keys[family.local_theta] = parameters["sliding_attention"]["rope_theta"]
    if "partial_rotary_factor" in full or partial not in BESIDE:
        keys[partial] = full.get("partial_rotary_factor", 1.0)
    if not family.scaled:
        return {key: value for key, value in keys.items() if key != "rope_scaling"}
    kind = full.get("rope_type", "default")
    scaling = {k: v for k, v in full.items() if k not in BESIDE}
    if kind == "default" and not others:
        return keys
    if kind == "longrope":
        # Version 4 reads the original length here, and derives the factor only from it.
        (original,) = LONG
        keys[original] = scaling.setdefault(original, config.max_position_embeddings)
        if "factor" in scaling:
            scaling["attention_factor"] = _frequencies(config, full)[1]
    if family == FAMILIES["phi3"]:
        # Version 4 only knows the older name here, and refuses a fourth key.
        scaling.pop(LONG[0], None)
        return keys | {"rope_scaling": {"type": kind} | scaling}
    return keys | {"rope_scaling": {"rope_type": kind} | scaling}


def _frequencies(config: ModelConfig, parameters: dict, length: int | None = None):
    dim = rotated_features(config.full_attention.head_dim or config.H, parameters)
    return rope_frequencies(
        dim, parameters, max_position_embeddings=config.max_position_embeddings, length=length
    )


def check_rope(raw: dict[str, Any], config: ModelConfig) -> None:
    """Checks that transformers reads the config's rotary positions from `raw`.

    Raises:
      ValueError: transformers refuses them, or reads them differently.
    """
    kind, family = raw["model_type"], find_family(raw)
    message = f"model.rope_parameters={config.rope_parameters}: a {kind} cannot be exported with it"
    try:
        read = transformers().CONFIG_MAPPING[kind].from_dict(json.loads(json.dumps(raw)))
        back = read_keys(read, raw, family)
    except Exception as error:
        # transformers' validators raise their own exception classes.
        text = " ".join(str(error).split())
        raise ValueError(f"{message}: transformers refuses it: {text}") from error
    if not same_rope(config, back):
        raise ValueError(f"{message}: transformers would read {back.rope_parameters}")


def same_rope(config: ModelConfig, other: ModelConfig) -> bool:
    """Returns whether both have the same number of positions, and the same rotation below and above
    every length at which the frequencies change."""
    lengths = (
        (c.max_position_embeddings, c.attention.query_growth_length) for c in (config, other)
    )
    if len({*lengths}) > 1:
        return False
    if len(config.ropes) != len(other.ropes):
        return False
    edges = {
        p.get(LONG[0]) or config.max_position_embeddings or 1 for p in (*config.ropes, *other.ropes)
    }
    tested = [
        None,
        *edges,
        *(edge + 1 for edge in edges),
        8 * (config.max_position_embeddings or 1),
    ]
    for a, b in zip(config.ropes, other.ropes, strict=True):
        for length in tested:
            (f, s), (g, t) = _frequencies(config, a, length), _frequencies(other, b, length)
            if f.shape != g.shape or not np.allclose(f, g, rtol=1e-6, atol=0):
                return False
            if not math.isclose(s, t, rel_tol=1e-6):
                return False
    return True
