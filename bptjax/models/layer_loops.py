"""Layers of several kinds as loops over repeated patterns. The kind of a layer is static."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class LayerLoop(NamedTuple):
    """Layers of these kinds in order, `repeats` times."""

    pattern: tuple[Any, ...]
    repeats: int


def layer_loops(kinds: Sequence[Any]) -> list[LayerLoop]:
    """Divides layers of these kinds into the loops with the shortest patterns in total, because
    each layer of a pattern is compiled. Of such divisions, one with the fewest loops.

    26 layers of which every sixth is of kind B: `AAAAAB` 4 times, then `A` twice.
    """
    # Numbers compare faster than kinds.
    numbers = [kinds.index(kind) for kind in kinds]
    # From each layer on: total length of the patterns, number of loops, size of the first pattern,
    # end of the first loop.
    best: dict[int, tuple[int, int, int, int]] = {len(kinds): (0, 0, 0, 0)}
    for start in reversed(range(len(kinds))):
        size, found = 1, None
        # A pattern that is longer than a known division is in no better one.
        while found is None or size <= found[0] and start + size <= len(kinds):
            pattern, end = numbers[start : start + size], start
            while numbers[end : end + size] == pattern:
                end += size
                total, count = best[end][0] + size, best[end][1] + 1
                # Of equal divisions the one whose first pattern is the longest, which comes last.
                if found is None or (total, count) <= found[:2]:
                    found = total, count, size, end
            size += 1
        best[start] = found
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
    checkpoint: Callable[..., Callable],
) -> tuple[Any, Any]:
    """Applies the layers in order: one `lax.scan` for each loop, whose body runs a pattern.

    Args:
      step: (carry, index of the layer, kind=) to (carry, output of the layer).
      carry: the residual stream first.
      first: index of the first layer.
      checkpoint: `jax.checkpoint` with a policy, for each layer.

    Returns:
      the last carry, and the outputs stacked on axis 0.
    """
    outputs = []
    for pattern, repeats in layer_loops(kinds):
        # A layer that is alone in a loop is recomputed in another loop, so XLA cannot merge the
        # recomputation with the forward pass, nor move it before the layers that come later.
        prevent_cse = len(pattern) > 1 or repeats == 1
        # One function for all layers of a kind, so that JAX traces it once.
        steps = {
            pattern.index(kind): checkpoint(partial(step, kind=kind), prevent_cse=prevent_cse)
            for kind in pattern
        }

        def body(carry, start, pattern=pattern, steps=steps):
            outputs = []
            for offset, kind in enumerate(pattern):
                if offset:
                    # Layers round what they pass on, as rounds of a loop do. Of the residual stream
                    # alone: behind a barrier, gradient slots would exist in the forward pass.
                    carry = jax.lax.optimization_barrier(carry[0]), *carry[1:]
                carry, output = steps[pattern.index(kind)](carry, start + offset)
                outputs.append(output)
            return carry, jax.tree.map(lambda *each: jnp.stack(each), *outputs)

        starts = first + len(pattern) * jnp.arange(repeats, dtype=jnp.int32)
        carry, output = jax.lax.scan(body, carry, starts)
        outputs.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), output))
        first += len(pattern) * repeats
    return carry, jax.tree.map(lambda *each: jnp.concatenate(each), *outputs)
