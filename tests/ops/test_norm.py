import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from bptjax.ops.norm import l2_norm, layer_norm, rms_norm
from ops.comparing import TOLERANCE, error, normal

X, SCALE, BIAS = 3 * normal(0, 2, 5, 16) + 1, normal(1, 16), normal(2, 16)


def by_hand(x, scale, bias=0.0, *, centre, eps):
    x, scale, bias = (np.asarray(a, np.float64) for a in (x, scale, bias))
    x = x - x.mean(-1, keepdims=True) if centre else x
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale + bias


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_values(dtype):
    x = X.astype(dtype)
    for a, b in [
        (rms_norm(x, SCALE), by_hand(x, SCALE, centre=False, eps=1e-6)),
        (rms_norm(x, SCALE, eps=0.5), by_hand(x, SCALE, centre=False, eps=0.5)),
        (layer_norm(x, SCALE), by_hand(x, SCALE, centre=True, eps=1e-5)),
        (layer_norm(x, SCALE, BIAS, eps=0.5), by_hand(x, SCALE, BIAS, centre=True, eps=0.5)),
        # The mean of squares is 1/16 of their sum.
        (l2_norm(x, eps=8.0), by_hand(x, np.full(16, 0.25), centre=False, eps=0.5)),
    ]:
        assert a.dtype == dtype
        assert error(a, b) < TOLERANCE[dtype]


def test_statistics_are_float32():
    """Squares beyond float16's range, and a mean far from 0 in bfloat16's."""
    x, one = (300 * jnp.ones((1, 4096))).astype(jnp.float16), jnp.ones(4096)
    assert error(rms_norm(x, one), jnp.ones((1, 4096))) < 1e-3
    x = (normal(3, 4, 256) + 64).astype(jnp.bfloat16)
    assert error(layer_norm(x, one[:256]), by_hand(x, one[:256], centre=True, eps=1e-5)) < 5e-3


def test_gradients():
    check_grads(jax.jit(rms_norm), (X, SCALE), 1, ["rev"], atol=1e-2, rtol=1e-2, eps=1e-2)
    check_grads(jax.jit(layer_norm), (X, SCALE, BIAS), 1, ["rev"], atol=1e-2, rtol=1e-2, eps=1e-2)
