"""The parts of a transformer layer: modules that hold parameters, and pure calls."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from bptjax.models.config import ModelConfig
from bptjax.ops.dropout import dropout
from bptjax.ops.norm import layer_norm, rms_norm
from bptjax.ops.position import rope, rope_frequencies

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


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
        kernel = std * jax.random.normal(key, inputs + outputs, jnp.float32)
        self.kernel = nnx.Param(kernel.astype(dtype), axes=axes)
        self.bias = nnx.Param(jnp.zeros(outputs, dtype), axes=axes[len(inputs) :]) if bias else None
        self.contracted = len(inputs)

    def __call__(self, x: Array) -> Array:
        y = jnp.tensordot(x, self.kernel[...].astype(x.dtype), axes=self.contracted)
        if self.bias is not None:
            bias = self.bias[...].astype(x.dtype)
            y = y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)
        return y


class Norm(nnx.Module):
    """RMSNorm, or LayerNorm with or without bias."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        D = config.hidden_size
        self.kind, self.eps = config.norm, config.norm_eps
        self.scale = nnx.Param(jnp.ones((D,), dtype), axes=("embed",))
        biased = config.bias and config.norm == "layer"
        self.bias = nnx.Param(jnp.zeros((D,), dtype), axes=("embed",)) if biased else None

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        if self.kind == "rms":
            return rms_norm(x, self.scale[...], eps=self.eps)
        bias = None if self.bias is None else self.bias[...]
        return layer_norm(x, self.scale[...], bias, eps=self.eps)


class Mlp(nnx.Module):
    """down(activation(gate(x)) · up(x)) or down(activation(up(x)))."""

    def __init__(self, config: ModelConfig, key: Array, dtype: jnp.dtype):
        D, F, std = (config.hidden_size,), (config.F,), config.init_std
        gate, up, down = jax.random.split(key, 3)
        wide = dict(std=std, bias=config.bias, dtype=dtype)
        narrow = wide | dict(std=std / (2 * config.num_layers) ** 0.5)
        self.activation = config.activation
        self.gate = Linear(gate, D, F, ("embed", "mlp"), **wide) if config.gated else None
        self.up = Linear(up, D, F, ("embed", "mlp"), **wide)
        self.down = Linear(down, F, D, ("mlp", "embed"), **narrow)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        act = ACTIVATIONS[self.activation]
        if self.gate is None:
            return self.down(act(self.up(x)))
        return self.down(act(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    """One pre-norm transformer layer, in three position-wise parts with attention between them."""

    def __init__(self, config: ModelConfig, key: Array, dtype: jnp.dtype):
        D, N, K, H = config.hidden_size, config.num_heads, config.K, config.H
        keys = jax.random.split(key, 5)
        wide = dict(std=config.init_std, bias=config.bias, dtype=dtype)
        narrow = wide | dict(std=config.init_std / (2 * config.num_layers) ** 0.5)
        self.config = config
        self.attention_norm = Norm(config, dtype)
        self.query = Linear(keys[0], (D,), (N, H), ("embed", "heads", None), **wide)
        self.key = Linear(keys[1], (D,), (K, H), ("embed", "kv_heads", None), **wide)
        self.value = Linear(keys[2], (D,), (K, H), ("embed", "kv_heads", None), **wide)
        self.out = Linear(keys[3], (N, H), (D,), ("heads", None, "embed"), **narrow)
        self.mlp_norm = Norm(config, dtype)
        self.mlp = Mlp(config, keys[4], dtype)

    def _turn(self, x: Array, positions: Int[Array, "B T"]) -> Array:
        if self.config.position != "rope":
            return x
        return rope(x, positions, rope_frequencies(self.config.H, self.config.rope_theta))

    def queries(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T N H"]:
        return self._turn(self.query(self.attention_norm(x)), positions)

    def keys_values(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        x = self.attention_norm(x)
        return self._turn(self.key(x), positions), self.value(x)

    def finish(
        self,
        x: Float[Array, "B T D"],
        out: Float[Array, "B T N H"],
        rows: Int[Array, "B T"],
        keys: tuple[Array, Array] | None,
    ) -> Float[Array, "B T D"]:
        """Output projection, residual, norm, feed-forward, residual. `rows` numbers the tokens for
        dropout.
        """
        rate = self.config.residual_dropout
        first, second = keys if keys is not None else (None, None)
        x = x + dropout(self.out(out), first, rate, rows)
        return x + dropout(self.mlp(self.mlp_norm(x)), second, rate, rows)
