"""The model families: the reader of each family's config, and the rules of its tensors.

A family is named by the `model_type` of its config.json. Its `read` may look at any key of the
config. Every other key must be neutral or have its default value; otherwise an error names the key
and refuses the checkpoint. So no key that changes the result is ignored.
"""

from bptjax.hf.families.classic import (
    read_bloom,
    read_falcon,
    read_gpt2,
    read_gpt_neox,
    read_mpt,
    read_opt,
    rules_bloom,
    rules_falcon,
    rules_gpt2,
    rules_gpt_neox,
    rules_mpt,
    rules_opt,
)
from bptjax.hf.families.encoders import read_bert, read_vit, rules_bert, rules_vit
from bptjax.hf.families.family import Family
from bptjax.hf.families.gated import (
    read_gemma,
    read_gemma2,
    read_gemma3,
    read_llama,
    read_mistral,
    read_phi3,
    read_qwen2,
    read_qwen3,
    rules_phi3,
    rules_rmsnorm_glu,
)
from bptjax.models.config import EncoderConfig

WINDOWS = ("use_sliding_window", "max_window_layers")
# Buffers that old versions of transformers saved: rotary frequencies and tables, causal masks.
IGNORED = r"(.*\.)?rotary_emb(_local)?\.(\w*inv_freq|cos_cached|sin_cached)"
CAUSAL_MASKS = r".*\.{}\.(bias|masked_bias)"
MEGATRON_MASK = r".*\.self_attention\.scale_mask_softmax\.causal_mask"
# Names of second copies of tied parameters in some files, with the path of the parameter.
COPIES = {
    "lm_head.weight": "embedding",
    "embed_out.weight": "embedding",
    "cls.predictions.decoder.weight": "embedding",
    "cls.predictions.decoder.bias": "masked.bias",
}
FAMILIES: dict[str, Family] = {
    "llama": Family(read_llama, rules_rmsnorm_glu, neutral=("pretraining_tp",)),
    "mistral": Family(read_mistral, rules_rmsnorm_glu),
    "qwen2": Family(read_qwen2, rules_rmsnorm_glu, neutral=WINDOWS),
    "qwen3": Family(read_qwen3, rules_rmsnorm_glu, neutral=WINDOWS),
    "gemma": Family(read_gemma, rules_rmsnorm_glu),
    "gemma2": Family(read_gemma2, rules_rmsnorm_glu),
    "gemma3_text": Family(read_gemma3, rules_rmsnorm_glu),
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
        config=EncoderConfig,
        ignored=(
            r"(bert\.)?embeddings\.(position|token_type)_ids",
            # Heads that the class named by config.json does not have.
            r"cls\.seq_relationship\..*",
            r"(bert\.)?pooler\.dense\..*",
        ),
        renamed=((".gamma", ".weight"), (".beta", ".bias")),
    ),
    "vit": Family(
        read_vit, rules_vit, prefix="vit.", config=EncoderConfig, neutral=("encoder_stride",)
    ),
}
