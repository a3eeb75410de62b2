"""The model families: a reader of each family's config, and rules for its tensors.

A family is named by the `model_type` of its config.json. Its `read` may read any key of the config.
Every other key must be neutral or have its default value; otherwise an error names the key and
refuses the checkpoint. So no key that changes the result is ignored.
"""

from dataclasses import replace
from typing import Any

from bptjax.weights.hf.families.classic import (
    read_bloom,
    read_falcon,
    read_gpt2,
    read_gpt_neox,
    read_mpt,
    read_opt,
    read_phi,
    read_starcoder2,
    rules_bloom,
    rules_falcon,
    rules_gpt2,
    rules_gpt_neox,
    rules_mpt,
    rules_opt,
    rules_phi,
    rules_starcoder2,
)
from bptjax.weights.hf.families.convolution import read_lfm2, rules_lfm2
from bptjax.weights.hf.families.encoders import (
    read_bert,
    read_modernbert,
    read_roberta,
    read_vit,
    rules_bert,
    rules_modernbert,
    rules_roberta,
    rules_vit,
)
from bptjax.weights.hf.families.experts import (
    read_glm4_moe,
    read_gpt_oss,
    read_mixtral,
    read_olmoe,
    read_qwen3_moe,
    rules_glm4_moe,
    rules_gpt_oss,
    rules_mixtral,
    rules_qwen3_moe,
)
from bptjax.weights.hf.families.family import Family
from bptjax.weights.hf.families.gated import (
    read_exaone4,
    read_gemma,
    read_gemma2,
    read_gemma3,
    read_granite,
    read_llama,
    read_mistral,
    read_olmo2,
    read_olmo3,
    read_phi3,
    read_qwen2,
    read_qwen3,
    read_seed_oss,
    read_smollm3,
    read_stablelm,
    rules_phi3,
    rules_rmsnorm_glu,
)
from bptjax.weights.hf.families.gemma4 import read_gemma4, rules_gemma4, unused_gemma4
from bptjax.weights.hf.families.interleaved import (
    read_cohere2,
    read_ernie4_5,
    read_glm4,
    rules_glm4,
    rules_interleaved_glu,
)
from bptjax.weights.hf.families.linear import (
    read_qwen3_5,
    read_qwen3_5_moe,
    read_qwen3_next,
    rules_qwen3_5,
    rules_qwen3_5_moe,
    rules_qwen3_next,
)
from bptjax.weights.hf.families.multimodal import GROWTH, MROPE, read_ministral3, text_model

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
    read_gemma4,
    rules_gemma4,
    neutral=(
        # Read through per_layer_config.
        *("head_dim", "num_key_value_heads"),
        # Read if they have an effect; text is causal unless is_causal says otherwise.
        *("num_experts", "top_k_experts", "moe_intermediate_size", "vocab_size_per_layer_input"),
        "use_bidirectional_attention",
    ),
    rope_names=(),
    unused=unused_gemma4,
    experts_module="experts",
    experts="concatenated",
    peft_keeps_mlps=True,
)
FAMILIES: dict[str, Family] = {
    "llama": Family(read_llama, rules_rmsnorm_glu, neutral=("pretraining_tp",)),
    "mistral": Family(read_mistral, rules_rmsnorm_glu),
    "qwen2": Family(read_qwen2, rules_rmsnorm_glu, neutral=WINDOWS),
    "qwen3": Family(read_qwen3, rules_rmsnorm_glu, neutral=WINDOWS),
    "gemma": Family(read_gemma, rules_rmsnorm_glu),
    "gemma2": Family(read_gemma2, rules_rmsnorm_glu),
    "gemma3_text": Family(read_gemma3, rules_rmsnorm_glu),
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "ministral3": Family(read_ministral3, rules_rmsnorm_glu, rope_kept=GROWTH),
    "smollm3": Family(
        read_smollm3, rules_rmsnorm_glu, neutral=(*WINDOWS, "no_rope_layer_interval")
    ),
    "seed_oss": Family(read_seed_oss, rules_rmsnorm_glu, neutral=("pretraining_tp",)),
    "stablelm": Family(read_stablelm, rules_rmsnorm_glu),
    "starcoder2": Family(read_starcoder2, rules_starcoder2),
    "phi": Family(read_phi, rules_phi),
    "ernie4_5": Family(read_ernie4_5, rules_interleaved_glu),
    "cohere2": Family(read_cohere2, rules_interleaved_glu),
    "granite": Family(read_granite, rules_rmsnorm_glu),
    "olmo2": Family(read_olmo2, rules_rmsnorm_glu),
    "olmo3": Family(read_olmo3, rules_rmsnorm_glu),
    "exaone4": Family(read_exaone4, rules_rmsnorm_glu, neutral=("sliding_window_pattern",)),
    "glm4": Family(read_glm4, rules_glm4),
    "mixtral": Family(read_mixtral, rules_mixtral, experts="concatenated"),
    "qwen3_moe": Family(
        read_qwen3_moe,
        rules_qwen3_moe,
        neutral=WINDOWS,
        experts="concatenated",
    ),
    "qwen3_5_text": Family(read_qwen3_5, rules_qwen3_5, rope_kept=MROPE, kept=(MTP,)),
    "qwen3_5_moe_text": Family(
        read_qwen3_5_moe,
        rules_qwen3_5_moe,
        rope_kept=MROPE,
        kept=(MTP,),
        experts="concatenated",
        peft_keeps_mlps=True,
    ),
    "qwen3_next": Family(read_qwen3_next, rules_qwen3_next, kept=(MTP,), experts="concatenated"),
    "lfm2": Family(read_lfm2, rules_lfm2, neutral=("full_attn_idxs",)),
    "glm4_moe": Family(
        read_glm4_moe,
        rules_glm4_moe,
        # Layer for multi-token prediction; transformers skips the same layer indices.
        kept=(r"(model\.)?layers\.(46|92)\..*",),
        neutral=("output_router_logits", "num_mtp_layers", "num_nextn_predict_layers"),
        experts="concatenated",
    ),
    "olmoe": Family(read_olmoe, rules_qwen3_moe, experts="concatenated"),
    "gpt_oss": Family(
        read_gpt_oss,
        rules_gpt_oss,
        experts="interleaved",
        neutral=("hidden_act", "quantization_config"),
    ),
    "phi3": Family(read_phi3, rules_phi3, neutral=("original_max_position_embeddings",)),
    "gpt2": Family(
        read_gpt2,
        rules_gpt2,
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
    ),
    "gpt_neox": Family(
        read_gpt_neox,
        rules_gpt_neox,
        prefix="gpt_neox.",
        ignored=(CAUSAL_MASKS.format("attention"),),
        neutral=("is_decoder",),
        rope_names=("rotary_emb_base", "rotary_pct"),
    ),
    "bloom": Family(
        read_bloom,
        rules_bloom,
        prefix="transformer.",
        ignored=(MEGATRON_MASK,),
        neutral=("pretraining_tp", "slow_but_exact"),
    ),
    "opt": Family(read_opt, rules_opt, ignored=(r"(model\.)?decoder\.version",)),
    "mpt": Family(
        read_mpt,
        rules_mpt,
        prefix="transformer.",
        neutral=("init_device", "norm_type", "learned_pos_emb"),
        positions="max_seq_len",
    ),
    "falcon": Family(read_falcon, rules_falcon, prefix="transformer.", ignored=(MEGATRON_MASK,)),
    "bert": Family(
        read_bert,
        rules_bert,
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
        read_roberta,
        rules_roberta,
        prefix="roberta.",
        ignored=(
            r"(roberta\.)?embeddings\.(position|token_type)_ids",
            # Pooler that the class named by config.json does not have.
            r"(roberta\.)?pooler\.dense\..*",
        ),
    ),
    "modernbert": Family(
        read_modernbert,
        rules_modernbert,
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
        read_vit,
        rules_vit,
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
    "qwen3_5_moe": {"qwen3_5_moe_text": text_model(FAMILIES["qwen3_5_moe_text"])},
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
