"""Checks a model's choices: ranges, and choices that exclude each other."""

from typing import Any

from bptjax.models.attention_pattern import AttentionPattern
from bptjax.models.groups.group import MixerGroup, check_bounds, check_sandwich
from bptjax.ops.arguments import check_softcap

# Several times the largest existing models.
MOST_PARAMETERS = 10**13
# Keys that a config may set together with name_or_path.
OVERRIDABLE = (
    "name_or_path",
    "rope_parameters",
    "max_position_embeddings",
    "extend_to",
    "extend_theta",
    "attention_pattern",
    "embedding_dropout",
    "attention_dropout",
    "residual_dropout",
    "experts.aux_loss",
    "experts.z_loss",
    "init_std",
    "add_tokens",
)


def check_choices(config: Any) -> None:
    """Checks a `ModelConfig`.

    Raises:
      ValueError: a value out of range, or values that exclude each other.
    """
    check_bounds(config, "model.")
    check_softcap(config.logits_softcap, "model.logits_softcap")
    if config.num_heads % config.K:
        raise ValueError(
            f"model.num_kv_heads={config.num_kv_heads}: must divide num_heads={config.num_heads}"
        )
    if config.head_dim is None and config.hidden_size % config.num_heads:
        raise ValueError(
            f"model.num_heads={config.num_heads}: must divide hidden_size={config.hidden_size}; "
            "choose another number, or set head_dim"
        )
    if config.position_embedding == "rope" and config.H % 2:
        raise ValueError(f"model.head_dim={config.H}: must be even with rotary positions")
    if config.position_embedding == "learned" and config.max_position_embeddings is None:
        raise ValueError("model.position_embedding=learned: requires model.max_position_embeddings")
    if config.extend_to is not None and not config.name_or_path:
        raise ValueError(
            f"model.extend_to={config.extend_to}: requires a checkpoint; set "
            "model.name_or_path, or model.max_position_embeddings instead"
        )
    if config.extend_theta is not None and config.extend_to is None:
        raise ValueError(
            f"model.extend_theta={config.extend_theta}: requires model.extend_to; leave it out, or "
            "set model.rope_parameters.rope_theta instead"
        )
    for name in ("layer_types", "rope_layers"):
        entries = getattr(config, name)
        if entries is not None and len(entries) != config.num_layers:
            raise ValueError(
                f"model.{name}: must have num_layers={config.num_layers} entries, not "
                f"{len(entries)}"
            )
    if config.layer_types is not None:
        if "sliding_attention" in config.layer_types and config.sliding_window is None:
            raise ValueError(
                "model.sliding_window: must be set with sliding_attention in layer_types"
            )
    for kind, group in config.groups.items():
        if isinstance(group, MixerGroup) and group.on != bool(config.layers_of(kind)):
            raise ValueError(
                f"model.{kind}: must have sizes if, and only if, model.layer_types has {kind}"
            )
    if config.mixers:
        kinds = ", ".join(config.mixers)
        if not config.attention_layers or not config.causal:
            raise ValueError(
                f"model.layer_types: must also have attention layers, with {kinds}; set them, and "
                "causal=true"
            )
        shape = config.norms.position, config.residual
        if shape != ("pre", "sequential"):
            raise ValueError(
                f"model.layer_types: must have no {kinds} unless norms.position=pre and "
                f"residual=sequential, not {shape[0]} and {shape[1]}"
            )
    if config.layer_scale:
        check_sandwich(config, "layer_scale=True")
    if config.attention_pattern is not None:
        pattern = AttentionPattern.parse(config.attention_pattern)
        ids = [x for x in (*pattern.global_markers, pattern.token) if isinstance(x, int)]
        if config.vocab_size is not None and max(ids, default=-1) >= config.vocab_size:
            raise ValueError(
                f"model.attention_pattern: token ids {ids}: must be less than vocab_size="
                f"{config.vocab_size}"
            )
        if pattern.global_markers and config.encoder.image_size is not None:
            raise ValueError("model.attention_pattern.global_markers: requires a model of text")
        if pattern.type == "landmark" and not config.causal:
            raise ValueError("model.attention_pattern.type=landmark: requires a decoder")
        if all(kind.window is not None for kind in config.layer_kinds):
            raise ValueError(
                "model.attention_pattern: requires layers of full attention, but all layers have "
                f"sliding_window={config.sliding_window}"
            )
    if config.rope_layers is not None and config.position_embedding != "rope":
        raise ValueError("model.rope_layers: requires model.position_embedding=rope")
    for name in ("embedding_dropout", "attention_dropout", "residual_dropout"):
        if not 0.0 <= (getattr(config, name) or 0.0) < 1.0:
            raise ValueError(f"model.{name}={getattr(config, name)}: must be in [0, 1)")

    if (config.feed_forward == "experts") != config.experts.on:
        raise ValueError(
            f"model.experts.count={config.experts.count}: must be set with feed_forward=experts, "
            f"and only then, not with {config.feed_forward}"
        )
    for name, group in config.groups.items():
        check_bounds(group, f"model.{name}.")
        if group.on:
            group.check(config)
            continue
        switch = f"model.{name}.{group.SWITCH}" if group.SWITCH else f"{name} in model.layer_types"
        for key, value in group.changed.items():
            # The checkpoint may have the part; see `weights.hf.config.merge`.
            if not (config.name_or_path and f"{name}.{key}" in OVERRIDABLE):
                raise ValueError(f"model.{name}.{key}={value}: requires {switch}")

    # A typo would otherwise surface minutes later, as out of memory.
    width = 2 * config.stored_F
    width += sum(sum(group.widths(config).values()) for _, group in config.mixing)
    entry = config.E + sum(group.entry(config) for group in config.groups.values())
    parameters = config.num_layers * config.hidden_size * width + (config.vocab_size or 0) * entry
    if parameters > MOST_PARAMETERS:
        raise ValueError(
            f"{sizes_of(config)}: must have at most {MOST_PARAMETERS:.0e} parameters, not "
            f"{parameters:.0e}"
        )


def sizes_of(config: Any) -> str:
    """Formats the sizes that decide a `ModelConfig`'s number of parameters."""
    text = (
        f"model.num_layers={config.num_layers}, hidden_size={config.hidden_size}, "
        f"intermediate_size={config.expert_F}, vocab_size={config.vocab_size}"
    )
    if config.position_embedding == "learned":
        text += f", max_position_embeddings={config.max_position_embeddings}"
    return text
