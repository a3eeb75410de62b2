"""Decoders that alternate between linear-attention and attention layers."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from bptjax.models.config import ModelConfig
from bptjax.models.groups.attention import AttentionConfig
from bptjax.models.groups.linear_attention import LinearAttentionConfig
from bptjax.weights.hf.families.experts import layers_without_experts, new_experts, rules_sparse_mlp
from bptjax.weights.hf.families.family import require
from bptjax.weights.hf.families.gated import rmsnorm_glu_decoder
from bptjax.weights.hf.tensor_rules import (
    TensorRule,
    embedding_norm_head,
    fused,
    identity,
    linear,
    mlp,
    norm,
)

# Name prefixes of linear attention, in files and in bptjax.
LINEAR, OURS = "model.layers.{linear_layer}.linear_attn.", "layers.linear."


def hybrid_decoder(c: Any, **more: Any) -> dict[str, Any]:
    """Returns the keywords that these families share, updated with `more`. All norms except linear
    attention's multiply by 1 + scale; part of each head is rotated; the query projection of
    attention also computes its gate."""
    # The convolution of linear attention has the activation of the feed-forward network.
    require(c, hidden_act="silu")
    bias = c.attention_bias
    return rmsnorm_glu_decoder(
        c,
        partial=True,
        norms=dict(unit_offset=True),
        attention=AttentionConfig(qk_norm=True, qkv_bias=bias, out_bias=bias, gate=True),
        layer_types=list(c.layer_types),
        linear_attention=LinearAttentionConfig(
            key_heads=c.linear_num_key_heads,
            value_heads=c.linear_num_value_heads,
            key_size=c.linear_key_head_dim,
            value_size=c.linear_value_head_dim,
            conv_size=c.linear_conv_kernel_dim,
        ),
        **more,
    )


def read_qwen3_5(c: Any) -> dict[str, Any]:
    """Reads Qwen3_5ForCausalLM."""
    return hybrid_decoder(c)


def read_qwen3_5_moe(c: Any, **more: Any) -> dict[str, Any]:
    """Reads Qwen3_5MoeForCausalLM, with further keywords `more` of its experts. The shared expert
    has a gate."""
    experts = new_experts(
        c,
        size=c.moe_intermediate_size,
        shared_size=c.shared_expert_intermediate_size,
        shared_gate=True,
        **more,
    )
    return hybrid_decoder(c, feed_forward="experts", experts=experts)


def read_qwen3_next(c: Any) -> dict[str, Any]:
    """Reads Qwen3NextForCausalLM. Some layers may have an MLP instead of experts."""
    return read_qwen3_5_moe(
        c, mlp_only_layers=layers_without_experts(c), renormalized=c.norm_topk_prob
    )


def rules_qwen3_5(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of Qwen3_5ForCausalLM."""
    yield from _rules_attention(c)
    yield from _rules_split(c)
    yield from mlp(c, *(f"model.layers.{{layer}}.mlp.{n}_proj" for n in ("up", "down", "gate")))


def rules_qwen3_5_moe(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of Qwen3_5MoeForCausalLM."""
    yield from _rules_attention(c)
    yield from _rules_split(c)
    yield from _rules_experts(c)


def rules_qwen3_next(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of Qwen3NextForCausalLM, whose projections are fused by key head."""
    yield from _rules_attention(c)
    yield from _rules_linear_attention(c)
    D, (keys, values) = c.hidden_size, c.linear_attention.heads
    (K, _), (N, _) = keys, values
    for hf, names, outputs in (
        ("qkvz", ("query", "key", "value", "gate"), (keys, keys, values, values)),
        ("ba", ("write", "decay"), ((N,), (N,))),
    ):
        ours = tuple(f"{OURS}{name}" for name in names)
        yield from fused(f"{LINEAR}in_proj_{hf}", ours, D, outputs, bias=False, groups=K)
    yield from _rules_experts(c)


def _rules_attention(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of everything except linear attention and feed-forward networks."""
    layer, D = "model.layers.{layer}.", c.hidden_size
    yield from embedding_norm_head(c, "model.embed_tokens", "model.norm")
    yield from norm(f"{layer}input_layernorm", "layers.attention_norm", c)
    yield from norm(f"{layer}post_attention_layernorm", "layers.mlp_norm", c)
    attention, heads = "model.layers.{attention_layer}.self_attn.", (c.num_heads, c.H)
    names = "layers.query", "layers.gate"
    bias, N = c.attention.qkv_bias, c.num_heads
    yield from fused(f"{attention}q_proj", names, D, (heads, heads), bias=bias, groups=N)
    for name, ours in (("k", "key"), ("v", "value")):
        yield from linear(f"{attention}{name}_proj", f"layers.{ours}", (D,), (c.K, c.H), bias=bias)
    yield from linear(f"{attention}o_proj", "layers.out", heads, (D,), bias=c.attention.out_bias)
    for name, ours in (("q", "query"), ("k", "key")):
        yield from norm(f"{attention}{name}_norm", f"layers.{ours}_norm", c, c.H)


def _rules_linear_attention(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of linear attention except its input projections."""
    (keys, values), size = c.linear_attention.heads, c.linear_attention.conv_size
    parts = {"query": keys, "key": keys, "value": values}
    names = tuple(f"{OURS}{name}" for name in parts)
    yield _convolution(f"{LINEAR}conv1d.weight", names, tuple(parts.values()), size)
    yield identity(f"{LINEAR}A_log", f"{OURS}log_rate", values[:1])
    yield identity(f"{LINEAR}dt_bias", f"{OURS}decay_bias", values[:1])
    yield identity(f"{LINEAR}norm.weight", f"{OURS}norm_scale", values[1:])
    yield from linear(f"{LINEAR}out_proj", f"{OURS}out", values, (c.hidden_size,), bias=False)


def _rules_split(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of linear attention with separate input projections."""
    D, (keys, values) = c.hidden_size, c.linear_attention.heads
    yield from _rules_linear_attention(c)
    names = tuple(f"{OURS}{name}" for name in ("query", "key", "value"))
    yield from fused(f"{LINEAR}in_proj_qkv", names, D, (keys, keys, values), bias=False)
    for name, ours, outputs in (
        ("z", "gate", values),
        ("b", "write", values[:1]),
        ("a", "decay", values[:1]),
    ):
        yield from linear(f"{LINEAR}in_proj_{name}", f"{OURS}{ours}", (D,), outputs, bias=False)


def _rules_experts(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of the experts and of the shared expert."""
    layer, shared = "model.layers.{expert_layer}.mlp.", "layers.mlp.shared"
    yield from rules_sparse_mlp(c)
    names = (f"{layer}shared_expert.{name}_proj" for name in ("up", "down", "gate"))
    yield from mlp(c, *names, ours=shared, size=c.experts.shared_size)
    D = c.hidden_size
    yield from linear(f"{layer}shared_expert_gate", f"{shared}_gate", (D,), (1,), bias=False)


def _convolution(
    hf: str, names: tuple[str, ...], heads: tuple[tuple[int, int], ...], size: int
) -> TensorRule:
    """Returns the rule of one convolution [channels, 1, size] over the concatenated channels of
    several linear layers."""
    ends = np.cumsum([0, *(n * width for n, width in heads)])

    def split(w):
        parts = (w[a:b, 0].T for a, b in pairwise(ends))
        return tuple(x.reshape(size, *shape) for x, shape in zip(parts, heads, strict=True))

    def join(*kernels):
        return np.concatenate([x.reshape(size, -1).T for x in kernels])[:, None]

    ours = tuple(f"{name}_convolution" for name in names)
    return TensorRule(hf, (int(ends[-1]), 1, size), ours, split, join)
