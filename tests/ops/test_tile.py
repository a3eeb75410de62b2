"""Kernels visit the tiles that their mask does not empty, and no others."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bptjax.ops.attention import (
    attention,
    scan,
)
from bptjax.ops.attention.contract import QKV, AttentionSpec, AttentionState
from bptjax.ops.mask import Mask
from ops.comparing import normal, quick


@pytest.mark.timing
def test_empty_tiles_take_no_time():
    """Forward and backward, best of several interleaved runs: causal against all keys, and a window
    of one chunk against all keys too."""
    T = 2048
    q = normal(0, 1, T, 2, 64)
    masks = {
        "all": (Mask(), 128),
        "causal": (Mask(causal=True), 128),
        "all, 32 chunks": (Mask(), 64),
        "window": (Mask(causal=True, window=64), 64),
    }

    def step(mask, chunk):
        def loss(q, k, v):
            return attention(q, k, v, mask=mask, q_chunk=chunk, k_chunk=chunk).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, q, q).compile()

    steps = {name: step(*arguments) for name, arguments in masks.items()}
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(30):  # Other work on the machine only adds time: on, until the best are clean.
        for name, f in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(f(q, q, q))
            best[name] = min(best[name], time.perf_counter() - start)
        causal = best["causal"] / best["all"]
        window = best["window"] / best["all, 32 chunks"]
        if causal <= 0.62 and window <= 0.2:
            break
    assert causal <= 0.62 and window <= 0.2, best


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    "mask, seen",
    [
        (Mask(causal=True), 12),
        (Mask(window=2), 11),
        (Mask(segments=np.repeat([[1, 2]], 8, 1).astype(np.int32)), 8),
    ],
)
def test_empty_tiles_are_not_visited(mask, seen, known):
    """The values of the last tile's keys are NaN, so any visit to it, even with weights of 0,
    shows in both passes. The mask is static or traced."""
    T, chunks = 16, dict(q_chunk=4, k_chunk=4)
    q = normal(0, 1, T, 1, 8)
    v = q.at[:, -4:].set(jnp.nan)
    mask = mask if known else mask.resolve(T, T)

    @quick
    def run(mask):
        x, spec = QKV(q, q, v), AttentionSpec(mask, 1.0, **chunks)
        state = scan.forward(x, spec)
        finite = AttentionState(jnp.nan_to_num(state.out), state.lse)
        return state.out, scan.backward(x, finite, q, spec).q

    for x in run(mask) if not known else quick(lambda: run.__wrapped__(mask))():
        finite = jnp.isfinite(x).all((0, 2, 3))
        assert (finite == (jnp.arange(T) < seen // 4 * 4)).all()
