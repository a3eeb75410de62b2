"""Cases of attention: operands, masks and options that every kernel takes or refuses, and their
oracle."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bptjax.ops.attention import KERNELS, attention, reference
from bptjax.ops.attention.contract import QKV, AttentionSpec
from bptjax.ops.mask import Mask
from bptjax.ops.position import alibi_slopes
from ops.comparing import normal, quick

KEY = jax.random.key(7)

DOCUMENTS = np.array([[1] * 5 + [2] * 4 + [3] * 4, [1] * 3 + [2] * 6 + [0] * 4], np.int32)

# A prompt with two answers, then a document; a tree of three leaves, then padding.
ENDS = np.array(
    [[9] * 4 + [6] * 2 + [9] * 3 + [13] * 4, [10] + [6] * 2 + [5] * 2 + [6] + [10] * 4 + [0] * 3],
    np.int32,
)

DEPTHS = np.array(
    [[*range(4), 4, 5, 4, 5, 6, *range(4)], [*range(5), 3, *range(1, 5), 0, 0, 0]], np.int32
)

ZIGZAG = np.array([3, 4, 5, 15, 16, 17], np.int32)

# Global tokens of 13, and which blocks of 3 see which.
GLOBAL = np.zeros((2, 13), bool)

GLOBAL[[0, 0, 1], [0, 7, 4]] = True

BLOCKS = np.array(
    [[1, 0, 1, 0, 0], [1, 1, 0, 0, 1], [0] * 5, [1, 1, 1, 0, 1], [0, 0, 1, 1, 1]], bool
)


class Case(NamedTuple):
    mask: Mask = Mask(causal=True)
    T: int = 13
    S: int | None = None
    N: int = 4
    K: int = 2
    q_chunk: int = 7
    k_chunk: int = 5
    sinks: np.ndarray | None = None
    options: dict = {}
    H: int = 8

    def operands(self, dtype="float32"):
        B, H = 2, self.H
        T, S, N, K = self.T, self.S or self.T, self.N, self.K
        shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H)
        return [normal(i, *shape).astype(dtype) for i, shape in enumerate(shapes)]

    def spec(self):
        """The spec that `attention` makes."""
        options = dict(scale=8**-0.5) | self.chunks | self.options
        if "dropout_key" in options:
            options["dropout_key"] = jax.random.key_data(options["dropout_key"])
        return AttentionSpec(mask=self.mask, **options)

    @property
    def chunks(self):
        return dict(q_chunk=self.q_chunk, k_chunk=self.k_chunk)


def sees(p, s, *, T, S, **mask):
    """A mask for queries at absolute positions `p` and keys at `s`, as Case's arguments."""
    positions = dict(positions=np.asarray(p, np.int32), k_positions=np.asarray(s, np.int32))
    return dict(mask=Mask(**positions, **mask), T=T, S=S)


DROPOUT = dict(dropout=0.3, dropout_key=KEY)

SINKS = np.array([0.5, -1.0, 3.0, 0.0], np.float32)

CASES = {
    "mha": Case(K=4),
    "gqa": Case(),
    "mqa": Case(K=1),
    "all keys": Case(Mask()),
    "wide heads": Case(N=2, K=1, options=dict(scale=0.1), H=260),
    "window": Case(Mask(causal=True, window=3)),
    "window, 3 heads of a key": Case(Mask(causal=True, window=3, segments=DOCUMENTS), N=6),
    "one query": Case(
        **sees(
            [8],
            range(13),
            T=1,
            S=13,
            causal=True,
            segments=DOCUMENTS[:, 8:9],
            k_segments=DOCUMENTS,
        )
    ),
    "window of 1": Case(Mask(causal=True, window=1)),
    "window both ways": Case(Mask(window=3)),
    "segments": Case(Mask(causal=True, segments=DOCUMENTS)),
    "segments both ways": Case(Mask(segments=DOCUMENTS)),
    "all padding": Case(Mask(causal=True, segments=np.zeros((2, 13), np.int32))),
    "around padding": Case(
        Mask(causal=True, segments=np.array([[1] * 3 + [0] * 2 + [1] * 4 + [2] * 4] * 2, np.int32))
    ),
    "unordered segments": Case(Mask(segments=DOCUMENTS[:, ::-1])),
    "alibi": Case(options=dict(alibi=alibi_slopes(4))),
    "alibi, 6 heads": Case(N=6, K=3, options=dict(alibi=alibi_slopes(6))),
    "alibi both ways": Case(Mask(), options=dict(alibi=alibi_slopes(4))),
    "soft cap": Case(options=dict(softcap=1.5)),
    "dropout": Case(options=DROPOUT),
    "all but dropout": Case(
        Mask(causal=True, window=4, segments=DOCUMENTS),
        options=dict(alibi=alibi_slopes(4), softcap=2.0, scale=0.5),
    ),
    "everything": Case(
        Mask(causal=True, window=4, segments=DOCUMENTS),
        options=dict(alibi=alibi_slopes(4), softcap=2.0, scale=0.5) | DROPOUT,
    ),
    "cache, 1 query": Case(**sees([11], range(12), T=1, S=12, causal=True)),
    "cache, 5 queries": Case(**sees(range(8, 13), range(13), T=5, S=13, causal=True)),
    "cache, other rows": Case(
        **sees([[3, 4], [9, 10]], range(13), T=2, S=13, causal=True, window=6),
        options=dict(alibi=alibi_slopes(4)) | DROPOUT,
    ),
    "shard": Case(**sees(range(6, 12), range(18), T=6, S=18, causal=True)),
    "shard sees nothing": Case(**sees(range(6), range(6, 19), T=6, S=13, causal=True)),
    "zigzag": Case(**sees(ZIGZAG, ZIGZAG, T=6, S=6, causal=True), q_chunk=4, k_chunk=2),
    "zigzag, keys of others": Case(
        **sees(ZIGZAG, [0, 1, 2, 18, 19, 20], T=6, S=6, causal=True, window=16),
        q_chunk=2,
        k_chunk=3,
        options=dict(alibi=alibi_slopes(4)) | DROPOUT,
    ),
    "cross": Case(Mask(), T=4, S=11),
    "cross, segments": Case(
        Mask(segments=DOCUMENTS[:, 3:10], k_segments=DOCUMENTS), T=7, S=13, options=DROPOUT
    ),
    "global tokens": Case(Mask(causal=True, window=3, global_tokens=GLOBAL)),
    "block mask": Case(
        Mask(causal=True, block_mask=BLOCKS, block_size=3), N=2, K=1, q_chunk=6, k_chunk=3
    ),
    "block mask both ways": Case(
        Mask(window=9, block_mask=BLOCKS, block_size=3, global_tokens=GLOBAL, segments=DOCUMENTS),
        N=2,
        q_chunk=5,
        k_chunk=4,
    ),
    "zigzag, sparse": Case(
        **sees(
            ZIGZAG,
            [0, 1, 2, 15, 16, 17],
            T=6,
            S=6,
            causal=True,
            block_mask=np.eye(6, dtype=bool),
            block_size=3,
            global_tokens=ZIGZAG == 16,
            k_global_tokens=np.arange(6) == 1,
        ),
        N=2,
        K=1,
        q_chunk=2,
        k_chunk=4,
        options=DROPOUT,
    ),
    "tree": Case(Mask(causal=True, ends=ENDS)),
    "tree, everything": Case(
        Mask(causal=True, window=4, ends=ENDS, depths=DEPTHS),
        options=dict(alibi=alibi_slopes(4), softcap=2.0, scale=0.5) | DROPOUT,
    ),
    "tree, zigzag": Case(
        **sees(
            [0, 1, 2, 9, 10, 11],
            [3, 4, 5, 6, 7, 8],
            T=6,
            S=6,
            causal=True,
            window=5,
            ends=ENDS[:, 3:9],
            depths=DEPTHS[:, [0, 1, 2, 9, 10, 11]],
            k_depths=DEPTHS[:, 3:9],
        ),
        sinks=SINKS,
        q_chunk=4,
        k_chunk=2,
        options=dict(alibi=alibi_slopes(4)),
    ),
    "sinks": Case(sinks=SINKS),
    "sinks, documents": Case(Mask(causal=True, segments=DOCUMENTS), K=1, sinks=SINKS),
    "sinks, window": Case(Mask(causal=True, window=3), sinks=SINKS),
    "sinks, all padding": Case(
        Mask(causal=True, segments=np.zeros((2, 13), np.int32)), sinks=SINKS
    ),
    "sinks, everything": Case(
        Mask(causal=True, window=4, segments=DOCUMENTS),
        sinks=SINKS,
        options=dict(alibi=alibi_slopes(4), softcap=2.0, scale=0.5) | DROPOUT,
    ),
    "chunk longer than T": Case(q_chunk=64, k_chunk=32),
    "chunk divides": Case(T=12, q_chunk=4, k_chunk=6),
    "one token": Case(T=1),
}

# The grid of features, each at least once.
FEATURES = (
    "mqa",
    "wide heads",
    "window both ways",
    "window, 3 heads of a key",
    "one query",
    "segments",
    "all padding",
    "alibi, 6 heads",
    "everything",
    "dropout",
    "cache, other rows",
    "zigzag, keys of others",
    "block mask",
    "block mask both ways",
    "zigzag, sparse",
    "cross, segments",
    "tree, everything",
    "tree, zigzag",
    "shard sees nothing",
    "sinks, documents",
    "sinks, window",
)


def refuses(impl, case, operands):
    """Whether the kernel cannot honor the case, in which case it raises."""
    if not KERNELS[impl].unsupported(QKV(*operands[:3]), case.spec()):
        return False
    with pytest.raises(NotImplementedError, match=impl):
        run(case, impl, operands)
    return True


# Kernels that this machine can run.
HERE = [
    impl
    for impl, kernel in KERNELS.items()
    if not all(
        kernel.unsupported(QKV(*case.operands()[:3]), case.spec()) for case in CASES.values()
    )
]

every_impl = pytest.mark.parametrize("impl", HERE)

NAMES = "out", "dq", "dk", "dv", "dsinks"


@functools.cache
def oracle(name):
    """(out, dq, dk, dv) in float32, by plain autodiff of the dense definition; dsinks too where the
    case has sinks."""
    case = CASES[name]

    def dense(q, k, v):
        return reference.forward(QKV(q, k, v), case.spec()).out

    def dense_with_sinks(q, k, v, sinks):
        """One more column of logits, whose weight nothing reads."""
        logits, factors = reference._logits(q, k, case.spec())
        column = jnp.broadcast_to(sinks[None, :, None, None], (*logits.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([logits, column], -1))[..., :-1] * factors
        values = jnp.repeat(v, case.N // case.K, axis=2)
        return jnp.einsum("bnts,bsnh->btnh", weights, values, precision="highest")

    return with_gradients(dense if case.sinks is None else dense_with_sinks, case, case.operands())


def run(case, impl, operands):
    """(out, dq, dk, dv) of the implementation, and dsinks where the case has sinks."""
    options = dict(mask=case.mask, impl=impl, **case.chunks) | case.options

    def f(q, k, v, sinks=None):
        return attention(q, k, v, sinks=sinks, **options)

    return with_gradients(f, case, operands)


def with_gradients(f, case, operands):
    *qkv, dout = operands
    inputs = qkv if case.sinks is None else [*qkv, jnp.asarray(case.sinks)]

    def run(inputs, dout):
        out, pull = jax.vjp(f, *inputs)
        return out, *pull(dout)

    return quick(run)(inputs, dout)
