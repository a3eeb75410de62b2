"""Decoders that alternate between short-convolution and attention layers."""

from collections.abc import Iterator
from typing import Any

from bptjax.models.config import ModelConfig
from bptjax.models.groups.attention import AttentionConfig
from bptjax.models.groups.short_convolution import ShortConvolutionConfig
from bptjax.weights.hf.families.family import require
from bptjax.weights.hf.families.gated import rmsnorm_glu_decoder
from bptjax.weights.hf.tensor_rules import (
    TensorRule,
    attention,
    embedding_norm_head,
    fused,
    linear,
    mlp,
    norm,
)


def read_lfm2(c: Any) -> dict[str, Any]:
    """Reads Lfm2ForCausalLM. Each query and key head is normalized before rotary positions."""
    require(c, conv_bias=False)
    types = ["short_convolution" if x == "conv" else x for x in c.layer_types]
    size = c.conv_L_cache
    return rmsnorm_glu_decoder(
        c,
        intermediate_size=_feed_forward_width(c),
        norms=dict(eps=c.norm_eps),
        activation="silu",
        attention=AttentionConfig(qk_norm=True),
        layer_types=types,
        short_convolution=ShortConvolutionConfig(size if "short_convolution" in types else 0),
    )


def _feed_forward_width(c: Any) -> int:
    """Returns the width of the feed-forward network."""
    width, multiple, factor = c.intermediate_size, c.block_multiple_of, c.block_ffn_dim_multiplier
    if not c.block_auto_adjust_ff_dim:
        return width
    width = int(2 * width / 3)
    return width if factor is None else -(-int(factor * width) // multiple) * multiple


def rules_lfm2(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of Lfm2ForCausalLM."""
    layer, own = "model.layers.{layer}.", "model.layers.{attention_layer}.self_attn."
    yield from embedding_norm_head(c, "model.embed_tokens", "model.embedding_norm")
    yield from norm(f"{layer}operator_norm", "layers.attention_norm", c)
    yield from norm(f"{layer}ffn_norm", "layers.mlp_norm", c)
    yield from attention(c, *(f"{own}{name}_proj" for name in ("q", "k", "v", "out")))
    for name, ours in (("q", "query"), ("k", "key")):
        yield from norm(f"{own}{name}_layernorm", f"layers.{ours}_norm", c, c.H)
    yield from mlp(c, *(f"{layer}feed_forward.w{number}" for number in (3, 2, 1)))
    if c.short_convolution.on:
        yield from _rules_convolution(c)


def _rules_convolution(c: ModelConfig) -> Iterator[TensorRule]:
    hf, D = "model.layers.{convolution_layer}.conv.", c.hidden_size
    names = tuple(f"layers.convolution.{name}" for name in ("key", "gate", "value"))
    yield from fused(f"{hf}in_proj", names, D, ((D,), (D,), (D,)), bias=False)
    yield from linear(f"{hf}out_proj", "layers.convolution.out", (D,), (D,), bias=False)
    yield TensorRule(
        f"{hf}conv.weight",
        (D, 1, c.short_convolution.size),
        ("layers.convolution.taps",),
        lambda w: (w[:, 0].T,),
        lambda x: x.T[:, None],
    )
