"""Runs layers of several kinds as loops over repeated patterns. A layer's kind is static."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class LayerLoop(NamedTuple):
    """A pattern of layer kinds, repeated `repeats` times."""

    pattern: tuple[Any, ...]
    repeats: int


def layer_loops(kinds: Sequence[Any]) -> list[LayerLoop]:
    """Divides layers of these kinds into loops. Minimizes the total length of the patterns, because
    each layer of a pattern is compiled, then the number of loops.

    Example: 26 layers whose every sixth is of kind B become `AAAAAB` 4 times, then `A` twice.
    """
    # Integers compare faster than kinds.
    numbers = [kinds.index(kind) for kind in kinds]
    # Per start layer: total length of the patterns, number of loops, size of the first pattern, end
    # of the first loop.
    best: dict[int, tuple[int, int, int, int]] = {len(kinds): (0, 0, 0, 0)}
    for start in reversed(range(len(kinds))):
        size, loop = 1, None
        # A pattern longer than the best total so far cannot improve on it.
        while loop is None or size <= loop[0] and start + size <= len(kinds):
            pattern, end = numbers[start : start + size], start
            while numbers[end : end + size] == pattern:
                end += size
                total, count = best[end][0] + size, best[end][1] + 1
                # Break ties toward the longest first pattern.
                if loop is None or (total, count) <= loop[:2]:
                    loop = total, count, size, end
            size += 1
        best[start] = loop
    loops, start = [], 0
    while start < len(kinds):
        *_, size, end = best[start]
        loops.append(LayerLoop(tuple(kinds[start : start + size]), (end - start) // size))
        start = end
    return loops


def scan_layers(
    step: Callable[..., tuple[Any, Any]],
    carry: tuple[Any, ...],
    kinds: Sequence[Any],
    *,
    first: Array | int = 0,
    stack: Any = None,
    checkpoint: Callable[..., Callable],
) -> tuple[Any, Any]:
    """Applies the layers in order, one `lax.scan` per loop, whose body runs a pattern.

    Args:
      step: maps (carry, index of the layer, entry of `stack`, kind=) to (carry, output of the
        layer).
      carry: the residual stream comes first.
      first: index of the first layer.
      stack: pytree of arrays with an axis of layers, if the layers have one kind.
      checkpoint: `jax.checkpoint` with a policy, applied to each layer.

    Returns:
      the last carry, and the outputs stacked on axis 0.
    """
    outputs = []
    for pattern, repeats in layer_loops(kinds):
        # The recomputation of a layer alone in a loop runs in another loop, so XLA can neither
        # merge it with the forward pass nor move it before later layers.
        prevent_cse = len(pattern) > 1 or repeats == 1
        # One function per kind, so that JAX traces each kind once.
        steps = {
            pattern.index(kind): checkpoint(partial(step, kind=kind), prevent_cse=prevent_cse)
            for kind in pattern
        }

        def body(carry, x, pattern=pattern, steps=steps):
            (start, entry), outputs = x, []
            for offset, kind in enumerate(pattern):
                if offset:
                    # Round between layers as between rounds of a loop. Only the residual stream
                    # gets a barrier: behind one, gradient slots would exist early.
                    carry = jax.lax.optimization_barrier(carry[0]), *carry[1:]
                carry, output = steps[pattern.index(kind)](carry, start + offset, entry)
                outputs.append(output)
            return carry, jax.tree.map(lambda *each: jnp.stack(each), *outputs)

        starts = first + len(pattern) * jnp.arange(repeats, dtype=jnp.int32)
        carry, output = jax.lax.scan(body, carry, (starts, stack))
        outputs.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), output))
        first += len(pattern) * repeats
    return carry, jax.tree.map(lambda *each: jnp.concatenate(each), *outputs)
