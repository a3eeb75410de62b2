"""Ulysses: from some tokens of all heads to all tokens of some heads and back, by all-to-all;
between them attention over whole rows. Jacobs et al. 2023, arXiv 2309.14509.

Four exchanges a pass, each 1 / devices of a row; as many devices as query heads at most. Key heads
that are fewer than the devices are repeated.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bptjax.ops.attention.tile import Score
from bptjax.ops.softmax import Partial

BY_TOKEN = (
    "segments",
    "positions",
    "global_tokens",
    "k_segments",
    "k_positions",
    "k_global_tokens",
)


def unsupported(heads: int, devices: int) -> str | None:
    """Why rows of so many query heads cannot be cut so; None where they can."""
    if heads % devices:
        return f"{heads} query heads do not divide among sp={devices} devices"
    return None


def forward(
    kernel: Any,
    q: Array,
    k: Array,
    v: Array,
    score: Score,
    axis: str,
    places: tuple[Any, Any],
    devices: int | None = None,
    **chunks,
) -> Partial:
    """Attention of this device's queries to the keys of all devices along `axis`, or of its group
    of so many neighbours; of `places`, the positions of whole rows, the mask has what it needs."""
    group = _Group(axis, devices or jax.lax.axis_size(axis))
    score = group.some_heads(score, q.shape[2])
    q, k, v = group.to_heads(q), *(group.to_heads(group.repeat(x)) for x in (k, v))
    out, lse = kernel.forward(q, k, v, score, **chunks)
    return Partial(group.to_tokens(out), group.to_tokens(lse))


def backward(
    kernel: Any,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    score: Score,
    axis: str,
    places: tuple[Any, Any],
    devices: int | None = None,
    **chunks,
) -> tuple[Array, Array, Array]:
    """Gradients of this device's queries, keys and values."""
    group = _Group(axis, devices or jax.lax.axis_size(axis))
    score, (B, S, K, H) = group.some_heads(score, q.shape[2]), k.shape
    k, v = (group.to_heads(group.repeat(x)) for x in (k, v))
    q, out, lse, dout = (group.to_heads(x) for x in (q, out, lse, dout))
    gradients = kernel.backward(q, k, v, out, lse, dout, score, **chunks)
    dq, dk, dv = (group.to_tokens(x) for x in gradients)
    dk, dv = (
        x.reshape(B, S, K, -1, H).astype(jnp.float32).sum(3).astype(x.dtype) for x in (dk, dv)
    )
    return dq, dk, dv


@dataclass(frozen=True)
class _Group:
    """This device and its neighbours along a mesh axis, so many together."""

    axis: str
    devices: int

    @property
    def _across(self) -> dict[str, Any]:
        numbers = np.arange(jax.lax.axis_size(self.axis)).reshape(-1, self.devices)
        return dict(axis_name=self.axis, axis_index_groups=numbers.tolist(), tiled=True)

    def to_heads(self, x: Array) -> Array:
        """`[B, T / n, N, ...]` to `[B, T, N / n, ...]`."""
        return jax.lax.all_to_all(x, split_axis=2, concat_axis=1, **self._across)

    def to_tokens(self, x: Array) -> Array:
        """`[B, T, N / n, ...]` to `[B, T / n, N, ...]`."""
        return jax.lax.all_to_all(x, split_axis=1, concat_axis=2, **self._across)

    def repeat(self, x: Array) -> Array:
        """Key heads in the least number that the devices divide; it divides that of query heads,
        as both do."""
        K = x.shape[2]
        return jnp.repeat(x, math.lcm(K, self.devices) // K, axis=2)

    def some_heads(self, score: Score, heads: int) -> Score:
        """The score of this device's heads over whole rows; what is NumPy in it is whole
        already."""
        n = heads // self.devices
        first = jax.lax.axis_index(self.axis) % self.devices * n
        fields = {
            name: jax.lax.all_gather(x, axis=x.ndim - 1, **self._across)
            for name in BY_TOKEN
            if (x := getattr(score.mask, name)) is not None and not isinstance(x, np.ndarray)
        }
        alibi = score.alibi
        return replace(
            score,
            mask=replace(score.mask, **fields),
            alibi=None if alibi is None else jax.lax.dynamic_slice_in_dim(alibi, first, n),
            first_head=(0 if score.first_head is None else score.first_head) + first,
        )
