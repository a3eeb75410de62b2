"""Names of config keys, `group.key`, in nested dataclasses and trees; and new names of old keys."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

# New names of old config keys: those of version 0.1, whose group `memory` is now `execution`, and
# those from before the model had groups.
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
}
# Model keys that are now in a group: `old:new`, or one name if it has not changed.
_GROUPED = {
    "alibi": "alibi_scale:scale alibi_interleaved:interleaved",
    "attention": (
        "attention_scale:scale attention_softcap:softcap attention_gate:gate attention_sinks:sinks "
        "qk_norm qk_norm_joint value_norm clip_qkv:clip qkv_bias out_bias query_growth "
        "query_growth_length"
    ),
    "encoder": (
        "token_types image_size patch_size channels pooler pooler_activation masked_head "
        "masked_head_bias classes class_pooling"
    ),
    "experts": (
        "num_experts:count experts_per_token:per_token expert_size:size mlp_only_layers "
        "router_bias router_scores:scores router_correction:correction router_groups:groups "
        "router_groups_per_token:groups_per_token routed_scale:scale "
        "shared_expert_size:shared_size shared_expert_gate:shared_gate expert_norms:norms "
        "router_renormalized:renormalized router_aux_loss:aux_loss router_z_loss:z_loss glu_limit "
        "glu_offset"
    ),
    "full_attention": (
        "full_head_dim:head_dim full_kv_heads:kv_heads full_keys_as_values:keys_as_values"
    ),
    "layer_embedding": "layer_embedding_size:size",
    "linear_attention": (
        "linear_key_heads:key_heads linear_value_heads:value_heads linear_key_size:key_size "
        "linear_value_size:value_size linear_conv_size:conv_size"
    ),
    "norms": (
        "norm_offset:unit_offset norm_place:position norm:type norm_eps:eps norm_position:position "
        "norm_scale:scale norm_bias:bias norm_unit_offset:unit_offset first_norm:first "
        "final_norm:final embedding_norm:embedding"
    ),
    "shared_kv": "shared_kv_layers:layers shared_kv_intermediate_size:intermediate_size",
}
RENAMED |= {
    f"model.{old}": f"model.{group}.{new or old}"
    for group, names in _GROUPED.items()
    for old, _, new in (name.partition(":") for name in names.split())
}


def new_name(key: str) -> str:
    """Returns the new name of an old config key. Other keys stay the same."""
    # Version 0.1 had no memory.budget_gib, so this key is the new one.
    return RENAMED.get(key) or re.sub(r"^memory\.(?!budget_gib)", "execution.", key)


def rename_keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a saved config's tree with the new names of its keys. Leaves out old keys that are
    null: the default of the new key means the same."""
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


def check_seed(name: str, seed: int) -> None:
    """Checks a seed.

    Raises:
      ValueError: the seed is negative or has more than 32 bits.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"{name}={seed}: must be in [0, 2^32)")
