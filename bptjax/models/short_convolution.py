"""A short convolution between two gates, instead of attention."""

from typing import ClassVar

import jax
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from bptjax.models.config import ModelConfig
from bptjax.models.linear import AdapterDropout, Linear, new_param
from bptjax.models.mixer import Mixer
from bptjax.ops.checkpoint_names import checkpoint_named
from bptjax.parallel.causal_convolution import causal_convolution


class ShortConvolution(Mixer):
    """out(gate(x) · convolution(key(x) · value(x))). Its state is the convolution's last inputs."""

    AXES: ClassVar = (("batch", None, None),)
    STREAM: ClassVar = 5

    def __init__(self, config: ModelConfig, key: Array, dtype: DTypeLike):
        D, J, std = config.hidden_size, config.short_convolution.size, config.init_std
        keys = jax.random.split(key, 5)

        def linear(key, axes=("embed", "heads"), std=std):
            return Linear(key, (D,), (D,), axes, std=std, bias=False, dtype=dtype)

        self.key, self.value, self.gate = (linear(k) for k in keys[:3])
        self.taps = new_param(keys[3], (J, D), (None, "heads"), std, dtype)
        self.out = linear(keys[4], ("heads", "embed"), std / (2 * config.num_layers) ** 0.5)

    @staticmethod
    def state_shapes(
        config: ModelConfig, batch: int, dtype: DTypeLike
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        history = batch, config.short_convolution.size - 1, config.hidden_size
        return (jax.ShapeDtypeStruct(history, dtype),)

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
    ) -> tuple[Float[Array, "B T D"], tuple[Array, ...]]:
        out, history = causal_convolution(
            checkpoint_named(self.key(x, seeds), "key", offload)
            * checkpoint_named(self.value(x, seeds), "value", offload),
            self.taps[...],
            silu=False,
            segments=segments,
            history=carried[0] if carried else None,
            previous=previous,
            order=order,
        )
        return out, (history,)

    def finish(
        self,
        x: Float[Array, "B T D"],
        out: Float[Array, "B T D"],
        seeds: AdapterDropout | None = None,
    ) -> Float[Array, "B T D"]:
        return self.out(self.gate(x, seeds) * out, seeds)
