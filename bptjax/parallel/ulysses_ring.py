"""Ulysses within groups of neighbors, a ring across the groups: for more devices than heads. Fang &
Zhao 2024, arXiv 2405.07719.

The group size is the greatest common divisor of the numbers of heads and devices. Devices of a
group exchange heads, so that each has all tokens of the group for some heads. Then each passes keys
to its counterpart in the next group.
"""

import math
from dataclasses import replace

from jax import Array
from jaxtyping import Float

from bptjax.ops.attention.contract import (
    QKV,
    AttentionSpec,
    AttentionState,
    Kernel,
    SequenceSplit,
    Shards,
)
from bptjax.parallel import ring, ulysses
from bptjax.parallel.strategy_kernel import StrategyKernel


def unsupported(heads: int, shards: int) -> str | None:
    """Returns why the shards cannot divide `heads` query heads, or None if they can."""
    if math.gcd(heads, shards) == 1 < shards:
        return f"{heads} query heads and sp={shards} devices have no common divisor"
    return None


def split(heads: int, shards: int) -> SequenceSplit:
    """Returns the split in which as many devices as possible exchange heads, and groups of devices
    divide the tokens."""
    n = math.gcd(heads, shards)
    return SequenceSplit(heads=n, tokens=shards // n)


def forward(kernel: Kernel, x: QKV, spec: AttentionSpec, shards: Shards) -> AttentionState:
    """Attends from this shard's queries to the keys of all shards."""
    neighbors, across = _groups(x, shards)
    return ulysses.forward(StrategyKernel(ring, kernel, across), x, spec, neighbors)


def backward(
    kernel: Kernel,
    x: QKV,
    state: AttentionState,
    dout: Float[Array, "B T N H"],
    spec: AttentionSpec,
    shards: Shards,
) -> QKV:
    """Returns the gradients of this shard's queries, keys and values."""
    neighbors, across = _groups(x, shards)
    return ulysses.backward(StrategyKernel(ring, kernel, across), x, state, dout, spec, neighbors)


def _groups(x: QKV, shards: Shards) -> tuple[Shards, Shards]:
    """Returns this device's group of neighbors, and its counterparts in all groups."""
    heads, tokens = split(x.q.shape[2], shards.size)
    return replace(shards, size=heads), replace(shards, size=tokens, stride=heads)
