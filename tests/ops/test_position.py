import jax.numpy as jnp
import numpy as np
import pytest

from bptjax.ops.position import alibi_slopes, rope, rope_frequencies
from ops.comparing import TOLERANCE, error, normal


def test_frequencies():
    assert np.allclose(rope_frequencies(8, 1e4), [1, 0.1, 0.01, 0.001])
    assert rope_frequencies(64, 5e5).dtype == np.float32


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("turned", [8, 4])
def test_rope_is_complex_multiplication(turned, dtype):
    """Features i and i + R are one complex number; the features after them pass."""
    x, positions = (
        normal(0, 2, 5, 3, 8).astype(dtype),
        jnp.array([[0, 1, 2, 9, 4], [7, 7, 0, 1, 1000]]),
    )
    frequencies, R = rope_frequencies(turned), turned // 2
    y = rope(x, positions, frequencies)
    z = np.asarray(x, np.float64)
    z = z[..., :R] + 1j * z[..., R:turned]
    angle = np.float32(positions[..., None]) * frequencies
    z = z * np.exp(1j * angle[:, :, None].astype(np.float64))
    assert y.dtype == dtype
    assert error(y[..., :turned], np.concatenate([z.real, z.imag], -1)) < TOLERANCE[dtype]
    assert (y[..., turned:] == x[..., turned:]).all()


def test_rope_is_relative():
    q, k = normal(0, 1, 1, 1, 16), normal(1, 1, 1, 1, 16)
    frequencies = rope_frequencies(16)

    def score(p, s):
        turned = (rope(x, jnp.array([[t]]), frequencies) for x, t in ((q, p), (k, s)))
        return jnp.vdot(*turned)

    assert error(score(5, 2), score(105, 102)) < 1e-4
    assert error(score(5, 2), score(5, 3)) > 1e-2


@pytest.mark.parametrize(
    "heads, slopes",
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (8, [2.0**-i for i in range(1, 9)]),
        # As transformers' build_alibi_tensor of BLOOM gives them.
        (3, [2**-4, 2**-8, 2**-2]),
        (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
        (12, [2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    ],
)
def test_alibi_slopes(heads, slopes):
    assert np.allclose(alibi_slopes(heads), slopes)
