"""Per-layer token embeddings."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from bptjax.models.config import ModelConfig
from bptjax.models.feed_forward import activate
from bptjax.models.linear import AdapterDropout, Linear, new_param
from bptjax.models.norm import Norm
from bptjax.parallel.mesh import lookup


class LayerEmbedding(nnx.Module):
    """Token embedding of one layer: gate(x) · (entry + norm(context(x_0))) / √2, where x_0 is the
    input of the first layer; the result is projected and normalized for the residual stream. Used
    by Gemma 4's small models. `table` is `[V, P]`, `context` `[D, P]`."""

    def __init__(self, config: ModelConfig, key: Array, dtype: DTypeLike):
        D, P, std = config.hidden_size, config.layer_embedding.size, config.init_std
        keys = jax.random.split(key, 4)

        def linear(key, inputs, outputs, axes):
            return Linear(key, (inputs,), (outputs,), axes, std=std, bias=False, dtype=dtype)

        self.activation = config.activation
        self.table = new_param(keys[0], (config.V, P), ("vocab", "embed"), std, dtype)
        # Not a `Linear`: files store the contexts of all layers as one linear layer.
        shape, axes = (D, P), ("embed", None)
        self.context = new_param(keys[1], shape, axes, std, dtype, matrix=(1, 1))
        self.gate = linear(keys[2], D, P, ("embed", None))
        self.out = linear(keys[3], P, D, (None, "embed"))
        self.norm = Norm(config, dtype)

    def read(
        self, tokens: Int[Array, "B T"], x: Float[Array, "B T D"], norm: Norm
    ) -> Float[Array, "B T P"]:
        """Computes the features of each token.

        Args:
          x: input of the first layer.
          norm: norm of the context, shared by all layers.
        """
        P, D = self.table.shape[-1], x.shape[-1]
        entry = lookup(self.table[...], tokens, "vocab").astype(x.dtype)
        # Checkpoints were trained with this factor rounded to the compute dtype.
        entry = entry * jnp.asarray(P**0.5, x.dtype)
        kernel = self.context[...].astype(x.dtype)
        context = jnp.einsum("btd,dp->btp", x, kernel, preferred_element_type=jnp.float32)
        context = norm(context * D**-0.5)
        return ((context + entry.astype(jnp.float32)) * 2**-0.5).astype(x.dtype)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        embedded: Float[Array, "B T P"],
        seeds: AdapterDropout | None = None,
    ) -> Float[Array, "B T D"]:
        """Computes the addend to the residual stream. `embedded` is the result of `read`."""
        gate = self.gate(x, seeds)
        return self.norm(self.out(activate(self.activation, gate, embedded), seeds))
