import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import fast

from bptjax.ops.attention import attention
from bptjax.ops.blockwise import blockwise_transformer
from bptjax.ops.dropout import dropout
from bptjax.ops.mask import Mask
from bptjax.ops.norm import rms_norm
from bptjax.ops.position import alibi_slopes
from ops.attention_cases import HERE
from ops.comparing import TOLERANCE, close, error, normal, quick

B, T, D, N, K, H, F = 2, 13, 16, 4, 2, 8, 24
PARAMS = {
    "query": normal(1, D, N, H) / 4,
    "key": normal(2, D, K, H) / 4,
    "value": normal(3, D, K, H) / 4,
    "out": normal(4, N, H, D) / 4,
    "up": normal(5, D, F) / 4,
    "down": normal(6, F, D) / 4,
    "scale": 1 + normal(7, D) / 4,
}
DOCUMENTS = np.array([[1] * 5 + [2] * 4 + [3] * 4, [1] * 3 + [2] * 6 + [0] * 4], np.int32)
KEY = jax.random.key(5)
X = normal(8, B, T, D)
CASES = {
    "causal": {},
    "window": dict(mask=Mask(window=3)),
    "segments": dict(mask=Mask(causal=True, segments=DOCUMENTS)),
    "segments of all sequences": dict(mask=Mask(causal=True, segments=DOCUMENTS[:1])),
    "positions": dict(mask=Mask(causal=True, positions=np.arange(T, dtype=np.int32)[::-1].copy())),
    "alibi": dict(alibi=alibi_slopes(N)),
    "sinks": dict(sinks=normal(10, N), mask=Mask(causal=True, segments=DOCUMENTS)),
    "sparse": dict(
        mask=Mask(
            window=4,
            global_tokens=np.arange(T) == 6,
            block_mask=~np.eye(5, dtype=bool),
            block_size=3,
        )
    ),
    "everything": dict(
        mask=Mask(causal=True, window=6, segments=DOCUMENTS),
        alibi=alibi_slopes(N),
        dropout=0.3,
        dropout_key=KEY,
        softcap=2.0,
        scale=0.3,
    ),
}


def query(p, x):
    return jnp.einsum("btd,dnh->btnh", rms_norm(x["x"], p["scale"]), p["query"])


def finish(p, x, out):
    """Output projection, dropout, residual, norm, feed-forward, residual."""
    y = jnp.einsum("btnh,nhd->btd", out, p["out"])
    y = x["x"] + dropout(y, jax.random.key_data(KEY), 0.2, x["rows"])
    return y + jax.nn.silu(rms_norm(y, p["scale"]) @ p["up"]) @ p["down"]


def layer(params, x, *, fused, **options):
    normed = rms_norm(x, params["scale"])
    k, v = (jnp.einsum("btd,dkh->btkh", normed, params[name]) for name in ("key", "value"))
    x = {"x": x, "rows": jnp.arange(B * T).reshape(B, T)}
    if fused:
        return blockwise_transformer(query, finish, params, x, k, v, **options)
    return finish(params, x, attention(query(params, x), k, v, **options))


def run(params, x, dtype="float32", **options):
    """(y, dparams, dx)."""
    params, x, dy = jax.tree.map(lambda a: a.astype(dtype), (params, x, normal(9, B, T, D)))

    def f(params, x, dy):
        y, pull = jax.vjp(lambda p, x: layer(p, x, **options), params, x)
        return y, *pull(dy)

    return quick(f)(params, x, dy)


@functools.cache
def oracle(name):
    return run(PARAMS, X, fused=False, impl="reference", **CASES[name])


@pytest.mark.parametrize("name", fast(CASES, ["everything"]))
def test_fused_is_split(name):
    close(run(PARAMS, X, fused=True, q_chunk=5, k_chunk=4, **CASES[name]), oracle(name))


@pytest.mark.parametrize("q_chunk, k_chunk", fast([(13, 13), (64, 64), (4, 13)], [(64, 64)]))
def test_any_chunks(q_chunk, k_chunk):
    options = dict(q_chunk=q_chunk, k_chunk=k_chunk) | CASES["everything"]
    close(run(PARAMS, X, fused=True, **options), oracle("everything"))


@pytest.mark.parametrize("impl", fast(HERE, ["scan"]))
def test_any_attention(impl):
    close(run(PARAMS, X, fused=True, impl=impl, q_chunk=7, k_chunk=7), oracle("causal"))


@pytest.mark.thorough
def test_bfloat16():
    """At worst twice the split schedule's own error."""
    options = dict(q_chunk=5, k_chunk=4) | CASES["segments"]
    split = run(PARAMS, X, "bfloat16", fused=False, **options)
    fused = run(PARAMS, X, "bfloat16", fused=True, **options)
    for e, s, f in zip(*map(jax.tree.leaves, (oracle("segments"), split, fused)), strict=True):
        assert f.dtype == "bfloat16"
        assert error(f, e) <= max(2 * error(s, e), TOLERANCE["bfloat16"])


def test_traced_segments():
    def f(segments, fused):
        mask = Mask(causal=True, segments=segments)
        return layer(PARAMS, X, fused=fused, q_chunk=5, mask=mask)

    fused, split = (quick(functools.partial(f, fused=fused)) for fused in (True, False))
    close(fused(DOCUMENTS), split(DOCUMENTS))


def test_queries_of_a_shard():
    """T ≠ S: a block of rows sees the keys of others."""
    q, k, v = normal(1, B, 6, N, H), normal(2, B, T, K, H), normal(3, B, T, K, H)
    mask = Mask(
        causal=True,
        positions=np.arange(4, 10, dtype=np.int32),
        k_positions=np.arange(T, dtype=np.int32),
        segments=DOCUMENTS[:, 4:10],
        k_segments=DOCUMENTS,
    )
    options = dict(mask=mask, dropout=0.2, dropout_key=KEY)

    def fused(q):
        chunks = dict(q_chunk=4, k_chunk=5)
        return blockwise_transformer(
            lambda p, q: q, lambda p, q, out: out, {}, q, k, v, **chunks, **options
        )

    split = functools.partial(attention, k=k, v=v, impl="reference", **options)
    close(quick(fused)(q), quick(split)(q))
