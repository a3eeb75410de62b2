"""The table of families in GGUF files, by model_type."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from bptjax.models.config import ModelConfig
from bptjax.ops.position import rotated_features
from bptjax.weights.gguf.keys import Keys
from bptjax.weights.gguf.row import Row
from bptjax.weights.gguf.transforms import (
    CONVOLUTION,
    DECAY,
    KEYS,
    PLUS_ONE,
    QUERIES,
    TRANSPOSED,
    VALUE_CONVOLUTION,
    VALUE_DECAY,
    VALUE_HEADS,
    VALUE_INPUTS,
    VALUE_LAST,
    VALUE_OUTPUTS,
)
from bptjax.weights.hf.families.family import Family
from bptjax.weights.hf.tensor_rules import TensorRule, fused, linear, qkv

# Keys of metadata after the architecture's name, with the attribute of transformers' config.
SHARED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "vocab_size": "vocab_size",
}
RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
NORM = {"attention.layer_norm_epsilon": "layer_norm_eps"}
EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
WINDOW = "attention.sliding_window"
PATTERN = "attention.sliding_window_pattern"
# Rotated pairs are neighbors in a head.
PAIRS = ((r".*\.q_proj\.(weight|bias)", QUERIES), (r".*\.k_proj\.(weight|bias)", KEYS))
NORMS = ((r".*norm\.weight", PLUS_ONE),)
# Llama's own implementation has more than others.
LLAMA: dict[str, Any] = dict(ropes=("llama3",), transforms=PAIRS)
NO_BIAS = {"attention_bias": False, "mlp_bias": False}
NO_WINDOW = {"sliding_window": None}
UNTIED = {"tie_word_embeddings": False}


def windows(period: int, **default: int) -> dict[str, Any]:
    """Returns the functions of a row that write and read which layers have a window; by default,
    all but every `period`-th."""

    def usual(layers: int) -> list[bool]:
        return [i % period < period - 1 for i in range(layers)]

    def write(c: Any, config: ModelConfig) -> dict[str, Any]:
        types = [kind == "sliding_attention" for kind in c.layer_types]
        keys = {WINDOW: c.sliding_window} if c.sliding_window and any(types) else {}
        return keys | ({PATTERN: types} if keys and types != usual(config.num_layers) else {})

    def read(keys: Keys) -> dict[str, Any]:
        layers, pattern = keys.integer("block_count"), keys.get(PATTERN)
        window = keys.integer(WINDOW, default.get("window", 0))
        if not window:
            return {"layer_types": ["full_attention"] * layers, "sliding_window": None}
        if isinstance(pattern, int) and not isinstance(pattern, bool):
            found = [i % max(pattern, 1) < pattern - 1 for i in range(layers)]
        else:
            found = pattern if isinstance(pattern, list) else usual(layers)
        types = ["sliding_attention" if windowed else "full_attention" for windowed in found]
        return {"layer_types": types[:layers], "sliding_window": window}

    return dict(write=write, read=read)


def _gemma(period: int, large: int, cap: float | None, final: float | None) -> dict[str, Any]:
    """Returns the functions of the rows of Gemma 2 and 3.

    Args:
      large: layers of the model whose heads are scaled by their number.
      cap, final: soft caps that a file without them has.
    """
    both = windows(period, **({"window": 4096} if cap else {}))

    def write(c: Any, config: ModelConfig) -> dict[str, Any]:
        keys = {"attn_logit_softcapping": c.attn_logit_softcapping}
        keys["final_logit_softcapping"] = c.final_logit_softcapping
        return both["write"](c, config) | keys

    def read(keys: Keys) -> dict[str, Any]:
        values = both["read"](keys)
        scale = keys.integer("attention.key_length", 256)
        if keys.integer("block_count") == large:
            heads = keys.integer("attention.head_count")
            scale = keys.integer("embedding_length") // max(heads, 1)
        caps = keys.get("attn_logit_softcapping"), keys.get("final_logit_softcapping")
        return values | dict(
            query_pre_attn_scalar=scale,
            attn_logit_softcapping=cap if caps[0] is None else caps[0],
            final_logit_softcapping=final if caps[1] is None else caps[1],
        )

    return dict(write=write, read=read)


def _write_linear(c: Any, config: ModelConfig) -> dict[str, Any]:
    """Returns the keys of linear attention."""
    heads, size = c.linear_num_value_heads, c.linear_value_head_dim
    linear = [kind == "linear_attention" for kind in c.layer_types]
    interval = next((i + 1 for i, own in enumerate(linear) if not own), len(linear))
    keys = {
        "ssm.conv_kernel": c.linear_conv_kernel_dim,
        "ssm.state_size": c.linear_key_head_dim,
        "ssm.group_count": c.linear_num_key_heads,
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * size,
        "full_attention_interval": interval,
    }
    if linear != [(i + 1) % interval != 0 for i in range(len(linear))]:
        keys["attention.recurrent_layers"] = linear
    return keys


def _read_linear(keys: Keys) -> dict[str, Any]:
    layers = keys.integer("block_count")
    interval = keys.integer("full_attention_interval", 4)
    linear = keys.get("attention.recurrent_layers")
    if not isinstance(linear, list):
        linear = [(i + 1) % max(interval, 1) != 0 for i in range(layers)]
    return dict(
        linear_conv_kernel_dim=keys.integer("ssm.conv_kernel"),
        linear_key_head_dim=keys.integer("ssm.state_size"),
        linear_num_key_heads=keys.integer("ssm.group_count"),
        linear_num_value_heads=keys.integer("ssm.time_step_rank"),
        # llama.cpp has value heads as wide as key heads.
        linear_value_head_dim=keys.integer("ssm.state_size"),
        layer_types=["linear_attention" if x else "full_attention" for x in linear[:layers]],
    )


SECTIONS = "rope.dimension_sections"


def _write_sections(c: Any, config: ModelConfig) -> dict[str, Any]:
    sections = list(c.rope_parameters.get("mrope_section") or (11, 11, 10))
    pairs = rotated_features(config.H, config.rope("full_attention")) // 2
    if any(i >= 3 * sections[i % 3] for i in range(pairs)):
        raise ValueError(
            f"mrope_section={sections}: must have at least every third of the {pairs} rotated "
            "pairs in each section, because llama.cpp does not rotate the others"
        )
    return _write_linear(c, config) | {SECTIONS: (sections + [0] * 4)[:4]}


def _rope_sections(keys: Keys) -> dict[str, Any]:
    sections = keys.get(SECTIONS)
    known = isinstance(sections, list) and len(sections) == 4
    return {"mrope_section": sections[:3], "mrope_interleaved": True} if known else {}


def _rules_qwen3_next(family: Family, c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules with queries, keys and values apart from the gate."""
    keys, values = c.linear_attention.heads
    for rule in family.tensor_rules(c):
        prefix, fused_here, _ = rule.hf.partition("in_proj_qkvz")
        if not fused_here:
            yield rule
            continue
        *names, gate = rule.ours
        ours = tuple(name.removesuffix(".kernel") for name in (*names, gate))
        D, outputs = c.hidden_size, (keys, keys, values)
        yield from fused(f"{prefix}in_proj_qkv", ours[:3], D, outputs, bias=False)
        yield from linear(f"{prefix}in_proj_z", ours[3], (D,), values, bias=False)


def _rules_ungrouped(family: Family, c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules with all queries, then all keys, then all values."""
    rules = list(family.tensor_rules(c))
    for rule in rules:
        name, joined, _ = rule.hf.partition("query_key_value")
        if not joined:
            yield rule
        elif rule.hf.endswith(".weight"):
            yield from qkv(c, name + joined)


def _rules_gpt_oss(family: Family, c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules with gate apart from up."""
    X, D, F = c.experts.count, c.hidden_size, c.expert_F
    for rule in family.tensor_rules(c):
        prefix, found, _ = rule.hf.partition("mlp.experts.")
        if not found:
            yield rule
        elif "gate_up_proj_bias" in rule.hf:
            for name, (I, O) in dict(gate=(D, F), up=(D, F), down=(F, D)).items():  # noqa: E741
                hf, ours = f"{prefix}{found}{name}_proj", f"layers.mlp.{name}"
                yield replace(
                    rule,
                    hf=f"{hf}.weight",
                    shape=(X, O, I),
                    ours=(f"{ours}.kernel",),
                    split=lambda w: (np.swapaxes(w, -1, -2),),
                    join=lambda x: np.swapaxes(x, -1, -2),
                )
                yield replace(
                    rule,
                    hf=f"{hf}.bias",
                    shape=(X, O),
                    ours=(f"{ours}.bias",),
                    split=lambda w: (w,),
                    join=lambda x: x,
                )


def _read_gpt_oss(keys: Keys) -> dict[str, Any]:
    return windows(2)["read"](keys) | dict(
        intermediate_size=keys.integer("expert_feed_forward_length"), swiglu_limit=7.0
    )


def _write_gpt_oss(c: Any, config: ModelConfig) -> dict[str, Any]:
    return windows(2)["write"](c, config) | {"expert_feed_forward_length": c.intermediate_size}


def _write_lfm2(c: Any, config: ModelConfig) -> dict[str, Any]:
    attends = [kind == "full_attention" for kind in c.layer_types]
    if all(attends):
        raise ValueError("layer_types: must have a conv layer, because llama.cpp aborts without")
    return {
        "attention.head_count_kv": [config.K * own for own in attends],
        "feed_forward_length": config.F,
    }


def _read_lfm2(keys: Keys) -> dict[str, Any]:
    heads = keys.per_layer("attention.head_count_kv")
    return dict(
        layer_types=["full_attention" if own else "conv" for own in heads],
        num_key_value_heads=max(heads),
        block_auto_adjust_ff_dim=False,
    )


def _write_glm4_moe(c: Any, config: ModelConfig) -> dict[str, Any]:
    return {"expert_gating_func": 2}


def _read_exaone4(keys: Keys) -> dict[str, Any]:
    # llama.cpp has windows only in the model of this size.
    if keys.integer("block_count") == 64:
        return windows(4, window=4096)["read"](keys)
    layers = ["full_attention"] * keys.integer("block_count")
    return dict(sliding_window=None, layer_types=layers)


def _read_smollm3(keys: Keys) -> dict[str, Any]:
    layers = range(1, keys.integer("block_count") + 1)
    return dict(no_rope_layers=[int(i % 4 != 0) for i in layers], use_sliding_window=False)


TEMPERATURE = "attention.temperature_scale"


def _write_mistral3(c: Any, config: ModelConfig) -> dict[str, Any]:
    return {TEMPERATURE: c.rope_parameters["llama_4_scaling_beta"]}


def _rope_mistral3(keys: Keys) -> dict[str, Any]:
    original = keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))
    beta = keys.number(TEMPERATURE, 0.0)
    return {"llama_4_scaling_beta": beta, "original_max_position_embeddings": original}


GEMMA: dict[str, Any] = dict(keys=RMS, transforms=NORMS)
GEMMA_FIXED = {"tie_word_embeddings": True, "attention_bias": False}
GLM_KEYS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
LINEAR_NAME = r".*linear_attn\."
LINEAR_NEXT = (
    (LINEAR_NAME + r"A_log", DECAY),
    (LINEAR_NAME + r"conv1d\.weight", CONVOLUTION),
    (LINEAR_NAME + r"norm\.weight", VALUE_LAST),
    *NORMS,
)
LINEAR_3_5 = (
    (LINEAR_NAME + r"A_log", VALUE_DECAY),
    (LINEAR_NAME + r"dt_bias", VALUE_HEADS),
    (LINEAR_NAME + r"conv1d\.weight", VALUE_CONVOLUTION),
    (LINEAR_NAME + r"in_proj_[ab]\.weight", VALUE_HEADS),
    (LINEAR_NAME + r"in_proj_(qkv|z)\.weight", VALUE_OUTPUTS),
    (LINEAR_NAME + r"out_proj\.weight", VALUE_INPUTS),
    *LINEAR_NEXT,
)
LINEAR: dict[str, Any] = dict(renamed=((r"\.dt_bias$", ".dt_proj.bias"),))
SHARED_EXPERT = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
NEXT_READ: dict[str, Any] = dict(decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True)
ROWS: dict[str, Row] = {
    "mixtral": Row(
        "llama",
        RMS | LOCAL_EXPERTS,
        fixed=NO_WINDOW,
        chosen=lambda keys: bool(keys.get("expert_count")),
        **LLAMA,
    ),
    "llama": Row("llama", RMS, **LLAMA),
    "mistral": Row("llama", RMS, fixed=NO_WINDOW, **LLAMA),
    "ministral3": Row(
        "mistral3",
        RMS,
        PAIRS,
        fixed=NO_WINDOW,
        write=_write_mistral3,
        rope=_rope_mistral3,
    ),
    "qwen2": Row("qwen2", RMS, fixed={"use_sliding_window": False}),
    "qwen3": Row("qwen3", RMS, fixed=NO_BIAS | {"use_sliding_window": False}),
    "qwen3_moe": Row(
        "qwen3moe", RMS | EXPERTS, fixed=NO_BIAS | NEXT_READ | {"use_sliding_window": False}
    ),
    "qwen3_next": Row(
        "qwen3next",
        RMS | EXPERTS | SHARED_EXPERT,
        LINEAR_NEXT,
        rules=_rules_qwen3_next,
        fixed=NO_BIAS | NEXT_READ,
        write=_write_linear,
        read=_read_linear,
        **LINEAR,
    ),
    "qwen3_5_text": Row(
        "qwen35",
        RMS,
        LINEAR_3_5,
        fixed=NO_BIAS,
        write=_write_sections,
        rope=_rope_sections,
        read=_read_linear,
        **LINEAR,
    ),
    "qwen3_5_moe_text": Row(
        "qwen35moe",
        RMS | EXPERTS | SHARED_EXPERT,
        LINEAR_3_5,
        fixed=NO_BIAS,
        write=_write_sections,
        rope=_rope_sections,
        read=_read_linear,
        **LINEAR,
    ),
    "gemma": Row("gemma", fixed=GEMMA_FIXED, **GEMMA),
    "gemma2": Row("gemma2", fixed=GEMMA_FIXED, **_gemma(2, 46, 50.0, 30.0), **GEMMA),
    "gemma3_text": Row("gemma3", fixed=GEMMA_FIXED, **_gemma(6, 62, None, None), **GEMMA),
    "phi3": Row(
        "phi3",
        RMS,
        ropes=("longrope",),
        fixed=NO_WINDOW,
        read=lambda keys: dict(
            original_max_position_embeddings=keys.integer(
                "rope.scaling.original_context_length", keys.integer("context_length")
            )
        ),
    ),
    "smollm3": Row("smollm3", RMS, PAIRS, fixed=NO_BIAS, read=_read_smollm3),
    "gpt_oss": Row(
        "gpt-oss",
        RMS | LOCAL_EXPERTS,
        rules=_rules_gpt_oss,
        renamed=((r"sinks$", "sinks.weight"),),
        fixed=UNTIED | {"attention_bias": True},
        # llama.cpp truncates all the same.
        rope=lambda keys: {"truncate": False} if keys.get("rope.scaling.type") == "yarn" else {},
        write=_write_gpt_oss,
        read=_read_gpt_oss,
    ),
    "granite": Row(
        "granite",
        RMS
        | {
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        fixed=NO_BIAS,
        **LLAMA,
    ),
    "olmo3": Row(
        "olmo2",
        RMS,
        fixed=NO_BIAS | UNTIED,
        chosen=lambda keys: bool(keys.get(WINDOW)),
        **windows(4),
    ),
    "olmo2": Row("olmo2", RMS, fixed=NO_BIAS | UNTIED),
    "olmoe": Row(
        "olmoe",
        RMS | {k: v for k, v in EXPERTS.items() if v != "moe_intermediate_size"},
        fixed=NO_BIAS | UNTIED | {"norm_topk_prob": False},
        read=lambda keys: dict(num_key_value_heads=keys.integer("attention.head_count")),
    ),
    "lfm2": Row(
        "lfm2",
        {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"},
        ((r".*conv\.conv\.weight", CONVOLUTION),),
        write=_write_lfm2,
        read=_read_lfm2,
    ),
    "seed_oss": Row("seed_oss", RMS, fixed={"attention_out_bias": False, "mlp_bias": False}),
    "glm4": Row("glm4", RMS),
    "glm4_moe": Row(
        "glm4moe",
        RMS | GLM_KEYS,
        renamed=((r"e_score_correction_bias$", "e_score_correction.bias"),),
        write=_write_glm4_moe,
        read=lambda keys: dict(use_qk_norm=keys.has("attn_q_norm.weight")),
    ),
    "exaone4": Row(
        "exaone4", RMS, ropes=("llama3",), read=_read_exaone4, write=windows(4)["write"]
    ),
    "ernie4_5": Row("ernie4_5", RMS, fixed={"use_bias": False}),
    "cohere2": Row(
        "cohere2",
        NORM | {"logit_scale": "logit_scale"},
        fixed=NO_BIAS | {"tie_word_embeddings": True},
        **windows(4),
    ),
    "stablelm": Row(
        "stablelm",
        NORM | {"use_parallel_residual": "use_parallel_residual"},
        fixed=UNTIED,
        read=lambda keys: dict(
            use_parallel_residual=not keys.has("ffn_norm.weight"),
            use_qkv_bias=keys.has("attn_q.bias"),
        ),
    ),
    "starcoder2": Row(
        "starcoder2",
        {"attention.layer_norm_epsilon": "norm_epsilon"},
        fixed=NO_WINDOW | {"use_bias": True},
    ),
    "phi": Row("phi2", NORM, fixed=UNTIED | {"qk_layernorm": False}),
    "gpt2": Row(
        "gpt2",
        {"attention.layer_norm_epsilon": "layer_norm_epsilon", "feed_forward_length": "n_inner"},
        ((r".*\.(c_attn|c_proj|c_fc)\.weight", TRANSPOSED),),
        write=lambda c, config: {"feed_forward_length": config.F},
    ),
    "gpt_neox": Row(
        "gptneox",
        NORM | {"use_parallel_residual": "use_parallel_residual"},
        rules=_rules_ungrouped,
        fixed=UNTIED | {"attention_bias": True},
    ),
    "bloom": Row(
        "bloom",
        {"attention.layer_norm_epsilon": "layer_norm_epsilon"},
        rules=_rules_ungrouped,
        renamed=((r"^transformer\.", ""),),
        write=lambda c, config: {
            "feed_forward_length": config.F,
            # llama.cpp needs a length; ALiBi has none.
            "context_length": getattr(c, "seq_length", 2048),
        },
    ),
}
# Text models of multimodal models, by the model_type whose row is theirs.
TEXT_MODELS = {"qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}


def row_name(kind: str) -> str:
    """Returns the key in ROWS of a text model of this model_type."""
    return TEXT_MODELS.get(kind, kind)
