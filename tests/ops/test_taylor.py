import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bptjax.ops.taylor_attention import taylor_attention
from ops.comparing import close, normal, temp_bytes

B, T, S, N, K, H = 2, 9, 13, 4, 2, 8


def dense(q, k, v, keys=None):
    """As its docstring says, weight by weight."""
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    weights = 1.0 + jnp.einsum("btnh,bsnh->bnts", q, k)
    if keys is not None:
        weights = jnp.where(keys[:, None, None], weights, 0.0)
    return jnp.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("keys", [None, np.arange(S)[None] < np.array([[S], [5]])], ids=str)
def test_equals_its_dense_definition(keys):
    q, k, v, dout = (
        normal(i, B, n, h, H) for i, (n, h) in enumerate([(T, N), (S, K), (S, K), (T, N)])
    )
    keys = None if keys is None else jnp.asarray(keys)

    def both(f):
        out, pull = jax.vjp(lambda q, k, v: f(q, k, v, keys=keys), q, k, v)
        return out, *pull(dout)

    close(both(taylor_attention), both(dense), scale=2.0)


def test_no_key_gives_zero():
    q, k, v = normal(0, 1, 3, 2, 8), normal(1, 1, 5, 2, 8), normal(2, 1, 5, 2, 8)
    assert not taylor_attention(q, k, v, keys=jnp.zeros((1, 5), bool)).any()


def test_memory_is_linear():
    def bytes_at(T):
        x = jax.ShapeDtypeStruct((1, T, 2, 16), jnp.float32)
        return temp_bytes(jax.grad(lambda *a: taylor_attention(*a).sum(), (0, 1, 2)), x, x, x)

    assert bytes_at(4096) <= 2.2 * bytes_at(2048)
