"""Configs of families that GGUF files hold: those of tests/weights/hf/cases.py, most of which have
options that llama.cpp lacks, and more without these."""

from typing import Any

from bptjax.weights.gguf.families import ROWS, row_name
from weights.hf.cases import (
    CASES,
    CONVOLUTIONS,
    IDS,
    LONG,
    MIXED,
    MODERN,
    MOE,
    NEOX,
    SHORT,
    THREE,
    mrope,
    rope,
)

WINDOWS = dict(layer_types=MIXED)
SCALED = dict(head_dim=16, sliding_window=7, query_pre_attn_scalar=16)
TIED = dict(tie_word_embeddings=True)
YARN = dict(factor=4.0, original_max_position_embeddings=16)
MQA = dict(num_key_value_heads=1)


def changed(case: str, **keys: Any) -> tuple[str, dict[str, Any]]:
    return CASES[case][0], CASES[case][1] | keys


def rope_by_layer(**full: Any) -> dict[str, Any]:
    local = dict(rope_type="default", rope_theta=1e4)
    return dict(rope_parameters=dict(full_attention=full, sliding_attention=local))


def windowed(layers: int, period: int) -> dict[str, Any]:
    """Returns the keys of layers of which all but every `period`-th have a window."""
    kinds = ["sliding_attention"] * (period - 1) + ["full_attention"]
    return dict(num_hidden_layers=layers, layer_types=(kinds * layers)[:layers])


SECTIONS = mrope(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.5)
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama: linear": ("LlamaConfig", MODERN | rope("linear", factor=2.0)),
    "qwen3: yarn, tied": ("Qwen3Config", MODERN | TIED | rope("yarn", 1e6, **YARN)),
    "gemma: MQA": ("GemmaConfig", MODERN | MQA | dict(head_dim=8)),
    "gemma2: scaled by head": ("Gemma2Config", MODERN | SCALED),
    "gemma2: low caps, MQA": (
        "Gemma2Config",
        MODERN | SCALED | MQA | dict(attn_logit_softcapping=0.5, final_logit_softcapping=2.0),
    ),
    "gemma2: 46 layers": (
        "Gemma2Config",
        MODERN | SCALED | dict(query_pre_attn_scalar=8, num_hidden_layers=46),
    ),
    "gemma3: scaled by head": ("Gemma3TextConfig", MODERN | THREE | SCALED | WINDOWS),
    "gemma3: seven layers, linear in the full one": (
        "Gemma3TextConfig",
        MODERN
        | SCALED
        | windowed(7, 6)
        | rope_by_layer(rope_type="linear", rope_theta=1e6, factor=8.0),
    ),
    "gpt_oss: usual limit": (
        "GptOssConfig",
        MOE | THREE | WINDOWS | dict(head_dim=16, num_local_experts=4, sliding_window=7),
    ),
    "gpt_oss: yarn, three of five": (
        "GptOssConfig",
        MOE
        | rope("yarn", truncate=False, **YARN)
        | dict(head_dim=8, num_local_experts=5, num_experts_per_tok=3, sliding_window=5),
    ),
    "qwen3_next: renormalized": changed("qwen3_next", norm_topk_prob=True, linear_value_head_dim=8),
    "qwen3_next: as many heads, linear": changed(
        "qwen3_next: every other layer has experts, as many heads",
        decoder_sparse_step=1,
        linear_value_head_dim=8,
    ),
    "qwen3_5_text: equal heads": changed("qwen3_5_text", **SECTIONS, linear_value_head_dim=8),
    "qwen3_5_text: linear first and last, equal heads": changed(
        "qwen3_5_text: linear first and last, full rotation, MQA", linear_value_head_dim=8
    ),
    "qwen3_5_moe_text: equal heads": changed(
        "qwen3_5_moe_text", **SECTIONS, linear_value_head_dim=8
    ),
    "qwen3_5_moe_text: tied, equal heads": changed(
        "qwen3_5_moe_text: tied, biases", attention_bias=False, linear_value_head_dim=8
    ),
    "qwen3_5: equal heads": (
        "Qwen3_5Config",
        CASES["qwen3_5: two layers"][1]
        | dict(text_config=changed("qwen3_5_text", **SECTIONS, linear_value_head_dim=8)[1]),
    ),
    "qwen3_moe: experts alone": changed("qwen3_moe", norm_topk_prob=True, mlp_only_layers=[]),
    "qwen3_moe: yarn, tied, every expert": (
        "Qwen3MoeConfig",
        MOE
        | TIED
        | rope("yarn", 1e6, **YARN)
        | dict(num_experts=3, num_experts_per_tok=3, moe_intermediate_size=16)
        | dict(norm_topk_prob=True),
    ),
    "olmoe: as many key heads": changed("olmoe", num_key_value_heads=4),
    "olmoe: linear, one of three": changed(
        "olmoe: linear, tied, one of three", num_key_value_heads=4, tie_word_embeddings=False
    ),
    "lfm2: yarn": (
        "Lfm2Config",
        MODERN | IDS | rope("yarn", **YARN) | dict(layer_types=CONVOLUTIONS[:2], norm_eps=1e-3),
    ),
    "phi3: longrope, 512": (
        "Phi3Config",
        MODERN
        | IDS
        | rope("longrope", short_factor=SHORT, long_factor=LONG)
        | dict(max_position_embeddings=2048, original_max_position_embeddings=512),
    ),
    "smollm3: yarn, untied": (
        "SmolLM3Config",
        MODERN | IDS | rope("yarn", **YARN) | dict(num_hidden_layers=4, tie_word_embeddings=False),
    ),
    "stablelm: all rotary, linear": changed(
        "stablelm: all rotary, linear, tied", tie_word_embeddings=False
    ),
    "phi: yarn, gelu": changed("phi: yarn, MQA", hidden_act="gelu_new"),
    "ernie4_5: yarn, silu": changed("ernie4_5: yarn, MQA", hidden_act="silu"),
    "granite: all factors, tied": changed(
        "granite: all factors, biases, tied", attention_bias=False, mlp_bias=False
    ),
    "olmo2: MQA": ("Olmo2Config", MODERN | MQA | dict(rms_norm_eps=1e-3)),
    "olmo3: yarn in full layers": (
        "Olmo3Config",
        MODERN
        | THREE
        | WINDOWS
        | rope_by_layer(rope_type="yarn", rope_theta=1e4, **YARN)
        | dict(sliding_window=5),
    ),
    "olmo3: yarn in full layers, two bases": changed(
        "olmo3: yarn in full layers, biases, tied", attention_bias=False, tie_word_embeddings=False
    ),
    "seed_oss: tied": changed("seed_oss", **TIED),
    "ministral3: tied": changed("ministral3", **TIED),
    "qwen3_next: tied": changed("qwen3_next", **TIED, norm_topk_prob=True, linear_value_head_dim=8),
    "qwen3_5_text: tied": changed("qwen3_5_text", **SECTIONS, **TIED, linear_value_head_dim=8),
    "phi3: tied": changed("phi3", **TIED),
    "exaone4: 64 layers": (
        "Exaone4Config",
        MODERN | windowed(64, 4) | dict(sliding_window=7),
    ),
    "gpt_neox: sequential, gelu": changed("gpt_neox: sequential, half rotary", hidden_act="gelu"),
    "gpt_neox: linear": (
        "GPTNeoXConfig",
        NEOX | rope("linear", factor=4.0, partial_rotary_factor=1.0),
    ),
}


def keywords(name: str) -> dict[str, Any]:
    return (CASES.get(name) or MORE[name])[1]


def new(name: str) -> Any:
    import transformers

    return getattr(transformers, (CASES.get(name) or MORE[name])[0])(**keywords(name))


def kind(name: str) -> str:
    """Returns the model_type of the text model."""
    found = new(name)
    return getattr(found, "text_config", found).model_type


ALL = [name for name in (*CASES, *MORE) if row_name(kind(name)) in ROWS]
