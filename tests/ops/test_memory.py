"""O(T) memory, proved from what XLA reserves: temp bytes of gradients at T and at 2T tokens."""

import jax
import jax.numpy as jnp
import pytest
from tiers import fast

from bptjax.ops.attention import attention
from bptjax.ops.blockwise import blockwise, blockwise_transformer
from bptjax.ops.landmark_attention import landmark_attention
from bptjax.ops.loss import linear_cross_entropy
from bptjax.ops.mask import Mask
from ops.comparing import temp_bytes

T, D, N, H, F, V = 2048, 32, 2, 16, 512, 2048
CHUNKS = dict(q_chunk=256, k_chunk=256)


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def attend(T, impl="scan", **mask):
    """With what the gradient holds; segments and positions are arguments."""
    qkv = [shape(1, T, N, H)] * 3
    arrays = {name: shape(1, T, dtype="int32") for name in ("segments",) if mask.pop(name, None)}

    def f(q, k, v, arrays):
        options = dict(mask=Mask(causal=True, **mask, **arrays), impl=impl, **CHUNKS)
        return jnp.square(attention(q, k, v, **options)).sum()

    return temp_bytes(jax.grad(f, (0, 1, 2)), *qkv, arrays)


def landmarks(T):
    def f(q, k, v):
        return jnp.square(landmark_attention(q, k, v, block_size=32, **CHUNKS)).sum()

    return temp_bytes(jax.grad(f, (0, 1, 2)), *[shape(1, T, N, H)] * 3)


def mlp(p, x):
    return x + jax.nn.gelu(x @ p[0]) @ p[1]


def feed(T, chunked=True):
    def f(p, x):
        y = blockwise(mlp, p, x, chunk=256) if chunked else mlp(p, x)
        return jnp.square(y).sum()

    return temp_bytes(jax.grad(f, (0, 1)), (shape(D, F), shape(F, D)), shape(1, T, D))


def whole_block(T, fused=True):
    """Query projection, attention, output projection, feed-forward; keys and values given."""

    def query(p, x):
        return (x @ p[2]).reshape(*x.shape[:2], N, H)

    def finish(p, x, out):
        return mlp(p, x + out.reshape(x.shape))

    def f(p, x, k, v):
        if fused:
            y = blockwise_transformer(query, finish, p, x, k, v, **CHUNKS)
        else:
            y = finish(p, x, attention(query(p, x), k, v, impl="reference"))
        return jnp.square(y).sum()

    params, keys = (shape(D, F), shape(F, D), shape(D, D)), shape(1, T, N, H)
    return temp_bytes(jax.grad(f, (0, 1, 2, 3)), params, shape(1, T, D), keys, keys)


def cross_entropy(T, chunked=True, reduction="sum"):
    def f(hidden, head, labels):
        if chunked:
            return linear_cross_entropy(hidden, head, labels, chunk=256, reduction=reduction).sum()
        logits = jax.nn.log_softmax(hidden @ head.T)
        return -jnp.take_along_axis(logits, labels[..., None], -1).sum()

    operands = shape(1, T, D), shape(V, D), shape(1, T, dtype="int32")
    return temp_bytes(jax.value_and_grad(f, (0, 1)), *operands)


GROWING = {
    "attention": attend,
    "window": lambda T: attend(T, window=300),
    "segments": lambda T: attend(T, segments=True),
    "landmarks": landmarks,
    "feed_forward": feed,
    "block": whole_block,
    "loss": cross_entropy,
    "losses": lambda T: cross_entropy(T, reduction="none"),
}


@pytest.mark.parametrize("name", fast(GROWING, ["segments", "feed_forward", "loss"]))
def test_grows_with_T(name):
    f = GROWING[name]
    short, long = f(T), f(2 * T)
    assert 0 < long <= 2.2 * short


def test_dense_attention_grows_with_T_squared():
    short, long = attend(T, "reference"), attend(2 * T, "reference")
    assert 3.8 < long / short < 4.2
    assert long > 20 * attend(2 * T)


@pytest.mark.parametrize("f, factor", [(feed, 4), (whole_block, 50), (cross_entropy, 8)])
def test_far_below_plain(f, factor):
    assert factor * f(2 * T) < f(2 * T, False)
