import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bptjax.ops.attention import attention
from bptjax.ops.landmark_attention import landmark_attention
from bptjax.ops.mask import Mask
from ops.comparing import TOLERANCE, close, error, normal, quick

DOCUMENTS = np.array([[1] * 10 + [2] * 13, [1] * 3 + [2] * 15 + [0] * 5], np.int32)
CASES = {
    "whole blocks": dict(T=24, block_size=4, q_chunk=8, k_chunk=8),
    "last block short": dict(T=23, block_size=5, q_chunk=7, k_chunk=12),
    "documents": dict(T=23, block_size=3, q_chunk=64, k_chunk=64, segments=DOCUMENTS),
}


def definition(q, k, v, *, block_size, segments=None):
    """The paper's grouped softmax, term by term: `[B, N, T, S, S]` float32."""
    T, group = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    x = jnp.einsum("binh,bjnh->bnij", q, k, precision="highest") * q.shape[3] ** -0.5
    i, j = np.arange(T)[:, None], np.arange(T)[None]
    # p_j, the landmark of j's block; T where the block has none.
    p = np.minimum(np.arange(T) // block_size * block_size + block_size - 1, T)
    seen = np.broadcast_to(j <= i, (q.shape[0], T, T))
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None]) & (segments != 0)[:, :, None]
    is_landmark, own = p == np.arange(T), p[:, None] == p[None]
    # A landmark stands for the tokens of its block that are seen: none, no landmark.
    tokens = np.stack([(seen & (p == c) & ~is_landmark).any(-1) for c in range(T)], -1)
    seen = seen & (tokens | ~is_landmark)
    # G_ij: other blocks' landmarks in the query's own group, its own landmark in none.
    G = np.where(is_landmark[None], np.where(own, -1, p[:, None]), p[None])
    same = (G[:, :, None] == G[:, None, :]).astype(np.float32)
    e = jnp.where(seen[:, None], jnp.exp(x), 0.0)
    total = jnp.einsum("ijy,bniy->bnij", same, e, precision="highest")
    S = e / jnp.where(total == 0.0, 1.0, total)
    gate = jnp.where(own, 1.0, S[..., np.minimum(p, T - 1)])
    weights = jnp.where(is_landmark, 0.0, S * gate)
    return jnp.einsum("bnij,bjnh->binh", weights, v, precision="highest"), weights


def operands(T):
    shapes = (2, T, 4, 8), (2, T, 2, 8), (2, T, 2, 8), (2, T, 4, 8)
    return [normal(i, *shape) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize(
    "name, dtype", [*((name, "float32") for name in CASES), ("last block short", "bfloat16")]
)
def test_equals_definition(name, dtype):
    options = dict(CASES[name])
    *qkv, dout = operands(options.pop("T"))
    segments = options.pop("segments", None)
    mask = Mask(causal=True, segments=segments)

    def true(*qkv):
        return definition(*qkv, block_size=options["block_size"], segments=segments)[0]

    def ours(*qkv):
        return landmark_attention(*qkv, mask=mask, **options)

    @quick
    def run(*operands):
        dense, pull = jax.vjp(true, *qkv)
        blockwise, ours_pull = jax.vjp(ours, *operands[:3])
        return (dense, *pull(dout)), (blockwise, *ours_pull(operands[3]))

    for a, b in zip(*run(*(x.astype(dtype) for x in (*qkv, dout))), strict=True):
        assert b.dtype == dtype and error(b, a) <= TOLERANCE[dtype], error(b, a)


def test_definition_by_hand():
    """Blocks of 3, two tokens and a landmark; the last query is a block's first token."""
    x = np.log([1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0])
    one = jnp.ones((1, 7, 1, 1))
    q, k = one, jnp.asarray(x, jnp.float32)[None, :, None, None]
    weights = definition(q, k, one, block_size=3)[1][0, 0]
    third = [1 / 10, 2 / 10, 0, 1 / 10, 2 / 10, 0, 4 / 10]
    close(weights[6], jnp.array(third, jnp.float32))
    # The second landmark sees its own block's tokens, and the first block through its landmark.
    close(weights[5], jnp.array([1 / 6, 2 / 6, 0, 1 / 6, 2 / 6, 0, 0], jnp.float32))


def test_queries_of_a_shard():
    q, k, v, _ = operands(24)
    whole = landmark_attention(q, k, v, block_size=4)
    mask = Mask(causal=True, positions=np.arange(10, 17), k_positions=np.arange(24))
    options = dict(block_size=4, mask=mask, q_chunk=3, k_chunk=8)
    close(quick(lambda q: landmark_attention(q, k, v, **options))(q[:, 10:17]), whole[:, 10:17])


def test_bad_arguments():
    q, k, v, _ = operands(8)
    with pytest.raises(ValueError, match="landmark_block=1: must be at least 2"):
        landmark_attention(q, k, v, block_size=1)
    with pytest.raises(ValueError, match="3 query heads: must be a multiple of 2"):
        landmark_attention(q[:, :, :3], k, v, block_size=4)


def test_with_slopes_a_cap_and_sinks():
    """The weights are a plain softmax over x_j + l_c - L_c, and the sink is one more key."""
    T, block, cap = 14, 4, 3.0
    q, k, v, dout = operands(T)
    slopes, sinks = np.array([0.5, 0.25, 0.1, 0.05], np.float32), normal(9, 4)
    i, j = np.arange(T)[:, None], np.arange(T)[None]
    mark, own = j % block == block - 1, i // block == j // block
    # Landmarks of a block, one for each of its tokens; a token of the last block has none.
    at = np.minimum(j[0] // block * block + block - 1, T - 1)

    def dense(q, k, v, sinks):
        x = jnp.einsum("binh,bjnh->bnij", q, jnp.repeat(k, 2, 2), precision="highest") * 8**-0.5
        x = cap * jnp.tanh(x / cap) - slopes[None, :, None, None] * np.abs(i - j)[None, None]
        tokens = jnp.where((j <= i) & ~mark, x, -jnp.inf)
        same = (j[0][:, None] // block == j[0][None] // block).astype(np.float32)
        sums = jnp.einsum("bnij,jy->bniy", jnp.exp(tokens), same, precision="highest")
        far = jnp.where(own | (j > i) | mark, 0.0, 1.0)[None, None]
        y = tokens + far * (x[..., at] - jnp.log(jnp.where(far > 0, sums, 1.0)))
        sink = jnp.broadcast_to(sinks[None, :, None, None], (*y.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([y, sink], -1), -1)[..., :-1]
        return jnp.einsum("bnij,bjnh->binh", weights, jnp.repeat(v, 2, 2), precision="highest")

    def ours(q, k, v, sinks):
        options = dict(alibi=slopes, softcap=cap, sinks=sinks, q_chunk=5, k_chunk=8)
        return attention(q, k, v, landmark_block=block, **options)

    @quick
    def run(*operands):
        found = [jax.vjp(f, *operands) for f in (dense, ours)]
        return [(out, *pull(dout)) for out, pull in found]

    for a, b in zip(*run(q, k, v, sinks), strict=True):
        assert error(b, a) <= TOLERANCE["float32"]
    with pytest.raises(NotImplementedError, match="'loop': no landmark attention"):
        attention(q, k, v, landmark_block=block, impl="loop")
