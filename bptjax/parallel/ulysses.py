"""Ulysses: an all-to-all exchange from some tokens of all heads to all tokens of some heads, and
back, with attention over complete sequences in between. Jacobs et al. 2023, arXiv 2309.14509.

Each pass has four exchanges of 1 / n of a sequence on n devices. n must divide the number of query
heads; key heads are repeated if n does not divide their number.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Shaped

from bptjax.ops.attention.contract import (
    QKV,
    AttentionSpec,
    AttentionState,
    Kernel,
    SequenceSplit,
    Shards,
)

TOKEN_FIELDS = (
    "segments",
    "positions",
    "global_tokens",
    "depths",
    "k_segments",
    "k_positions",
    "k_global_tokens",
    "k_depths",
    "ends",
)


def unsupported(heads: int, shards: int) -> str | None:
    """Returns why the shards cannot divide `heads` query heads, or None if they can."""
    if heads % shards:
        return f"{heads} query heads do not divide among sp={shards} devices"
    return None


def split(heads: int, shards: int) -> SequenceSplit:
    """Returns the split in which all devices exchange heads."""
    return SequenceSplit(heads=shards, tokens=1)


def forward(kernel: Kernel, x: QKV, spec: AttentionSpec, shards: Shards) -> AttentionState:
    """Attends from this shard's queries to the keys of all shards."""
    exchange = _Exchange(shards)
    spec, (q, k, v) = exchange.spec_of_heads(spec, x.q.shape[2]), x
    x = QKV(q, exchange.repeat(k), exchange.repeat(v))
    state = kernel.forward(jax.tree.map(exchange.to_heads, x), spec)
    return jax.tree.map(exchange.to_tokens, state)


def backward(
    kernel: Kernel,
    x: QKV,
    state: AttentionState,
    dout: Float[Array, "B T N H"],
    spec: AttentionSpec,
    shards: Shards,
) -> QKV:
    """Returns the gradients of this shard's queries, keys and values."""
    exchange = _Exchange(shards)
    spec, (q, k, v) = exchange.spec_of_heads(spec, x.q.shape[2]), x
    x = QKV(q, exchange.repeat(k), exchange.repeat(v))
    x, state, dout = jax.tree.map(exchange.to_heads, (x, state, dout))
    dq, dk, dv = jax.tree.map(exchange.to_tokens, kernel.backward(x, state, dout, spec))
    (B, S, K, H), dtype = k.shape, k.dtype
    dk, dv = (y.reshape(B, S, K, -1, H).astype(jnp.float32).sum(3).astype(dtype) for y in (dk, dv))
    return QKV(dq, dk, dv)


@dataclass(frozen=True)
class _Exchange:
    """Exchange of heads for tokens among shards."""

    shards: Shards

    @property
    def _options(self) -> dict[str, Any]:
        shards = self.shards
        return dict(axis_name=shards.axis, axis_index_groups=shards.groups, tiled=True)

    def to_heads(self, x: Shaped[Array, "B T N *rest"]) -> Shaped[Array, "B S K *rest"]:
        """Exchanges `[B, T / n, N, ...]` for `[B, T, N / n, ...]`."""
        return jax.lax.all_to_all(x, split_axis=2, concat_axis=1, **self._options)

    def to_tokens(self, x: Shaped[Array, "B S K *rest"]) -> Shaped[Array, "B T N *rest"]:
        """Exchanges `[B, T, N / n, ...]` for `[B, T / n, N, ...]`."""
        return jax.lax.all_to_all(x, split_axis=1, concat_axis=2, **self._options)

    def repeat(self, x: Float[Array, "B S K H"]) -> Float[Array, "B S R H"]:
        """Repeats key heads up to the least common multiple of K and the number of shards, both of
        which divide the number of query heads."""
        K = x.shape[2]
        return jnp.repeat(x, math.lcm(K, self.shards.size) // K, axis=2)

    def spec_of_heads(self, spec: AttentionSpec, heads: int) -> AttentionSpec:
        """Returns the spec of this shard's heads over complete sequences. NumPy arrays in the spec
        already cover complete sequences."""
        n = heads // self.shards.size
        first = self.shards.index * n
        fields = {
            name: jax.lax.all_gather(field, axis=field.ndim - 1, **self._options)
            for name in TOKEN_FIELDS
            if (field := getattr(spec.mask, name)) is not None and not isinstance(field, np.ndarray)
        }
        alibi = spec.alibi
        return replace(
            spec,
            mask=replace(spec.mask, **fields),
            alibi=None if alibi is None else jax.lax.dynamic_slice_in_dim(alibi, first, n),
            first_head=(0 if spec.first_head is None else spec.first_head) + first,
        )
