"""The model families: for each, what its config says in our words, and where its tensors go.

A family is named by the `model_type` of its config.json. Its `read` may look at any key of the
config; every other key must be neutral or stand at its default, or the checkpoint is refused by
name: nothing that changes the arithmetic is passed over.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bptjax.hf.rows import Row, attention, conv, ends, fused, linear, mlp, norm, qkv, same
from bptjax.models.config import EncoderConfig, ModelConfig

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu_squared",
}


@dataclass(frozen=True)
class Family:
    """
    Attributes:
      read: the HF config to keywords of ModelConfig. It raises ValueError for what is not
        supported.
      rows: the table of tensors.
      prefix: of the names that a file of the bare model, without its head, leaves out.
      neutral: config keys that change no result.
      ignored: patterns of names of tensors that are left out, beside `IGNORED`.
      renamed: endings of names in old files, and what they are now.
      positions: the config key that holds their number.
      rope_names: config keys of rope_theta and partial_rotary_factor in transformers 4.
      config: the class that `read` makes keywords for.
    """

    read: Callable[[Any], dict[str, Any]]
    rows: Callable[[Any], Iterator[Row]]
    prefix: str = "model."
    neutral: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    positions: str = "max_position_embeddings"
    rope_names: tuple[str, str] = ("rope_theta", "partial_rotary_factor")
    config: type[ModelConfig] = ModelConfig


def must(c: Any, **wanted: Any) -> None:
    """Refuses keys with another value than these."""
    for key, value in wanted.items():
        if getattr(c, key) != value:
            raise ValueError(f"{key}={getattr(c, key)!r} is not supported, only {value!r}")


def activation(name: str) -> str:
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"activation {name!r} is not supported; there are {known}")
    return ACTIVATIONS[name]


def rotary(c: Any, *, partial: bool = False) -> dict[str, Any]:
    """Without `partial`, transformers passes partial_rotary_factor over, but for some scalings."""
    each = [p for p in c.rope_parameters.values() if isinstance(p, dict)] or [c.rope_parameters]
    if not partial and any(p.get("partial_rotary_factor", 1.0) != 1.0 for p in each):
        raise ValueError("partial_rotary_factor is not supported in this family")
    return dict(
        position_embedding="rope",
        rope_parameters=dict(c.rope_parameters),
        max_position_embeddings=c.max_position_embeddings,
    )


def sliding(c: Any) -> dict[str, Any]:
    """Windows by layer; where no layer has one, nothing."""
    window, types = c.sliding_window, list(c.layer_types)
    return dict(sliding_window=window, layer_types=types) if "sliding_attention" in types else {}


def modern(c: Any, *, partial: bool = False, **more: Any) -> dict[str, Any]:
    """What RMS-norm, rotary, gated decoders have in common."""
    return (
        dict(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_layers=c.num_hidden_layers,
            num_heads=c.num_attention_heads,
            num_kv_heads=c.num_key_value_heads,
            head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
            norm="rms",
            norm_eps=c.rms_norm_eps,
            gated=True,
            tied_head=c.tie_word_embeddings,
            attention_dropout=c.attention_dropout or 0.0,
        )
        | rotary(c, partial=partial)
        | more
    )


def read_llama(c: Any) -> dict[str, Any]:
    bias = c.attention_bias
    return modern(
        c,
        activation=activation(c.hidden_act),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=c.mlp_bias,
    )


def read_mistral(c: Any) -> dict[str, Any]:
    return modern(c, activation=activation(c.hidden_act), sliding_window=c.sliding_window)


def read_qwen2(c: Any) -> dict[str, Any]:
    return modern(c, activation=activation(c.hidden_act), qkv_bias=True, **sliding(c))


def read_qwen3(c: Any) -> dict[str, Any]:
    bias = c.attention_bias
    return modern(
        c,
        activation=activation(c.hidden_act),
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
        **sliding(c),
    )


def gemma(c: Any, act: str, **more: Any) -> dict[str, Any]:
    return modern(
        c,
        activation=activation(act),
        norm_unit_offset=True,
        qkv_bias=c.attention_bias,
        out_bias=c.attention_bias,
        embedding_scale=c.hidden_size**0.5,
        **more,
    )


def read_gemma(c: Any) -> dict[str, Any]:
    return gemma(c, c.hidden_act)


def read_gemma2(c: Any) -> dict[str, Any]:
    return gemma(
        c,
        c.hidden_activation,
        norm_position="sandwich",
        attention_scale=c.query_pre_attn_scalar**-0.5,
        attention_softcap=c.attn_logit_softcapping,
        logits_softcap=c.final_logit_softcapping,
        **sliding(c),
    )


def read_gemma3(c: Any) -> dict[str, Any]:
    # transformers reads attn_logit_softcapping and does not apply it.
    must(c, attn_logit_softcapping=None)
    return gemma(
        c,
        c.hidden_activation,
        norm_position="sandwich",
        qk_norm=True,
        attention_scale=c.query_pre_attn_scalar**-0.5,
        logits_softcap=c.final_logit_softcapping,
        sliding_window=c.sliding_window,
        layer_types=list(c.layer_types),
    )


def rows_modern(c: ModelConfig) -> Iterator[Row]:
    at = "model.layers.{}."
    yield from ends(c, "model.embed_tokens", "model.norm")
    names = (f"{at}self_attn.{n}_proj" for n in "qkvo")
    yield from attention(c, *names)
    if c.qk_norm:
        yield from norm(f"{at}self_attn.q_norm", "layers.query_norm", c, c.H)
        yield from norm(f"{at}self_attn.k_norm", "layers.key_norm", c, c.H)
    yield from mlp(c, f"{at}mlp.up_proj", f"{at}mlp.down_proj", f"{at}mlp.gate_proj")
    yield from norm(f"{at}input_layernorm", "layers.attention_norm", c)
    after = f"{at}post_attention_layernorm"
    if c.norm_position == "sandwich":
        yield from norm(after, "layers.attention_post_norm", c)
        yield from norm(f"{at}pre_feedforward_layernorm", "layers.mlp_norm", c)
        yield from norm(f"{at}post_feedforward_layernorm", "layers.mlp_post_norm", c)
    else:
        yield from norm(after, "layers.mlp_norm", c)


def read_phi3(c: Any) -> dict[str, Any]:
    return modern(
        c,
        partial=True,
        activation=activation(c.hidden_act),
        sliding_window=c.sliding_window,
        embedding_dropout=c.embd_pdrop,
        residual_dropout=c.resid_pdrop,
    )


def rows_phi3(c: ModelConfig) -> Iterator[Row]:
    at, F = "model.layers.{}.", (c.F,)
    yield from ends(c, "model.embed_tokens", "model.norm")
    yield from qkv(c, f"{at}self_attn.qkv_proj")
    yield from attention(c, "", "", "", f"{at}self_attn.o_proj")
    gate_up = "layers.mlp.gate", "layers.mlp.up"
    yield from fused(f"{at}mlp.gate_up_proj", gate_up, c.hidden_size, (F, F), bias=False)
    yield from mlp(c, "", f"{at}mlp.down_proj")
    yield from norm(f"{at}input_layernorm", "layers.attention_norm", c)
    yield from norm(f"{at}post_attention_layernorm", "layers.mlp_norm", c)


def classic(c: Any, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    """What layer-norm decoders with a plain feed-forward have in common."""
    return (
        dict(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            num_layers=layers,
            num_heads=heads,
            norm="layer",
            norm_bias=True,
            gated=False,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            tied_head=c.tie_word_embeddings,
        )
        | more
    )


def read_gpt2(c: Any) -> dict[str, Any]:
    return classic(
        c,
        c.num_hidden_layers,
        c.num_attention_heads,
        intermediate_size=c.n_inner,
        norm_eps=c.layer_norm_epsilon,
        position_embedding="learned",
        max_position_embeddings=c.max_position_embeddings,
        attention_scale=None if c.scale_attn_weights else 1.0,
        activation=activation(c.activation_function),
        embedding_dropout=c.embd_pdrop,
        attention_dropout=c.attn_pdrop,
        residual_dropout=c.resid_pdrop,
    )


def rows_gpt2(c: ModelConfig) -> Iterator[Row]:
    at = "transformer.h.{}."
    yield from ends(c, "transformer.wte", "transformer.ln_f")
    yield same(
        "transformer.wpe.weight", "positions", (c.max_position_embeddings or 0, c.hidden_size)
    )
    yield from qkv(c, f"{at}attn.c_attn", transposed=True)
    yield from attention(c, "", "", "", f"{at}attn.c_proj", transposed=True)
    yield from mlp(c, f"{at}mlp.c_fc", f"{at}mlp.c_proj", transposed=True)
    yield from norm(f"{at}ln_1", "layers.attention_norm", c)
    yield from norm(f"{at}ln_2", "layers.mlp_norm", c)


def read_gpt_neox(c: Any) -> dict[str, Any]:
    return classic(
        c,
        c.num_hidden_layers,
        c.num_attention_heads,
        intermediate_size=c.intermediate_size,
        norm_eps=c.layer_norm_eps,
        residual="parallel" if c.use_parallel_residual else "sequential",
        activation=activation(c.hidden_act),
        qkv_bias=c.attention_bias,
        out_bias=c.attention_bias,
        embedding_dropout=c.hidden_dropout,
        attention_dropout=c.attention_dropout,
        residual_dropout=c.hidden_dropout,
        **rotary(c, partial=True),
    )


def rows_gpt_neox(c: ModelConfig) -> Iterator[Row]:
    at = "gpt_neox.layers.{}."
    yield from ends(c, "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out")
    yield from qkv(c, f"{at}attention.query_key_value", order="grouped")
    yield from attention(c, "", "", "", f"{at}attention.dense")
    yield from mlp(c, f"{at}mlp.dense_h_to_4h", f"{at}mlp.dense_4h_to_h")
    yield from norm(f"{at}input_layernorm", "layers.attention_norm", c)
    yield from norm(f"{at}post_attention_layernorm", "layers.mlp_norm", c)


def read_bloom(c: Any) -> dict[str, Any]:
    return classic(
        c,
        c.num_hidden_layers,
        c.num_attention_heads,
        norm_eps=c.layer_norm_epsilon,
        residual_normed=c.apply_residual_connection_post_layernorm,
        position_embedding="alibi",
        activation="gelu_tanh",
        embedding_norm=True,
        attention_dropout=c.attention_dropout,
        residual_dropout=c.hidden_dropout,
    )


def rows_bloom(c: ModelConfig) -> Iterator[Row]:
    at = "transformer.h.{}."
    yield from ends(c, "transformer.word_embeddings", "transformer.ln_f")
    yield from norm("transformer.word_embeddings_layernorm", "embedding_norm", c)
    yield from qkv(c, f"{at}self_attention.query_key_value", order="grouped")
    yield from attention(c, "", "", "", f"{at}self_attention.dense")
    yield from mlp(c, f"{at}mlp.dense_h_to_4h", f"{at}mlp.dense_4h_to_h")
    yield from norm(f"{at}input_layernorm", "layers.attention_norm", c)
    yield from norm(f"{at}post_attention_layernorm", "layers.mlp_norm", c)


def read_opt(c: Any) -> dict[str, Any]:
    bias = c.enable_bias
    affine = c.layer_norm_elementwise_affine
    narrow = c.word_embed_proj_dim != c.hidden_size
    return classic(
        c,
        c.num_hidden_layers,
        c.num_attention_heads,
        intermediate_size=c.ffn_dim,
        norm_position="pre" if c.do_layer_norm_before else "post",
        norm_scale=affine,
        norm_bias=affine,
        position_embedding="learned",
        max_position_embeddings=c.max_position_embeddings,
        position_offset=2,
        activation=activation(c.activation_function),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        embedding_size=c.word_embed_proj_dim if narrow else None,
        final_norm=c.do_layer_norm_before and not c._remove_final_layer_norm,
        attention_dropout=c.attention_dropout,
        residual_dropout=c.dropout,
    )


def rows_opt(c: ModelConfig) -> Iterator[Row]:
    root, at, D = "model.decoder.", "model.decoder.layers.{}.", c.hidden_size
    yield from ends(c, f"{root}embed_tokens", f"{root}final_layer_norm")
    rows = (c.max_position_embeddings or 0) + c.position_offset
    yield same(f"{root}embed_positions.weight", "positions", (rows, D))
    if c.E != D:
        yield from linear(f"{root}project_in", "project_in", (c.E,), (D,), bias=False)
        yield from linear(f"{root}project_out", "project_out", (D,), (c.E,), bias=False)
    names = (f"{at}self_attn.{n}_proj" for n in ("q", "k", "v", "out"))
    yield from attention(c, *names)
    yield from mlp(c, f"{at}fc1", f"{at}fc2")
    yield from norm(f"{at}self_attn_layer_norm", "layers.attention_norm", c)
    yield from norm(f"{at}final_layer_norm", "layers.mlp_norm", c)


def read_mpt(c: Any) -> dict[str, Any]:
    # transformers reads these and does not apply them.
    must(c, expansion_ratio=4, no_bias=True, logit_scale=None, embedding_fraction=1.0)
    must(c, resid_pdrop=0.0, emb_pdrop=0.0)
    a = c.attn_config
    must(a, alibi=True, attn_type="multihead_attention", prefix_lm=False, qk_ln=False)
    must(a, attn_uses_sequence_id=False, alibi_bias_max=8)
    return classic(
        c,
        c.num_hidden_layers,
        c.num_attention_heads,
        norm_eps=c.layer_norm_epsilon,
        norm_bias=False,
        position_embedding="alibi",
        max_position_embeddings=c.max_seq_len,
        alibi_interleaved=True,
        attention_scale=a.softmax_scale,
        clip_qkv=a.clip_qkv,
        activation="gelu",
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        attention_dropout=float(a.attn_pdrop),
        residual_dropout=float(a.attn_pdrop),
    )


def rows_mpt(c: ModelConfig) -> Iterator[Row]:
    at = "transformer.blocks.{}."
    yield from ends(c, "transformer.wte", "transformer.norm_f")
    yield from qkv(c, f"{at}attn.Wqkv")
    yield from attention(c, "", "", "", f"{at}attn.out_proj")
    yield from mlp(c, f"{at}ffn.up_proj", f"{at}ffn.down_proj")
    yield from norm(f"{at}norm_1", "layers.attention_norm", c)
    yield from norm(f"{at}norm_2", "layers.mlp_norm", c)


def read_falcon(c: Any) -> dict[str, Any]:
    # transformers applies attention_dropout to a residual here, to attention there, or nowhere.
    must(c, attention_dropout=0.0, hidden_dropout=0.0)
    new, norms, kv_heads = c.new_decoder_architecture, c.num_ln_in_parallel_attn, c.num_kv_heads
    if new:
        must(c, parallel_attn=True)
        residual = "shared" if norms == 1 else "parallel"
    else:
        if norms == 2 and c.parallel_attn:
            raise ValueError("num_ln_in_parallel_attn=2 needs new_decoder_architecture")
        residual = "shared" if c.parallel_attn else "sequential"
    return classic(
        c,
        c.num_hidden_layers,
        c.num_attention_heads,
        intermediate_size=c.ffn_hidden_size,
        num_kv_heads=1 if c.multi_query and not new else kv_heads,
        norm_eps=c.layer_norm_epsilon,
        residual=residual,
        activation=activation(c.activation),
        qkv_bias=c.bias,
        out_bias=c.bias,
        mlp_bias=c.bias,
        # transformers rounds slopes and their products with positions to bfloat16; we do not.
        **(
            dict(position_embedding="alibi", alibi_scale=c.head_dim**-0.5) if c.alibi else rotary(c)
        ),
    )


def rows_falcon(c: ModelConfig) -> Iterator[Row]:
    at = "transformer.h.{}."
    yield from ends(c, "transformer.word_embeddings", "transformer.ln_f")
    yield from qkv(c, f"{at}self_attention.query_key_value", order="grouped")
    yield from attention(c, "", "", "", f"{at}self_attention.dense")
    yield from mlp(c, f"{at}mlp.dense_h_to_4h", f"{at}mlp.dense_4h_to_h")
    if c.residual == "parallel":
        yield from norm(f"{at}ln_attn", "layers.attention_norm", c)
        yield from norm(f"{at}ln_mlp", "layers.mlp_norm", c)
    else:
        yield from norm(f"{at}input_layernorm", "layers.attention_norm", c)
        if c.residual == "sequential":
            yield from norm(f"{at}post_attention_layernorm", "layers.mlp_norm", c)


def encoder(c: Any, **more: Any) -> dict[str, Any]:
    return (
        dict(
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_layers=c.num_hidden_layers,
            num_heads=c.num_attention_heads,
            norm="layer",
            norm_eps=c.layer_norm_eps,
            norm_bias=True,
            position_embedding="learned",
            activation=activation(c.hidden_act),
            gated=False,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            embedding_dropout=c.hidden_dropout_prob,
            attention_dropout=c.attention_probs_dropout_prob,
            residual_dropout=c.hidden_dropout_prob,
        )
        | more
    )


def head(c: Any, known: tuple[str, ...]) -> str:
    """The class whose file it is, which says what heads there are."""
    names = c.architectures or known[:1]
    if names[0] not in known:
        raise ValueError(f"architectures={names} is not supported, only {', '.join(known)}")
    return names[0]


def read_bert(c: Any) -> dict[str, Any]:
    kind = head(c, ("BertModel", "BertForMaskedLM"))
    must(c, tie_word_embeddings=True)
    return encoder(
        c,
        vocab_size=c.vocab_size,
        norm_position="post",
        max_position_embeddings=c.max_position_embeddings,
        token_types=c.type_vocab_size,
        embedding_norm=True,
        final_norm=False,
        pooler=c.hidden_size if kind == "BertModel" else 0,
        masked_head=kind == "BertForMaskedLM",
    )


def rows_encoder_layers(c: ModelConfig, at: str) -> Iterator[Row]:
    """What the two encoders' files share."""
    inside = "self" if c.norm_position == "post" else "attention"
    q, k, v = (f"{at}attention.{inside}.{name}" for name in ("query", "key", "value"))
    yield from attention(c, q, k, v, f"{at}attention.output.dense")
    yield from mlp(c, f"{at}intermediate.dense", f"{at}output.dense")


def rows_bert(c: EncoderConfig) -> Iterator[Row]:
    root, at, D = "bert.embeddings.", "bert.encoder.layer.{}.", c.hidden_size
    yield same(f"{root}word_embeddings.weight", "embedding", (c.V, D))
    yield same(
        f"{root}position_embeddings.weight", "positions", (c.max_position_embeddings or 0, D)
    )
    yield same(f"{root}token_type_embeddings.weight", "types", (c.token_types, D))
    yield from norm(f"{root}LayerNorm", "embedding_norm", c)
    yield from rows_encoder_layers(c, at)
    yield from norm(f"{at}attention.output.LayerNorm", "layers.attention_norm", c)
    yield from norm(f"{at}output.LayerNorm", "layers.mlp_norm", c)
    if c.pooler:
        yield from linear("bert.pooler.dense", "pooler", (D,), (D,), bias=True)
    if c.masked_head:
        root = "cls.predictions."
        yield from linear(f"{root}transform.dense", "masked.linear", (D,), (D,), bias=True)
        yield from norm(f"{root}transform.LayerNorm", "masked.norm", c)
        yield same(f"{root}bias", "masked.bias", (c.V,))


def read_vit(c: Any) -> dict[str, Any]:
    kind = head(c, ("ViTModel", "ViTForImageClassification"))
    sizes = (
        tuple(size) if isinstance(size, list | tuple) else (size, size)
        for size in (c.image_size, c.patch_size)
    )
    image, patch = sizes
    if image[0] % patch[0] or image[1] % patch[1]:
        raise ValueError(f"patch_size={patch} does not divide image_size={image}")
    pooler, labels, act = c.pooler_output_size, c.num_labels, c.pooler_act
    if act not in ("tanh", "gelu", "relu", "silu"):
        raise ValueError(f"pooler_act={act!r} is not supported")
    return encoder(
        c,
        max_position_embeddings=image[0] // patch[0] * (image[1] // patch[1]) + 1,
        image_size=image,
        patch_size=patch,
        channels=c.num_channels,
        qkv_bias=c.qkv_bias,
        pooler=pooler if kind == "ViTModel" else 0,
        pooler_activation=act,
        classes=labels if kind == "ViTForImageClassification" else 0,
    )


def rows_vit(c: EncoderConfig) -> Iterator[Row]:
    root, at, D = "vit.embeddings.", "vit.encoder.layer.{}.", c.hidden_size
    yield same(f"{root}cls_token", "first", (1, D), (1, 1, D))
    rows = c.patches + 1
    yield same(f"{root}position_embeddings", "positions", (rows, D), (1, rows, D))
    patch = (c.channels, *(c.patch_size or ()))
    yield from conv(f"{root}patch_embeddings.projection", "patches", patch, D)
    yield from rows_encoder_layers(c, at)
    yield from norm(f"{at}layernorm_before", "layers.attention_norm", c)
    yield from norm(f"{at}layernorm_after", "layers.mlp_norm", c)
    yield from norm("vit.layernorm", "norm", c)
    if c.pooler:
        yield from linear("vit.pooler.dense", "pooler", (D,), (c.pooler,), bias=True)
    if c.classes:
        yield from linear("classifier", "classes", (D,), (c.classes,), bias=True)


WINDOWS = ("use_sliding_window", "max_window_layers")
# Buffers that old versions of transformers saved: rotary frequencies and tables, causal masks.
IGNORED = r"(.*\.)?rotary_emb(_local)?\.(\w*inv_freq|cos_cached|sin_cached)"
CAUSAL_MASKS = r".*\.{}\.(bias|masked_bias)"
MEGATRON_MASK = r".*\.self_attention\.scale_mask_softmax\.causal_mask"
# Second names under which some files repeat a tied parameter, and the parameter.
COPIES = {
    "lm_head.weight": "embedding",
    "embed_out.weight": "embedding",
    "cls.predictions.decoder.weight": "embedding",
    "cls.predictions.decoder.bias": "masked.bias",
}
FAMILIES: dict[str, Family] = {
    "llama": Family(read_llama, rows_modern, neutral=("pretraining_tp",)),
    "mistral": Family(read_mistral, rows_modern),
    "qwen2": Family(read_qwen2, rows_modern, neutral=WINDOWS),
    "qwen3": Family(read_qwen3, rows_modern, neutral=WINDOWS),
    "gemma": Family(read_gemma, rows_modern),
    "gemma2": Family(read_gemma2, rows_modern),
    "gemma3_text": Family(read_gemma3, rows_modern),
    "phi3": Family(read_phi3, rows_phi3, neutral=("original_max_position_embeddings",)),
    "gpt2": Family(
        read_gpt2,
        rows_gpt2,
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
        rows_gpt_neox,
        prefix="gpt_neox.",
        ignored=(CAUSAL_MASKS.format("attention"),),
        neutral=("is_decoder",),
        rope_names=("rotary_emb_base", "rotary_pct"),
    ),
    "bloom": Family(
        read_bloom,
        rows_bloom,
        prefix="transformer.",
        ignored=(MEGATRON_MASK,),
        neutral=("pretraining_tp", "slow_but_exact"),
    ),
    "opt": Family(read_opt, rows_opt, ignored=(r"(model\.)?decoder\.version",)),
    "mpt": Family(
        read_mpt,
        rows_mpt,
        prefix="transformer.",
        neutral=("init_device", "norm_type", "learned_pos_emb"),
        positions="max_seq_len",
    ),
    "falcon": Family(read_falcon, rows_falcon, prefix="transformer.", ignored=(MEGATRON_MASK,)),
    "bert": Family(
        read_bert,
        rows_bert,
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
        read_vit, rows_vit, prefix="vit.", config=EncoderConfig, neutral=("encoder_stride",)
    ),
}
