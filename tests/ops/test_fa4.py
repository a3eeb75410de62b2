"""FlashAttention-4: what it refuses, how documents reach it; its results, on a GPU and with the
reference that fa4-jax has beside its kernels."""

import os
import subprocess
import sys
from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import fast
from training.specs import assert_same, gradient_sums

from bptjax.config import Config, TrainConfig
from bptjax.cost.trace import read_events
from bptjax.models.config import ModelConfig
from bptjax.models.execution import ExecutionConfig
from bptjax.ops.attention import attend, fa4, packed, reference, scan, triton_flash
from bptjax.ops.attention.contract import QKV, AttentionSpec, AttentionState
from bptjax.ops.choices import record_choices
from bptjax.ops.mask import Mask
from bptjax.ops.softmax import merge_states
from bptjax.parallel.mesh import ParallelConfig, make_mesh
from bptjax.training.spec import TrainSpec
from ops.attention_cases import CASES, oracle
from ops.comparing import TOLERANCE, error, normal

B, T, N, K, H = 2, 256, 4, 2, 64
# Padding before, between and behind.
DOCUMENTS = np.zeros((B, T), np.int32)
DOCUMENTS[0, :100], DOCUMENTS[0, 100:131], DOCUMENTS[0, 140:200] = 1, 2, 5
DOCUMENTS[1, 3:50] = 1
ONE = (np.arange(T)[None] < np.array([[T], [200]])).astype(np.int32)
MANY = 1 + np.arange(T, dtype=np.int32)[None].repeat(B, 0) // 3
PADDING_FIRST = DOCUMENTS[::-1]
AROUND_PADDING = ONE.copy()
AROUND_PADDING[:, 40:50] = 0

# CuTe DSL, which compiles the kernels, uses names of its own that it deprecates.
DEPRECATED = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def both(x, dout, spec, sinks=None):
    """(out, lse, dq, dk, dv)."""
    state = attend(fa4, x, spec, sinks)
    return *state, *fa4.backward(x, state, dout, spec)


def tree_ends(*trees):
    """Ends of trees of (tokens of the prompt, tokens of each answer), and 7 tokens of padding."""
    ends, at = [], 0
    for prompt, *answers in trees:
        stop = at + prompt + sum(answers)
        ends += [stop] * prompt
        for answer in answers:
            at = len(ends) + answer
            ends += [at] * answer
        at = stop
    return np.array([*ends, *[0] * 7], np.int32)


# Pairs, one answer, three answers, documents without a prompt, one token each.
PAIRS = np.stack(
    [tree_ends((70, 30, 40), (20, 10, 9), (60, 10)), tree_ends((1, 1, 1), (90, 20, 66, 70))]
)
DEEPER = tree_ends((200, 20, 29))[None].repeat(B, 0)
DEEPER[1, 225:230] = 230  # A branch of the second answer.
ENDS = {
    "pairs": (PAIRS, True),
    "chains": (np.stack([tree_ends((100,), (149,)), tree_ends((249,))]), True),
    "padding": (np.stack([tree_ends((249,)), np.zeros(T, np.int32)]), True),
    "deeper": (DEEPER, False),
    "many": (tree_ends(*[(1, 1, 1)] * 83)[None].repeat(B, 0), False),
}


class Fallback:
    """Writes over results as Triton's kernels do, with `scan`."""

    unsupported = scan.unsupported

    @staticmethod
    def forward(x, spec, done=None):
        if done is None:
            return scan.forward(x, spec)
        real = (jnp.asarray(spec.mask.segments) != 0)[..., None]
        kept = jnp.where(real[..., None], done[1].out, 0), jnp.where(real, done[1].lse, -jnp.inf)
        return jax.tree.map(
            lambda a, b: jnp.where(done[0], a, b), AttentionState(*kept), scan.forward(x, spec)
        )

    @staticmethod
    def backward(x, state, dout, spec, done=None):
        if done is None:
            return scan.backward(x, state, dout, spec)
        real = (jnp.asarray(spec.mask.segments) != 0)[..., None, None]
        kept = (jnp.where(real, y, 0) for y in done[1])
        other = scan.backward(x, state, dout, spec)
        return jax.tree.map(lambda a, b: jnp.where(done[0], a, b), QKV(*kept), other)


def vjp(cfg, q, k, v, out, lse, d_out, _, aux, seqlens=None):
    """The backward pass of fa4-jax's kernels, which take `out` and `lse` over all keys; that of its
    reference makes its own."""
    from fa4_jax._reference_backend import _fwd

    (own, own_lse), pull = jax.vjp(_fwd(cfg, aux, seqlens), q, k, v)
    share = jnp.where(own_lse == -jnp.inf, 0.0, jnp.exp(own_lse - lse))
    own_delta, delta = ((y * d_out).sum(-1).swapaxes(-1, -2) for y in (own, out))
    weights = share.swapaxes(-1, -2)[..., None]
    return pull((weights * d_out, share * (own_delta - delta)))


@pytest.fixture
def anywhere(monkeypatch):
    """fa4-jax's reference in place of its kernels, and `scan` in place of Triton's."""
    backend = pytest.importorskip("fa4_jax._reference_backend").ReferenceBackend
    monkeypatch.setattr(backend, "vjp", lambda self, *operands: vjp(*operands))
    monkeypatch.setattr(fa4, "BACKEND", "reference")
    monkeypatch.setattr(fa4, "FALLBACK", Fallback)


@pytest.fixture
def as_on_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(triton_flash, "unsupported", lambda *_: None)
    monkeypatch.setattr(fa4, "_missing", lambda: None)
    monkeypatch.setattr(fa4, "capability", lambda: (9, 0))


def refusal(mask, H=H, S=T, dtype="bfloat16", rows=B, **options):
    q, k = (
        jax.ShapeDtypeStruct((rows, length, heads, H), dtype) for length, heads in ((T, N), (S, K))
    )
    return fa4.unsupported(QKV(q, k, k), AttentionSpec(mask, 1.0, **options))


def test_refusals(as_on_gpu, monkeypatch):
    causal = Mask(causal=True)
    for mask in (causal, Mask(window=9), Mask(segments=DOCUMENTS), Mask(causal=True, ends=PAIRS)):
        assert refusal(mask) is None
    assert refusal(Mask(), S=9) is None and refusal(causal, H=256) is None
    for reason, found in {
        "float16 and bfloat16, not float32": refusal(causal, dtype="float32"),
        "multiples of 8 up to 256, not 264": refusal(causal, H=264),
        "no ALiBi": refusal(causal, alibi=jnp.ones(N)),
        "no soft cap": refusal(causal, softcap=5.0),
        "no dropout": refusal(causal, dropout=0.1),
        "causal masks where T = S only": refusal(causal, S=9),
        "windows where T = S only": refusal(Mask(window=9), S=9),
        "no global tokens": refusal(Mask(window=9, global_tokens=np.ones(T, bool))),
        "no block masks": refusal(Mask(block_mask=np.eye(2, dtype=bool), block_size=T)),
        "positions from 0": refusal(Mask(causal=True, positions=np.arange(T) + 1)),
        "along a branch": refusal(Mask(causal=True, window=9, ends=PAIRS)),
        "the same tokens": refusal(Mask(segments=DOCUMENTS, k_segments=DOCUMENTS)),
    }.items():
        assert reason in found
    assert "not tested on 2³¹ elements" in (refusal(causal, rows=2**31 // (T * N * H)) or "")
    assert "up to 128, not 192" in (refusal(Mask(segments=DOCUMENTS), H=192) or "")
    monkeypatch.setattr(fa4, "capability", lambda: (8, 0))
    assert "9.0, not 8.0" in (refusal(causal) or "")


def test_what_a_machine_lacks(monkeypatch):
    """No package, an old one, and an XLA that breaks the gradients."""
    missing = fa4._missing.__wrapped__
    monkeypatch.setitem(sys.modules, "cutejax", None)
    assert "needs fa4-jax" in missing()
    for name in ("cutejax", "cutejax.cache", "fa4_jax", "fa4_jax.attention"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name in ("AttnConfig", "fa4_fwd_p"):
        setattr(sys.modules["fa4_jax.attention"], name, None)
    assert "needs fa4-jax" in missing()
    sys.modules["fa4_jax.attention"].fa4_vjp_p = None
    monkeypatch.setattr(fa4, "_slices_stay", lambda: False)
    assert fa4.XLA_FLAG in missing()


@pytest.mark.parametrize("value, stay", [("true", False), ("false", True)])
def test_the_flag_is_read_from_xla(value, stay):
    """Not from the environment, which XLA reads once."""
    code = """
import os
from bptjax.ops.attention import fa4
found = fa4._slices_stay()
os.environ["XLA_FLAGS"] = fa4.XLA_FLAG
assert found == fa4._slices_stay()
print(found)
"""
    environment = os.environ | {"XLA_FLAGS": fa4.XLA_FLAG.replace("false", value)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.stdout.decode().strip() == str(stay), done.stderr.decode()


def test_documents():
    """Padding before, between and behind documents is in none, and empty documents fill up."""
    fit, starts, lengths = packed.documents(jnp.asarray(DOCUMENTS))
    assert fit and starts.tolist() == [0, 0, 100, 140, T + 3, *[2 * T] * 13]
    assert lengths.tolist() == [0, 100, 31, 60, 47, *[0] * 12]


@pytest.mark.thorough
def test_documents_that_do_not_fit():
    """Their number grows with the tokens."""
    short, long = (jnp.ones((2, size), jnp.int32) for size in (256, 16_384))
    assert packed.documents(short).lengths.shape == (17,)
    assert packed.documents(long).lengths.shape == (129,)
    assert packed.documents(jnp.ones((1, 2**17), jnp.int32)).lengths.shape == (257,)
    for segments, fit in (
        (ONE, True),
        (MANY, False),
        (DOCUMENTS[:, ::-1], False),
        (AROUND_PADDING, False),
        (PADDING_FIRST, True),
        (np.zeros_like(ONE), True),
        *((1 + np.minimum(np.arange(512), n - 1)[None], n <= 16) for n in (16, 17)),
    ):
        found = packed.documents(jnp.asarray(segments, jnp.int32))
        assert found.starts[0] == 0 and found.starts[-1] == np.size(segments)
        assert found.fit == fit and (found.lengths.sum() == (segments != 0).sum() * fit)


SEGMENTS = {
    "around padding": AROUND_PADDING,
    "some": DOCUMENTS,
    "one each": ONE,
    "padding first": PADDING_FIRST,
    "padding": np.zeros_like(ONE),
    "many": MANY,
    "out of order": DOCUMENTS[:, ::-1],
}


def equals_oracle(spec):
    """Compares states and gradients with the oracle's."""
    shapes = (B, T, N, 8), (B, T, K, 8), (B, T, K, 8), (B, T, N, 8)
    *qkv, dout = (normal(i, *shape) for i, shape in enumerate(shapes))
    x = QKV(*qkv)
    got = jax.jit(partial(both, spec=spec))(x, dout)
    state = reference.forward(x, spec)
    true = *state, *reference.backward(x, state, dout, spec)
    seen = np.isfinite(true[1])
    assert (np.isneginf(got[1]) == ~seen).all()
    for a, b in zip(got, true, strict=True):
        assert error(jnp.where(jnp.isfinite(a), a, 0), jnp.where(jnp.isfinite(b), b, 0)) < 1e-5


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", fast(SEGMENTS, ["some", "out of order"]))
def test_documents_equal_oracle(name, causal, window, anywhere):
    mask = Mask(causal, window, SEGMENTS[name])
    equals_oracle(AttentionSpec(mask, 0.3, q_chunk=64, k_chunk=64))


@pytest.mark.parametrize("name", ENDS)
def test_trees_equal_oracle(name, anywhere):
    ends, fit = ENDS[name]
    assert packed.trees(jnp.asarray(ends)).fit == fit
    equals_oracle(AttentionSpec(Mask(causal=True, ends=ends), 0.3, q_chunk=64, k_chunk=64))


def test_trees():
    """The later answers of a tree are one document, which attends to their prompt."""
    found = packed.trees(jnp.asarray(PAIRS))
    chains, later, prompts = ([y[:9].tolist() for y in each[1:]] for each in found[1:4])
    assert chains == [
        [0, 0, 100, 140, 170, 179, T, T + 2, T + 3],
        [0, 100, 40, 30, 9, 70, 2, 1, 110],
    ]
    assert later == [[0, 100, 170, T + 2, T + 113, *4 * [2 * T]], [0, 40, 9, 1, 136, *4 * [0]]]
    assert prompts == [[0, 0, 140, T, T + 3, *4 * [2 * T]], [0, 70, 20, 1, 90, *4 * [0]]]


def test_cases_equal_oracle(anywhere, as_on_gpu):
    """The cases that it takes."""
    taken = 0
    for name, case in CASES.items():
        *qkv, dout = case.operands()
        half = QKV(*(x.astype("bfloat16") for x in qkv))
        if fa4.unsupported(half, case.spec()) or case.sinks is not None:
            continue
        out, _, *gradients = both(QKV(*qkv), dout, case.spec())
        for a, b in zip((out, *gradients), oracle(name)[:4], strict=True):
            assert error(a, b) <= TOLERANCE["float32"], name
        taken += 1
    assert taken >= 10


def operands(rows, T, N, K, H, dtype="bfloat16"):
    shapes = (rows, T, N, H), (rows, T, K, H), (rows, T, K, H), (rows, T, N, H)
    keys = jax.random.split(jax.random.key(T), 4)
    return [jax.random.normal(key, s).astype(dtype) for key, s in zip(keys, shapes, strict=True)]


ON_GPU = {
    "causal": (Mask(causal=True), 2, 777, 4, 2, 64),
    "all": (Mask(), 1, 513, 4, 4, 128),
    "one token": (Mask(causal=True), 1, 1, 4, 2, 64),
    "window": (Mask(causal=True, window=100), 1, 1111, 4, 1, 128),
    "window of 1": (Mask(causal=True, window=1), 1, 300, 4, 1, 128),
    "window both ways": (Mask(window=100), 1, 1111, 4, 1, 64),
    "head size 96": (Mask(causal=True), 2, 640, 4, 2, 96),
    "head size 256": (Mask(causal=True), 1, 640, 4, 2, 256),
    "one each": (Mask(causal=True, segments=ONE), B, T, N, K, H),
    "documents": (Mask(causal=True, segments=DOCUMENTS), B, T, N, K, H),
    "padding first": (Mask(causal=True, segments=PADDING_FIRST), B, T, N, K, H),
    "padding": (Mask(causal=True, segments=np.zeros_like(ONE)), B, T, N, K, H),
    "documents, 128": (Mask(causal=True, segments=DOCUMENTS), B, T, N, 1, 128),
    "documents, all": (Mask(segments=DOCUMENTS), B, T, N, K, H),
    "head size 80": (Mask(causal=True), 1, 640, 4, 2, 80),
    "around padding": (Mask(causal=True, segments=AROUND_PADDING), B, T, N, K, H),
    "documents, window": (Mask(causal=True, window=20, segments=DOCUMENTS), B, T, N, K, H),
    "many documents": (Mask(causal=True, segments=MANY), B, T, N, K, H),
    "out of order": (Mask(causal=True, segments=DOCUMENTS[:, ::-1]), B, T, N, K, H),
    **{
        f"trees, {name}": (Mask(causal=True, ends=ends), B, T, N, K, H)
        for name, (ends, _) in ENDS.items()
    },
    "trees, 128": (Mask(causal=True, ends=PAIRS), B, T, N, 1, 128),
}


@pytest.mark.gpu
@DEPRECATED
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ON_GPU)
def test_compiled_equals_oracle(name, dtype, sinks):
    mask, *shape = ON_GPU[name]
    spec = AttentionSpec(mask, shape[-1] ** -0.5)
    *qkv, dout = operands(*shape, dtype=dtype)
    logits = jnp.arange(shape[2], dtype=jnp.float32) if sinks else None
    assert fa4.unsupported(QKV(*qkv), spec) is None
    out, lse, *gradients = jax.jit(partial(both, spec=spec, sinks=logits))(QKV(*qkv), dout)
    wide = QKV(*(x.astype(jnp.float32) for x in qkv))
    state = attend(reference, wide, spec, logits)
    true = state.out, *reference.backward(wide, state, dout.astype(jnp.float32), spec)
    for a, b in zip((out, *gradients), true, strict=True):
        assert error(a, b) <= TOLERANCE[dtype]
    seen = np.isfinite(state.lse)
    assert lse.dtype == jnp.float32 and (np.isneginf(lse) == ~seen).all()
    assert np.abs(np.asarray(lse)[seen] - np.asarray(state.lse)[seen]).max(initial=0) < 0.02


@pytest.mark.gpu
@DEPRECATED
def test_halves_merge():
    """Keys in two halves: partials merge, and gradients from the global (out, lse) add up."""
    q, k, v, dout = operands(1, 1024, 4, 2, 128)
    spec = AttentionSpec(Mask(), 128**-0.5)

    @jax.jit
    def in_halves(q, k, v, dout):
        halves = [QKV(q, k[:, i : i + 512], v[:, i : i + 512]) for i in (0, 512)]
        state = merge_states(*(fa4.forward(half, spec) for half in halves))
        state = AttentionState(state.out.astype(q.dtype), state.lse)
        dq, dk, dv = zip(*(fa4.backward(half, state, dout, spec) for half in halves), strict=True)
        return state.out, sum(dq), jnp.concatenate(dk, 1), jnp.concatenate(dv, 1)

    out, _, *true = both(QKV(q, k, v), dout, spec)
    for a, b in zip(in_halves(q, k, v, dout), (out, *true), strict=True):
        assert error(a, b) <= TOLERANCE["bfloat16"]


@pytest.mark.gpu
@DEPRECATED
@pytest.mark.parametrize(
    "execution",
    [
        dict(remat="none"),
        dict(remat="dots"),
        dict(remat="save_attention", save=("query", "attended")),
        dict(remat="save_attention", offload=0.5),
        dict(remat="full"),
        dict(remat="nested(2)"),
    ],
    ids=lambda execution: " ".join(map(str, execution.values())),
)
def test_gradients_through_the_layer_loop(execution, tmp_path):
    """Gradients of a model are those of cuDNN: XLA must not fuse the slices of stacked layers into
    the kernels. The forward kernel runs once a layer, and once more only if its results are not
    saved."""
    T = 1024
    train = TrainConfig(seq_len=T, max_steps=2, compute_dtype="bfloat16", param_dtype="bfloat16")
    model = ModelConfig(
        vocab_size=64, hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64
    )
    place = np.arange(T, dtype=np.int32)[None]
    segments = (1 + (place >= 300) + (place >= 777)).astype(np.int32)
    tokens = np.random.default_rng(0).integers(0, 64, (1, T), dtype=np.int32)
    batch = dict(tokens=tokens, labels=np.roll(tokens, -1, 1), segments=segments, positions=place)
    found, mesh = {}, make_mesh(ParallelConfig(), jax.devices()[:1])
    for name in ("fa4", "cudnn"):
        group = ExecutionConfig(attention_implementation=name, ffn_chunk=T, **execution)
        spec = TrainSpec(Config(train=train, execution=group), model, mesh)
        with record_choices() as choices:
            with jax.profiler.trace(tmp_path / name):
                found[name] = jax.block_until_ready(gradient_sums(spec, batch))
        assert {choice.name for choice in choices} == {name}
    assert_same(found["fa4"], found["cudnn"], rtol=2e-2)
    kernels = [event.kernel for event in read_events(tmp_path / "fa4")]
    forward, backward = (
        sum(f"flash_{way}_sm90" in kernel for kernel in kernels) for way in ("fwd", "bwd")
    )
    again = execution["remat"] in ("full", "nested(2)")
    assert (forward, backward) == (model.num_layers * (1 + again), model.num_layers)
