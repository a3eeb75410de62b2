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
MOE = MODERN | dict(num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.5)
GLM_MOE = MODERN | THREE | dict(n_routed_experts=6, num_experts_per_tok=2, use_qk_norm=True)
GLM_MOE |= dict(moe_intermediate_size=20, head_dim=16)
LINEAR: dict[str, Any] = dict(num_hidden_layers=4, head_dim=16)
LINEAR |= dict(linear_num_key_heads=2, linear_num_value_heads=4)
LINEAR |= dict(linear_key_head_dim=8, linear_value_head_dim=12)
LINEAR_MOE = dict(num_experts=4, moe_intermediate_size=20, shared_expert_intermediate_size=24)
CONVOLUTIONS = ["conv", "full_attention", "conv"]
LINEAR_FULL = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
GEMMA4: dict[str, Any] = dict(head_dim=8, global_head_dim=16, sliding_window=5)
GEMMA4 |= dict(hidden_size_per_layer_input=0)
UNIFIED = {k: v for k, v in GEMMA4.items() if k != "hidden_size_per_layer_input"}
KEYS_AS_VALUES = dict(attention_k_eq_v=True, num_global_key_value_heads=1)
GEMMA4_MOE = dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=20)
SHARED_KEYS: dict[str, Any] = dict(num_hidden_layers=5, num_kv_shared_layers=2)
SHARED_KEYS |= dict(layer_types=[MIXED[0], *2 * MIXED[:2]], use_double_wide_mlp=True)
LAYER_EMBEDDINGS = dict(hidden_size_per_layer_input=6, vocab_size_per_layer_input=61)
GPT2 = dict(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64)
NEOX = SIZES | dict(intermediate_size=48)
BLOOM = dict(vocab_size=61, hidden_size=32, n_layer=2, n_head=4)
OPT = SIZES | dict(ffn_dim=48, max_position_embeddings=64)
MPT = dict(vocab_size=61, d_model=32, n_layers=2, n_heads=4, max_seq_len=64)
FALCON = SIZES | dict(ffn_hidden_size=48)
TOWER = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
TOWER |= dict(patch_size=4, image_size=8, head_dim=8)
QWEN_TOWER = dict(hidden_size=16, intermediate_size=16, depth=1, num_heads=2, patch_size=4) | dict(
    out_hidden_size=32, num_position_embeddings=16, deepstack_visual_indexes=[0]
)

QWEN3_5_TOWER = {k: v for k, v in QWEN_TOWER.items() if k != "deepstack_visual_indexes"}


def multimodal(text: dict, tower: dict | None, **more: Any) -> dict[str, Any]:
    return dict(text_config=text, vision_config=tower) | more


def mrope(*section: int, kind: str = "default", **more: Any) -> dict:
    return rope(kind, mrope_section=list(section), **more)


GROWTH = dict(factor=4.0, original_max_position_embeddings=8, llama_4_scaling_beta=0.5) | dict(
    mscale=1.0, mscale_all_dim=1.0, max_position_embeddings=32
)

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
    "mixtral": ("MixtralConfig", MOE | dict(num_local_experts=4)),
    "mixtral: window, tied, three of five": (
        "MixtralConfig",
        MOE
        | dict(num_local_experts=5, num_experts_per_tok=3, sliding_window=5, head_dim=16)
        | dict(tie_word_embeddings=True, output_router_logits=False),
    ),
    "mixtral: one of three, gelu": (
        "MixtralConfig",
        MOE | dict(num_local_experts=3, num_experts_per_tok=1, hidden_act="gelu"),
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        MOE
        | dict(num_hidden_layers=3, mlp_only_layers=[1])
        | dict(head_dim=16, num_experts=6, moe_intermediate_size=20),
    ),
    "qwen3_moe: renormalized, tied, biases": (
        "Qwen3MoeConfig",
        MOE
        | dict(head_dim=8, num_experts=4, moe_intermediate_size=24, norm_topk_prob=True)
        | dict(tie_word_embeddings=True, attention_bias=True, output_router_logits=False),
    ),
    "qwen3_moe: window, yarn, every expert": (
        "Qwen3MoeConfig",
        MOE
        | rope("yarn", 1e6, factor=2.0, original_max_position_embeddings=16)
        | dict(head_dim=8, num_experts=3, num_experts_per_tok=3, moe_intermediate_size=16)
        | dict(decoder_sparse_step=2)
        | dict(use_sliding_window=True, sliding_window=6),
    ),
    "qwen3_5_text": (
        "Qwen3_5TextConfig",
        MODERN
        | LINEAR
        | LINEAR_FULL
        | mrope(1, 1, 2, mrope_interleaved=True, partial_rotary_factor=0.5),
    ),
    "qwen3_5_text: tied, biases, a layer of each kind, other sizes": (
        "Qwen3_5TextConfig",
        MODERN
        | LINEAR
        | mrope(1, 1, 0, partial_rotary_factor=0.25)
        | dict(num_hidden_layers=2, layer_types=["full_attention", "linear_attention"])
        | dict(linear_num_key_heads=3, linear_num_value_heads=3, linear_key_head_dim=6)
        | dict(linear_conv_kernel_dim=2, attention_bias=True, tie_word_embeddings=True),
    ),
    "qwen3_5_text: linear first and last, full rotation, MQA": (
        "Qwen3_5TextConfig",
        MODERN
        | LINEAR
        | THREE
        | mrope(2, 1, 1, partial_rotary_factor=1.0)
        | dict(layer_types=["linear_attention", "full_attention", "linear_attention"], head_dim=8)
        | dict(linear_num_key_heads=1, num_key_value_heads=1),
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        MOE
        | LINEAR
        | LINEAR_FULL
        | rope("default", partial_rotary_factor=0.5)
        | LINEAR_MOE
        | dict(norm_topk_prob=False),
    ),
    "qwen3_next: an MLP, a tied head, biases": (
        "Qwen3NextConfig",
        MOE
        | LINEAR
        | LINEAR_MOE
        | dict(mlp_only_layers=[1], tie_word_embeddings=True, attention_bias=True),
    ),
    "qwen3_next: every other layer has experts, as many heads": (
        "Qwen3NextConfig",
        MOE
        | LINEAR
        | LINEAR_MOE
        | rope("linear", factor=2.0, partial_rotary_factor=1.0)
        | dict(decoder_sparse_step=2, linear_num_value_heads=2, output_router_logits=False),
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeTextConfig",
        MOE | LINEAR | LINEAR_FULL | mrope(1, 1, 2, partial_rotary_factor=0.5) | LINEAR_MOE,
    ),
    "qwen3_5_moe_text: tied, biases": (
        "Qwen3_5MoeTextConfig",
        MOE
        | LINEAR
        | LINEAR_MOE
        | mrope(1, 1, 0, mrope_interleaved=True, partial_rotary_factor=0.25)
        | dict(tie_word_embeddings=True, attention_bias=True),
    ),
    "qwen3_5_moe_text: one expert, without its loss": (
        "Qwen3_5MoeTextConfig",
        MOE
        | LINEAR
        | LINEAR_FULL
        | LINEAR_MOE
        | mrope(1, 1, 2, partial_rotary_factor=0.5)
        | dict(num_experts_per_tok=1, output_router_logits=False, num_key_value_heads=1),
    ),
    "lfm2": ("Lfm2Config", MODERN | IDS | THREE | dict(layer_types=CONVOLUTIONS)),
    "lfm2: four tokens, another width, untied, MQA": (
        "Lfm2Config",
        MODERN
        | IDS
        | dict(layer_types=CONVOLUTIONS[:2], conv_L_cache=4, num_key_value_heads=1)
        | dict(block_multiple_of=10, block_ffn_dim_multiplier=1.5, tie_word_embeddings=False),
    ),
    "lfm2: attention alone, yarn": (
        "Lfm2Config",
        MODERN
        | IDS
        | rope("yarn", factor=4.0, original_max_position_embeddings=16)
        | dict(block_auto_adjust_ff_dim=False, norm_eps=1e-3),
    ),
    "glm4_moe": ("Glm4MoeConfig", GLM_MOE | dict(n_group=2, routed_scaling_factor=1.5)),
    "glm4_moe: no group, biases, two shared, two layers without experts": (
        "Glm4MoeConfig",
        GLM_MOE
        | dict(n_shared_experts=2, first_k_dense_replace=2, norm_topk_prob=False)
        | dict(attention_bias=True, use_qk_norm=False, partial_rotary_factor=1.0),
    ),
    "glm4_moe: two of three groups, tied, no layer without experts": (
        "Glm4MoeConfig",
        GLM_MOE
        | dict(n_routed_experts=9, n_group=3, topk_group=2, num_experts_per_tok=3)
        | dict(first_k_dense_replace=0, tie_word_embeddings=True, head_dim=8),
    ),
    "olmoe": ("OlmoeConfig", MOE | dict(num_experts=4)),
    "olmoe: renormalized, biases, three of five": (
        "OlmoeConfig",
        MOE
        | dict(num_experts=5, num_experts_per_tok=3, norm_topk_prob=True, attention_bias=True)
        | dict(num_key_value_heads=4, output_router_logits=False),
    ),
    "olmoe: linear, tied, one of three": (
        "OlmoeConfig",
        MOE
        | rope("linear", factor=2.0)
        | dict(num_experts=3, num_experts_per_tok=1, tie_word_embeddings=True),
    ),
    "gpt_oss": (
        "GptOssConfig",
        MOE | THREE | dict(head_dim=16, num_local_experts=4, sliding_window=7, swiglu_limit=0.3),
    ),
    "gpt_oss: yarn as it is, three of five, tied": (
        "GptOssConfig",
        MOE
        | dict(head_dim=8, num_local_experts=5, num_experts_per_tok=3, sliding_window=5)
        | dict(tie_word_embeddings=True, max_position_embeddings=128, output_router_logits=False),
    ),
    "gpt_oss: no biases of attention, full layers": (
        "GptOssConfig",
        MOE
        | rope("default", 1e4)
        | dict(head_dim=16, num_local_experts=3, attention_bias=False, hidden_size=64)
        | dict(layer_types=["full_attention"] * 2),
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
    "smollm3": ("SmolLM3Config", MODERN | IDS | dict(num_hidden_layers=4)),
    "smollm3: windows without rotation, untied, biases": (
        "SmolLM3Config",
        MODERN
        | IDS
        | THREE
        | dict(no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=5)
        | dict(tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    ),
    "smollm3: yarn, MQA": (
        "SmolLM3Config",
        MODERN
        | IDS
        | rope("yarn", factor=4.0, original_max_position_embeddings=16)
        | dict(no_rope_layers=[0, 1], num_key_value_heads=1, hidden_act="gelu"),
    ),
    "seed_oss": ("SeedOssConfig", MODERN | dict(head_dim=16)),
    "seed_oss: all biases, tied": (
        "SeedOssConfig",
        MODERN | dict(head_dim=8, attention_out_bias=True, mlp_bias=True, tie_word_embeddings=True),
    ),
    "seed_oss: no biases, linear": (
        "SeedOssConfig",
        MODERN
        | rope("linear", factor=2.0)
        | dict(head_dim=8, attention_bias=False, residual_dropout=0.0, num_key_value_heads=1),
    ),
    "stablelm": ("StableLmConfig", MODERN),
    "stablelm: parallel, biases, half rotary": (
        "StableLmConfig",
        MODERN
        | rope("default", partial_rotary_factor=0.5)
        | dict(use_parallel_residual=True, use_qkv_bias=True, layer_norm_eps=1e-3),
    ),
    "stablelm: all rotary, linear, tied": (
        "StableLmConfig",
        MODERN
        | rope("linear", factor=2.0, partial_rotary_factor=1.0)
        | dict(tie_word_embeddings=True, num_key_value_heads=4),
    ),
    "starcoder2": ("Starcoder2Config", MODERN),
    "starcoder2: window, untied": (
        "Starcoder2Config",
        MODERN | dict(sliding_window=5, tie_word_embeddings=False, norm_epsilon=1e-3),
    ),
    "starcoder2: no biases, MQA": (
        "Starcoder2Config",
        MODERN | dict(use_bias=False, num_key_value_heads=1, residual_dropout=0.1),
    ),
    "phi": ("PhiConfig", MODERN),
    "phi: norms of queries and keys, tied": (
        "PhiConfig",
        MODERN | dict(qk_layernorm=True, tie_word_embeddings=True, partial_rotary_factor=0.25),
    ),
    "phi: yarn, MQA": (
        "PhiConfig",
        MODERN
        | rope("yarn", factor=4.0, original_max_position_embeddings=16, partial_rotary_factor=0.5)
        | dict(num_key_value_heads=1, hidden_act="relu", resid_pdrop=0.1),
    ),
    "ernie4_5": ("Ernie4_5Config", MODERN | dict(head_dim=16)),
    "ernie4_5: biases, untied": (
        "Ernie4_5Config",
        MODERN | dict(head_dim=8, use_bias=True, tie_word_embeddings=False),
    ),
    "ernie4_5: yarn, MQA": (
        "Ernie4_5Config",
        MODERN
        | rope("yarn", factor=4.0, original_max_position_embeddings=16)
        | dict(head_dim=8, num_key_value_heads=1, hidden_act="gelu"),
    ),
    "cohere2": ("Cohere2Config", MODERN | THREE | dict(sliding_window=7, layer_types=MIXED)),
    "cohere2: biases, untied": (
        "Cohere2Config",
        MODERN
        | dict(layer_types=MIXED[:2], sliding_window=5, attention_bias=True, logit_scale=0.3)
        | dict(tie_word_embeddings=False, layer_norm_eps=1e-3),
    ),
    "cohere2: linear, MQA": (
        "Cohere2Config",
        MODERN
        | rope("linear", factor=2.0)
        | dict(layer_types=MIXED[:2], sliding_window=9, num_key_value_heads=1, logit_scale=1.0),
    ),
    "granite": ("GraniteConfig", MODERN | dict(attention_multiplier=0.3, logits_scaling=3.0)),
    "granite: all factors, biases, tied": (
        "GraniteConfig",
        MODERN
        | dict(attention_multiplier=0.1, logits_scaling=0.5, embedding_multiplier=12.0)
        | dict(residual_multiplier=0.22, tie_word_embeddings=True)
        | dict(attention_bias=True, mlp_bias=True),
    ),
    "granite: small residuals, MQA": (
        "GraniteConfig",
        MODERN | dict(residual_multiplier=0.5, num_key_value_heads=1, hidden_act="gelu"),
    ),
    "olmo2": ("Olmo2Config", MODERN),
    "olmo2: biases, tied, MQA": (
        "Olmo2Config",
        MODERN
        | dict(attention_bias=True, tie_word_embeddings=True, num_key_value_heads=1)
        | dict(rms_norm_eps=1e-3),
    ),
    "olmo2: yarn": (
        "Olmo2Config",
        MODERN | THREE | rope("yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    "olmo3": ("Olmo3Config", MODERN | THREE | dict(sliding_window=7, layer_types=MIXED)),
    "olmo3: yarn in full layers, biases, tied": (
        "Olmo3Config",
        MODERN
        | dict(sliding_window=5, layer_types=MIXED[:2], attention_bias=True)
        | dict(tie_word_embeddings=True, num_key_value_heads=4)
        | dict(
            rope_parameters=dict(
                full_attention=dict(
                    rope_type="yarn",
                    rope_theta=5e5,
                    factor=4.0,
                    original_max_position_embeddings=16,
                ),
                sliding_attention=dict(rope_type="default", rope_theta=1e4),
            )
        ),
    ),
    "olmo3: no windows": (
        "Olmo3Config",
        MODERN | dict(layer_types=["full_attention"] * 2, num_key_value_heads=1),
    ),
    "exaone4": ("Exaone4Config", MODERN | THREE | dict(sliding_window=7, layer_types=MIXED)),
    "exaone4: no windows, tied": (
        "Exaone4Config",
        MODERN
        | rope("linear", factor=2.0)
        | dict(sliding_window=None, layer_types=["full_attention"] * 2)
        | dict(tie_word_embeddings=True, num_key_value_heads=1),
    ),
    "exaone4: wide heads, full layers alone": (
        "Exaone4Config",
        MODERN | dict(sliding_window=4, layer_types=["full_attention"] * 2, head_dim=16),
    ),
    "glm4": ("Glm4Config", MODERN | dict(head_dim=16, **IDS)),
    "glm4: no biases, quarter rotary, tied": (
        "Glm4Config",
        MODERN
        | IDS
        | rope("default", partial_rotary_factor=0.25)
        | dict(head_dim=16, attention_bias=False, tie_word_embeddings=True),
    ),
    "glm4: all rotary, linear": (
        "Glm4Config",
        MODERN
        | IDS
        | rope("linear", factor=2.0, partial_rotary_factor=1.0)
        | dict(head_dim=8, num_key_value_heads=1),
    ),
    "gemma4_text": (
        "Gemma4TextConfig",
        MODERN | GEMMA4 | KEYS_AS_VALUES | dict(layer_types=MIXED[:2]),
    ),
    "gemma4_text: soft cap, untied, factor, as many key heads": (
        "Gemma4TextConfig",
        MODERN
        | GEMMA4
        | THREE
        | dict(layer_types=[*MIXED[1:], "full_attention"], final_logit_softcapping=2.0)
        | dict(tie_word_embeddings=False, num_global_key_value_heads=1)
        | dict(
            rope_parameters=dict(
                full_attention=dict(
                    rope_type="proportional",
                    rope_theta=1e6,
                    partial_rotary_factor=0.5,
                    factor=8.0,
                ),
                sliding_attention=dict(rope_type="default", rope_theta=1e4),
            )
        ),
    ),
    "gemma4_text with experts": (
        "Gemma4TextConfig",
        MODERN | GEMMA4 | GEMMA4_MOE | KEYS_AS_VALUES | dict(layer_types=MIXED[:2]),
    ),
    "gemma4_text with shared keys": (
        "Gemma4TextConfig",
        MODERN | GEMMA4 | SHARED_KEYS | LAYER_EMBEDDINGS,
    ),
    "gemma4_unified_text": (
        "Gemma4UnifiedTextConfig",
        MODERN | UNIFIED | KEYS_AS_VALUES | dict(layer_types=MIXED[:2], head_dim=12),
    ),
    "ministral3": ("Ministral3Config", MODERN | rope("yarn", 1e6, **GROWTH) | dict(head_dim=16)),
    "ministral3: window, tied": (
        "Ministral3Config",
        MODERN
        | rope("yarn", **GROWTH | dict(llama_4_scaling_beta=-0.2))
        | dict(head_dim=8, sliding_window=5, tie_word_embeddings=True),
    ),
    "ministral3: no growth, gelu": (
        "Ministral3Config",
        MODERN
        | rope("yarn", **GROWTH | dict(llama_4_scaling_beta=0.0))
        | dict(head_dim=8, num_key_value_heads=1, hidden_act="gelu"),
    ),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", multimodal(MODERN | mrope(2, 1, 1), QWEN_TOWER)),
    "qwen2_5_vl: tied, yarn": (
        "Qwen2_5_VLConfig",
        multimodal(
            MODERN | mrope(1, 1, 2, kind="yarn", factor=4.0, original_max_position_embeddings=16),
            QWEN_TOWER,
            tie_word_embeddings=True,
        ),
    ),
    "qwen2_5_vl: window in upper layers": (
        "Qwen2_5_VLConfig",
        multimodal(
            MODERN
            | THREE
            | mrope(2, 2, 0)
            | dict(use_sliding_window=True, sliding_window=6, max_window_layers=1),
            QWEN_TOWER,
        ),
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        multimodal(MODERN | mrope(2, 1, 1, mrope_interleaved=True) | dict(head_dim=8), QWEN_TOWER),
    ),
    "qwen3_vl: tied, yarn, biases": (
        "Qwen3VLConfig",
        multimodal(
            MODERN
            | mrope(3, 3, 2, kind="yarn", factor=2.0, original_max_position_embeddings=16)
            | dict(head_dim=16, attention_bias=True),
            QWEN_TOWER,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3_vl: linear, MQA": (
        "Qwen3VLConfig",
        multimodal(
            MODERN
            | mrope(1, 2, 1, kind="linear", factor=2.0)
            | dict(head_dim=8, num_key_value_heads=1, hidden_act="gelu"),
            QWEN_TOWER,
        ),
    ),
    "qwen3_5": (
        "Qwen3_5Config",
        multimodal(
            MODERN | LINEAR | mrope(1, 1, 2, mrope_interleaved=True, partial_rotary_factor=0.5),
            QWEN3_5_TOWER,
        ),
    ),
    "qwen3_5: tied, biases": (
        "Qwen3_5Config",
        multimodal(
            MODERN
            | LINEAR
            | mrope(2, 1, 1, partial_rotary_factor=0.5)
            | dict(attention_bias=True, num_hidden_layers=5),
            QWEN3_5_TOWER,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3_5: two layers": (
        "Qwen3_5Config",
        multimodal(
            MODERN
            | LINEAR
            | mrope(2, 1, 1, partial_rotary_factor=1.0)
            | LINEAR_FULL
            | dict(head_dim=8, linear_value_head_dim=4),
            QWEN3_5_TOWER,
        ),
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeConfig",
        multimodal(
            MOE | LINEAR | LINEAR_FULL | LINEAR_MOE | mrope(1, 1, 2, partial_rotary_factor=0.5),
            QWEN3_5_TOWER,
        ),
    ),
    "qwen3_5_moe: tied": (
        "Qwen3_5MoeConfig",
        multimodal(
            MOE | LINEAR | LINEAR_MOE | mrope(2, 1, 1, partial_rotary_factor=0.5),
            QWEN3_5_TOWER,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3_5_moe: three of five, biases": (
        "Qwen3_5MoeConfig",
        multimodal(
            MOE
            | LINEAR
            | LINEAR_FULL
            | LINEAR_MOE
            | mrope(2, 1, 1, partial_rotary_factor=1.0)
            | dict(num_experts=5, num_experts_per_tok=3, attention_bias=True),
            QWEN3_5_TOWER,
        ),
    ),
    "gemma3 multimodal": (
        "Gemma3Config",
        multimodal(
            MODERN | THREE | dict(head_dim=16, sliding_window=7, layer_types=MIXED),
            TOWER,
            mm_tokens_per_image=4,
        ),
    ),
    "gemma3 multimodal: linear in full layers": (
        "Gemma3Config",
        multimodal(
            MODERN
            | dict(head_dim=8, sliding_window=5, layer_types=MIXED[:2], num_key_value_heads=1)
            | dict(rope_scaling=dict(rope_type="linear", factor=8.0), rope_theta=1e6),
            TOWER,
            mm_tokens_per_image=4,
        ),
    ),
    "gemma3 multimodal: untied, biases": (
        "Gemma3Config",
        multimodal(
            MODERN
            | dict(head_dim=8, attention_bias=True, query_pre_attn_scalar=9, sliding_window=9),
            TOWER,
            mm_tokens_per_image=4,
            tie_word_embeddings=False,
        ),
    ),
    "gemma4": (
        "Gemma4Config",
        multimodal(
            MODERN | GEMMA4 | SHARED_KEYS | LAYER_EMBEDDINGS,
            TOWER | dict(position_embedding_size=16),
        ),
    ),
    "gemma4 with experts": (
        "Gemma4Config",
        multimodal(
            MODERN
            | GEMMA4
            | GEMMA4_MOE
            | LAYER_EMBEDDINGS
            | dict(num_hidden_layers=4, num_kv_shared_layers=2, layer_types=2 * MIXED[:2]),
            None,
        ),
    ),
    "gemma4_unified": (
        "Gemma4UnifiedConfig",
        multimodal(MODERN | UNIFIED | KEYS_AS_VALUES | dict(layer_types=MIXED[:2]), None),
    ),
    "mistral3": (
        "Mistral3Config",
        multimodal(
            MODERN | dict(model_type="mistral", head_dim=16, sliding_window=None),
            TOWER,
            tie_word_embeddings=False,
        ),
    ),
    "mistral3: tied, window": (
        "Mistral3Config",
        multimodal(MODERN | dict(model_type="mistral", head_dim=8, sliding_window=5), TOWER),
    ),
    "mistral3: ministral3": (
        "Mistral3Config",
        multimodal(
            MODERN | rope("yarn", **GROWTH) | dict(model_type="ministral3", head_dim=8),
            TOWER,
            tie_word_embeddings=False,
        ),
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
ROBERTA = dict(pad_token_id=1, bos_token_id=0, eos_token_id=2)
MODERNBERT = SIZES | IDS | dict(intermediate_size=48, max_position_embeddings=64)
MODERNBERT |= dict(cls_token_id=1, sep_token_id=2)
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
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", BERT | ROBERTA),
    "roberta: pooler, one type": (
        "RobertaModel",
        "RobertaConfig",
        BERT | ROBERTA | dict(hidden_act="relu", type_vocab_size=1),
    ),
    "roberta: another padding, 8 heads, eps": (
        "RobertaForMaskedLM",
        "RobertaConfig",
        BERT
        | ROBERTA
        | dict(pad_token_id=2, eos_token_id=1, num_attention_heads=8, layer_norm_eps=1e-3),
    ),
    "bert: classes": (
        "BertForSequenceClassification",
        "BertConfig",
        BERT | dict(num_labels=3, hidden_act="relu"),
    ),
    "roberta: classes": (
        "RobertaForSequenceClassification",
        "RobertaConfig",
        BERT | ROBERTA | dict(num_labels=5),
    ),
    "modernbert: classes": (
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        MODERNBERT | dict(num_labels=2, classifier_bias=True, classifier_pooling="cls"),
    ),
    "modernbert: classes of the mean": (
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        MODERNBERT | dict(num_labels=2, classifier_pooling="mean"),
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        MODERNBERT | dict(num_hidden_layers=5, local_attention=6),
    ),
    "modernbert: all biases, other rotation": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        MODERNBERT
        | dict(attention_bias=True, mlp_bias=True, norm_bias=True, classifier_bias=True)
        | dict(norm_eps=1e-3, local_attention=9, layer_types=MIXED[:2])
        | dict(
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", rope_theta=2e4, factor=4.0),
                sliding_attention=dict(rope_type="default", rope_theta=50.0),
            )
        ),
    ),
    "modernbert: no bias, full layers alone": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        MODERNBERT
        | dict(decoder_bias=False, layer_types=["full_attention"] * 2)
        | dict(hidden_activation="silu", classifier_activation="silu"),
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
# Families of different structure, by which the fast tier tests what all families share.
DIFFERENT = "llama", "gemma2", "gpt_neox", "bloom", "mixtral", "qwen3_next", "gemma4_text"

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
    # No version of transformers saved any.
    "mixtral": [],
    "qwen3_moe": [],
    "lfm2": [],
    "glm4_moe": [],
    "olmoe": [],
    "qwen3_next": [],
    "qwen3_5_moe_text": [],
    "qwen3_5_text": [],
    "gpt_oss": [],
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
    "roberta": [
        ("roberta.embeddings.position_ids", "int64", (1, 66)),
        ("roberta.embeddings.token_type_ids", "int64", (1, 66)),
    ],
    "modernbert": [],
    "vit": [],
}


def config(name: str) -> Any:
    import transformers

    *_, kind, keywords = CASES.get(name) or ENCODERS[name]
    return getattr(transformers, kind)(**keywords)


def auto_model(name: str) -> Any:
    """Returns the class of transformers that loads the case's decoder."""
    import transformers

    wrapped = "text_config" in CASES[name][1]
    kind = "AutoModelForImageTextToText" if wrapped else "AutoModelForCausalLM"
    return getattr(transformers, kind)
