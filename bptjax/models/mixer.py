"""The base class of modules that mix the tokens of a layer without attention."""

from typing import ClassVar

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from bptjax.models.config import ModelConfig
from bptjax.models.linear import AdapterDropout


class Mixer(nnx.Module):
    """The part of a layer that replaces attention: `heads` mixes tokens, and `finish` is
    position-wise. A state carries information from earlier tokens to later ones."""

    # Logical axes of the arrays of the state.
    AXES: ClassVar[tuple[tuple[str | None, ...], ...]]
    # Results, other than matrix products, that a remat policy can save.
    RESIDUAL_NAMES: ClassVar[tuple[str, ...]] = ()
    # Number of the random stream of its parameters, different for each part of a layer.
    STREAM: ClassVar[int]

    def __init__(self, config: ModelConfig, key: Array, dtype: DTypeLike):
        raise NotImplementedError

    @staticmethod
    def state_shapes(
        config: ModelConfig, batch: int, dtype: DTypeLike
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the shapes of the state in a cache of `dtype`."""
        raise NotImplementedError

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
    ) -> tuple[Float[Array, "B T *heads"], tuple[Array, ...]]:
        """Mixes the tokens of the layer's normalized input. Returns the input of `finish` and the
        new state.

        Args:
          segments, order, previous: as in `parallel.causal_convolution`; `previous` is the document
            of `carried`, the state.
          offload: share of the tokens whose saved activations go to host memory.
        """
        raise NotImplementedError

    def finish(
        self,
        x: Float[Array, "B T D"],
        out: Float[Array, "B T *heads"],
        seeds: AdapterDropout | None = None,
    ) -> Float[Array, "B T D"]:
        """Computes the layer's output from its normalized input and the first result of `heads`."""
        raise NotImplementedError
