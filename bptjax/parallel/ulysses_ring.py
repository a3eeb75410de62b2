"""Ulysses within groups of neighbours, a ring across them: for more devices than heads. Fang & Zhao
2024, arXiv 2405.07719.

As many neighbours as heads and devices have as common divisor exchange heads; each then has the
tokens of its group for some heads, and passes keys on to its like in the next group.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from bptjax.ops.attention.tile import Score
from bptjax.ops.softmax import Partial
from bptjax.parallel import ring, ulysses


def unsupported(heads: int, devices: int) -> str | None:
    """Why rows of so many query heads cannot be cut so; None where they can."""
    if math.gcd(heads, devices) == 1 < devices:
        return f"{heads} query heads and sp={devices} devices have no common divisor"
    return None


def forward(
    kernel: Any,
    q: Array,
    k: Array,
    v: Array,
    score: Score,
    axis: str,
    places: tuple[Any, Any],
    **chunks,
) -> Partial:
    """Attention of this device's queries to the keys of all devices along `axis`; `places` are the
    positions of the whole rows' queries and keys."""
    n = math.gcd(q.shape[2], jax.lax.axis_size(axis))
    around = _Ring(kernel, axis, places, n)
    return ulysses.forward(around, q, k, v, score, axis, places, n, **chunks)


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
    **chunks,
) -> tuple[Array, Array, Array]:
    """Gradients of this device's queries, keys and values."""
    n = math.gcd(q.shape[2], jax.lax.axis_size(axis))
    around = _Ring(kernel, axis, places, n)
    return ulysses.backward(around, q, k, v, out, lse, dout, score, axis, places, n, **chunks)


@dataclass(frozen=True)
class _Ring:
    """A pair over the tokens of groups of `stride` neighbours: `kernel` in a ring across them."""

    kernel: Any
    axis: str
    places: tuple[Any, Any]
    stride: int

    def forward(self, q: Array, k: Array, v: Array, score: Score, **chunks) -> Partial:
        rest = score, self.axis, self.places, self.stride
        return ring.forward(self.kernel, q, k, v, *rest, **chunks)

    def backward(
        self,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        lse: Array,
        dout: Array,
        score: Score,
        **chunks,
    ) -> tuple[Array, Array, Array]:
        rest = score, self.axis, self.places, self.stride
        return ring.backward(self.kernel, q, k, v, out, lse, dout, *rest, **chunks)
