"""Comparison of arrays, and the memory of compiled functions."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

# Relative error ‖a - b‖ / ‖b‖ against float32.
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 1.5e-3}


# jax.jit for functions that run once: most of their time is compiling.
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def error(a: ArrayLike, b: ArrayLike) -> float:
    """‖a - b‖ / ‖b‖ in float64; a norm below 0.1 counts as 0.1, so that rounding noise about an
    exact 0 is no error."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    assert np.isfinite(a).all()
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 0.1))


def close(a, b, dtype="float32", scale=1.0):
    """Asserts that two pytrees agree, leaf by leaf, within the tolerance of `dtype`."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert error(x, y) <= scale * TOLERANCE[dtype], (
            f"{jax.tree_util.keystr(path)}: {error(x, y)}"
        )


def normal(seed: int, *shape: int) -> Array:
    """Normal float32 numbers, rounded so that bfloat16 and float16 hold them exactly: one oracle
    serves all three."""
    x = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray((np.round(x * 32) / 32).clip(-4, 4).astype(np.float32))


def temp_bytes(f: Callable, *operands) -> int:
    """Bytes that the compiled `f` needs besides operands and results."""
    return quick(f).lower(*operands).compile().memory_analysis().temp_size_in_bytes
