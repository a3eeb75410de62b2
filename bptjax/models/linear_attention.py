"""Linear attention: the gated delta rule after a short convolution, instead of attention."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from bptjax.models.config import ModelConfig
from bptjax.models.linear import AdapterDropout, Linear, new_param
from bptjax.models.mixer import Mixer
from bptjax.ops import delta_rule
from bptjax.ops.checkpoint_names import checkpoint_named
from bptjax.ops.norm import l2_norm, rms_norm
from bptjax.parallel.causal_convolution import causal_convolution
from bptjax.parallel.delta_rule import gated_delta_rule


class LinearAttention(Mixer):
    """The gated delta rule with L2-normalized queries and keys. A convolution and SiLU precede it;
    each head's output is normalized and gated. A layer's state is the float32 state of each head
    and the convolution's last inputs: queries, keys, values.

    Yang et al. 2024, arXiv 2412.06464, Section 3.4.
    """

    AXES: ClassVar = ("batch", "heads", None, None), ("batch", None, None)
    RESIDUAL_NAMES: ClassVar = delta_rule.RESIDUAL_NAMES
    STREAM: ClassVar = 1

    def __init__(self, config: ModelConfig, key: Array, dtype: DTypeLike):
        D, std, J = config.hidden_size, config.init_std, config.linear_attention.conv_size
        (K, H), (N, W) = config.linear_attention.heads
        keys = jax.random.split(key, 11)

        def linear(key, heads, axis, *size):
            axes = ("embed", axis, *(None for _ in size))
            return Linear(key, (D,), (heads, *size), axes, std=std, bias=False, dtype=dtype)

        def convolution(key, heads, axis, size):
            return new_param(key, (J, heads, size), (None, axis, None), std, dtype)

        self.eps = config.norms.eps
        self.query = linear(keys[0], K, "kv_heads", H)
        self.key = linear(keys[1], K, "kv_heads", H)
        self.value = linear(keys[2], N, "heads", W)
        self.gate = linear(keys[3], N, "heads", W)
        self.write = linear(keys[4], N, "heads")
        self.decay = linear(keys[5], N, "heads")
        self.query_convolution = convolution(keys[6], K, "kv_heads", H)
        self.key_convolution = convolution(keys[7], K, "kv_heads", H)
        self.value_convolution = convolution(keys[8], N, "heads", W)
        rates = jax.random.uniform(keys[9], (N,), minval=0.01, maxval=16.0)
        self.log_rate = nnx.Param(jnp.log(rates).astype(dtype), axes=("heads",))
        self.decay_bias = nnx.Param(jnp.ones(N, dtype), axes=("heads",))
        self.norm_scale = nnx.Param(jnp.ones(W, dtype), axes=(None,))
        self.out = Linear(
            keys[10],
            (N, W),
            (D,),
            ("heads", None, "embed"),
            std=std / (2 * config.num_layers) ** 0.5,
            bias=False,
            dtype=dtype,
        )

    @staticmethod
    def state_shapes(
        config: ModelConfig, batch: int, dtype: DTypeLike
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        group = config.linear_attention
        (K, H), (N, W) = group.heads
        history = batch, group.conv_size - 1, 2 * K * H + N * W
        state = jax.ShapeDtypeStruct((batch, N, H, W), jnp.float32)
        return state, jax.ShapeDtypeStruct(history, dtype)

    def heads(
        self,
        x: Float[Array, "B T D"],
        *,
        segments: Int[Array | np.ndarray, "B T"] | None,
        order: Int[np.ndarray, "T"] | None = None,
        carried: tuple[Array, ...] | None = None,
        previous: Int[Array, "B"] | None = None,
        seeds: AdapterDropout | None = None,
        offload: float = 0.0,
    ) -> tuple[Float[Array, "B T N W"], tuple[Array, ...]]:
        where = dict(segments=segments, order=order, previous=previous)
        inputs = [
            checkpoint_named(projection(x, seeds), name, offload)
            for name, projection in (
                ("query", self.query),
                ("key", self.key),
                ("value", self.value),
            )
        ]
        sizes = np.cumsum([y.shape[2] * y.shape[3] for y in inputs])[:-1]
        state, history = carried or (None, None)
        histories = [None] * 3 if history is None else jnp.split(history, sizes, axis=2)
        kernels = self.query_convolution, self.key_convolution, self.value_convolution
        outputs, ends = [], []
        for y, kernel, history in zip(inputs, kernels, histories, strict=True):
            flat = kernel[...].reshape(kernel.shape[0], -1)
            out, end = causal_convolution(
                y.reshape(*y.shape[:2], -1), flat, history=history, **where
            )
            outputs.append(out.reshape(y.shape))
            ends.append(end)
        q, k, v = outputs
        bias, log_rate = (
            y[...].astype(jnp.float32)[None, None] for y in (self.decay_bias, self.log_rate)
        )
        decay = self.decay(x, seeds).astype(jnp.float32) + bias
        out, state = gated_delta_rule(
            l2_norm(q),
            l2_norm(k),
            v,
            -jnp.exp(log_rate) * jax.nn.softplus(decay),
            jax.nn.sigmoid(self.write(x, seeds).astype(jnp.float32)),
            state=state,
            **where,
        )
        return out, (state, jnp.concatenate(ends, 2))

    def finish(
        self,
        x: Float[Array, "B T D"],
        out: Float[Array, "B T N W"],
        seeds: AdapterDropout | None = None,
    ) -> Float[Array, "B T D"]:
        normed = rms_norm(out, self.norm_scale[...], eps=self.eps).astype(jnp.float32)
        gate = jax.nn.silu(self.gate(x, seeds).astype(jnp.float32))
        return self.out((normed * gate).astype(x.dtype), seeds)
