"""What the tests of ops share: how two arrays are compared, and what a compiled function holds."""

import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import jaxprs_in_params
from jax.interpreters import partial_eval as pe

# Relative error ‖a - b‖ / ‖b‖ against float32.
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 1.5e-3}


# jax.jit for functions that run once: most of their time is compiling.
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def error(a: Array, b: Array) -> float:
    """‖a - b‖ / ‖b‖ in float64; a norm below 0.1 counts as 0.1, so that rounding noise about an
    exact 0 is no error."""
    a, b = (np.asarray(x, np.float64) for x in (a, b))
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
    return jnp.asarray(np.round(x * 32) / 32, jnp.float32).clip(-4, 4)


def temp_bytes(f: Callable, *operands) -> int:
    """Bytes that the compiled `f` needs besides operands and results."""
    return quick(f).lower(*operands).compile().memory_analysis().temp_size_in_bytes


def dots(f: Callable, *operands) -> int:
    """Matrix products in the jaxpr of `f`, without those that nothing reads; a loop's body counts
    once."""
    jaxpr = jax.make_jaxpr(f)(*operands).jaxpr
    jaxpr, _ = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))

    def count(jaxpr):
        inner = (sub for eqn in jaxpr.eqns for sub in jaxprs_in_params(eqn.params))
        return sum(eqn.primitive.name == "dot_general" for eqn in jaxpr.eqns) + sum(
            map(count, inner)
        )

    return count(jaxpr)


def collectives(text: str) -> list[tuple[str, str]]:
    """(result, kind) of each message between devices in a compiled program."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text)


def sends_once(text: str) -> bool:
    """Whether devices exchange something, and nothing of it in a loop or a branch."""
    before, entry = text.split("\nENTRY")
    return bool(collectives(entry)) and not collectives(before)
