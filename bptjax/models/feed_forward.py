"""Feed-forward networks of a layer, by name."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from bptjax.models.config import ModelConfig
from bptjax.models.linear import AdapterDropout, Linear
from bptjax.ops.checkpoint_names import checkpoint_named

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
    "tanh": jnp.tanh,
}

# Values `[B, T, ...]` of each token for an auxiliary loss, by name. Only their sums are used.
Auxiliary = dict[str, Array]


class FeedForward(nnx.Module):
    """A position-wise network of a layer.

    Attributes:
      has_auxiliary_loss: calls return auxiliary values.
    """

    has_auxiliary_loss: bool = False

    def __init__(self, config: ModelConfig, key: Array, dtype: DTypeLike):
        raise NotImplementedError

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        seeds: AdapterDropout | None = None,
        offload: float = 0.0,
    ) -> tuple[Float[Array, "B T D"], Auxiliary]:
        """Computes the output and the auxiliary values.

        Args:
          seeds: for the dropout of adapters; None for no dropout.
          offload: share of the tokens whose saved activations go to host memory.
        """
        raise NotImplementedError

    @staticmethod
    def auxiliary_loss(config: ModelConfig, sums: Auxiliary, tokens: Array) -> Float[Array, ""]:
        """Computes the mean loss per token, in nats, that is added to the cross-entropy.

        Args:
          sums: float32 sums `[L, ...]` of the auxiliary values over all tokens but padding.
          tokens: number of these tokens.
        """
        raise NotImplementedError


class Mlp(FeedForward):
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
    ) -> tuple[Float[Array, "B T D"], Auxiliary]:
        activation = ACTIVATIONS[self.activation]
        up = checkpoint_named(self.up(x, seeds), "up", offload)
        if self.gate is None:
            return self.down(activation(up), seeds), {}
        gate = checkpoint_named(self.gate(x, seeds), "gate", offload)
        return self.down(activation(gate) * up, seeds), {}


FEED_FORWARDS: dict[str, type[FeedForward]] = {"mlp": Mlp}


def new_feed_forward(config: ModelConfig, key: Array, dtype: DTypeLike) -> FeedForward:
    """Makes the network that `config.feed_forward` names."""
    return FEED_FORWARDS[config.feed_forward](config, key, dtype)
