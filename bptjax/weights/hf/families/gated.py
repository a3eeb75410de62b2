"""Decoders with rotary positions and a gated feed-forward network, most with RMS norms."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from bptjax.models.config import ModelConfig
from bptjax.models.groups.attention import AttentionConfig
from bptjax.models.groups.norms import NormsConfig
from bptjax.weights.hf.families.family import activation, require, rotary
from bptjax.weights.hf.tensor_rules import (
    TensorRule,
    attention,
    embedding_norm_head,
    fused,
    mlp,
    norm,
    qkv,
)


def rmsnorm_glu_decoder(
    c: Any, *, partial: bool = False, norms: Mapping[str, Any] = MappingProxyType({}), **more: Any
) -> dict[str, Any]:
    """Returns the keywords that these families share, updated with `more`. The activation is
    hidden_act unless `more` has another.

    Args:
      partial: whether the family rotates part of each head.
      norms: keywords of NormsConfig.
    """
    own: dict[str, Any] = {"eps": getattr(c, "rms_norm_eps", None), **norms}
    # Do not read hidden_act otherwise: a key that is read counts as supported.
    if "activation" not in more:
        more["activation"] = activation(c.hidden_act)
    return (
        dict(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            # Some models with experts in all layers have none.
            intermediate_size=getattr(c, "intermediate_size", None),
            num_layers=c.num_hidden_layers,
            num_heads=c.num_attention_heads,
            num_kv_heads=c.num_key_value_heads,
            head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
            norms=NormsConfig(**own),
            gated=True,
            # Text models of multimodal models may leave the key to the outer config.
            tied_head=getattr(c, "tie_word_embeddings", False),
            attention_dropout=getattr(c, "attention_dropout", None) or 0.0,
        )
        | rotary(c, partial=partial)
        | more
    )


def window_pattern(c: Any) -> dict[str, Any]:
    """Returns the keywords of windows by layer; empty if no layer has a window."""
    window, types = getattr(c, "sliding_window", None), getattr(c, "layer_types", ())
    windowed = "sliding_attention" in types
    return dict(sliding_window=window, layer_types=list(types)) if windowed else {}


def read_llama(c: Any) -> dict[str, Any]:
    """Reads LlamaForCausalLM. One key turns on the biases of all four attention projections."""
    bias = c.attention_bias
    heads = AttentionConfig(qkv_bias=bias, out_bias=bias)
    return rmsnorm_glu_decoder(c, attention=heads, mlp_bias=c.mlp_bias)


def read_mistral(c: Any) -> dict[str, Any]:
    """Reads MistralForCausalLM. All layers have the same window."""
    return rmsnorm_glu_decoder(c, sliding_window=c.sliding_window)


def read_qwen2(c: Any) -> dict[str, Any]:
    """Reads Qwen2ForCausalLM. Queries, keys and values always have biases."""
    return rmsnorm_glu_decoder(c, attention=AttentionConfig(qkv_bias=True), **window_pattern(c))


def read_qwen3(c: Any) -> dict[str, Any]:
    """Reads Qwen3ForCausalLM. Each query and key head is normalized before rotary positions."""
    bias = c.attention_bias
    heads = AttentionConfig(qk_norm=True, qkv_bias=bias, out_bias=bias)
    return rmsnorm_glu_decoder(c, attention=heads, **window_pattern(c))


def gemma_decoder(
    c: Any,
    act: str,
    choices: Mapping[str, Any] = MappingProxyType({}),
    position: str = "pre",
    **more: Any,
) -> dict[str, Any]:
    """Returns the keywords that the Gemma families share: norms multiply by 1 + scale, and
    embeddings are scaled by √D.

    Args:
      choices: further keywords of AttentionConfig.
      position: position of norms.
    """
    return rmsnorm_glu_decoder(
        c,
        activation=activation(act),
        norms=dict(unit_offset=True, position=position),
        attention=AttentionConfig(qkv_bias=c.attention_bias, out_bias=c.attention_bias, **choices),
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
        dict(scale=c.query_pre_attn_scalar**-0.5, softcap=c.attn_logit_softcapping),
        "sandwich",
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
        dict(scale=c.query_pre_attn_scalar**-0.5, qk_norm=True),
        "sandwich",
        logits_softcap=c.final_logit_softcapping,
        sliding_window=c.sliding_window,
        layer_types=list(c.layer_types),
    )


def rules_rmsnorm_glu(c: ModelConfig, order: Sequence[int] | None = None) -> Iterator[TensorRule]:
    """Yields the rules for LlamaForCausalLM's names, with the norms that Qwen 3 and Gemma add. See
    `attention` for `order`."""
    yield from rules_rmsnorm_decoder(c, order)
    names = (f"model.layers.{{layer}}.mlp.{n}_proj" for n in ("up", "down", "gate"))
    yield from mlp(c, *names)


def rules_rmsnorm_decoder(
    c: ModelConfig, order: Sequence[int] | None = None
) -> Iterator[TensorRule]:
    """Yields the rules of `rules_rmsnorm_glu` without the feed-forward network. If outputs are
    normalized, post_attention_layernorm is the norm of attention's output."""
    layer = "model.layers.{layer}."
    yield from embedding_norm_head(c, "model.embed_tokens", "model.norm")
    names = (f"{layer}self_attn.{n}_proj" for n in "qkvo")
    yield from attention(c, *names, order=order)
    if c.attention.qk_norm:
        q_heads, k_heads = (c.num_heads, c.K) if c.attention.qk_norm_joint else (1, 1)
        yield from norm(f"{layer}self_attn.q_norm", "layers.query_norm", c, q_heads * c.H)
        yield from norm(f"{layer}self_attn.k_norm", "layers.key_norm", c, k_heads * c.H)
    after = f"{layer}post_attention_layernorm"
    if c.norms.position != "output":
        yield from norm(f"{layer}input_layernorm", "layers.attention_norm", c)
    if c.norms.position == "sandwich":
        yield from norm(f"{layer}pre_feedforward_layernorm", "layers.mlp_norm", c)
    if c.norms.position in ("output", "sandwich"):
        yield from norm(after, "layers.attention_post_norm", c)
        yield from norm(f"{layer}post_feedforward_layernorm", "layers.mlp_post_norm", c)
    elif c.residual != "shared":
        yield from norm(after, "layers.mlp_norm", c)


def read_granite(c: Any) -> dict[str, Any]:
    """Reads GraniteForCausalLM, which has four factors; it divides logits by one of them."""
    llama = read_llama(c)
    return llama | dict(
        attention=replace(llama["attention"], scale=c.attention_multiplier),
        embedding_scale=c.embedding_multiplier,
        residual_scale=c.residual_multiplier,
        logits_scale=1 / c.logits_scaling,
    )


def output_norm_decoder(c: Any, **more: Any) -> dict[str, Any]:
    """Returns the keywords of families that normalize the outputs of sublayers."""
    return rmsnorm_glu_decoder(c, norms=dict(position="output"), **more)


def read_olmo2(c: Any) -> dict[str, Any]:
    """Reads Olmo2ForCausalLM. The norms of queries and keys are over all heads."""
    bias = c.attention_bias
    heads = AttentionConfig(qk_norm=True, qk_norm_joint=True, qkv_bias=bias, out_bias=bias)
    return output_norm_decoder(c, attention=heads)


def read_olmo3(c: Any) -> dict[str, Any]:
    """Reads Olmo3ForCausalLM. Windowed and full layers have separate rotary parameters."""
    return read_olmo2(c) | dict(sliding_window=c.sliding_window, layer_types=list(c.layer_types))


def read_exaone4(c: Any) -> dict[str, Any]:
    """Reads Exaone4ForCausalLM. If there are windows, full-attention layers rotate nothing."""
    layers = None
    if c.sliding_window is not None:
        layers = [kind == "sliding_attention" for kind in c.layer_types]
    heads = AttentionConfig(qk_norm=True)
    return output_norm_decoder(c, attention=heads, rope_layers=layers, **window_pattern(c))


def read_smollm3(c: Any) -> dict[str, Any]:
    """Reads SmolLM3ForCausalLM. Some layers, every fourth by default, rotate nothing."""
    rope_layers = [bool(rotates) for rotates in c.no_rope_layers]
    return read_llama(c) | dict(rope_layers=rope_layers, **window_pattern(c))


def read_seed_oss(c: Any) -> dict[str, Any]:
    """Reads SeedOssForCausalLM. The bias of the output projection has a separate key."""
    return rmsnorm_glu_decoder(
        c,
        attention=AttentionConfig(qkv_bias=c.attention_bias, out_bias=c.attention_out_bias),
        mlp_bias=c.mlp_bias,
        residual_dropout=c.residual_dropout,
    )


def read_stablelm(c: Any) -> dict[str, Any]:
    """Reads StableLmForCausalLM. Norms are layer norms; part of each head is rotated."""
    # transformers applies hidden_dropout to one of two sublayers, and has separate norm weights for
    # each head of queries and keys.
    require(c, hidden_dropout=0.0, qk_layernorm=False)
    return rmsnorm_glu_decoder(
        c,
        partial=True,
        norms=dict(type="layer", eps=c.layer_norm_eps, bias=True),
        residual="shared" if c.use_parallel_residual else "sequential",
        attention=AttentionConfig(qkv_bias=c.use_qkv_bias),
    )


def read_phi3(c: Any) -> dict[str, Any]:
    """Reads Phi3ForCausalLM. Part of a head may be rotated; long models have longrope."""
    return rmsnorm_glu_decoder(
        c,
        partial=True,
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
