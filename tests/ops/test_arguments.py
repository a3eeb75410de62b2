"""Public operations refuse bad arguments at trace time, by name and with a remedy."""

import inspect

import jax
import numpy as np
import pytest

from bptjax.ops.attention import attention, make_spec
from bptjax.ops.attention.contract import QKV
from bptjax.ops.blockwise import blockwise, blockwise_transformer
from bptjax.ops.mask import Mask
from bptjax.ops.taylor_attention import taylor_attention
from bptjax.parallel.mesh import ParallelConfig, make_mesh
from bptjax.parallel.sequence import attention as on_mesh
from ops.comparing import normal

KEY = jax.random.key(7)
X = normal(0, 2, 4, 3, 8)
ONES = np.ones((2, 4), np.int32)
BAD = {
    "no key": (dict(dropout=0.1), "dropout=0.1: requires dropout_key"),
    "dropout": (dict(dropout=1.0, dropout_key=KEY), r"dropout=1.0: must be in \[0, 1\)"),
    "dropout < 0": (dict(dropout=-0.1, dropout_key=KEY), r"dropout=-0.1: must be in \[0, 1\)"),
    "q_chunk": (dict(q_chunk=0), "q_chunk=0: must be at least 1 token"),
    "k_chunk": (dict(k_chunk=-4), "k_chunk=-4: must be at least 1 token"),
    "softcap": (
        dict(softcap=0.0),
        "softcap=0.0: must be positive and finite; leave it out for no cap",
    ),
    "softcap < 0": (dict(softcap=-50.0), "softcap=-50.0: must be positive"),
    "scale": (dict(scale=float("nan")), "scale=nan: must be finite; leave it out"),
    "sinks": (
        dict(sinks=np.ones(2)),
        r"sinks: must be \[3\], one logit per query head, not \(2,\)",
    ),
    "integer sinks": (dict(sinks=np.ones(3, int)), "sinks: must be of a float dtype, not int64"),
    "alibi": (
        dict(alibi=np.ones(2)),
        r"alibi: must be \[3\], one slope per query head, not \(2,\)",
    ),
    "alibi, T != S": (dict(q=X[:, :2], mask=Mask(), alibi=np.ones(3)), "S=4 keys: with ALiBi"),
    "T != S": (dict(q=X[:, :2]), "T=2 queries and S=4 keys: with causal"),
    "heads": (dict(k=X[:, :, :2], v=X[:, :, :2]), "3 query heads: must be a multiple of 2"),
    "fewer values": (
        dict(v=X[:, :-1]),
        r"keys \(2, 4, 3, 8\) and values \(2, 3, 3, 8\): must",
    ),
    "value heads": (dict(v=X[:, :, :1]), r"keys .* and values \(2, 4, 1, 8\): must have the same"),
    "head sizes": (dict(q=X[..., :4]), r"queries \(2, 4, 3, 4\) and keys .* batch and head size"),
    "batches": (dict(q=X[:1]), r"queries \(1, 4, 3, 8\) and keys .* batch and head size"),
    "dtypes": (dict(k=X.astype("bfloat16")), "q float32, k bfloat16, v float32: must have the"),
    "integers": (dict(q=X.astype(int)), "q: must be of a float dtype, not int32"),
    "rank": (dict(q=X[0]), r"q: must be \[batch, tokens, .*\], not \(4, 3, 8\)"),
    "no batch": (dict(q=X[:0], k=X[:0], v=X[:0]), r"q: must be .*, not \(0, 4, 3, 8\)"),
    "no tokens": (dict(q=X[:, :0], k=X[:, :0], v=X[:, :0]), r"q: must be .*, not \(2, 0, 3, 8\)"),
    "window": (dict(mask=Mask(causal=True, window=0)), "window=0: must be at least 1 token"),
    "negative window": (dict(mask=Mask(window=-1)), "window=-1: must be at least 1 token"),
    "few segments": (
        dict(mask=Mask(segments=ONES[:, :3])),
        r"segments: must have 4 entries.*not 3",
    ),
    "flat segments": (dict(mask=Mask(segments=ONES[0])), r"Mask.segments: must be .*not \(4,\)"),
    "segments' batch": (
        dict(mask=Mask(segments=np.ones((3, 4), np.int32))),
        r"Mask.segments: must be \[batch, tokens\], batch 2; not \(3, 4\)",
    ),
    "float segments": (dict(mask=Mask(segments=ONES / 2)), "segments: must be integer, not float"),
    "few positions": (
        dict(mask=Mask(positions=np.arange(3))),
        "Mask.positions: must have 4 entries, one per token, not 3",
    ),
    "positions' rank": (
        dict(mask=Mask(positions=np.zeros((1, 1, 4), int))),
        r"Mask.positions: must be \[tokens\] or \[batch, tokens\], batch 2; not \(1, 1, 4\)",
    ),
}


@pytest.mark.parametrize("options, message", BAD.values(), ids=BAD)
def test_bad_arguments(options, message):
    # Without the shape checker of the tests, which users do not have.
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(attention)(**dict(q=X, k=X, v=X) | options)


def test_one_row_of_segments_stands_for_all_sequences():
    q, k = (normal(i, 2, 9, heads, 8) for i, heads in enumerate((4, 2)))
    rows = np.array([[1] * 4 + [2] * 5], np.int32)
    x = QKV(q, k, k)
    (one, two) = (make_spec(x, mask=Mask(segments=y)).mask for y in (rows, rows.repeat(2, 0)))
    assert one.segments.shape == (2, 9) and (one.segments == two.segments).all()
    assert make_spec(x, mask=Mask(segments=rows, k_segments=rows)).mask.k_segments.shape == (2, 9)


def test_a_mesh_refuses_the_same_arguments_as_one_device():
    with jax.set_mesh(make_mesh(ParallelConfig(fsdp=2), jax.devices()[:2])):
        for name in ("q_chunk", "softcap", "sinks", "fewer values", "window", "no tokens"):
            options, message = BAD[name]
            with pytest.raises(ValueError, match=message):
                inspect.unwrap(on_mesh)(**dict(q=X, k=X, v=X) | options)


def test_related_functions_refuse_bad_arguments():
    for name in ("fewer values", "heads", "dtypes", "no tokens"):
        options, message = BAD[name]
        with pytest.raises(ValueError, match=message):
            inspect.unwrap(taylor_attention)(**dict(q=X, k=X, v=X) | options)
    with pytest.raises(ValueError, match=r"keys: must be \(2, 4\), as k, not \(2, 3\)"):
        inspect.unwrap(taylor_attention)(X, X, X, keys=np.ones((2, 3), bool))
    for x, message in (
        (
            X[:, :0],
            r"x: must be arrays \[batch, tokens, ...\] of one batch and length, not \(2, 0\)",
        ),
        ((X, X[:, :2]), r"not \(2, 2\), \(2, 4\)"),
        ((), "not no arrays"),
    ):
        with pytest.raises(ValueError, match=message):
            blockwise(lambda p, x: x, {}, x, chunk=2)
        with pytest.raises(ValueError, match=message):
            blockwise_transformer(lambda p, x: x, lambda p, x, out: out, {}, x, X, X, q_chunk=2)
