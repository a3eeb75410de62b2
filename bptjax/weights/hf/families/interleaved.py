"""Decoders that rotate pairs of neighboring features; all others pair the halves of a head.

The rules reorder the features of queries and keys to match the others. Scores do not change,
because queries and keys have the same order.
"""

from collections.abc import Iterator
from typing import Any

from bptjax.models.config import ModelConfig
from bptjax.models.groups.attention import AttentionConfig
from bptjax.weights.hf.families.gated import rmsnorm_glu_decoder, rules_rmsnorm_glu
from bptjax.weights.hf.tensor_rules import (
    TensorRule,
    attention,
    embedding_norm_head,
    fused,
    mlp,
    norm,
)


def halves(c: ModelConfig) -> list[int]:
    """Returns a head's features, rotated ones first: even, then odd."""
    rotated = int(c.H * c.rope_parameters.get("partial_rotary_factor", 1.0))
    return [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, c.H)]


def rules_interleaved_glu(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of Ernie4_5ForCausalLM and Cohere2ForCausalLM, which have Llama's names."""
    yield from rules_rmsnorm_glu(c, halves(c))


def read_ernie4_5(c: Any) -> dict[str, Any]:
    """Reads Ernie4_5ForCausalLM. One key turns on all biases."""
    bias = c.use_bias
    heads = AttentionConfig(qkv_bias=bias, out_bias=bias)
    return rmsnorm_glu_decoder(c, attention=heads, mlp_bias=bias)


def read_glm4(c: Any) -> dict[str, Any]:
    """Reads Glm4ForCausalLM. Half of each head rotates; sublayers have norms before and after."""
    return rmsnorm_glu_decoder(
        c,
        partial=True,
        norms=dict(position="sandwich"),
        attention=AttentionConfig(qkv_bias=c.attention_bias),
    )


def rules_glm4(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of Glm4ForCausalLM, which concatenates gate and up, and where
    post_attention_layernorm precedes the feed-forward network."""
    layer, F = "model.layers.{layer}.", (c.F,)
    yield from embedding_norm_head(c, "model.embed_tokens", "model.norm")
    names = (f"{layer}self_attn.{n}_proj" for n in "qkvo")
    yield from attention(c, *names, order=halves(c))
    gate_up = "layers.mlp.gate", "layers.mlp.up"
    yield from fused(f"{layer}mlp.gate_up_proj", gate_up, c.hidden_size, (F, F), bias=False)
    yield from mlp(c, "", f"{layer}mlp.down_proj")
    yield from norm(f"{layer}input_layernorm", "layers.attention_norm", c)
    yield from norm(f"{layer}post_self_attn_layernorm", "layers.attention_post_norm", c)
    yield from norm(f"{layer}post_attention_layernorm", "layers.mlp_norm", c)
    yield from norm(f"{layer}post_mlp_layernorm", "layers.mlp_post_norm", c)


def read_cohere2(c: Any) -> dict[str, Any]:
    """Reads Cohere2ForCausalLM. Full-attention layers rotate nothing; attention and the
    feed-forward network share a layer norm without a bias."""
    bias = c.attention_bias
    return rmsnorm_glu_decoder(
        c,
        norms=dict(type="layer", eps=c.layer_norm_eps),
        residual="shared",
        attention=AttentionConfig(qkv_bias=bias, out_bias=bias),
        sliding_window=c.sliding_window,
        layer_types=list(c.layer_types),
        rope_layers=[kind == "sliding_attention" for kind in c.layer_types],
        logits_scale=c.logit_scale,
    )
