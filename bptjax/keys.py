"""Names of config keys, `group.key`: of nested dataclasses and trees, and new names of old keys."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

# Old names of config keys, with their new names: those of version 0.1, whose group `memory` is now
# `execution`, and those of the model before it had groups.
RENAMED = {
    "memory.attention": "execution.attention_implementation",
    "memory.sequence": "parallel.sequence_strategy",
    "parallel.zero": "parallel.zero_stage",
    "train.dtype": "train.compute_dtype",
    "train.eval_predictions": "train.num_eval_generations",
    "data.shards": "data.num_shards",
    "optimizer.state_memory": "optimizer.state_memory_kind",
    "model.window": "model.sliding_window",
    "model.max_positions": "model.max_position_embeddings",
    "model.position": "model.position_embedding",
    "model.norm_offset": "model.norms.unit_offset",
    "model.norm_place": "model.norms.position",
    "model.num_experts": "model.experts.count",
    "model.experts_per_token": "model.experts.per_token",
    "model.expert_size": "model.experts.size",
    "model.mlp_only_layers": "model.experts.mlp_only_layers",
    "model.router_bias": "model.experts.router_bias",
    "model.router_scores": "model.experts.scores",
    "model.router_correction": "model.experts.correction",
    "model.router_groups": "model.experts.groups",
    "model.router_groups_per_token": "model.experts.groups_per_token",
    "model.routed_scale": "model.experts.scale",
    "model.shared_expert_size": "model.experts.shared_size",
    "model.shared_expert_gate": "model.experts.shared_gate",
    "model.expert_norms": "model.experts.norms",
    "model.router_renormalized": "model.experts.renormalized",
    "model.router_aux_loss": "model.experts.aux_loss",
    "model.router_z_loss": "model.experts.z_loss",
    "model.glu_limit": "model.experts.glu_limit",
    "model.glu_offset": "model.experts.glu_offset",
    "model.linear_key_heads": "model.linear_attention.key_heads",
    "model.linear_value_heads": "model.linear_attention.value_heads",
    "model.linear_key_size": "model.linear_attention.key_size",
    "model.linear_value_size": "model.linear_attention.value_size",
    "model.linear_conv_size": "model.linear_attention.conv_size",
    "model.attention_scale": "model.attention.scale",
    "model.attention_softcap": "model.attention.softcap",
    "model.attention_gate": "model.attention.gate",
    "model.attention_sinks": "model.attention.sinks",
    "model.qk_norm": "model.attention.qk_norm",
    "model.qk_norm_joint": "model.attention.qk_norm_joint",
    "model.value_norm": "model.attention.value_norm",
    "model.clip_qkv": "model.attention.clip",
    "model.qkv_bias": "model.attention.qkv_bias",
    "model.out_bias": "model.attention.out_bias",
    "model.query_growth": "model.attention.query_growth",
    "model.query_growth_length": "model.attention.query_growth_length",
    "model.full_head_dim": "model.full_attention.head_dim",
    "model.full_kv_heads": "model.full_attention.kv_heads",
    "model.full_keys_as_values": "model.full_attention.keys_as_values",
    "model.shared_kv_layers": "model.shared_kv.layers",
    "model.shared_kv_intermediate_size": "model.shared_kv.intermediate_size",
    "model.layer_embedding_size": "model.layer_embedding.size",
    "model.alibi_scale": "model.alibi.scale",
    "model.alibi_interleaved": "model.alibi.interleaved",
    "model.norm": "model.norms.type",
    "model.norm_eps": "model.norms.eps",
    "model.norm_position": "model.norms.position",
    "model.norm_scale": "model.norms.scale",
    "model.norm_bias": "model.norms.bias",
    "model.norm_unit_offset": "model.norms.unit_offset",
    "model.first_norm": "model.norms.first",
    "model.final_norm": "model.norms.final",
    "model.embedding_norm": "model.norms.embedding",
}


def new_name(key: str) -> str:
    """Returns the new name of an old config key. Other keys stay the same."""
    # Version 0.1 had no memory.budget_gib, so this key is the new one.
    return RENAMED.get(key) or re.sub(r"^memory\.(?!budget_gib)", "execution.", key)


def rename_keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tree of a saved config with the new names of its keys. An old key whose value is
    null is left out: the default of the new key means the same."""
    found = {}
    for group, keys in tree.items():
        for key, value in keys.items() if isinstance(keys, dict) else ():
            new = new_name(f"{group}.{key}")
            if new == f"{group}.{key}" or value is not None:
                found[new] = value
    return {group: keys for group, keys in tree.items() if not isinstance(keys, dict)} | nest(found)


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens nested dataclasses to `{"group.key": value}`."""
    flat = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            flat |= flatten(value, f"{prefix}{f.name}.")
        elif isinstance(value, list):
            flat[prefix + f.name] = [
                dataclasses.asdict(x) if dataclasses.is_dataclass(x) else x for x in value
            ]
        else:
            flat[prefix + f.name] = value
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tree of `{"group.key": value}`.

    Raises:
      ValueError: a group is also a value.
    """
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *groups, key = name.split(".")
        inner = tree
        for group in groups:
            inner = inner.setdefault(group, {})
            if not isinstance(inner, dict):
                raise ValueError(f"{group}={inner}: must be a group of keys")
        inner[key] = value
    return tree


def replace_keys(config: Any, changes: Mapping[str, Any]) -> Any:
    """Returns nested dataclasses with the values of `{"group.key": value}`."""
    values = {}
    for name, value in nest(changes).items():
        own = getattr(config, name)
        inner = dataclasses.is_dataclass(own) and isinstance(value, dict)
        values[name] = replace_keys(own, value) if inner else value
    return replace(config, **values)
