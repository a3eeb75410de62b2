"""Builds a config.json for a model that was trained from scratch."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from bptjax.models.config import ModelConfig
from bptjax.models.config_checks import OVERRIDABLE
from bptjax.ops.position import alibi_slopes
from bptjax.parsing.keys import flatten
from bptjax.run.lazy_imports import transformers
from bptjax.weights.hf.config import complete_rope
from bptjax.weights.hf.config_export import check_rope, rope_keys
from bptjax.weights.hf.families import FAMILIES
from bptjax.weights.hf.families.family import ACTIVATIONS, Family

# Families that a model trained from scratch can be exported to, best-known first, with their
# classes.
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "bloom": "BloomForCausalLM",
    "opt": "OPTForCausalLM",
    "mpt": "MptForCausalLM",
    "falcon": "FalconForCausalLM",
    "bert": "BertForMaskedLM",
}
# For each activation, a name that every family accepts.
HF_NAMES = ("silu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2")


def from_scratch(config: ModelConfig) -> tuple[dict[str, Any], Family]:
    """Returns a config.json, and its family, for a model that was trained from scratch.

    Raises:
      ValueError: no family computes the same function as the model.
    """
    kind, config = family_of(config), _complete(config)
    keys, config_class = _keys(config, kind), transformers().CONFIG_MAPPING[kind]
    known = config_class().to_dict().keys() | config_class.attribute_map.values()
    if config.position_embedding == "rope":
        known |= rope_keys(config, FAMILIES[kind]).keys()
    raw = {k: v for k, v in keys.items() if k in known}
    raw["model_type"] = kind
    raw["transformers_version"] = transformers().__version__
    if config.position_embedding == "rope":
        check_rope(raw, replace(config, max_position_embeddings=keys["max_position_embeddings"]))
    return raw, FAMILIES[kind]


def family_of(config: ModelConfig) -> str:
    """Returns the model_type of the first family that computes the same function as `config`.

    Raises:
      ValueError: there is no such family; the message names the keys that differ.
    """
    config = _complete(config)
    wanted, nearest = computed(config), None
    for kind in CLASSES:
        try:
            read = FAMILIES[kind].read(_namespace(_keys(config, kind)))
            got = computed(ModelConfig(**read))
        except ValueError:
            continue
        others = [key for key, value in wanted.items() if not same_value(value, got.get(key))]
        if not others:
            return kind
        if nearest is None or len(others) < len(nearest[1]):
            nearest = kind, others
    assert nearest is not None
    values = flatten(config)
    differing = ", ".join(f"model.{key}={values[key]}" for key in nearest[1])
    raise ValueError(f"no Hugging Face family has {differing} with the other keys of the model")


def same_value(a: Any, b: Any) -> bool:
    """Returns whether two values of a config are the same but for rounding."""
    numbers = isinstance(a, float) and isinstance(b, float)
    return math.isclose(a, b, rel_tol=1e-6) if numbers else a == b


def computed(config: ModelConfig) -> dict[str, Any]:
    """Returns the values that determine an architecture's function, with defaults filled in."""
    values = {k: v for k, v in flatten(config).items() if k not in OVERRIDABLE}
    for key in ("layer_types", "position_offset", "alibi.scale", "alibi.interleaved"):
        del values[key]
    values |= dict(
        intermediate_size=config.F,
        num_kv_heads=config.K,
        head_dim=config.H,
        embedding_size=config.E,
        window=[kind.window for kind in config.layer_kinds],
    )
    values["attention.scale"] = _attention_scale(config)
    if config.position_embedding == "rope":
        values["rope_parameters"] = [kind.rope for kind in config.layer_kinds]
    if config.position_embedding == "learned":
        values["position_offset"] = config.position_offset
    if config.position_embedding == "alibi":
        slopes = alibi_slopes(config.num_heads, interleaved=config.alibi.interleaved)
        values["alibi.interleaved"] = (config.alibi.scale * slopes).tolist()
    return values


def _attention_scale(config: ModelConfig) -> float:
    return config.H**-0.5 if config.attention.scale is None else config.attention.scale


def _namespace(keys: dict[str, Any]) -> SimpleNamespace:
    attention = SimpleNamespace(**keys["attn_config"])
    return SimpleNamespace(**keys | {"attn_config": attention})


def _keys(config: ModelConfig, kind: str) -> dict[str, Any]:
    """Returns the architecture under the config keys of all families."""
    c, D, L, N, K = config, config.hidden_size, config.num_layers, config.num_heads, config.K
    act = next(name for name in HF_NAMES if ACTIVATIONS[name] == c.activation)
    positions, parallel = c.max_position_embeddings or 2048, c.residual != "sequential"
    attention, residual = c.attention_dropout or 0.0, c.residual_dropout or 0.0
    types = c.layer_types or ["sliding_attention" if c.sliding_window else "full_attention"] * L
    keys = dict(
        vocab_size=c.V,
        **dict.fromkeys(("hidden_size", "n_embd", "d_model"), D),
        **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), L),
        **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), N),
        **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), K),
        **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"), c.F),
        head_dim=c.H,
        **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), positions),
        **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), c.norms.eps),
        **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), act),
        activation=act,
        architectures=[CLASSES[kind]],
        type_vocab_size=c.encoder.token_types,
        hidden_dropout_prob=residual,
        attention_probs_dropout_prob=attention,
        **dict.fromkeys(("attention_bias", "bias", "enable_bias"), c.attention.qkv_bias),
        mlp_bias=c.mlp_bias,
        tie_word_embeddings=c.tied_head,
        # None, because the defaults may be outside the vocabulary.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        embd_pdrop=c.embedding_dropout or 0.0,
        **dict.fromkeys(("attention_dropout", "attn_pdrop"), attention),
        **dict.fromkeys(("resid_pdrop", "hidden_dropout", "dropout"), residual),
        sliding_window=c.sliding_window,
        use_sliding_window=c.sliding_window is not None,
        layer_types=types,
        # Clipped to the range of families with the key; beyond it they compute something else.
        query_pre_attn_scalar=round(1 / min(max(_attention_scale(c) ** 2, 2**-31), 1)),
        attn_logit_softcapping=c.attention.softcap,
        final_logit_softcapping=c.logits_softcap,
        scale_attn_weights=c.attention.scale is None,
        use_parallel_residual=parallel,
        parallel_attn=parallel,
        new_decoder_architecture=parallel,
        num_ln_in_parallel_attn=1 if c.residual == "shared" else 2 if parallel else None,
        multi_query=K == 1 and N > 1,
        alibi=c.position_embedding == "alibi",
        apply_residual_connection_post_layernorm=c.residual_normed,
        do_layer_norm_before=c.norms.position == "pre",
        layer_norm_elementwise_affine=c.norms.scale,
        word_embed_proj_dim=c.E,
        _remove_final_layer_norm=not c.norms.final,
        **dict(expansion_ratio=4, no_bias=True, logit_scale=None, embedding_fraction=1.0),
        emb_pdrop=0.0,
        attn_config=dict(
            alibi=True,
            attn_type="multihead_attention",
            # transformers requires an int for zero.
            attn_pdrop=attention or 0,
            attn_uses_sequence_id=False,
            alibi_bias_max=8,
            clip_qkv=c.attention.clip,
            prefix_lm=False,
            qk_ln=False,
            softmax_scale=c.attention.scale,
        ),
    )
    rope = c.rope_parameters
    if c.position_embedding != "rope":
        return keys | {"rope_parameters": {}}
    if kind == "gemma3_text" and not isinstance(rope.get("full_attention"), dict):
        rope = dict.fromkeys(("full_attention", "sliding_attention"), rope)
    return keys | rope_keys(replace(c, rope_parameters=rope), FAMILIES[kind])


def _complete(config: ModelConfig) -> ModelConfig:
    """Returns the config with complete rotary parameters."""
    rope, length = config.rope_parameters, config.max_position_embeddings
    if config.position_embedding != "rope":
        return config
    if any(isinstance(p, dict) for p in rope.values()):
        rope = {kind: complete_rope({}, p, length, length) for kind, p in rope.items()}
    else:
        rope = complete_rope({}, rope, length, length)
    return replace(config, rope_parameters=rope)
