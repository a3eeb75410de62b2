"""Decoders with a mixture of experts."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from bptjax.models.config import ModelConfig
from bptjax.models.groups.attention import AttentionConfig
from bptjax.models.groups.experts import ExpertsConfig
from bptjax.weights.hf.families.family import require
from bptjax.weights.hf.families.gated import (
    rmsnorm_glu_decoder,
    rules_rmsnorm_decoder,
    window_pattern,
)
from bptjax.weights.hf.tensor_rules import TensorRule, identity, mlp


def new_experts(c: Any, **more: Any) -> ExpertsConfig:
    """Returns the experts of these families, with the keywords `more`. transformers adds the
    load-balancing loss only if output_router_logits is set."""
    factor = c.router_aux_loss_coef
    return ExpertsConfig(
        count=c.num_experts,
        per_token=c.num_experts_per_tok,
        aux_loss=factor if c.output_router_logits else None,
        **more,
    )


def experts_decoder(c: Any, experts: ExpertsConfig, **more: Any) -> dict[str, Any]:
    """Returns the keywords that these families share, updated with `more`."""
    return rmsnorm_glu_decoder(c, feed_forward="experts", experts=experts, **more)


def read_mixtral(c: Any) -> dict[str, Any]:
    """Reads MixtralForCausalLM. All layers have the same window."""
    return experts_decoder(c, new_experts(c), sliding_window=c.sliding_window)


def layers_without_experts(c: Any) -> list[int]:
    """Returns the indices of the layers that have an MLP instead of experts."""
    every = c.decoder_sparse_step
    skipped = (i for i in range(c.num_hidden_layers) if (i + 1) % every)
    return sorted({*c.mlp_only_layers, *skipped})


def read_qwen3_moe(c: Any) -> dict[str, Any]:
    """Reads Qwen3MoeForCausalLM. Each query and key head is normalized before rotary positions."""
    bias = c.attention_bias
    return experts_decoder(
        c,
        new_experts(
            c,
            mlp_only_layers=layers_without_experts(c),
            size=c.moe_intermediate_size,
            renormalized=c.norm_topk_prob,
        ),
        attention=AttentionConfig(qk_norm=True, qkv_bias=bias, out_bias=bias),
        sliding_window=c.sliding_window,
    )


def read_olmoe(c: Any) -> dict[str, Any]:
    """Reads OlmoeForCausalLM. The norms of queries and keys are over all heads."""
    bias = c.attention_bias
    return experts_decoder(
        c,
        new_experts(c, renormalized=c.norm_topk_prob),
        attention=AttentionConfig(qk_norm=True, qk_norm_joint=True, qkv_bias=bias, out_bias=bias),
    )


def read_gpt_oss(c: Any) -> dict[str, Any]:
    """Reads GptOssForCausalLM. Heads have sinks; windowed and full layers alternate; experts
    compute gate · σ(1.702 · gate) · (up + 1) with gate and up clipped."""
    require(c, swiglu_alpha=1.702)
    method = (getattr(c, "quantization_config", None) or {}).get("quant_method", "mxfp4")
    if method != "mxfp4":
        raise ValueError(f"quantization_config.quant_method={method}: must be mxfp4")
    bias = c.attention_bias
    return experts_decoder(
        c,
        new_experts(c, glu_limit=c.swiglu_limit, glu_offset=1.0, router_bias=True),
        activation="quick_gelu",
        mlp_bias=True,
        attention=AttentionConfig(sinks=True, qkv_bias=bias, out_bias=bias),
        **window_pattern(c),
    )


def read_glm4_moe(c: Any) -> dict[str, Any]:
    """Reads Glm4MoeForCausalLM. Part of each head is rotated. The first layers have an MLP.
    Other layers have a shared expert, and choose experts by sigmoids plus a correction bias."""
    return experts_decoder(
        c,
        ExpertsConfig(
            count=c.n_routed_experts,
            per_token=c.num_experts_per_tok,
            size=c.moe_intermediate_size,
            shared_size=c.n_shared_experts * c.moe_intermediate_size,
            mlp_only_layers=list(range(c.first_k_dense_replace)),
            scores="sigmoid",
            correction=True,
            renormalized=c.norm_topk_prob,
            groups=c.n_group,
            groups_per_token=c.topk_group,
            scale=c.routed_scaling_factor,
        ),
        partial=True,
        attention=AttentionConfig(qk_norm=c.use_qk_norm, qkv_bias=c.attention_bias),
    )


def rules_mixtral(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of MixtralForCausalLM."""
    yield from rules_rmsnorm_decoder(c)
    yield from experts(c, "model.layers.{layer}.block_sparse_moe.", gate="w1", up="w3", down="w2")


def rules_qwen3_moe(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of Qwen3MoeForCausalLM and OlmoeForCausalLM."""
    yield from rules_rmsnorm_decoder(c)
    yield from rules_sparse_mlp(c)


def rules_sparse_mlp(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of the experts, and of the MLP of layers without experts."""
    names = {name: f"{name}_proj" for name in ("gate", "up", "down")}
    yield from experts(c, "model.layers.{expert_layer}.mlp.", **names)
    if c.experts.mlp_only_layers:
        gate, up, down = (f"model.layers.{{mlp_layer}}.mlp.{name}" for name in names.values())
        yield from mlp(c, up, down, gate, ours="layers.dense")


def rules_glm4_moe(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of Glm4MoeForCausalLM."""
    layer, X, size = "model.layers.{expert_layer}.mlp.", c.experts.count, c.experts.shared_size
    yield from rules_qwen3_moe(c)
    correction = f"{layer}gate.e_score_correction_bias", "layers.mlp.router.correction"
    yield replace(identity(*correction, (X,)), dtype="float32")
    gate, up, down = (f"{layer}shared_experts.{name}_proj" for name in ("gate", "up", "down"))
    yield from mlp(c, up, down, gate, ours="layers.mlp.shared", size=size)


def rules_gpt_oss(c: ModelConfig) -> Iterator[TensorRule]:
    """Yields the rules of GptOssForCausalLM. One tensor per layer holds gate and up of all experts,
    with interleaved outputs."""
    layer, (D, F, X) = "model.layers.{layer}.", (c.hidden_size, c.expert_F, c.experts.count)
    yield from rules_rmsnorm_decoder(c)
    yield identity(f"{layer}self_attn.sinks", "layers.sinks", (c.num_heads,))
    yield _transposed(f"{layer}mlp.router.weight", "router", (X, D))
    yield identity(f"{layer}mlp.router.bias", "layers.mlp.router.bias", (X,))
    for ending, ours, inputs in (("", "kernel", (D,)), ("_bias", "bias", ())):
        names = tuple(f"layers.mlp.{name}.{ours}" for name in ("gate", "up"))
        hf, shape = f"{layer}mlp.experts.gate_up_proj{ending}", (X, *inputs, 2 * F)
        yield TensorRule(hf, shape, names, _deinterleaved, _interleaved)
    yield identity(f"{layer}mlp.experts.down_proj", "layers.mlp.down.kernel", (X, F, D))
    yield identity(f"{layer}mlp.experts.down_proj_bias", "layers.mlp.down.bias", (X, D))


def _deinterleaved(w: np.ndarray) -> tuple[np.ndarray, ...]:
    """Splits the last axis into its even and its odd entries."""
    return w[..., 0::2], w[..., 1::2]


def _interleaved(even: np.ndarray, odd: np.ndarray) -> np.ndarray:
    """Inverts `_deinterleaved`."""
    return np.stack([even, odd], -1).reshape(*even.shape[:-1], -1)


def experts(c: ModelConfig, hf: str, **names: str) -> Iterator[TensorRule]:
    """Yields the rules of a router, and of experts with separate tensors.

    Args:
      hf: prefix of their names.
      names: names of gate, up and down in the file.
    """
    yield _transposed(f"{hf}gate.weight", "router", (c.experts.count, c.hidden_size))
    for ours, name in names.items():
        shape = (c.expert_F, c.hidden_size)
        shape = shape[::-1] if ours == "down" else shape
        yield _transposed(f"{hf}experts.{{expert}}.{name}.weight", ours, shape, inputs=1)


def _transposed(hf: str, ours: str, shape: tuple[int, int], inputs: int = 0) -> TensorRule:
    """Returns the rule of a kernel that the file stores as [outputs, inputs]; see TensorRule for
    `inputs`, which is 0 for a router because it takes no adapter."""
    kernel = (f"layers.mlp.{ours}.kernel",)
    return TensorRule(hf, shape, kernel, lambda w: (w.T,), np.transpose, inputs)
