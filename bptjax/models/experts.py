"""A mixture of experts: a router sends each token to a few of many gated feed-forward networks."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, UInt32

from bptjax.models.config import ModelConfig
from bptjax.models.feed_forward import Auxiliary, FeedForward, Mlp, activate
from bptjax.models.linear import AdapterDropout, Linear, dequantize, new_param
from bptjax.models.norm import Norm
from bptjax.models.params import expert_placement, slice_placement
from bptjax.ops.checkpoint_names import checkpoint_named
from bptjax.ops.grouped_matmul import (
    Groups,
    block_rows,
    collect,
    dispatch,
    group,
    grouped_matmul,
)
from bptjax.ops.norm import rms_norm
from bptjax.ops.per_device import REPLICATED, SHARDED, free_axes, per_device
from bptjax.parallel.experts import (
    own_experts,
    slice_axes,
    slice_index,
    sum_over_devices,
    sum_over_slices,
)
from bptjax.parallel.sequence import FOLDED_BATCH

# Name under which a remat policy saves the experts of each token.
ROUTING = "routing"


class RouterCorrection(nnx.Variable):
    """Constants that balance the load of the experts, float32 `[X]`. Saved, but not trained."""


class Router(nnx.Module):
    """Float32 router logits over the experts, and the choice of each token's experts."""

    def __init__(self, config: ModelConfig, key: Array, dtype: DTypeLike):
        D, X = config.hidden_size, config.experts.count
        std, axes = config.init_std, ("embed", None)
        self.kernel = new_param(key, (D, X), axes, std, dtype, decayed=True)
        bias = nnx.Param(jnp.zeros(X, dtype), axes=(None,))
        self.bias = bias if config.experts.router_bias else None
        correction = RouterCorrection(jnp.zeros(X, jnp.float32), axes=(None,))
        self.correction = correction if config.experts.correction else None
        scale = nnx.Param(jnp.ones(D, dtype), axes=("embed",))
        factors = nnx.Param(jnp.ones(X, dtype), axes=(None,))
        # Factors on the router's normalized input, and on the weights of the chosen experts.
        self.scale = scale if config.experts.norms else None
        self.factors = factors if config.experts.norms else None
        self.config = config

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T X"]:
        if self.scale is not None:
            scale = self.scale[...].astype(jnp.float32) * x.shape[1] ** -0.5
            x = rms_norm(x, scale, eps=self.config.norms.eps)
        kernel = self.kernel[...].astype(x.dtype)
        logits = jnp.dot(x, kernel, preferred_element_type=jnp.float32)
        return logits if self.bias is None else logits + self.bias[...].astype(jnp.float32)[None]

    def choose(self, logits: Float[Array, "T X"]) -> Int[Array, "T k"]:
        """Chooses the experts of each token: the highest scores within the groups whose two highest
        scores have the largest sums.

        DeepSeek-V3, 2024, arXiv 2412.19437, section 2.1.2.
        """
        config, scores = self.config, jax.lax.stop_gradient(logits)
        groups, (T, X) = config.experts.groups, scores.shape
        if self.correction is not None or groups > 1:
            scores = _scores(config, scores)
        if self.correction is not None:
            scores += jax.lax.stop_gradient(self.correction[...])[None]
        if groups > 1:
            grouped = scores.reshape(T, groups, X // groups)
            best, _ = jax.lax.top_k(grouped, 2)
            _, chosen = jax.lax.top_k(best.sum(2), config.experts.groups_per_token)
            allowed = (chosen[:, :, None] == jnp.arange(groups)[None, None]).any(1)
            scores = jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(T, X)
        return jax.lax.top_k(scores, config.experts.per_token)[1]


def apply_expert_kernel(
    kernel: Any,
    x: Float[Array, "M I"],
    experts: Int[Array, "n"],
    seeds: AdapterDropout | None = None,
) -> Float[Array, "M O"]:
    """Computes `grouped_matmul(x, kernel, experts)`. Kernels that are not plain parameters, such
    as those with an adapter, compute the product themselves."""
    if isinstance(kernel, nnx.Variable):
        return grouped_matmul(x, kernel[...], experts)
    return kernel.grouped(x, experts, seeds)


class ExpertLinear(nnx.Module):
    """x · kernel + bias, where each token uses the matrix of its expert."""

    def __init__(
        self,
        key: Array,
        shape: tuple[int, int, int],
        axes: tuple[str | None, ...],
        *,
        std: float,
        bias: bool,
        dtype: DTypeLike,
    ):
        self.kernel = new_param(key, shape, ("experts", *axes), std, dtype, matrix=(1, 1))
        experts, _, outputs = shape
        zeros = jnp.zeros((experts, outputs), dtype)
        self.bias = nnx.Param(zeros, axes=("experts", axes[-1])) if bias else None

    def __call__(
        self, x: Float[Array, "M I"], groups: Groups, seeds: AdapterDropout | None = None
    ) -> Float[Array, "M O"]:
        y = apply_expert_kernel(self.kernel, x, groups.experts, seeds)
        if self.bias is not None:
            # Round after the copies, so that gradients are summed over tokens in float32.
            bias = self.bias[...].astype(jnp.float32)
            if self.bias.axes[-1] != "mlp":
                # Only one of the devices whose results are summed adds the bias.
                bias = jnp.where(slice_index() == 0, bias, 0)
            bias = jnp.take(bias, groups.experts, axis=0, mode="clip")
            y = y + jnp.repeat(bias, len(x) // len(bias), axis=0).astype(x.dtype)
        return y


class Experts(FeedForward):
    """Σ weight · down(activation(gate(x)) · up(x)) over the experts of each token, plus the shared
    expert. No token is dropped.

    Auxiliary sums: `chosen` `[X]`, tokens per expert; `probability` `[X]`, each expert's share of a
    token's scores; `z`, the squared log-sum-exp of the logits.
    """

    # Rounding could send a token to another expert in the backward pass, and the saved gate and up
    # would then belong to other tokens.
    SAVED_WITH: ClassVar = (ROUTING,)
    LINEAR: ClassVar = False

    def __init__(self, config: ModelConfig, key: Array, dtype: DTypeLike):
        D, F, X = config.hidden_size, config.expert_F, config.experts.count
        router, gate, up, down = jax.random.split(key, 4)
        std, bias = config.init_std, config.mlp_bias

        def linear(key, inputs, outputs, axes, std):
            shape = X, inputs, outputs
            return ExpertLinear(key, shape, axes, std=std, bias=bias, dtype=dtype)

        self.config = config
        self.router = Router(config, router, dtype)
        self.gate = linear(gate, D, F, ("embed", "mlp"), std)
        self.up = linear(up, D, F, ("embed", "mlp"), std)
        self.down = linear(down, F, D, ("mlp", "embed"), std / (2 * config.num_layers) ** 0.5)
        size = config.experts.shared_size
        self.shared = Mlp(config, jax.random.fold_in(key, 0), dtype, size) if size else None
        norms = [Norm(config, dtype) if config.experts.norms else None for _ in range(3)]
        self.norm, self.routed_norm, self.shared_norm = norms
        sizes, options = ((D,), (1,), ("embed", None)), dict(std=std, bias=False, dtype=dtype)
        shared_gate = Linear(jax.random.fold_in(key, 1), *sizes, **options)
        self.shared_gate = shared_gate if config.experts.shared_gate else None

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        counted: Bool[Array, "B T"],
        seeds: AdapterDropout | None = None,
        offload: float = 0.0,
        residual: Float[Array, "B T D"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Auxiliary]:
        """As `FeedForward`. With `experts.norms`, router and experts read `residual`, the stream
        before the norm that gave `x`."""
        # Each device groups its own tokens; a sort over all tokens would gather them. Generation
        # may have fewer sequences than devices.
        mesh, axes = jax.sharding.get_abstract_mesh(), free_axes(FOLDED_BATCH)
        sharded = x.shape[0] % math.prod(mesh.shape[name] for name in axes) == 0
        tokens = SHARDED if sharded else REPLICATED
        key, ids = (None, None) if seeds is None else (seeds.key, seeds.ids)
        # The mesh shards the shared expert like any linear layer.
        routed = jax.tree.map(lambda leaf: leaf, self)
        routed.shared = routed.shared_gate = routed.routed_norm = routed.shared_norm = None
        run = partial(_run, sharded=sharded, offload=offload)
        inputs = expert_placement(routed), tokens, tokens, REPLICATED, tokens
        y, aux = per_device(run, axes, inputs, tokens)(
            routed, x if residual is None else residual, counted, key, ids
        )
        y = y if self.routed_norm is None else self.routed_norm(y)
        if self.shared is not None:
            shared, _ = self.shared(x, counted=counted, seeds=seeds, offload=offload)
            shared = shared if self.shared_norm is None else self.shared_norm(shared)
            if self.shared_gate is not None:
                gate = jax.nn.sigmoid(self.shared_gate(x, seeds).astype(jnp.float32))
                shared = (gate * shared.astype(jnp.float32)).astype(shared.dtype)
            y += shared
        return y, aux

    def activate(
        self, gate: Float[Array, "*b F"], up: Float[Array, "*b F"]
    ) -> Float[Array, "*b F"]:
        """Computes activation(gate) · up, with the config's limit and offset."""
        config = self.config
        if (limit := config.experts.glu_limit) is not None:
            gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return activate(config.activation, gate, up + config.experts.glu_offset)

    @staticmethod
    def auxiliary_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
        X = (config.experts.count,)
        return dict(chosen=X, probability=X, z=())

    @staticmethod
    def has_auxiliary_loss(config: ModelConfig) -> bool:
        return bool(config.experts.aux_loss or config.experts.z_loss)

    @staticmethod
    def auxiliary_loss(
        config: ModelConfig, sums: Auxiliary, totals: Auxiliary, tokens: Array
    ) -> Float[Array, ""]:
        """Computes the load-balancing loss of Switch Transformers (Fedus et al. 2021, arXiv
        2101.03961, equation 4), with token shares and probabilities averaged over all layers, plus
        the z-loss of ST-MoE (Zoph et al. 2022, arXiv 2202.08906, equation 5)."""
        layers, experts = totals["chosen"].shape
        share = totals["chosen"].sum(0) / (layers * tokens)
        probability = sums["probability"].sum(0) / (layers * tokens)
        balance = experts * (share * probability).sum()
        z = sums["z"].sum() / (layers * tokens)
        return (config.experts.aux_loss or 0.0) * balance + config.experts.z_loss * z

    @staticmethod
    def metrics(
        config: ModelConfig, totals: Auxiliary, tokens: Array
    ) -> dict[str, Float[Array, ""]]:
        """Returns the load of the busiest expert of any layer, as a multiple of a balanced load."""
        chosen = totals["chosen"]
        balanced = tokens * config.experts.per_token / chosen.shape[1]
        return {"train/max_expert_load": chosen.max() / balanced}


class _Tokens(NamedTuple):
    """Tokens with their experts and the weights of these experts; `ids` seed AdapterDropout."""

    x: Float[Array, "1 T D"]
    chosen: Int[Array, "1 T k"]
    weights: Float[Array, "1 T k"]
    ids: Int[Array, "1 T"] | None


def _run(
    network: Experts,
    x: Float[Array, "B T D"],
    counted: Bool[Array, "B T"],
    key: UInt32[Array, "2"] | None,
    ids: Int[Array, "B T"] | None,
    axes: tuple[str, ...],
    sharded: bool,
    offload: float,
) -> tuple[Float[Array, "B T D"], Auxiliary]:
    """Runs the router on one device's tokens, and the experts of all devices. `key` and `ids` seed
    AdapterDropout; `sharded` says whether other devices hold other tokens."""
    config, (B, T, D), X = network.config, x.shape, network.config.experts.count
    logits = network.router(x.reshape(B * T, D))
    chosen = checkpoint_name(network.router.choose(logits), ROUTING)
    weights = _weights(config, logits, chosen)
    if (factors := network.router.factors) is not None:
        weights *= factors[...].astype(jnp.float32)[chosen]
    sums = _sums(config, logits.reshape(B, T, X), chosen.reshape(B, T, -1), counted)
    experts = jax.tree.map(lambda leaf: leaf, network)
    experts.router = experts.norm = None
    x = x if network.norm is None else network.norm(x)
    tokens = _Tokens(
        x.reshape(1, B * T, D),
        chosen[None],
        weights[None],
        None if ids is None else ids.reshape(1, B * T),
    )
    run = partial(
        sum_over_devices, partial(_run_experts, offload=offload), dtype=x.dtype, sharded=sharded
    )
    if axes := slice_axes(config.expert_F):
        run = partial(_run_slices, run, axes=axes)
    return run((experts, key), tokens).reshape(B, T, D), sums


def _run_slices(
    run: Callable[[Any, Any], Array],
    experts: tuple[Experts, UInt32[Array, "2"] | None],
    tokens: _Tokens,
    *,
    axes: tuple[str, ...],
) -> Float[Array, "1 T D"]:
    """Runs `run` on each device of `axes` with a slice of the experts' width."""
    # Block-quantized scales cannot be sliced along the width.
    experts = dequantize(experts, tokens.x.dtype)
    placement = slice_placement(experts)
    return sum_over_slices(run, experts, tokens, placement=placement, axes=axes)


def _run_experts(
    experts: tuple[Experts, UInt32[Array, "2"] | None], tokens: _Tokens, *, offload: float
) -> Float[Array, "1 T D"]:
    """Sums the weighted results of each token's experts on this device; in float32 if other devices
    hold other experts."""
    network, key = experts
    x, chosen, weights, ids = jax.tree.map(lambda leaf: leaf[0], tokens)
    X, k = network.config.experts.count, chosen.shape[1]
    own, size = own_experts(chosen, X)
    groups = group(own, size, block_rows(chosen.size, X))
    rows = dispatch(x, groups)
    seeds = None
    if key is not None and ids is not None:
        # A token gets a different dropout in each of its experts.
        each = ids[:, None] * k + jnp.arange(k, dtype=ids.dtype)[None]
        each = jnp.take(each.reshape(-1), groups.choices, mode="fill", fill_value=0)
        seeds = AdapterDropout(key, each[None])
    gate, up = (
        checkpoint_named(linear(rows, groups, seeds)[None], name, offload)[0]
        for name, linear in (("gate", network.gate), ("up", network.up))
    )
    rows = network.activate(gate, up)
    if seeds is not None:
        seeds = seeds._replace(first=slice_index() * rows.shape[1])
    rows = network.down(rows, groups, seeds)
    weights = jnp.take(weights.reshape(-1), groups.choices, mode="fill", fill_value=0)
    rows *= weights[:, None].astype(rows.dtype)
    return collect(rows if size == X else rows.astype(jnp.float32), groups)[None]


def _scores(config: ModelConfig, logits: Float[Array, "*b X"]) -> Float[Array, "*b X"]:
    softmax = config.experts.scores == "softmax"
    return jax.nn.softmax(logits) if softmax else jax.nn.sigmoid(logits)


def _weights(
    config: ModelConfig, logits: Float[Array, "T X"], chosen: Int[Array, "T k"]
) -> Float[Array, "T k"]:
    """Returns the scores of the chosen experts, optionally normalized to sum to 1, times the
    config's factor."""
    if config.experts.scores == "softmax" and config.experts.renormalized:
        # Softmax over the chosen experts equals the quotient, and avoids underflow.
        weights = jax.nn.softmax(jnp.take_along_axis(logits, chosen, 1))
    else:
        weights = jnp.take_along_axis(_scores(config, logits), chosen, 1)
        if config.experts.renormalized:
            weights /= weights.sum(1, keepdims=True) + 1e-20
    return config.experts.scale * weights


def _sums(
    config: ModelConfig,
    logits: Float[Array, "B T X"],
    chosen: Int[Array, "B T k"],
    counted: Bool[Array, "B T"],
) -> Auxiliary:
    """Sums the auxiliary values over each sequence's counted tokens."""
    B, _, X = logits.shape
    each = counted.astype(jnp.float32)
    sequences = jnp.arange(B)[:, None, None]
    tokens = jnp.zeros((B, X)).at[sequences, chosen].add(each[..., None])
    scores = _scores(config, logits)
    return dict(
        chosen=tokens,
        probability=jnp.einsum("bt,btx->bx", each, scores / scores.sum(2, keepdims=True)),
        z=(each * jnp.square(jax.nn.logsumexp(logits, 2))).sum(1),
    )
