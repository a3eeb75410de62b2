"""The parts of a transformer layer: modules that hold parameters; their calls are pure."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int, UInt32

from bptjax.models.config import ModelConfig
from bptjax.ops.checkpoint_names import checkpoint_named
from bptjax.ops.dropout import dropout
from bptjax.ops.norm import layer_norm, rms_norm
from bptjax.ops.position import rope, rope_frequencies

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
    "tanh": jnp.tanh,
}


def new_param(
    key: Array,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    std: float,
    dtype: DTypeLike,
    **metadata: Any,
) -> nnx.Param:
    """Draws a normal parameter with this standard deviation, in float32."""
    value = (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
    return nnx.Param(value, axes=axes, **metadata)


class TokenContext(NamedTuple):
    """What a layer knows of each token beside the residual stream.

    Attributes:
      positions: in the document, for rotary embeddings.
      ids: number of the token in the batch, which seeds its dropout.
      lengths: number of tokens of the document; None if no rotary scaling depends on it.
    """

    positions: Int[Array, "B T"]
    ids: Int[Array, "B T"]
    lengths: Int[Array, "B T"] | None = None


class DropoutKeys(NamedTuple):
    """Key data of a layer: for attention weights, for the outputs of attention and of the
    feed-forward network, and for the inputs of adapters."""

    attention: UInt32[Array, "2"]
    attended: UInt32[Array, "2"]
    feed_forward: UInt32[Array, "2"]
    adapters: UInt32[Array, "2"]


class AdapterDropout(NamedTuple):
    """Seeds of the dropout of an adapter's input: key data, and ids of the tokens."""

    key: UInt32[Array, "2"]
    ids: Int[Array, "B T"]


def adapter_dropout(keys: DropoutKeys | None, tokens: TokenContext) -> AdapterDropout | None:
    """Returns the seeds for a layer's adapters; None without dropout."""
    return None if keys is None else AdapterDropout(keys.adapters, tokens.ids)


def apply_kernel(kernel: Any, x: Array, in_ndim: int, seeds: AdapterDropout | None = None) -> Array:
    """Computes x · kernel over the last `in_ndim` axes of x, in x's dtype. A kernel that is not a
    parameter, as one with an adapter, computes this itself.
    """
    if isinstance(kernel, nnx.Variable):
        return jnp.tensordot(x, kernel[...].astype(x.dtype), axes=in_ndim)
    return kernel(x, in_ndim, seeds)


class Linear(nnx.Module):
    """x · kernel + bias over the last axes of x, in x's dtype."""

    def __init__(
        self,
        key: Array,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        axes: tuple[str | None, ...],
        *,
        std: float,
        bias: bool,
        dtype: DTypeLike,
    ):
        matrix = len(inputs), len(outputs)
        self.kernel = new_param(key, inputs + outputs, axes, std, dtype, matrix=matrix)
        self.bias = nnx.Param(jnp.zeros(outputs, dtype), axes=axes[len(inputs) :]) if bias else None
        self.in_ndim = len(inputs)

    def __call__(self, x: Array, seeds: AdapterDropout | None = None) -> Array:
        y = apply_kernel(self.kernel, x, self.in_ndim, seeds)
        if self.bias is not None:
            bias = self.bias[...].astype(x.dtype)
            y = y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)
        return y


class Norm(nnx.Module):
    """The config's norm over the last axis, of `size` features; by default the residual stream's.
    Its parameters have the logical axis `axis`.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: DTypeLike,
        size: int | None = None,
        axis: str | None = "embed",
    ):
        shape = (config.hidden_size if size is None else size,)
        self.kind, self.eps, self.offset = config.norm, config.norm_eps, config.norm_unit_offset
        start = jnp.zeros if config.norm_unit_offset else jnp.ones
        self.scale = nnx.Param(start(shape, dtype), axes=(axis,)) if config.norm_scale else None
        self.bias = nnx.Param(jnp.zeros(shape, dtype), axes=(axis,)) if config.norm_bias else None

    def __call__(self, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        scale = jnp.ones(x.shape[-1]) if self.scale is None else self.scale[...]
        if self.offset:
            scale = 1.0 + scale.astype(jnp.float32)
        if self.kind == "rms":
            return rms_norm(x, scale, eps=self.eps)
        bias = None if self.bias is None else self.bias[...]
        return layer_norm(x, scale, bias, eps=self.eps)


class Mlp(nnx.Module):
    """down(activation(gate(x)) · up(x)) or down(activation(up(x)))."""

    def __init__(self, config: ModelConfig, key: Array, dtype: DTypeLike):
        D, F, std = (config.hidden_size,), (config.F,), config.init_std
        gate, up, down = jax.random.split(key, 3)
        bias = config.mlp_bias

        def linear(key, inputs, outputs, axes, std):
            return Linear(key, inputs, outputs, axes, std=std, bias=bias, dtype=dtype)

        self.activation = config.activation
        self.gate = linear(gate, D, F, ("embed", "mlp"), std) if config.gated else None
        self.up = linear(up, D, F, ("embed", "mlp"), std)
        self.down = linear(down, F, D, ("mlp", "embed"), std / (2 * config.num_layers) ** 0.5)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        seeds: AdapterDropout | None = None,
        offload: float = 0.0,
    ) -> Float[Array, "B T D"]:
        activation = ACTIVATIONS[self.activation]
        up = checkpoint_named(self.up(x, seeds), "up", offload)
        if self.gate is None:
            return self.down(activation(up), seeds)
        gate = checkpoint_named(self.gate(x, seeds), "gate", offload)
        return self.down(activation(gate) * up, seeds)


class Layer(nnx.Module):
    """A transformer layer: three position-wise functions, with attention between the first two
    (`queries`, `keys_values`) and the last (`finish`).
    """

    def __init__(self, config: ModelConfig, key: Array, dtype: DTypeLike):
        D, N, K, H = config.hidden_size, config.num_heads, config.K, config.H
        keys, std = jax.random.split(key, 5), config.init_std

        def linear(key, heads, axis):
            axes = ("embed", axis, None)
            return Linear(key, (D,), (heads, H), axes, std=std, bias=config.qkv_bias, dtype=dtype)

        self.config = config
        self.attention_norm = Norm(config, dtype)
        self.query = linear(keys[0], N, "heads")
        self.key = linear(keys[1], K, "kv_heads")
        self.value = linear(keys[2], K, "kv_heads")
        self.query_norm = Norm(config, dtype, H, None) if config.qk_norm else None
        self.key_norm = Norm(config, dtype, H, None) if config.qk_norm else None
        sinks = nnx.Param(jnp.zeros(N, dtype), axes=("heads",))
        self.sinks = sinks if config.attention_sinks else None
        self.out = Linear(
            keys[3],
            (N, H),
            (D,),
            ("heads", None, "embed"),
            std=std / (2 * config.num_layers) ** 0.5,
            bias=config.out_bias,
            dtype=dtype,
        )
        sandwich = config.norm_position == "sandwich"
        self.attention_post_norm = Norm(config, dtype) if sandwich else None
        self.mlp_norm = None if config.residual == "shared" else Norm(config, dtype)
        self.mlp_post_norm = Norm(config, dtype) if sandwich else None
        self.mlp = Mlp(config, keys[4], dtype)

    def queries(
        self,
        x: Float[Array, "B T D"],
        tokens: TokenContext,
        rope: dict[str, Any],
        keys: DropoutKeys | None = None,
    ) -> Float[Array, "B T N H"]:
        """Computes the queries of the residual stream, rotated by these rotary parameters."""
        q = self.query(self._read(x), adapter_dropout(keys, tokens))
        return self._rotate(self._clip(q), self.query_norm, tokens, rope)

    def keys_values(
        self,
        x: Float[Array, "B T D"],
        tokens: TokenContext,
        rope: dict[str, Any],
        keys: DropoutKeys | None = None,
    ) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Computes the keys of the residual stream, rotated by these rotary parameters, and the
        values."""
        x, seeds = self._read(x), adapter_dropout(keys, tokens)
        k = self._rotate(self._clip(self.key(x, seeds)), self.key_norm, tokens, rope)
        return k, self._clip(self.value(x, seeds))

    def finish(
        self,
        x: Float[Array, "B T D"],
        out: Float[Array, "B T N H"],
        tokens: TokenContext,
        keys: DropoutKeys | None = None,
        offload: float = 0.0,
    ) -> Float[Array, "B T D"]:
        """Computes everything after attention: output projection, residuals, norms, feed-forward
        network. `offload` is the share of the tokens whose saved activations go to host memory.
        """
        config, seeds = self.config, adapter_dropout(keys, tokens)
        rate = config.residual_dropout or 0.0

        def feed_forward(x, post_norm=None):
            y = self.mlp(x, seeds=seeds, offload=offload)
            y = y if post_norm is None else post_norm(y)
            return dropout(y, keys and keys.feed_forward, rate, tokens.ids)

        attended = self.out(out, seeds)
        if self.attention_post_norm is not None:
            attended = self.attention_post_norm(attended)
        attended = dropout(attended, keys and keys.attended, rate, tokens.ids)
        norm = self.attention_norm if self.mlp_norm is None else self.mlp_norm
        if config.residual != "sequential":
            return x + attended + feed_forward(norm(x))
        x = (self._read(x) if config.residual_normed else x) + attended
        x = checkpoint_named(x, "attended", offload)
        if config.norm_position == "post":
            x = self.attention_norm(x)
            return norm(x + feed_forward(x))
        normed = norm(x)
        residual = normed if config.residual_normed else x
        return residual + feed_forward(normed, self.mlp_post_norm)

    def _read(self, x: Array) -> Array:
        return x if self.config.norm_position == "post" else self.attention_norm(x)

    def _clip(self, x: Array) -> Array:
        limit = self.config.clip_qkv
        return x if limit is None else jnp.clip(x, -limit, limit)

    def _rotate(
        self, x: Array, norm: Norm | None, tokens: TokenContext, parameters: dict[str, Any]
    ) -> Array:
        if norm is not None:
            x = norm(x)
        if self.config.position_embedding != "rope":
            return x
        frequencies, factor = rotary(self.config, parameters, tokens.lengths)
        return rope(x, tokens.positions, frequencies, factor)


def rotary(
    config: ModelConfig, parameters: dict[str, Any], length: Int[Array, "B T"] | None
) -> tuple[Float[Array | np.ndarray, "... R"], float]:
    """Returns the frequencies of a layer with these rotary parameters, and the factor on cos and
    sin."""
    return rope_frequencies(
        int(config.H * parameters.get("partial_rotary_factor", 1.0)),
        parameters,
        max_position_embeddings=config.max_position_embeddings,
        length=length,
    )
