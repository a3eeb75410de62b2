"""Decoders with layer norms and a plain feed-forward network."""

from collections.abc import Iterator
from typing import Any

from bptjax.models.config import ModelConfig
from bptjax.models.groups.alibi import AlibiConfig
from bptjax.models.groups.attention import AttentionConfig
from bptjax.models.groups.norms import NormsConfig
from bptjax.weights.hf.families.family import activation, require, rotary
from bptjax.weights.hf.tensor_rules import (
    TensorRule,
    attention,
    embedding_norm_head,
    identity,
    linear,
    mlp,
    norm,
    qkv,
)


def layernorm_mlp_decoder(c: Any, **more: Any) -> dict[str, Any]:
    """Returns the keywords that these families share, updated with `more`."""
    return (
        dict(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            num_layers=c.num_hidden_layers,
            num_heads=c.num_attention_heads,
            gated=False,
            attention=AttentionConfig(qkv_bias=True, out_bias=True),
            mlp_bias=True,
            tied_head=c.tie_word_embeddings,
        )
        | more
    )


def read_gpt2(c: Any) -> dict[str, Any]:
    """Reads GPT2LMHeadModel. Positions are learned; n_inner may be unset."""
    return layernorm_mlp_decoder(
        c,
        intermediate_size=c.n_inner,
        norms=NormsConfig("layer", c.layer_norm_epsilon, bias=True),
        position_embedding="learned",
        max_position_embeddings=c.max_position_embeddings,
        attention=AttentionConfig(
            scale=None if c.scale_attn_weights else 1.0, qkv_bias=True, out_bias=True
        ),
        activation=activation(c.activation_function),
        embedding_dropout=c.embd_pdrop,
        attention_dropout=c.attn_pdrop,
        residual_dropout=c.resid_pdrop,
    )


def rules_gpt2(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of GPT2LMHeadModel, which stores linear weights as [inputs, outputs]."""
    layer = "transformer.h.{layer}."
    yield from embedding_norm_head(c, "transformer.wte", "transformer.ln_f")
    yield identity(
        "transformer.wpe.weight", "positions", (c.max_position_embeddings or 0, c.hidden_size)
    )
    yield from qkv(c, f"{layer}attn.c_attn", transposed=True)
    yield from attention(c, "", "", "", f"{layer}attn.c_proj", transposed=True)
    yield from mlp(c, f"{layer}mlp.c_fc", f"{layer}mlp.c_proj", transposed=True)
    yield from norm(f"{layer}ln_1", "layers.attention_norm", c)
    yield from norm(f"{layer}ln_2", "layers.mlp_norm", c)


def read_gpt_neox(c: Any) -> dict[str, Any]:
    """Reads GPTNeoXForCausalLM (Pythia). Parallel residuals by default; partly rotated heads."""
    return layernorm_mlp_decoder(
        c,
        intermediate_size=c.intermediate_size,
        norms=NormsConfig("layer", c.layer_norm_eps, bias=True),
        residual="parallel" if c.use_parallel_residual else "sequential",
        activation=activation(c.hidden_act),
        attention=AttentionConfig(qkv_bias=c.attention_bias, out_bias=c.attention_bias),
        embedding_dropout=c.hidden_dropout,
        attention_dropout=c.attention_dropout,
        residual_dropout=c.hidden_dropout,
        **rotary(c, partial=True),
    )


def rules_gpt_neox(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of GPTNeoXForCausalLM, whose output embedding is called embed_out."""
    layer = "gpt_neox.layers.{layer}."
    yield from embedding_norm_head(c, "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out")
    yield from qkv(c, f"{layer}attention.query_key_value", groups=c.K)
    yield from attention(c, "", "", "", f"{layer}attention.dense")
    yield from mlp(c, f"{layer}mlp.dense_h_to_4h", f"{layer}mlp.dense_4h_to_h")
    yield from norm(f"{layer}input_layernorm", "layers.attention_norm", c)
    yield from norm(f"{layer}post_attention_layernorm", "layers.mlp_norm", c)


def read_bloom(c: Any) -> dict[str, Any]:
    """Reads BloomForCausalLM. Positions are ALiBi, embeddings are normalized, and the residual may
    start at the normalized input."""
    return layernorm_mlp_decoder(
        c,
        norms=NormsConfig("layer", c.layer_norm_epsilon, bias=True, embedding=True),
        residual_normed=c.apply_residual_connection_post_layernorm,
        position_embedding="alibi",
        activation="gelu_tanh",
        attention_dropout=c.attention_dropout,
        residual_dropout=c.hidden_dropout,
    )


def rules_bloom(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of BloomForCausalLM, which fuses queries, keys and values head by head."""
    layer = "transformer.h.{layer}."
    yield from embedding_norm_head(c, "transformer.word_embeddings", "transformer.ln_f")
    yield from norm("transformer.word_embeddings_layernorm", "embedding_norm", c)
    yield from qkv(c, f"{layer}self_attention.query_key_value", groups=c.K)
    yield from attention(c, "", "", "", f"{layer}self_attention.dense")
    yield from mlp(c, f"{layer}mlp.dense_h_to_4h", f"{layer}mlp.dense_4h_to_h")
    yield from norm(f"{layer}input_layernorm", "layers.attention_norm", c)
    yield from norm(f"{layer}post_attention_layernorm", "layers.mlp_norm", c)


def read_opt(c: Any) -> dict[str, Any]:
    """Reads OPTForCausalLM. Learned positions start at entry 2; the 350M model has post-norms and
    narrower embeddings."""
    bias = c.enable_bias
    affine = c.layer_norm_elementwise_affine
    narrow = c.word_embed_proj_dim != c.hidden_size
    return layernorm_mlp_decoder(
        c,
        intermediate_size=c.ffn_dim,
        norms=NormsConfig(
            "layer",
            position="pre" if c.do_layer_norm_before else "post",
            scale=affine,
            bias=affine,
            final=c.do_layer_norm_before and not c._remove_final_layer_norm,
        ),
        position_embedding="learned",
        max_position_embeddings=c.max_position_embeddings,
        position_offset=2,
        activation=activation(c.activation_function),
        attention=AttentionConfig(qkv_bias=bias, out_bias=bias),
        mlp_bias=bias,
        embedding_size=c.word_embed_proj_dim if narrow else None,
        attention_dropout=c.attention_dropout,
        residual_dropout=c.dropout,
    )


def rules_opt(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of OPTForCausalLM, where final_layer_norm in a layer is the second norm."""
    root, layer, D = "model.decoder.", "model.decoder.layers.{layer}.", c.hidden_size
    yield from embedding_norm_head(c, f"{root}embed_tokens", f"{root}final_layer_norm")
    entries = (c.max_position_embeddings or 0) + c.position_offset
    yield identity(f"{root}embed_positions.weight", "positions", (entries, D))
    if c.E != D:
        yield from linear(f"{root}project_in", "project_in", (c.E,), (D,), bias=False)
        yield from linear(f"{root}project_out", "project_out", (D,), (c.E,), bias=False)
    names = (f"{layer}self_attn.{n}_proj" for n in ("q", "k", "v", "out"))
    yield from attention(c, *names)
    yield from mlp(c, f"{layer}fc1", f"{layer}fc2")
    yield from norm(f"{layer}self_attn_layer_norm", "layers.attention_norm", c)
    yield from norm(f"{layer}final_layer_norm", "layers.mlp_norm", c)


def read_mpt(c: Any) -> dict[str, Any]:
    """Reads MptForCausalLM. Positions are ALiBi, attention has a separate config, no biases."""
    # transformers reads these keys but does not apply them.
    require(c, expansion_ratio=4, no_bias=True, logit_scale=None, embedding_fraction=1.0)
    require(c, resid_pdrop=0.0, emb_pdrop=0.0)
    a = c.attn_config
    require(a, alibi=True, attn_type="multihead_attention", prefix_lm=False, qk_ln=False)
    require(a, attn_uses_sequence_id=False, alibi_bias_max=8)
    return layernorm_mlp_decoder(
        c,
        norms=NormsConfig("layer", c.layer_norm_epsilon),
        position_embedding="alibi",
        max_position_embeddings=c.max_seq_len,
        alibi=AlibiConfig(interleaved=True),
        attention=AttentionConfig(
            scale=a.softmax_scale, clip=a.clip_qkv, qkv_bias=False, out_bias=False
        ),
        activation="gelu",
        mlp_bias=False,
        attention_dropout=float(a.attn_pdrop),
        residual_dropout=float(a.attn_pdrop),
    )


def rules_mpt(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of MptForCausalLM, which concatenates queries, keys and values."""
    layer = "transformer.blocks.{layer}."
    yield from embedding_norm_head(c, "transformer.wte", "transformer.norm_f")
    yield from qkv(c, f"{layer}attn.Wqkv")
    yield from attention(c, "", "", "", f"{layer}attn.out_proj")
    yield from mlp(c, f"{layer}ffn.up_proj", f"{layer}ffn.down_proj")
    yield from norm(f"{layer}norm_1", "layers.attention_norm", c)
    yield from norm(f"{layer}norm_2", "layers.mlp_norm", c)


def read_falcon(c: Any) -> dict[str, Any]:
    """Reads FalconForCausalLM. One class covers three layouts: sequential, parallel with one shared
    norm, and parallel with two norms."""
    # Depending on the layout, transformers applies attention_dropout to a residual, to attention,
    # or nowhere.
    require(c, attention_dropout=0.0, hidden_dropout=0.0)
    new, norms, kv_heads = c.new_decoder_architecture, c.num_ln_in_parallel_attn, c.num_kv_heads
    if new:
        require(c, parallel_attn=True)
        residual = "shared" if norms == 1 else "parallel"
    else:
        if norms == 2 and c.parallel_attn:
            raise ValueError("num_ln_in_parallel_attn=2: requires new_decoder_architecture")
        residual = "shared" if c.parallel_attn else "sequential"
    return layernorm_mlp_decoder(
        c,
        intermediate_size=c.ffn_hidden_size,
        num_kv_heads=1 if c.multi_query and not new else kv_heads,
        norms=NormsConfig("layer", c.layer_norm_epsilon, bias=True),
        residual=residual,
        activation=activation(c.activation),
        attention=AttentionConfig(qkv_bias=c.bias, out_bias=c.bias),
        mlp_bias=c.bias,
        # transformers rounds slopes and their products with positions to bfloat16; bptjax does not.
        **(
            dict(position_embedding="alibi", alibi=AlibiConfig(c.head_dim**-0.5))
            if c.alibi
            else rotary(c)
        ),
    )


def rules_falcon(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of FalconForCausalLM, where the names of the norms depend on the layout."""
    layer = "transformer.h.{layer}."
    yield from embedding_norm_head(c, "transformer.word_embeddings", "transformer.ln_f")
    yield from qkv(c, f"{layer}self_attention.query_key_value", groups=c.K)
    yield from attention(c, "", "", "", f"{layer}self_attention.dense")
    yield from mlp(c, f"{layer}mlp.dense_h_to_4h", f"{layer}mlp.dense_4h_to_h")
    if c.residual == "parallel":
        yield from norm(f"{layer}ln_attn", "layers.attention_norm", c)
        yield from norm(f"{layer}ln_mlp", "layers.mlp_norm", c)
    else:
        yield from norm(f"{layer}input_layernorm", "layers.attention_norm", c)
        if c.residual == "sequential":
            yield from norm(f"{layer}post_attention_layernorm", "layers.mlp_norm", c)


def read_starcoder2(c: Any) -> dict[str, Any]:
    """Reads Starcoder2ForCausalLM. Positions are rotary, and all layers have the same window."""
    bias = c.use_bias
    return layernorm_mlp_decoder(
        c,
        intermediate_size=c.intermediate_size,
        num_kv_heads=c.num_key_value_heads,
        norms=NormsConfig("layer", c.norm_epsilon, bias=True),
        sliding_window=c.sliding_window,
        activation=activation(c.hidden_act),
        attention=AttentionConfig(qkv_bias=bias, out_bias=bias),
        mlp_bias=bias,
        embedding_dropout=c.embedding_dropout,
        attention_dropout=c.attention_dropout,
        residual_dropout=c.residual_dropout,
        **rotary(c),
    )


def rules_starcoder2(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of Starcoder2ForCausalLM, which has Llama's names except for the MLP."""
    layer = "model.layers.{layer}."
    yield from embedding_norm_head(c, "model.embed_tokens", "model.norm")
    names = (f"{layer}self_attn.{n}_proj" for n in "qkvo")
    yield from attention(c, *names)
    yield from mlp(c, f"{layer}mlp.c_fc", f"{layer}mlp.c_proj")
    yield from norm(f"{layer}input_layernorm", "layers.attention_norm", c)
    yield from norm(f"{layer}post_attention_layernorm", "layers.mlp_norm", c)


def read_phi(c: Any) -> dict[str, Any]:
    """Reads PhiForCausalLM. Part of each head is rotated; one norm precedes both sublayers; the
    logits have a bias."""
    return layernorm_mlp_decoder(
        c,
        intermediate_size=c.intermediate_size,
        num_kv_heads=c.num_key_value_heads,
        norms=NormsConfig("layer", c.layer_norm_eps, bias=True),
        residual="shared",
        attention=AttentionConfig(qk_norm=c.qk_layernorm, qkv_bias=True, out_bias=True),
        activation=activation(c.hidden_act),
        head_bias=True,
        embedding_dropout=c.embd_pdrop,
        attention_dropout=c.attention_dropout,
        residual_dropout=c.resid_pdrop,
        **rotary(c, partial=True),
    )


def rules_phi(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of PhiForCausalLM."""
    layer, H = "model.layers.{layer}.", c.H
    yield from embedding_norm_head(c, "model.embed_tokens", "model.final_layernorm")
    names = (f"{layer}self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "dense"))
    yield from attention(c, *names)
    if c.attention.qk_norm:
        yield from norm(f"{layer}self_attn.q_layernorm", "layers.query_norm", c, H)
        yield from norm(f"{layer}self_attn.k_layernorm", "layers.key_norm", c, H)
    yield from mlp(c, f"{layer}mlp.fc1", f"{layer}mlp.fc2")
    yield from norm(f"{layer}input_layernorm", "layers.attention_norm", c)
