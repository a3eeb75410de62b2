"""Sums at given indices in a fixed order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bptjax.ops import determinism
from bptjax.ops.determinism import (
    BLOCK,
    OPTIONS,
    add_in_order,
    compiler_options,
    deterministic,
    is_deterministic,
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("count, rows", [(2 * BLOCK + 1, 7), (BLOCK, 4000), (3, 1), (0, 2)])
def test_values_are_added_at_their_indices(count, rows, dtype):
    rng = np.random.default_rng(0)
    # The index `rows` is out of range.
    indices = rng.integers(0, rows + 1, (1, count), np.int32)
    values = jnp.asarray(rng.standard_normal((1, count, 5)), dtype)
    start = np.ones((rows, 5), np.float32)
    found = jax.jit(add_in_order)(start, indices, values)
    wanted = np.ones((rows + 1, 5))
    np.add.at(wanted, indices[0], np.asarray(values[0], np.float64))
    np.testing.assert_allclose(found, wanted[:rows], rtol=1e-5, atol=1e-5)


def test_options_apply_to_gpus_only(monkeypatch):
    with deterministic(True):
        assert not is_deterministic() and compiler_options() == {}
        monkeypatch.setattr(determinism, "platform", lambda: "gpu")
        assert is_deterministic() and compiler_options() == OPTIONS
        with deterministic(False):
            assert compiler_options() == {}
    assert not is_deterministic()
    # XLA refuses the names of unknown options, on any device.
    assert jax.jit(lambda x: x + 1, compiler_options=OPTIONS)(1) == 2
