"""Every kernel gives the result and the gradients of the oracle, or refuses the case."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import fast

from bptjax.ops.attention import (
    KERNELS,
    RESIDUAL_NAMES,
    attend,
    attention,
    choose,
    reference,
    scan,
)
from bptjax.ops.attention.contract import QKV, AttentionState
from bptjax.ops.mask import Mask
from bptjax.ops.softmax import merge_states
from ops.attention_cases import (
    CASES,
    DOCUMENTS,
    FEATURES,
    HERE,
    KEY,
    NAMES,
    SINKS,
    every_impl,
    oracle,
    refuses,
    run,
)
from ops.comparing import TOLERANCE, close, error, normal, quick

# `loop` and `products` share the arithmetic of `scan`, and `reference` is the oracle but for its
# backward pass: in what is named here a few cases do. A kernel proves every case in every dtype.
FEW = "gqa", "segments", "everything", "tree", "zigzag, keys of others", "sinks, everything"
SPARED = {("scan", "float16")}
SPARED |= {(impl, dtype) for impl in ("loop", "products", "reference") for dtype in TOLERANCE}
GRID = [
    (name, impl, dtype)
    for name, impl, dtype in itertools.product(CASES, KERNELS, TOLERANCE)
    if name in FEW or (impl, dtype) not in SPARED
]


def is_fast(name, impl, dtype):
    """A kernel that this machine cannot run refuses every case alike, so one of them does."""
    if impl not in HERE:
        return (name, dtype) == (FEW[0], "float32")
    if dtype == "float32":
        return name in ("everything", "tree") or impl == "scan" and name in {*FEW, *FEATURES}
    return name == "everything" and (impl == "scan" or dtype == "bfloat16")


@pytest.mark.parametrize("name, impl, dtype", fast(GRID, is_fast))
def test_equals_oracle(name, impl, dtype):
    case = CASES[name]
    operands = case.operands(dtype)
    if refuses(impl, case, operands):
        return
    results = run(case, impl, operands)
    empty = ~np.asarray(oracle(name)[0]).any((2, 3))
    for what, a, b in zip(NAMES[: len(results)], results, oracle(name), strict=True):
        assert a.dtype == ("float32" if what == "dsinks" else dtype), what
        assert error(a, b) <= TOLERANCE[dtype], f"{what}: {error(a, b)}"
        if what in ("out", "dq"):
            assert not np.asarray(a)[empty].any(), f"{what} of a query that attends to no key"


@pytest.mark.parametrize("name", [n for n in CASES if "dropout" not in CASES[n].options])
def test_oracle_by_hand(name):
    """The oracle against scalar loops: every word of Mask's and attention's definition."""
    case = CASES[name]
    (q, k, v, _), m = case.operands(), case.mask
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (B, T, N, H), S = q.shape, k.shape[1]
    positions = np.broadcast_to(np.arange(T) if m.positions is None else m.positions, (B, T))
    if m.k_positions is None:
        k_positions = positions if T == S else np.broadcast_to(np.arange(S), (B, S))
    else:
        k_positions = np.broadcast_to(m.k_positions, (B, S))
    k_segments = m.segments if m.k_segments is None else m.k_segments
    k_depths = m.depths if m.k_depths is None else m.k_depths
    slopes, cap = case.options.get("alibi"), case.options.get("softcap")
    k_globals = m.global_tokens if m.k_global_tokens is None else m.k_global_tokens
    global_tokens, k_global_tokens = (
        np.broadcast_to(False if x is None else x, (B, n))
        for x, n in ((m.global_tokens, T), (k_globals, S))
    )

    out = np.zeros(q.shape)
    for b, t, n in np.ndindex(B, T, N):
        weights, values = [], []
        sink = 0.0 if case.sinks is None else np.exp(case.sinks[n])
        for s in range(S):
            far = int(positions[b, t]) - int(k_positions[b, s])
            if m.causal and far < 0:
                continue
            if m.ends is not None and positions[b, t] >= m.ends[b, s]:
                continue
            if m.depths is not None:
                far = int(m.depths[b, t]) - int(k_depths[b, s])
            near = m.window is None or (far if m.causal else abs(far)) < m.window
            if m.block_mask is not None:
                at = positions[b, t] // m.block_size, k_positions[b, s] // m.block_size
                near = near and m.block_mask[at]
            if not near and not global_tokens[b, t] and not k_global_tokens[b, s]:
                continue
            if m.segments is not None and (
                m.segments[b, t] == 0 or m.segments[b, t] != k_segments[b, s]
            ):
                continue
            head = n // (N // k.shape[2])
            logit = q[b, t, n] @ k[b, s, head] * case.options.get("scale", H**-0.5)
            logit = cap * np.tanh(logit / cap) if cap else logit
            logit -= slopes[n] * abs(far) if slopes is not None else 0.0
            weights.append(np.exp(logit))
            values.append(v[b, s, head])
        if weights:
            out[b, t, n] = np.array(weights) / (sum(weights) + sink) @ np.array(values)
    assert error(oracle(name)[0], out) < 1e-6


@every_impl
def test_causality(impl):
    """No output moves when a later key or value does."""
    case = CASES["gqa"]
    q, k, v, _ = case.operands()
    if refuses(impl, case, case.operands()):
        return

    @quick
    def moved_by(t):
        def f(k, v):
            out = attention(q, k, v, impl=impl, **case.chunks)
            return jnp.where(jnp.arange(case.T)[None, :, None, None] == t, out, 0.0).sum()

        return jax.grad(f, (0, 1))(k, v)

    for t in range(case.T):
        for d in moved_by(t):
            assert d[:, : t + 1].any() or t == 0
            assert not d[:, t + 1 :].any()


@every_impl
def test_packed_is_separate(impl):
    case = CASES["segments"]
    q, k, v, dout = (x[:1] for x in case.operands())
    mask = Mask(causal=True, segments=DOCUMENTS[:1])
    if refuses(impl, case._replace(mask=mask), (q, k, v, dout)):
        return
    packed = run(case._replace(mask=mask), impl, (q, k, v, dout))
    for document in (1, 2):
        where = DOCUMENTS[0] == document
        one = [x[:, where] for x in (q, k, v, dout)]
        alone = run(case._replace(mask=Mask(causal=True)), impl, one)
        close([x[:, where] for x in packed], list(alone))


@pytest.mark.parametrize("name", fast(["everything", "cross, segments"], ["everything"]))
@every_impl
def test_key_blocks_merge(name, impl):
    """Ring attention's algebra: attention to disjoint keys merges into attention to all of them,
    and the gradients of each block, from the merged state, add up."""
    case, kernel = CASES[name], KERNELS[impl]
    q, k, v, dout = case.operands()
    if refuses(impl, case, case.operands()):
        return
    S = k.shape[1]
    mask = case.mask.resolve(case.T, S)

    def part(start, stop):
        spec = case._replace(mask=mask.keys(start, stop)).spec()
        return QKV(q, k[:, start:stop], v[:, start:stop]), spec

    def run():
        parts = [part(0, 6), part(6, S)]
        state = functools.reduce(merge_states, [kernel.forward(*part) for part in parts])
        gradients = [kernel.backward(x, state, dout, spec) for x, spec in parts]
        dq, dk, dv = zip(*gradients, strict=True)
        return state, sum(dq), jnp.concatenate(dk, 1), jnp.concatenate(dv, 1)

    state, *gradients = quick(run)()
    expected = quick(lambda x: reference.forward(x, case.spec()))(QKV(q, k, v))
    attends = expected.lse > -jnp.inf
    assert (jnp.isneginf(state.lse) == ~attends).all()
    close(jnp.where(attends, state.lse, 0.0), jnp.where(attends, expected.lse, 0.0))
    close([state.out, *gradients], list(oracle(name)))


@every_impl
def test_every_tile_empty(impl):
    """A static mask without an allowed pair: nothing to visit, and no error."""
    case = CASES["shard sees nothing"]
    *qkv, dout = case.operands()
    kernel = KERNELS[impl]
    if refuses(impl, case, [*qkv, dout]):
        return

    @quick
    def run(x, dout):
        state = kernel.forward(x, case.spec())
        return state.lse, (state.out, *kernel.backward(x, state, dout, case.spec()))

    lse, results = run(QKV(*qkv), dout)
    assert jnp.isneginf(lse).all() and not any(x.any() for x in results)


def test_a_sink_is_the_lse_of_a_query_that_attends_to_no_key():
    case = CASES["sinks, documents"]
    x = QKV(*case.operands()[:3])
    padding = DOCUMENTS == 0
    attend_scan = quick(functools.partial(attend, scan, spec=case.spec()))
    state = attend_scan(x, sinks=jnp.asarray(SINKS))
    assert (np.asarray(state.lse)[padding] == SINKS).all() and not state.out[padding].any()
    assert jnp.isneginf(attend_scan(x).lse[padding]).all()


@pytest.mark.thorough
def test_scan_is_loop():
    case = CASES["everything"]
    operands = case.operands()
    close(run(case, "scan", operands), run(case, "loop", operands))


def test_loop_runs_eagerly():
    """The baseline of the comparison: no jit, one dispatch at a time."""
    case = CASES["gqa"]
    q, k, v, dout = case.operands()
    out, pull = jax.vjp(lambda *qkv: attention(*qkv, impl="loop", **case.chunks), q, k, v)
    close((out, *pull(dout)), oracle("gqa"))


@pytest.mark.parametrize("impl", fast(["scan", "loop"], ["scan"]))
def test_dropout_knows_no_chunks(impl):
    case = CASES["everything"]
    operands = case.operands()
    for chunks in ((13, 13), (3, 7)):
        other = case._replace(q_chunk=chunks[0], k_chunk=chunks[1])
        close(run(other, impl, operands), oracle("everything"))


def test_dropout_is_unbiased():
    """Over many keys the output's mean is the output without dropout."""
    q, k, v, _ = CASES["all keys"].operands()
    keys = jax.random.split(KEY, 2000)
    f = functools.partial(attention, q, k, v, mask=Mask(), impl="reference")
    outs = quick(jax.vmap(lambda key: f(dropout=0.3, dropout_key=key)))(keys)
    sigmas = (outs.mean(0) - f()) / (outs.std(0) / len(keys) ** 0.5)
    assert jnp.abs(sigmas).max() < 5.0
    assert 0.9 < jnp.square(sigmas).mean() < 1.1


def test_dropout_key_kinds():
    """Typed, raw and partitionable-free keys all serve; the same key drops the same."""
    q, k, v, _ = CASES["gqa"].operands()
    f = functools.partial(attention, q, k, v, impl="reference", dropout=0.5)
    typed, raw = f(dropout_key=jax.random.key(3)), f(dropout_key=jax.random.PRNGKey(3))
    assert (typed == raw).all()
    assert not (typed == f(dropout_key=jax.random.key(4))).all()
    assert jnp.isfinite(f(dropout_key=jax.random.key(3, impl="rbg"))).all()


@pytest.mark.parametrize("impl", fast(["scan", "loop"], ["scan"]))
def test_vmap(impl):
    """A batch of attentions, the segments of each among what is mapped."""
    case = CASES["segments"]
    operands = case.operands()
    twice = [jnp.stack([x, x[::-1]]) for x in operands[:3]]
    segments = jnp.stack([DOCUMENTS, DOCUMENTS[::-1]])

    @quick
    @jax.vmap
    def f(q, k, v, segments):
        mask = Mask(causal=True, segments=segments)
        options = dict(mask=mask, impl=impl, **case.chunks)
        _, pull = jax.vjp(lambda *qkv: attention(*qkv, **options), q, k, v)
        return pull(operands[3])

    close(tuple(x[0] for x in f(*twice, segments)), oracle("segments")[1:])


def test_traced_mask():
    """Segments and positions as arguments of one compiled function."""
    q, k, v, _ = CASES["segments"].operands()

    @quick
    def f(mask):
        return attention(q, k, v, mask=mask, **CASES["segments"].chunks)

    close(f(CASES["segments"].mask), oracle("segments")[0])
    close(f(Mask(causal=True, segments=np.ones((2, 13), np.int32))), oracle("gqa")[0])
    assert f._cache_size() == 1


@pytest.mark.parametrize(
    "name, impl",
    fast(
        [*(("gqa", impl) for impl in HERE), ("segments", "scan"), ("sinks", "scan")],
        [("gqa", "scan"), ("sinks", "scan")],
    ),
)
def test_remat_runs_forward_once(name, impl, monkeypatch):
    """With (out, lse) saved by name, the backward pass of jax.checkpoint does not run the forward
    again."""
    case, kernel = CASES[name], KERNELS[impl]
    q, k, v, _ = case.operands()
    if refuses(impl, case, case.operands()):
        return
    forward, runs = kernel.forward, []

    def counted(x, spec):
        def count(q):
            runs.append(1)
            return np.asarray(q)

        return forward(x._replace(q=jax.pure_callback(count, x.q, x.q)), spec)

    monkeypatch.setattr(kernel, "forward", counted)

    def layer(q):
        options = dict(mask=case.mask, sinks=case.sinks, impl=impl, **case.chunks)
        out = attention(jnp.sin(q), k, v, **options)
        return jnp.cos(out).sum()

    def run(f):
        runs.clear()
        result = jax.block_until_ready(quick(jax.value_and_grad(f))(q))
        return result, len(runs)

    save = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)
    plain, times = run(layer)
    assert times == 1
    saved, times = run(jax.checkpoint(layer, policy=save))
    assert times == 1
    again, times = run(jax.checkpoint(layer))
    assert times == 2
    close(saved, plain)
    close(again, plain)


@pytest.mark.parametrize("impl", fast(["reference", "scan"], ["scan"]))
def test_positions_below_0_are_in_no_block(impl):
    q, positions = normal(0, 1, 6, 1, 8), np.arange(6, dtype=np.int32) - 4
    mask = Mask(block_mask=np.ones((2, 2), bool), block_size=2, positions=positions)
    out = attention(q, q, q, mask=mask, impl=impl, q_chunk=2, k_chunk=3)
    assert not out[:, :4].any()
    wanted = attention(q[:, 4:], q[:, 4:], q[:, 4:], mask=Mask(), impl="reference")
    assert jnp.allclose(out[:, 4:], wanted, atol=1e-6)


@pytest.mark.parametrize("impl", fast(["reference", "scan"], ["scan"]))
def test_second_derivatives(impl):
    q, k, v = (normal(i, 1, 4, 1, 2) for i in range(3))

    def dense(q):
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) / 2**0.5
        logits = jnp.where(jnp.tril(jnp.ones((4, 4), bool)), logits, -jnp.inf)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v)

    def twice(f):
        first = jax.grad(lambda q: (f(q) ** 2).sum())
        return quick(jax.grad(lambda q: (first(q) ** 2).sum()))(q)

    ours = functools.partial(attention, k=k, v=v, mask=Mask(causal=True), impl=impl)
    assert jnp.allclose(twice(ours), twice(dense), rtol=1e-3, atol=1e-3)


def test_choose():
    spec, x = CASES["gqa"].spec(), QKV(*CASES["gqa"].operands()[:3])
    chosen, others = choose("auto", x, spec)
    assert {chosen, *others} == set(KERNELS) and chosen not in others
    with pytest.raises(ValueError, match="'flash': must be one of auto, fa4, cudnn, triton, scan"):
        choose("flash", x, spec)


def test_unsupported_raises(monkeypatch):
    def refuse(x, spec):
        return "no soft cap" if spec.softcap else None

    monkeypatch.setattr(scan, "unsupported", refuse)
    q, k, v, _ = CASES["gqa"].operands()
    with pytest.raises(NotImplementedError, match="'scan': no soft cap"):
        attention(q, k, v, softcap=1.0, impl="scan")


def test_state_is_a_pytree():
    leaves = jax.tree.leaves(AttentionState(jnp.zeros((1, 1, 1, 1)), jnp.zeros((1, 1, 1))))
    assert len(leaves) == 2
