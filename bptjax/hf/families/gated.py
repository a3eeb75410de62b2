"""Decoders with RMS norms, rotary positions and a gated feed-forward network."""

from collections.abc import Iterator
from typing import Any

from bptjax.hf.families.family import activation, require, rotary
from bptjax.hf.tensor_rules import (
    TensorRule,
    attention,
    embedding_norm_head,
    fused,
    mlp,
    norm,
    qkv,
)
from bptjax.models.config import ModelConfig


def rmsnorm_glu_decoder(c: Any, *, partial: bool = False, **more: Any) -> dict[str, Any]:
    """Returns the keywords that these families share, updated with `more`.

    Args:
      partial: whether the family rotates a part of each head.
    """
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


def window_pattern(c: Any) -> dict[str, Any]:
    """Returns the keywords of windows by layer; an empty dict if no layer has a window."""
    window, types = c.sliding_window, list(c.layer_types)
    return dict(sliding_window=window, layer_types=types) if "sliding_attention" in types else {}


def read_llama(c: Any) -> dict[str, Any]:
    """Reads LlamaForCausalLM. One key turns on the biases of all four attention projections."""
    bias = c.attention_bias
    return rmsnorm_glu_decoder(
        c,
        activation=activation(c.hidden_act),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=c.mlp_bias,
    )


def read_mistral(c: Any) -> dict[str, Any]:
    """Reads MistralForCausalLM. All layers have the same window."""
    return rmsnorm_glu_decoder(
        c, activation=activation(c.hidden_act), sliding_window=c.sliding_window
    )


def read_qwen2(c: Any) -> dict[str, Any]:
    """Reads Qwen2ForCausalLM. Queries, keys and values always have biases."""
    return rmsnorm_glu_decoder(
        c, activation=activation(c.hidden_act), qkv_bias=True, **window_pattern(c)
    )


def read_qwen3(c: Any) -> dict[str, Any]:
    """Reads Qwen3ForCausalLM. Each query and key head is normalized before rotary positions."""
    bias = c.attention_bias
    return rmsnorm_glu_decoder(
        c,
        activation=activation(c.hidden_act),
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
        **window_pattern(c),
    )


def gemma_decoder(c: Any, act: str, **more: Any) -> dict[str, Any]:
    """Returns the keywords that the Gemma families share: norms multiply by 1 + scale, and
    embeddings are scaled by √D."""
    return rmsnorm_glu_decoder(
        c,
        activation=activation(act),
        norm_unit_offset=True,
        qkv_bias=c.attention_bias,
        out_bias=c.attention_bias,
        embedding_scale=c.hidden_size**0.5,
        **more,
    )


def read_gemma(c: Any) -> dict[str, Any]:
    """Reads GemmaForCausalLM. The activation is in hidden_act, not hidden_activation."""
    return gemma_decoder(c, c.hidden_act)


def read_gemma2(c: Any) -> dict[str, Any]:
    """Reads Gemma2ForCausalLM. Sublayers have a norm before and after; logits have soft caps."""
    return gemma_decoder(
        c,
        c.hidden_activation,
        norm_position="sandwich",
        attention_scale=c.query_pre_attn_scalar**-0.5,
        attention_softcap=c.attn_logit_softcapping,
        logits_softcap=c.final_logit_softcapping,
        **window_pattern(c),
    )


def read_gemma3(c: Any) -> dict[str, Any]:
    """Reads Gemma3ForCausalLM. Windowed and full layers have separate rotary parameters."""
    # transformers reads attn_logit_softcapping but does not apply it.
    require(c, attn_logit_softcapping=None)
    return gemma_decoder(
        c,
        c.hidden_activation,
        norm_position="sandwich",
        qk_norm=True,
        attention_scale=c.query_pre_attn_scalar**-0.5,
        logits_softcap=c.final_logit_softcapping,
        sliding_window=c.sliding_window,
        layer_types=list(c.layer_types),
    )


def rules_rmsnorm_glu(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of LlamaForCausalLM's names, with the norms that Qwen 3 and Gemma add. With
    sandwich norms, post_attention_layernorm is the norm of attention's output."""
    layer = "model.layers.{layer}."
    yield from embedding_norm_head(c, "model.embed_tokens", "model.norm")
    names = (f"{layer}self_attn.{n}_proj" for n in "qkvo")
    yield from attention(c, *names)
    if c.qk_norm:
        yield from norm(f"{layer}self_attn.q_norm", "layers.query_norm", c, c.H)
        yield from norm(f"{layer}self_attn.k_norm", "layers.key_norm", c, c.H)
    yield from mlp(c, f"{layer}mlp.up_proj", f"{layer}mlp.down_proj", f"{layer}mlp.gate_proj")
    yield from norm(f"{layer}input_layernorm", "layers.attention_norm", c)
    after = f"{layer}post_attention_layernorm"
    if c.norm_position == "sandwich":
        yield from norm(after, "layers.attention_post_norm", c)
        yield from norm(f"{layer}pre_feedforward_layernorm", "layers.mlp_norm", c)
        yield from norm(f"{layer}post_feedforward_layernorm", "layers.mlp_post_norm", c)
    else:
        yield from norm(after, "layers.mlp_norm", c)


def read_phi3(c: Any) -> dict[str, Any]:
    """Reads Phi3ForCausalLM. Rotary positions may cover part of a head; long models have
    longrope."""
    return rmsnorm_glu_decoder(
        c,
        partial=True,
        activation=activation(c.hidden_act),
        sliding_window=c.sliding_window,
        embedding_dropout=c.embd_pdrop,
        residual_dropout=c.resid_pdrop,
    )


def rules_phi3(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of Phi3ForCausalLM, which concatenates q, k and v, and gate and up."""
    layer, F = "model.layers.{layer}.", (c.F,)
    yield from embedding_norm_head(c, "model.embed_tokens", "model.norm")
    yield from qkv(c, f"{layer}self_attn.qkv_proj")
    yield from attention(c, "", "", "", f"{layer}self_attn.o_proj")
    gate_up = "layers.mlp.gate", "layers.mlp.up"
    yield from fused(f"{layer}mlp.gate_up_proj", gate_up, c.hidden_size, (F, F), bias=False)
    yield from mlp(c, "", f"{layer}mlp.down_proj")
    yield from norm(f"{layer}input_layernorm", "layers.attention_norm", c)
    yield from norm(f"{layer}post_attention_layernorm", "layers.mlp_norm", c)
