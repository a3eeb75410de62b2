import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bptjax.ops.attention.contract import AttentionSpec
from bptjax.ops.attention.scores import dropout_factors
from bptjax.ops.dropout import PAIR, dropout, keep, philox
from bptjax.ops.mask import Mask

KEY = jax.random.key_data(jax.random.key(0))
ROWS = jnp.arange(512)


def correlation(a, b):
    """In standard deviations of chance."""
    a, b = (np.asarray(x, np.float64).ravel() for x in (a, b))
    return np.corrcoef(a, b)[0, 1] * len(a) ** 0.5


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.999])
def test_rate(rate):
    kept = keep(KEY, rate, ROWS, ROWS)
    sigma = max(rate * (1 - rate), 1e-12) ** 0.5
    assert abs(kept.mean() - (1 - rate)) < 5 * sigma / 512 + 1e-12
    # Of rows and columns too, not of the whole alone.
    for axis in (0, 1):
        assert abs(kept.mean(axis) - (1 - rate)).max() < 6 * sigma / 512**0.5 + 1e-12


def test_philox():
    """The numbers of its authors' library, Random123."""
    for counter, key, wanted in (
        ((0, 0), 0, [0x257A3673, 0xCD26BE2A]),
        ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, [0xAB302C4D, 0x3DC9D239]),
        ((0x243F6A88, 0x85A308D3), 0x13198A2E, [0xBEDBBE6B, 0xE4C770B3]),
    ):
        column, row = (jnp.full(1, x, jnp.uint32) for x in counter)
        words = philox(jnp.array([key, 0], jnp.uint32), row, column)
        assert [word.item() for word in words] == wanted


def test_independence():
    """Between neighbours, rows and columns swapped, keys, heads and rows of the batch."""
    kept = keep(KEY, 0.4, ROWS, ROWS)
    other = keep(jax.random.key_data(jax.random.key(1)), 0.4, ROWS, ROWS)
    pairs = [(kept[1:], kept[:-1]), (kept[:, 1:], kept[:, :-1]), (kept, kept.T), (kept, other)]
    pairs.append((kept[:, PAIR:], kept[:, :-PAIR]))
    spec = AttentionSpec(Mask(), 1.0, dropout=0.4, dropout_key=KEY)
    heads = dropout_factors(spec, 2, 3, ROWS[None], ROWS[None]).reshape(6, 512, 512)
    pairs += [(heads[i], heads[j]) for i in range(6) for j in range(i)]
    assert max(abs(correlation(a, b)) for a, b in pairs) < 5


def test_field_has_no_chunks():
    """A tile, a shuffled one, one far away: always the elements of one field."""
    whole = keep(KEY, 0.3, ROWS, ROWS)
    p, s = jnp.array([400, 3, 3]), jnp.array([7, 511, 0, 8, 9])
    assert (keep(KEY, 0.3, p, s) == whole[p][:, s]).all()
    far = keep(KEY, 0.3, ROWS + (2**31 - 600), ROWS)
    assert abs(correlation(far, whole)) < 5


def test_kept_is_scaled():
    spec = AttentionSpec(Mask(), 1.0, dropout=0.2, dropout_key=KEY)
    kept = dropout_factors(spec, 1, 1, ROWS[None], ROWS[None])
    assert set(np.unique(kept)) == {np.float32(0), np.float32(1 / 0.8)}
    assert abs(kept.mean() - 1) < 0.01


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dropout(dtype):
    x = jnp.ones((2, 64, 128), dtype)
    rows = jnp.arange(128).reshape(2, 64)
    y = dropout(x, KEY, 0.25, rows)
    assert y.dtype == dtype
    assert set(np.unique(y.astype(jnp.float32))) == {0.0, float(jnp.asarray(1 / 0.75, dtype))}
    assert abs(y.astype(jnp.float32).mean() - 1) < 0.03
    # The row's number decides, not where the token stands.
    assert (dropout(x[:, ::-1], KEY, 0.25, rows[:, ::-1]) == y[:, ::-1]).all()
    assert abs(correlation(y[0] > 0, y[1] > 0)) < 5
    gradient = jax.grad(lambda x: dropout(x, KEY, 0.25, rows).astype(jnp.float32).sum())(x)
    assert (gradient == y).all()


def test_nothing_to_drop():
    x = jnp.ones((1, 2, 3))
    assert dropout(x, None, 0.5, jnp.zeros((1, 2), int)) is x
    assert dropout(x, KEY, 0.0, jnp.zeros((1, 2), int)) is x
