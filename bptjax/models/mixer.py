"""The base class of modules that mix the tokens of a layer without attention; and trees of tokens
in such a layer."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from bptjax.models.config import ModelConfig
from bptjax.models.linear import AdapterDropout
from bptjax.ops.documents import chains


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


def heads_of_trees(
    heads: Callable[..., tuple[Float[Array, "B T *heads"], Any]],
    x: Float[Array, "B T D"],
    ends: Int[Array, "B T"],
    seeds: AdapterDropout | None,
    order: Int[np.ndarray, "T"] | None,
) -> Float[Array, "B T *heads"]:
    """Returns the first result of `Mixer.heads` for trees of tokens with up to two branches.
    `heads` runs once per branch, so twice on the tokens that both branches continue. Sequences
    that have a tree with more branches become NaN.

    Args:
      x, seeds, order: as in `Mixer.heads`.
      ends: `Mask.ends` of the tokens.
    """
    if order is not None:
        natural = np.argsort(order)
        x, ends = x[:, natural], ends[:, natural]
        seeds = seeds and seeds._replace(ids=seeds.ids[:, natural])
    split = chains(ends)
    out, _ = heads(x, segments=split.segments, seeds=seeds)
    seeds = seeds and seeds._replace(ids=_pick(seeds.ids, split.order))
    other, _ = heads(_pick(x, split.order), segments=split.moved, seeds=seeds)
    other = _pick(other, jnp.argsort(split.order, axis=1))
    ones = (1,) * (out.ndim - 2)
    out = jnp.where(split.second.reshape(*split.second.shape, *ones), other, out)
    out = jnp.where(split.more.reshape(-1, 1, *ones), jnp.asarray(jnp.nan, out.dtype), out)
    return out if order is None else out[:, order]


def _pick(x: Array, at: Int[Array, "B T"]) -> Array:
    """Returns the tokens of `x` `[B, T, ...]` at these indices."""
    return jnp.take_along_axis(x, at.reshape(*at.shape, *(1,) * (x.ndim - 2)), 1)
