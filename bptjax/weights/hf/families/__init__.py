"""The model families: a reader of each family's config, and rules for its tensors.

A family is named by the `model_type` of its config.json. Its `read` may read any key of the config.
Every other key must be neutral or have its default value; otherwise an error names the key and
refuses the checkpoint. So no key that changes the result is ignored.
"""

from dataclasses import replace
from typing import Any

from bptjax.weights.hf.families import (
    classic,
    convolution,
    encoders,
    experts,
    gated,
    gemma4,
    interleaved,
    linear,
    multimodal,
)
from bptjax.weights.hf.families.family import Family
from bptjax.weights.hf.families.multimodal import GROWTH, MROPE, text_model

WINDOWS = ("use_sliding_window", "max_window_layers")
# Buffers that old versions of transformers saved: rotary frequencies and tables, causal masks.
IGNORED = r"(.*\.)?rotary_emb(_local)?\.(\w*inv_freq|cos_cached|sin_cached)"
CAUSAL_MASKS = r".*\.{}\.(bias|masked_bias)"
MEGATRON_MASK = r".*\.self_attention\.scale_mask_softmax\.causal_mask"
# Layers for multi-token prediction.
MTP = r"mtp\..*"
# Names of second copies of tied parameters in some files, with the parameter's path.
COPIES = {
    "lm_head.weight": "embedding",
    "embed_out.weight": "embedding",
    "cls.predictions.decoder.weight": "embedding",
    "cls.predictions.decoder.bias": "head_bias",
    "lm_head.decoder.weight": "embedding",
    "lm_head.decoder.bias": "head_bias",
    "decoder.weight": "embedding",
}
GEMMA4 = Family(
    gemma4.read_gemma4,
    gemma4.rules_gemma4,
    neutral=(
        # Read through per_layer_config.
        *("head_dim", "num_key_value_heads"),
        # Read if they have an effect; text is causal unless is_causal says otherwise.
        *("num_experts", "top_k_experts", "moe_intermediate_size", "vocab_size_per_layer_input"),
        "use_bidirectional_attention",
    ),
    rope_names=(),
    unused=gemma4.unused_gemma4,
    experts_module="experts",
    experts="concatenated",
    peft_keeps_mlps=True,
)
FAMILIES: dict[str, Family] = {
    "llama": Family(gated.read_llama, gated.rules_rmsnorm_glu, neutral=("pretraining_tp",)),
    "mistral": Family(gated.read_mistral, gated.rules_rmsnorm_glu),
    "qwen2": Family(gated.read_qwen2, gated.rules_rmsnorm_glu, neutral=WINDOWS),
    "qwen3": Family(gated.read_qwen3, gated.rules_rmsnorm_glu, neutral=WINDOWS),
    "gemma": Family(gated.read_gemma, gated.rules_rmsnorm_glu),
    "gemma2": Family(gated.read_gemma2, gated.rules_rmsnorm_glu),
    "gemma3_text": Family(gated.read_gemma3, gated.rules_rmsnorm_glu),
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "ministral3": Family(multimodal.read_ministral3, gated.rules_rmsnorm_glu, rope_kept=GROWTH),
    "smollm3": Family(
        gated.read_smollm3, gated.rules_rmsnorm_glu, neutral=(*WINDOWS, "no_rope_layer_interval")
    ),
    "seed_oss": Family(gated.read_seed_oss, gated.rules_rmsnorm_glu, neutral=("pretraining_tp",)),
    "stablelm": Family(gated.read_stablelm, gated.rules_rmsnorm_glu, vllm_lora=False),
    "starcoder2": Family(classic.read_starcoder2, classic.rules_starcoder2),
    "phi": Family(classic.read_phi, classic.rules_phi),
    "ernie4_5": Family(interleaved.read_ernie4_5, interleaved.rules_interleaved_glu),
    "cohere2": Family(interleaved.read_cohere2, interleaved.rules_interleaved_glu),
    "granite": Family(gated.read_granite, gated.rules_rmsnorm_glu),
    "olmo2": Family(gated.read_olmo2, gated.rules_rmsnorm_glu),
    "olmo3": Family(gated.read_olmo3, gated.rules_rmsnorm_glu),
    "exaone4": Family(
        gated.read_exaone4, gated.rules_rmsnorm_glu, neutral=("sliding_window_pattern",)
    ),
    "glm4": Family(interleaved.read_glm4, interleaved.rules_glm4),
    "mixtral": Family(experts.read_mixtral, experts.rules_mixtral, experts="concatenated"),
    "qwen3_moe": Family(
        experts.read_qwen3_moe,
        experts.rules_qwen3_moe,
        neutral=WINDOWS,
        experts="concatenated",
    ),
    "qwen3_5_text": Family(linear.read_qwen3_5, linear.rules_qwen3_5, rope_kept=MROPE, kept=(MTP,)),
    "qwen3_5_moe_text": Family(
        linear.read_qwen3_5_moe,
        linear.rules_qwen3_5_moe,
        rope_kept=MROPE,
        kept=(MTP,),
        experts="concatenated",
        peft_keeps_mlps=True,
    ),
    "qwen3_next": Family(
        linear.read_qwen3_next, linear.rules_qwen3_next, kept=(MTP,), experts="concatenated"
    ),
    "lfm2": Family(convolution.read_lfm2, convolution.rules_lfm2, neutral=("full_attn_idxs",)),
    "glm4_moe": Family(
        experts.read_glm4_moe,
        experts.rules_glm4_moe,
        # Layer for multi-token prediction; transformers skips the same layer indices.
        kept=(r"(model\.)?layers\.(46|92)\..*",),
        neutral=("output_router_logits", "num_mtp_layers", "num_nextn_predict_layers"),
        experts="concatenated",
    ),
    "olmoe": Family(experts.read_olmoe, experts.rules_qwen3_moe, experts="concatenated"),
    "gpt_oss": Family(
        experts.read_gpt_oss,
        experts.rules_gpt_oss,
        experts="interleaved",
        neutral=("hidden_act", "quantization_config"),
        mxfp4=True,
        vllm_stacked=True,
    ),
    "phi3": Family(
        gated.read_phi3, gated.rules_phi3, neutral=("original_max_position_embeddings",)
    ),
    "gpt2": Family(
        classic.read_gpt2,
        classic.rules_gpt2,
        prefix="transformer.",
        ignored=(CAUSAL_MASKS.format("attn"),),
        neutral=(
            "reorder_and_upcast_attn",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        ),
        positions="n_positions",
        vllm_lora=False,
    ),
    "gpt_neox": Family(
        classic.read_gpt_neox,
        classic.rules_gpt_neox,
        prefix="gpt_neox.",
        ignored=(CAUSAL_MASKS.format("attention"),),
        neutral=("is_decoder",),
        rope_names=("rotary_emb_base", "rotary_pct"),
    ),
    "bloom": Family(
        classic.read_bloom,
        classic.rules_bloom,
        prefix="transformer.",
        ignored=(MEGATRON_MASK,),
        neutral=("pretraining_tp", "slow_but_exact"),
        vllm_lora=False,
    ),
    "opt": Family(classic.read_opt, classic.rules_opt, ignored=(r"(model\.)?decoder\.version",)),
    "mpt": Family(
        classic.read_mpt,
        classic.rules_mpt,
        prefix="transformer.",
        neutral=("init_device", "norm_type", "learned_pos_emb"),
        positions="max_seq_len",
        vllm_lora=False,
    ),
    "falcon": Family(
        classic.read_falcon,
        classic.rules_falcon,
        prefix="transformer.",
        ignored=(MEGATRON_MASK,),
        vllm_lora=False,
    ),
    "bert": Family(
        encoders.read_bert,
        encoders.rules_bert,
        prefix="bert.",
        ignored=(
            r"(bert\.)?embeddings\.(position|token_type)_ids",
            # Heads that the class named by config.json does not have.
            r"cls\.seq_relationship\..*",
            r"(bert\.)?pooler\.dense\..*",
        ),
        renamed=((".gamma", ".weight"), (".beta", ".bias")),
    ),
    "roberta": Family(
        encoders.read_roberta,
        encoders.rules_roberta,
        prefix="roberta.",
        ignored=(
            r"(roberta\.)?embeddings\.(position|token_type)_ids",
            # Pooler that the class named by config.json does not have.
            r"(roberta\.)?pooler\.dense\..*",
        ),
    ),
    "modernbert": Family(
        encoders.read_modernbert,
        encoders.rules_modernbert,
        neutral=(
            "classifier_pooling",
            "classifier_dropout",
            "cls_token_id",
            "sep_token_id",
            "deterministic_flash_attn",
            "initializer_cutoff_factor",
            "sparse_prediction",
            "sparse_pred_ignore_index",
        ),
        rope_names=("global_rope_theta", "partial_rotary_factor"),
        local_theta="local_rope_theta",
        scaled=False,
    ),
    "vit": Family(
        encoders.read_vit,
        encoders.rules_vit,
        prefix="vit.",
        # Pooler that the class named by config.json does not have.
        ignored=(r"(vit\.)?pooler\.dense\..*",),
        neutral=("encoder_stride",),
    ),
}
# Text models that each multimodal model may have, the default first.
MULTIMODAL: dict[str, dict[str, Family]] = {
    "qwen2_5_vl": {
        "qwen2_5_vl_text": text_model(replace(FAMILIES["qwen2"], rope_kept=MROPE)),
    },
    "qwen3_vl": {"qwen3_vl_text": text_model(replace(FAMILIES["qwen3"], rope_kept=MROPE))},
    "qwen3_5": {"qwen3_5_text": text_model(FAMILIES["qwen3_5_text"])},
    "qwen3_5_moe": {
        "qwen3_5_moe_text": text_model(replace(FAMILIES["qwen3_5_moe_text"], vllm_stacked=True))
    },
    "gemma3": {"gemma3_text": text_model(FAMILIES["gemma3_text"])},
    "gemma4": {"gemma4_text": text_model(GEMMA4)},
    "gemma4_unified": {"gemma4_unified_text": text_model(GEMMA4)},
    "mistral3": {kind: text_model(FAMILIES[kind]) for kind in ("mistral", "ministral3")},
}


def find_family(raw: dict[str, Any]) -> Family:
    """Returns the family of a config.json; for a multimodal model, its text model's family.

    Raises:
      ValueError: the family is not supported.
    """
    kind, text = raw.get("model_type"), raw.get("text_config") or {}
    if not isinstance(text, dict):
        raise ValueError(f"text_config={text!r}: must be a JSON object")
    # Not `in FAMILIES`: a damaged file may hold an unhashable value.
    if kind in tuple(FAMILIES):
        return FAMILIES[kind]
    if kind not in tuple(MULTIMODAL):
        known = ", ".join((*FAMILIES, *MULTIMODAL))
        inner = f" (with the text model {text.get('model_type')!r})" if text else ""
        raise ValueError(f"model_type={kind!r}{inner}: must be one of {known}")
    models = MULTIMODAL[kind]
    own = text.get("model_type", next(iter(models)))
    if own not in tuple(models):
        known = ", ".join(models)
        raise ValueError(f"text_config.model_type={own!r}: must be one of {known} in a {kind}")
    return models[own]
