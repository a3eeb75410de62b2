"""Gemma 4. Full-attention layers differ from windowed layers in head size and number of key heads.
In small models, the last layers use the keys and values of earlier layers, and each layer has its
own token embedding."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from bptjax.models.config import ModelConfig
from bptjax.models.groups.attention import AttentionConfig
from bptjax.models.groups.experts import ExpertsConfig
from bptjax.models.groups.full_attention import FullAttentionConfig, SharedKvConfig
from bptjax.models.groups.layer_embedding import LayerEmbeddingConfig
from bptjax.models.groups.norms import NormsConfig
from bptjax.weights.hf.families.family import activation, require, rotary
from bptjax.weights.hf.tensor_rules import (
    TensorRule,
    embedding_norm_head,
    identity,
    linear,
    mlp,
    norm,
)

LAYER = "model.layers.{layer}."
# Keys that a layer's config may change.
PER_LAYER = {"head_dim", "num_key_value_heads"}


def read_gemma4(c: Any) -> dict[str, Any]:
    """Reads Gemma4ForCausalLM and Gemma4UnifiedForCausalLM."""
    # In layers that use keys as values, the keys' bias would also enter the values.
    require(c, attention_bias=False)
    types = list(c.layer_types)
    heads = _heads(c, types)
    size, K = heads["sliding_attention"]
    full_size, full_K = heads["full_attention"]
    shared = c.num_kv_shared_layers
    double = c.use_double_wide_mlp and shared > 0
    return (
        dict(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_layers=c.num_hidden_layers,
            num_heads=c.num_attention_heads,
            num_kv_heads=K,
            head_dim=size,
            full_attention=FullAttentionConfig(full_size, full_K, c.attention_k_eq_v),
            shared_kv=SharedKvConfig(shared, 2 * c.intermediate_size if double else 0),
            layer_types=types,
            sliding_window=c.sliding_window,
            norms=NormsConfig(eps=c.rms_norm_eps, position="sandwich"),
            attention=AttentionConfig(qk_norm=True, value_norm=True, scale=1.0),
            attention_dropout=c.attention_dropout or 0.0,
            activation=activation(c.hidden_activation),
            gated=True,
            embedding_scale=c.hidden_size**0.5,
            layer_embedding=LayerEmbeddingConfig(_layer_embedding_size(c)),
            layer_scale=True,
            tied_head=c.tie_word_embeddings,
            logits_softcap=c.final_logit_softcapping,
        )
        | rotary(c)
        | _experts(c, double)
    )


def _heads(c: Any, types: list[str]) -> dict[str, tuple[int, int]]:
    """Returns the head size and the number of key heads of each layer type.

    Raises:
      ValueError: `per_layer_config` sets a key other than these two, or layers of the same type
        have different heads.
    """
    sizes: dict[str, tuple[int, int]] = {}
    changed = {key for own in (c.to_dict().get("per_layer_config") or {}).values() for key in own}
    if changed - PER_LAYER:
        raise ValueError(f"per_layer_config: {sorted(changed - PER_LAYER)}: must not be set")
    for i, kind in enumerate(types):
        own = c.per_layer_config[i]
        heads = own.head_dim, own.num_key_value_heads
        if sizes.setdefault(kind, heads) != heads:
            raise ValueError(f"per_layer_config: must be the same in all layers of {kind}")
    if sizes.keys() != {"sliding_attention", "full_attention"}:
        raise ValueError(f"layer_types={types}: must have both sliding and full attention")
    return sizes


def _layer_embedding_size(c: Any) -> int:
    """Returns the size of the per-layer token embeddings; 0 for none.

    Raises:
      ValueError: the per-layer embeddings and the model have different vocabulary sizes.
    """
    # Other models lack these keys.
    if not (size := getattr(c, "hidden_size_per_layer_input", None)):
        return 0
    require(c, vocab_size_per_layer_input=c.vocab_size)
    return size


def _experts(c: Any, double: bool) -> dict[str, Any]:
    """Returns the `ModelConfig` keywords for experts; an empty dict for a model without experts."""
    if not getattr(c, "enable_moe_block", False):
        return {}
    if double:
        raise ValueError("use_double_wide_mlp=True: must be false with enable_moe_block")
    return dict(
        feed_forward="experts",
        experts=ExpertsConfig(
            count=c.num_experts,
            per_token=c.top_k_experts,
            size=c.moe_intermediate_size,
            shared_size=c.intermediate_size,
            norms=True,
        ),
    )


def unused_gemma4(c: ModelConfig) -> tuple[str, ...]:
    """Returns patterns that match the unused key and value tensors of layers that use the keys and
    values of earlier layers."""
    layers = "|".join(map(str, range(c.num_layers - c.shared_kv.layers, c.num_layers)))
    name = rf".*layers\.({layers})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight"
    return (name,) if layers else ()


def rules_gemma4(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of Gemma4ForCausalLM and Gemma4UnifiedForCausalLM."""
    yield from embedding_norm_head(c, "model.embed_tokens", "model.norm")
    yield from _rules_attention(c)
    for hf, ours in (
        ("input", "attention_norm"),
        ("post_attention", "attention_post_norm"),
        ("pre_feedforward", "mlp_norm"),
        ("post_feedforward", "mlp_post_norm"),
    ):
        yield from norm(f"{LAYER}{hf}_layernorm", f"layers.{ours}", c)
    yield identity(f"{LAYER}layer_scalar", "layers.scale", (1,))
    if c.experts.on:
        yield from _rules_experts(c)
    else:
        yield from mlp(c, *_mlp_names("model.layers.{expert_layer}."))
    if c.dense_layers:
        names, size = _mlp_names("model.layers.{mlp_layer}."), c.shared_kv.intermediate_size
        yield from mlp(c, *names, ours="layers.dense", size=size)
    if c.layer_embedding.size:
        yield from _rules_layer_embedding(c)


def _mlp_names(layer: str) -> list[str]:
    return [f"{layer}mlp.{name}_proj" for name in ("up", "down", "gate")]


def _rules_attention(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of attention. Full and windowed layers have parameters of different shapes,
    so each type has separate rules."""
    D, N = (c.hidden_size,), c.num_heads
    for full, kind, ours in ((False, "windowed", "layers."), (True, "full", "layers.full_")):
        K, H = c.heads(full)
        own, of_keys = (
            f"model.layers.{{{kind}_{which}}}.self_attn." for which in ("layer", "kv_layer")
        )
        yield from linear(f"{own}q_proj", f"{ours}query", D, (N, H), bias=False)
        yield from linear(f"{of_keys}k_proj", f"{ours}key", D, (K, H), bias=False)
        if not (full and c.full_attention.keys_as_values):
            yield from linear(f"{of_keys}v_proj", f"{ours}value", D, (K, H), bias=False)
        yield from linear(f"{own}o_proj", f"{ours}out", (N, H), D, bias=False)
        yield from norm(f"{own}q_norm", f"{ours}query_norm", c, H)
        yield from norm(f"{of_keys}k_norm", f"{ours}key_norm", c, H)


def _rules_experts(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of the router, the routed experts and the MLP that every token passes. One
    tensor per layer holds the concatenated gate and up matrices of all experts."""
    D, F, X = c.hidden_size, c.expert_F, c.experts.count
    yield from mlp(c, *_mlp_names(LAYER), ours="layers.mlp.shared", size=c.experts.shared_size)
    for hf, ours in (
        ("post_feedforward_layernorm_1", "shared_norm"),
        ("post_feedforward_layernorm_2", "routed_norm"),
        ("pre_feedforward_layernorm_2", "norm"),
    ):
        yield from norm(f"{LAYER}{hf}", f"layers.mlp.{ours}", c)
    yield identity(f"{LAYER}router.scale", "layers.mlp.router.scale", (D,))
    yield identity(f"{LAYER}router.per_expert_scale", "layers.mlp.router.factors", (X,))
    router = ("layers.mlp.router.kernel",)
    yield TensorRule(f"{LAYER}router.proj.weight", (X, D), router, lambda w: (w.T,), lambda x: x.T)

    def split(w):
        gate, up = np.split(w, 2, axis=1)
        return gate.swapaxes(1, 2), up.swapaxes(1, 2)

    def join(gate, up):
        return np.concatenate([gate, up], 2).swapaxes(1, 2)

    gate_up = "layers.mlp.gate.kernel", "layers.mlp.up.kernel"
    yield TensorRule(f"{LAYER}experts.gate_up_proj", (X, 2 * F, D), gate_up, split, join)
    yield TensorRule(
        f"{LAYER}experts.down_proj",
        (X, D, F),
        ("layers.mlp.down.kernel",),
        lambda w: (w.swapaxes(1, 2),),
        lambda x: x.swapaxes(1, 2),
    )


def _rules_layer_embedding(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of the per-layer embeddings. The embedding table and its projection are
    single tensors that hold the values of all layers."""
    D, P, L = c.hidden_size, c.layer_embedding.size, c.num_layers
    ours = "layers.embedding."
    yield TensorRule(
        "model.embed_tokens_per_layer.weight",
        (c.V, L * P),
        (f"{ours}table",),
        lambda w: (w.reshape(c.V, L, P).swapaxes(0, 1),),
        lambda x: x.swapaxes(0, 1).reshape(c.V, L * P),
    )
    yield TensorRule(
        "model.per_layer_model_projection.weight",
        (L * P, D),
        (f"{ours}context",),
        lambda w: (w.reshape(L, P, D).swapaxes(1, 2),),
        lambda x: x.swapaxes(1, 2).reshape(L * P, D),
    )
    yield from norm("model.per_layer_projection_norm", "layer_embedding_norm", c, P)
    yield from linear(f"{LAYER}per_layer_input_gate", f"{ours}gate", (D,), (P,), bias=False)
    yield from linear(f"{LAYER}per_layer_projection", f"{ours}out", (P,), (D,), bias=False)
    yield from norm(f"{LAYER}post_per_layer_input_norm", f"{ours}norm", c)
