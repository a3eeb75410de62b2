"""The parts of a transformer layer: modules that hold parameters, and pure calls."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

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
    dtype: jnp.dtype,
    **metadata: Any,
) -> nnx.Param:
    """Normal with this standard deviation, drawn in float32."""
    value = (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
    return nnx.Param(value, axes=axes, **metadata)


# Key data uint32 `[2]` and numbers of the tokens `[B, T]`, for the dropout of what a kernel reads.
Noise = tuple[Array, Array] | None


def product(kernel: Any, x: Array, contracted: int, noise: Noise = None) -> Array:
    """x · kernel over the last `contracted` axes of x, in x's dtype. A kernel that is no parameter
    itself knows how.
    """
    if isinstance(kernel, nnx.Variable):
        return jnp.tensordot(x, kernel[...].astype(x.dtype), axes=contracted)
    return kernel(x, contracted, noise)


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
        dtype: jnp.dtype,
    ):
        matrix = len(inputs), len(outputs)
        self.kernel = new_param(key, inputs + outputs, axes, std, dtype, matrix=matrix)
        self.bias = nnx.Param(jnp.zeros(outputs, dtype), axes=axes[len(inputs) :]) if bias else None
        self.contracted = len(inputs)

    def __call__(self, x: Array, noise: Noise = None) -> Array:
        y = product(self.kernel, x, self.contracted, noise)
        if self.bias is not None:
            bias = self.bias[...].astype(x.dtype)
            y = y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)
        return y


class Norm(nnx.Module):
    """The config's norm over the last axis, of `size` features: the residual stream's by default,
    whose parameters bear the logical axis `axis`.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: jnp.dtype,
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

    def __init__(self, config: ModelConfig, key: Array, dtype: jnp.dtype):
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
        self, x: Float[Array, "B T D"], offload: float = 0.0, noise: Noise = None
    ) -> Float[Array, "B T D"]:
        act, up = ACTIVATIONS[self.activation], checkpoint_named(self.up(x, noise), "up", offload)
        if self.gate is None:
            return self.down(act(up), noise)
        return self.down(act(checkpoint_named(self.gate(x, noise), "gate", offload)) * up, noise)


class Layer(nnx.Module):
    """One transformer layer, in three position-wise parts with attention between them.

    The parts take a `place`: positions `[B, T]`, the kind of the layer (an index into the config's
    `ropes`) and the length of each token's document `[B, T]` (None if no scaling depends on it).
    """

    def __init__(self, config: ModelConfig, key: Array, dtype: jnp.dtype):
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
        self, x: Float[Array, "B T D"], place: tuple, noise: Noise = None
    ) -> Float[Array, "B T N H"]:
        return self._head(self.query(self._read(x), noise), self.query_norm, place)

    def keys_values(
        self, x: Float[Array, "B T D"], place: tuple, noise: Noise = None
    ) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        x = self._read(x)
        k = self._head(self.key(x, noise), self.key_norm, place)
        return k, self._clip(self.value(x, noise))

    def finish(
        self,
        x: Float[Array, "B T D"],
        out: Float[Array, "B T N H"],
        rows: Int[Array, "B T"],
        keys: tuple[Array, Array, Array] | None,
        offload: float = 0.0,
    ) -> Float[Array, "B T D"]:
        """All that follows attention: output projection, residuals, norms, feed-forward. `rows`
        numbers the tokens for dropout, whose keys are those of the two residuals and of the
        kernels; `offload` is the share of the tokens whose kept values go to host memory.
        """
        config, (first, second) = self.config, keys[:2] if keys else (None, None)
        rate, noise = config.residual_dropout or 0.0, keys and (keys[2], rows)
        attended = self.out(out, noise)
        if self.attention_post_norm is not None:
            attended = self.attention_post_norm(attended)
        attended = dropout(attended, first, rate, rows)
        norm = self.attention_norm if self.mlp_norm is None else self.mlp_norm
        if config.residual != "sequential":
            return x + attended + dropout(self.mlp(norm(x), offload, noise), second, rate, rows)
        x = (self._read(x) if config.residual_normed else x) + attended
        x = checkpoint_named(x, "attended", offload)
        if config.norm_position == "post":
            x = self.attention_norm(x)
            return norm(x + dropout(self.mlp(x, offload, noise), second, rate, rows))
        read = norm(x)
        changed = self.mlp(read, offload, noise)
        if self.mlp_post_norm is not None:
            changed = self.mlp_post_norm(changed)
        return (read if config.residual_normed else x) + dropout(changed, second, rate, rows)

    def _read(self, x: Array) -> Array:
        return x if self.config.norm_position == "post" else self.attention_norm(x)

    def _clip(self, x: Array) -> Array:
        limit = self.config.clip_qkv
        return x if limit is None else jnp.clip(x, -limit, limit)

    def _head(self, x: Array, norm: Norm | None, place: tuple) -> Array:
        x, (positions, kind, length) = self._clip(x), place
        if norm is not None:
            x = norm(x)
        if self.config.position_embedding != "rope":
            return x
        frequencies, factor = rotary(self.config, kind, length)
        return rope(x, positions, frequencies, factor)


def rotary(
    config: ModelConfig, kind: Array | int, length: Int[Array, "B T"] | None
) -> tuple[Float[Array | np.ndarray, "... R"], Float[Array, ""] | float]:
    """Frequencies, and the factor on cos and sin, of this kind of layer."""
    each = [
        rope_frequencies(
            int(config.H * parameters.get("partial_rotary_factor", 1.0)),
            parameters,
            max_position_embeddings=config.max_position_embeddings,
            length=length,
        )
        for parameters in config.ropes
    ]
    if all(parameters == config.ropes[0] for parameters in config.ropes):
        return each[0]
    frequencies, factors = zip(*each, strict=True)
    tokens = () if length is None else length.shape
    frequencies = [f if f.ndim > 1 else f.reshape(*(1 for _ in tokens), -1) for f in frequencies]
    frequencies = [jnp.broadcast_to(f, (*tokens, f.shape[-1])) for f in frequencies]
    return jnp.stack(frequencies)[kind], jnp.stack([jnp.float32(f) for f in factors])[kind]
