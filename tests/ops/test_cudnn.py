"""cuDNN's attention: what it refuses and how it divides its work; its results, on a GPU."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import fast

from bptjax.ops.attention import attend, cudnn, reference, scan, triton_flash
from bptjax.ops.attention.contract import QKV, AttentionSpec, AttentionState
from bptjax.ops.mask import Mask
from bptjax.ops.softmax import merge_states
from ops.attention_cases import CASES, oracle
from ops.comparing import TOLERANCE, error, quick

B, T, N, K, H = 2, 256, 4, 2, 64
# Padding before, between and behind.
DOCUMENTS = np.zeros((B, T), np.int32)
DOCUMENTS[0, :100], DOCUMENTS[0, 100:131], DOCUMENTS[0, 140:200] = 1, 2, 5
DOCUMENTS[1, 3:50] = 1


def both(q, k, v, dout, spec, sinks=None):
    """(out, lse, dq, dk, dv)."""
    x = QKV(q, k, v)
    state = attend(cudnn, x, spec, None if sinks is None else jnp.asarray(sinks))
    return *state, *cudnn.backward(x, state, dout, spec)


def run_scan_as_triton(monkeypatch):
    """On a machine without a GPU, and in chunks of 64 tokens."""

    def forward(x, spec):
        return scan.forward(x, replace(spec, q_chunk=64, k_chunk=64))

    def backward(x, state, dout, spec):
        return scan.backward(x, state, dout, replace(spec, q_chunk=64, k_chunk=64))

    monkeypatch.setattr(triton_flash, "unsupported", lambda *_: None)
    monkeypatch.setattr(triton_flash, "forward", forward)
    monkeypatch.setattr(triton_flash, "backward", backward)


def test_documents():
    find = quick(cudnn.documents)
    starts, sizes, fits = find(DOCUMENTS)
    assert starts[:, :3].tolist() == [[0, 100, 140], [3, T, T]]
    assert sizes[:, :3].tolist() == [[100, 31, 60], [47, 0, 0]]
    assert not sizes[:, 3:].any() and fits
    # One document in two pieces; more than there is room for.
    for row in (np.array([1, 2, 1, 0]), np.array([1, 0, 1, 1]), 1 + np.arange(40)):
        assert not find(jnp.asarray(row[None], jnp.int32))[2]
    assert find(jnp.asarray(1 + np.arange(16)[None], jnp.int32))[2]


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(dtype=jnp.float32), "float16 and bfloat16, not float32"),
        (dict(H=60), "multiples of 8 up to 128, not 60"),
        (dict(H=256), "multiples of 8 up to 128, not 256"),
        (dict(alibi=jnp.ones(N)), "no ALiBi"),
        (dict(softcap=5.0), "no soft cap"),
        (dict(dropout=0.1), "dropout"),
        (dict(mask=Mask(window=9)), "causal attention only"),
        (dict(mask=Mask(causal=True, window=9), S=9), "T = S only"),
        (dict(S=1), "two tokens or more"),
        (dict(mask=Mask(causal=True, window=9, global_tokens=np.ones(T, bool))), "global tokens"),
        (dict(mask=Mask(block_mask=np.eye(2, dtype=bool), block_size=T)), "no block masks"),
        (dict(mask=Mask(causal=True, positions=np.arange(T) + 1)), "positions from 0"),
        (dict(mask=Mask(segments=DOCUMENTS, k_segments=DOCUMENTS)), "the same tokens"),
    ],
)
def test_refusals(change, reason, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    shapes = dict(dtype=jnp.bfloat16, H=H, S=T) | change
    options = dict(mask=Mask(causal=True), scale=1.0) | {
        name: x for name, x in change.items() if name not in ("dtype", "H", "S")
    }
    q, k = (
        jax.ShapeDtypeStruct((B, length, heads, shapes["H"]), shapes["dtype"])
        for length, heads in ((T, N), (shapes["S"], K))
    )
    assert reason in cudnn.unsupported(QKV(q, k, k), AttentionSpec(**options))
    q, k = (jax.ShapeDtypeStruct((B, T, heads, H), jnp.bfloat16) for heads in (N, K))
    assert cudnn.unsupported(QKV(q, k, k), AttentionSpec(Mask(causal=True), 1.0)) is None


def operands(rows, T, N, K, H, dtype="bfloat16"):
    shapes = (rows, T, N, H), (rows, T, K, H), (rows, T, K, H), (rows, T, N, H)
    keys = jax.random.split(jax.random.key(T), 4)
    return [jax.random.normal(key, s).astype(dtype) for key, s in zip(keys, shapes, strict=True)]


# One document a row, of different lengths.
ONE = (np.arange(253)[None] < np.array([[253], [200]])).astype(np.int32)
MANY = np.repeat([[*range(1, 33)]], 32, 1).astype(np.int32)
ON_GPU = {
    "causal": (dict(mask=Mask(causal=True)), 2, 777, 4, 2, 64),
    "all": (dict(mask=Mask()), 1, 513, 4, 4, 128),
    "head size 256": (dict(mask=Mask(causal=True)), 1, 640, 4, 2, 256),
    "window": (dict(mask=Mask(causal=True, window=100)), 1, 1111, 4, 1, 128),
    "head size 96": (dict(mask=Mask(causal=True)), 2, 640, 4, 2, 96),
    "documents": (dict(mask=Mask(causal=True, segments=DOCUMENTS)), B, T, N, K, H),
    "documents, 128": (dict(mask=Mask(causal=True, segments=DOCUMENTS)), B, T, N, 1, 128),
    "documents, all": (dict(mask=Mask(segments=DOCUMENTS)), B, T, N, K, H),
    "one document": (dict(mask=Mask(causal=True, segments=DOCUMENTS[:1] // 5)), 1, T, N, K, H),
    "32 documents": (dict(mask=Mask(causal=True, segments=MANY)), 1, 1024, N, K, H),
    "one each": (dict(mask=Mask(causal=True, segments=ONE)), 2, 253, N, K, H),
    "documents, window": (
        dict(mask=Mask(causal=True, window=20, segments=DOCUMENTS)),
        B,
        T,
        N,
        K,
        H,
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ON_GPU)
def test_compiled_equals_oracle(name, dtype):
    options, *shape = ON_GPU[name]
    spec, arrays = AttentionSpec(scale=shape[-1] ** -0.5, **options), operands(*shape, dtype=dtype)
    assert cudnn.unsupported(QKV(*arrays[:3]), spec) is None
    out, lse, *gradients = jax.jit(lambda *xs: both(*xs, spec=spec))(*arrays)
    *wide, dout = (x.astype(jnp.float32) for x in arrays)
    true, pull = jax.vjp(lambda *qkv: reference.forward(QKV(*qkv), spec), *wide)
    true_gradients = pull(AttentionState(dout, jnp.zeros_like(true.lse)))
    for a, b in zip((out, *gradients), (true.out, *true_gradients), strict=True):
        assert error(a, b) <= TOLERANCE[dtype]
    seen = np.isfinite(true.lse)
    assert lse.dtype == jnp.float32 and (np.isneginf(lse) == ~seen).all()
    assert np.abs(np.asarray(lse)[seen] - np.asarray(true.lse)[seen]).max() < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_cases_equal_oracle(name, dtype):
    """Those that it takes."""
    case = CASES[name]
    arrays, spec = case.operands(dtype), case.spec()
    if cudnn.unsupported(QKV(*arrays[:3]), spec):
        return
    out, _, *gradients = jax.jit(lambda *xs: both(*xs, spec=spec, sinks=case.sinks))(*arrays)
    for a, b in zip((out, *gradients), oracle(name)[:4], strict=True):
        assert a.dtype == dtype and error(a, b) <= TOLERANCE[dtype]


def in_pieces(T, dtype):
    """Asserts that rows of T tokens in three pieces give what the oracle does."""
    q, k, v, _ = operands(2, T, N, K, H, dtype)
    spec = AttentionSpec(Mask(causal=True), 0.1)
    out, lse = jax.jit(lambda x: cudnn._forward_in_pieces(x, spec, 3))(QKV(q, k, v))
    wide = QKV(*(x.astype(jnp.float32) for x in (q, k, v)))
    true = jax.jit(lambda x: reference.forward(x, spec))(wide)
    assert error(out, true.out) <= TOLERANCE[dtype]
    np.testing.assert_allclose(lse, true.lse, atol=2e-6 if dtype == "float32" else 0.02)


@pytest.mark.parametrize("T", fast([256, 290], [290]))
def test_long_rows_in_pieces(T, monkeypatch):
    monkeypatch.setattr(cudnn, "_call_forward", reference.forward)
    in_pieces(T, "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("T", [256, 290])
def test_long_rows_in_pieces_on_a_gpu(T):
    in_pieces(T, "bfloat16")


def sinks_and_padding(dtype):
    """Asserts that padding behind one document, whose lse is a sink, changes no gradient."""
    arrays, sinks = operands(2, 253, N, K, H, dtype), jnp.arange(N, dtype=jnp.float32)
    spec = AttentionSpec(Mask(causal=True, segments=ONE), 0.1)

    def run(kernel, *arrays):
        *qkv, dout = arrays
        state = attend(kernel, QKV(*qkv), spec, sinks)
        return state.out, *kernel.backward(QKV(*qkv), state, dout, spec)

    wide = (x.astype(jnp.float32) for x in arrays)
    got, true = jax.jit(partial(run, cudnn))(*arrays), jax.jit(partial(run, reference))(*wide)
    for a, b in zip(got, true, strict=True):
        assert error(a, b) <= TOLERANCE[dtype]


def test_sinks_and_padding(monkeypatch):
    """With the oracle in cuDNN's place, which like cuDNN knows nothing of the padding."""

    def without_segments(f):
        return lambda *xs: f(*xs[:-1], replace(xs[-1], mask=Mask(causal=True)))

    monkeypatch.setattr(cudnn, "_forward", lambda x, spec, *_: causal_forward(x, spec))
    causal_forward = without_segments(reference.forward)
    monkeypatch.setattr(cudnn, "_backward", without_segments(reference.backward))
    run_scan_as_triton(monkeypatch)
    sinks_and_padding("float32")


@pytest.mark.gpu
def test_sinks_and_padding_on_a_gpu():
    sinks_and_padding("bfloat16")


@pytest.mark.gpu
def test_halves_merge():
    """Keys in two halves: partials merge, and gradients from the global (out, lse) add up."""
    q, k, v, dout = operands(1, 1024, 4, 2, 128)
    spec = AttentionSpec(Mask(), 128**-0.5)
    halves = [QKV(q, k[:, i : i + 512], v[:, i : i + 512]) for i in (0, 512)]
    state = merge_states(*(cudnn.forward(half, spec) for half in halves))
    state = state._replace(out=state.out.astype(q.dtype))
    gradients = [cudnn.backward(half, state, dout, spec) for half in halves]
    dq, dk, dv = zip(*gradients, strict=True)
    got = state.out, sum(dq), jnp.concatenate(dk, 1), jnp.concatenate(dv, 1)
    out, _, *true = both(q, k, v, dout, spec)
    for a, b in zip(got, (out, *true), strict=True):
        assert error(a, b) <= TOLERANCE["bfloat16"]
