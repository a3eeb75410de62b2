"""Tiny configs of every family, at least three each, chosen so that together they exercise every
option that its config has.
"""

from typing import Any

SIZES: dict[str, Any] = dict(
    vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
)
MODERN = SIZES | dict(intermediate_size=48, num_key_value_heads=2)
IDS: dict[str, Any] = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)


def rope(kind: str, theta: float = 1e4, **more: Any) -> dict:
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=theta, **more))


LLAMA3 = dict(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
THREE = dict(num_hidden_layers=3)
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
SHORT, LONG = [1.0, 1.1, 1.3, 1.5], [2.0, 3.0, 4.0, 8.0]
GPT2 = dict(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64)
NEOX = SIZES | dict(intermediate_size=48)
BLOOM = dict(vocab_size=61, hidden_size=32, n_layer=2, n_head=4)
OPT = SIZES | dict(ffn_dim=48, max_position_embeddings=64)
MPT = dict(vocab_size=61, d_model=32, n_layers=2, n_heads=4, max_seq_len=64)
FALCON = SIZES | dict(ffn_hidden_size=48)

# family and what is special about it: (config class, its keywords).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", MODERN),
    "llama: 3.1, tied, biases, wide heads, MQA": (
        "LlamaConfig",
        MODERN
        | rope("llama3", 5e5, **LLAMA3)
        | dict(num_key_value_heads=1, head_dim=16, attention_bias=True, mlp_bias=True)
        | dict(tie_word_embeddings=True, attention_dropout=0.1),
    ),
    "llama: linear, gelu": (
        "LlamaConfig",
        MODERN | rope("linear", factor=2.0) | dict(hidden_act="gelu", num_key_value_heads=4),
    ),
    "llama: dynamic, beyond its positions": (
        "LlamaConfig",
        MODERN | rope("dynamic", factor=2.0) | dict(max_position_embeddings=16),
    ),
    "mistral": ("MistralConfig", MODERN),
    "mistral: window, head_dim": ("MistralConfig", MODERN | dict(sliding_window=5, head_dim=16)),
    "mistral: no window, tied": (
        "MistralConfig",
        MODERN | dict(sliding_window=None, tie_word_embeddings=True),
    ),
    "qwen2": ("Qwen2Config", MODERN),
    "qwen2: yarn, tied": (
        "Qwen2Config",
        MODERN
        | rope("yarn", 1e6, factor=4.0, original_max_position_embeddings=16)
        | dict(tie_word_embeddings=True),
    ),
    "qwen2: window in upper layers": (
        "Qwen2Config",
        MODERN | THREE | dict(use_sliding_window=True, sliding_window=6, max_window_layers=1),
    ),
    "qwen3": ("Qwen3Config", MODERN | dict(head_dim=16)),
    "qwen3: biases, tied": (
        "Qwen3Config",
        MODERN | dict(head_dim=8, attention_bias=True, tie_word_embeddings=True),
    ),
    "qwen3: mixed windows, yarn": (
        "Qwen3Config",
        MODERN
        | THREE
        | rope("yarn", 1e6, factor=2.0, original_max_position_embeddings=16, truncate=False)
        | dict(head_dim=8, use_sliding_window=True, sliding_window=4, layer_types=MIXED),
    ),
    "gemma": ("GemmaConfig", MODERN | dict(head_dim=16)),
    "gemma: MQA, biases": (
        "GemmaConfig",
        MODERN | dict(head_dim=8, num_key_value_heads=1, attention_bias=True),
    ),
    "gemma: untied, exact gelu": (
        "GemmaConfig",
        MODERN | dict(head_dim=8, tie_word_embeddings=False, hidden_act="gelu_python"),
    ),
    "gemma2": ("Gemma2Config", MODERN | dict(head_dim=16, sliding_window=7)),
    "gemma2: low caps, scale": (
        "Gemma2Config",
        MODERN
        | dict(head_dim=8, sliding_window=5, query_pre_attn_scalar=24, attention_bias=True)
        | dict(attn_logit_softcapping=0.5, final_logit_softcapping=0.3),
    ),
    "gemma2: no caps, three layers": (
        "Gemma2Config",
        MODERN
        | THREE
        | dict(head_dim=8, sliding_window=5, layer_types=MIXED)
        | dict(attn_logit_softcapping=None, final_logit_softcapping=None),
    ),
    "gemma3": (
        "Gemma3TextConfig",
        MODERN | THREE | dict(head_dim=16, sliding_window=7, layer_types=MIXED),
    ),
    "gemma3: linear in full layers, caps": (
        "Gemma3TextConfig",
        MODERN
        | THREE
        | dict(head_dim=8, sliding_window=5, layer_types=MIXED, final_logit_softcapping=0.4)
        | dict(
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
                sliding_attention=dict(rope_type="default", rope_theta=1e4),
            )
        ),
    ),
    "gemma3: sliding only, untied, biases": (
        "Gemma3TextConfig",
        MODERN
        | dict(head_dim=8, sliding_window=5, layer_types=["sliding_attention"] * 2)
        | dict(tie_word_embeddings=False, attention_bias=True, query_pre_attn_scalar=9),
    ),
    "phi3": ("Phi3Config", MODERN | IDS),
    "phi3: longrope, short": (
        "Phi3Config",
        MODERN
        | IDS
        | rope("longrope", short_factor=SHORT, long_factor=LONG)
        | dict(max_position_embeddings=128, original_max_position_embeddings=64),
    ),
    "phi3: longrope, long": (
        "Phi3Config",
        MODERN
        | IDS
        | rope("longrope", short_factor=SHORT, long_factor=LONG)
        | dict(max_position_embeddings=64, original_max_position_embeddings=16),
    ),
    "phi3: window, partial rotary": (
        "Phi3Config",
        MODERN
        | IDS
        | dict(sliding_window=9, partial_rotary_factor=0.5, resid_pdrop=0.1, embd_pdrop=0.1),
    ),
    "gpt2": ("GPT2Config", GPT2),
    "gpt2: narrow feed-forward, relu": (
        "GPT2Config",
        GPT2 | dict(n_inner=40, activation_function="relu", resid_pdrop=0.0),
    ),
    "gpt2: no scale, untied": (
        "GPT2Config",
        GPT2 | dict(scale_attn_weights=False, tie_word_embeddings=False),
    ),
    "gpt_neox": ("GPTNeoXConfig", NEOX),
    "gpt_neox: sequential, half rotary": (
        "GPTNeoXConfig",
        NEOX
        | rope("default", partial_rotary_factor=0.5)
        | dict(use_parallel_residual=False, hidden_act="gelu_fast"),
    ),
    "gpt_neox: no attention biases, tied, linear": (
        "GPTNeoXConfig",
        NEOX
        | rope("linear", factor=4.0, partial_rotary_factor=1.0)
        | dict(attention_bias=False, tie_word_embeddings=True),
    ),
    "bloom": ("BloomConfig", BLOOM),
    "bloom: 6 heads": ("BloomConfig", BLOOM | dict(hidden_size=48, n_head=6)),
    "bloom: 12 heads, normed residual": (
        "BloomConfig",
        BLOOM
        | dict(hidden_size=48, n_head=12, apply_residual_connection_post_layernorm=True)
        | dict(hidden_dropout=0.1, attention_dropout=0.1),
    ),
    "opt": ("OPTConfig", OPT),
    "opt: post-norm, projected": (
        "OPTConfig",
        OPT | dict(do_layer_norm_before=False, word_embed_proj_dim=16),
    ),
    "opt: no biases, no affine norms": (
        "OPTConfig",
        OPT | dict(enable_bias=False, layer_norm_elementwise_affine=False),
    ),
    "opt: no final norm, gelu, untied": (
        "OPTConfig",
        OPT
        | dict(_remove_final_layer_norm=True, activation_function="gelu")
        | dict(tie_word_embeddings=False),
    ),
    "mpt": ("MptConfig", MPT),
    "mpt: 6 heads, clipped": (
        "MptConfig",
        MPT | dict(d_model=48, n_heads=6, attn_config=dict(clip_qkv=0.05)),
    ),
    "mpt: 12 heads, scale": (
        "MptConfig",
        MPT | dict(d_model=48, n_heads=12, attn_config=dict(softmax_scale=0.3)),
    ),
    "falcon": ("FalconConfig", FALCON),
    "falcon: new, two norms, biases": (
        "FalconConfig",
        FALCON | dict(new_decoder_architecture=True, num_kv_heads=2, bias=True),
    ),
    "falcon: new, one norm, untied": (
        "FalconConfig",
        FALCON
        | dict(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1)
        | dict(tie_word_embeddings=False),
    ),
    "falcon: ALiBi, sequential": (
        "FalconConfig",
        FALCON | dict(alibi=True, multi_query=False, parallel_attn=False, bias=True),
    ),
    "falcon: ALiBi, 6 heads, parallel": (
        "FalconConfig",
        FALCON | dict(hidden_size=48, num_attention_heads=6, alibi=True),
    ),
}
BERT = SIZES | dict(intermediate_size=48, max_position_embeddings=64)
VIT = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48) | dict(
    image_size=8, patch_size=2
)
# (class, config class, its keywords).
ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", BERT),
    "bert: pooler, no masked head": ("BertModel", "BertConfig", BERT | dict(hidden_act="gelu_new")),
    "bert: three types, 8 heads, eps": (
        "BertForMaskedLM",
        "BertConfig",
        BERT | dict(type_vocab_size=3, num_attention_heads=8, layer_norm_eps=1e-3),
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", VIT),
    "vit: pooler, no biases of queries": (
        "ViTModel",
        "ViTConfig",
        VIT | dict(qkv_bias=False, pooler_output_size=24, pooler_act="gelu"),
    ),
    "vit: oblong, one channel, relu": (
        "ViTForImageClassification",
        "ViTConfig",
        VIT | dict(image_size=[8, 12], patch_size=[4, 2], num_channels=1, hidden_act="relu"),
    ),
}
FAMILIES = {name.split(":")[0]: name for name in reversed(CASES)}

# Buffers that old versions of transformers saved beside a family's parameters: name (`{}` counts
# the layers), dtype, shape.
_ROTARY = ("model.layers.{}.self_attn.rotary_emb.inv_freq", "float32", (4,))
_TABLE = ("model.layers.{}.self_attn.rotary_emb.cos_cached", "float32", (1, 1, 8, 8))
_MASK = ("transformer.h.{}.self_attention.scale_mask_softmax.causal_mask", "bool", (1, 1, 8, 8))
OLD_BUFFERS: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {
    "llama": [
        _ROTARY,
        ("model.layers.{}.self_attn.rotary_emb.cos_cached", "float32", (1, 1, 8, 8)),
    ],
    "mistral": [_ROTARY],
    "qwen2": [_ROTARY],
    "qwen3": [_ROTARY],
    "gemma": [_ROTARY],
    "gemma2": [_ROTARY],
    "gemma3": [
        ("model.rotary_emb.inv_freq", "float32", (8,)),
        ("model.rotary_emb_local.inv_freq", "float32", (8,)),
    ],
    "phi3": [_ROTARY, ("model.rotary_emb.original_inv_freq", "float32", (4,))],
    "gpt2": [
        ("transformer.h.{}.attn.bias", "uint8", (1, 1, 8, 8)),
        ("transformer.h.{}.attn.masked_bias", "float32", ()),
    ],
    "gpt_neox": [
        ("gpt_neox.layers.{}.attention.bias", "bool", (1, 1, 8, 8)),
        ("gpt_neox.layers.{}.attention.masked_bias", "float16", ()),
        ("gpt_neox.layers.{}.attention.rotary_emb.inv_freq", "float32", (1,)),
    ],
    "bloom": [_MASK],
    "opt": [("model.decoder.version", "float32", (1,))],
    # No version of transformers saved any.
    "mpt": [],
    "falcon": [
        _MASK,
        ("transformer.h.{}.self_attention.rotary_emb.inv_freq", "float16", (4,)),
    ],
    "bert": [
        ("bert.embeddings.position_ids", "int64", (1, 64)),
        ("bert.embeddings.token_type_ids", "int64", (1, 64)),
    ],
    "vit": [],
}


def config(name: str) -> Any:
    import transformers

    *_, kind, keywords = CASES.get(name) or ENCODERS[name]
    return getattr(transformers, kind)(**keywords)
