"""The feed-forward network of a layer, and the MLP."""

import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from bptjax.models.config import ModelConfig
from bptjax.models.linear import AdapterDropout, Linear
from bptjax.ops.checkpoint_names import checkpoint_named


def _gelu_tanh(x: Array) -> Array:
    """Computes `jax.nn.gelu` with (1 + tanh(y)) / 2 as sigmoid(2 y): half the rounding error."""
    return x * jax.nn.sigmoid(8**0.5 * math.pi**-0.5 * (x + 0.044715 * x * x * x))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
    "tanh": jnp.tanh,
}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def activate(
    name: str, gate: Float[Array, "*b F"], up: Float[Array, "*b F"] | None = None
) -> Float[Array, "*b F"]:
    """Computes activation(gate) · up, or the activation alone, in float32, rounded once. The
    backward pass saves only `gate` and `up`."""
    y = ACTIVATIONS[name](gate.astype(jnp.float32))
    return (y if up is None else y * up.astype(jnp.float32)).astype(gate.dtype)


def _activate_backward(name: str, inputs: tuple[Array, Array | None], dy: Array):
    dgate, dup = jax.vjp(partial(activate.fun, name), *inputs)[1](dy)
    if dup is None:
        # Most networks without `up` have a bias, whose gradient sums `dgate`: fusing both is slower
        # than two kernels.
        dgate = jax.lax.optimization_barrier(dgate)
    return dgate, dup


activate.defvjp(lambda name, *inputs: (activate.fun(name, *inputs), inputs), _activate_backward)

# Float32 sums over tokens, by name, for an auxiliary loss and metrics: `[B, ...]` per sequence, or
# `[L, ...]` per layer over a batch.
Auxiliary = dict[str, Array]


class FeedForward(nnx.Module):
    """A position-wise network of a layer."""

    # Activations that a remat policy can save if the network runs in a single chunk.
    RESIDUAL_NAMES: ClassVar[tuple[str, ...]] = ("gate", "up")
    # Results that a remat policy saves together with them.
    SAVED_WITH: ClassVar[tuple[str, ...]] = ()
    # Whether `train.linear` applies to its matrices.
    LINEAR: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, key: Array, dtype: DTypeLike):
        raise NotImplementedError

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        counted: Bool[Array, "B T"],
        seeds: AdapterDropout | None = None,
        offload: float = 0.0,
    ) -> tuple[Float[Array, "B T D"], Auxiliary]:
        """Computes the output, and the auxiliary sums of each sequence.

        Args:
          counted: tokens that count in the auxiliary sums.
          seeds: seeds of adapter dropout; None for no dropout.
          offload: share of the tokens whose saved activations go to host memory.
        """
        raise NotImplementedError

    @staticmethod
    def auxiliary_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of a sequence's auxiliary sums, by name."""
        return {}

    @staticmethod
    def has_auxiliary_loss(config: ModelConfig) -> bool:
        """Returns whether networks of this config have an auxiliary loss."""
        return False

    @staticmethod
    def auxiliary_loss(
        config: ModelConfig, sums: Auxiliary, totals: Auxiliary, tokens: Array
    ) -> Float[Array, ""]:
        """Computes a micro-batch's share of the auxiliary loss, in nats per token, which is added
        to the cross-entropy. The shares of all micro-batches add up to the global batch's loss.

        Args:
          sums: sums `[L, ...]` over the tokens of the micro-batch, without padding.
          totals: the same sums over the global batch, without a gradient.
          tokens: number of tokens of the global batch, without padding.
        """
        raise NotImplementedError

    @staticmethod
    def metrics(
        config: ModelConfig, totals: Auxiliary, tokens: Array
    ) -> dict[str, Float[Array, ""]]:
        """Returns metrics of the global batch, by name; arguments as in `auxiliary_loss`."""
        return {}


class Mlp(FeedForward):
    """down(activation(gate(x)) · up(x)) or down(activation(up(x)))."""

    def __init__(self, config: ModelConfig, key: Array, dtype: DTypeLike, size: int | None = None):
        """Makes the network; `size` is its inner width, by default the config's."""
        D, F, std = (config.hidden_size,), (size or config.F,), config.init_std
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
        counted: Bool[Array, "B T"],
        seeds: AdapterDropout | None = None,
        offload: float = 0.0,
    ) -> tuple[Float[Array, "B T D"], Auxiliary]:
        up = checkpoint_named(self.up(x, seeds), "up", offload)
        if self.gate is None:
            return self.down(activate(self.activation, up), seeds), {}
        gate = checkpoint_named(self.gate(x, seeds), "gate", offload)
        return self.down(activate(self.activation, gate, up), seeds), {}
