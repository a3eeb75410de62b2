"""The gated delta rule in chunks equals its token recurrence, and documents are worlds apart."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import fast

from bptjax.ops import delta_triton
from bptjax.ops.choices import record_choices
from bptjax.ops.delta_rule import RESIDUAL_NAMES, choose, gated_delta_rule
from bptjax.ops.delta_triton import MOST_TOKENS
from bptjax.ops.documents import count_documents, last_segment
from bptjax.ops.norm import l2_norm
from ops.comparing import close, error, normal, quick, temp_bytes

NAMES = "q", "k", "v", "g", "beta", "state"
T = 75
# Documents shorter than a chunk, of one token, longer than several chunks; padding at the end,
# between two documents and at the start.
SEGMENTS = np.array(
    [
        [1] * 3 + [2] + [3] * 40 + [4] * 9 + [5] * 11 + [0] * 11,
        [0] * 5 + [1] * 30 + [0] * 2 + [2] * 38,
    ],
    np.int32,
)
# A document starts at the last token.
LATE = np.where(np.arange(T) == T - 1, 9, SEGMENTS)
PREVIOUS = jnp.array([1, 7], jnp.int32)
CASES = {
    "one document": dict(chunk=16),
    "documents": dict(chunk=16, segments=SEGMENTS, previous=jnp.array([2, 1], jnp.int32)),
    "documents, odd chunk": dict(chunk=7, segments=SEGMENTS, previous=PREVIOUS),
    # The last of two groups of chunks has a chunk of padding.
    "a late document": dict(chunk=5, segments=LATE, previous=PREVIOUS),
    "one chunk": dict(chunk=128, segments=SEGMENTS, previous=PREVIOUS),
    "a token at a time": dict(chunk=1),
}


def recurrence(q, k, v, g, beta, state, *, segments=None, previous=None, scale=None, **_):
    """Token by token, in float32."""
    (B, T, K, H), N = q.shape, v.shape[2]
    segments = np.ones((B, T), np.int32) if segments is None else np.asarray(segments)
    owner = segments[:, 0] if previous is None else np.array(previous)
    begins = np.zeros((B, T), bool)
    for t in range(T):
        begins[:, t] = (segments[:, t] != 0) & (segments[:, t] != owner)
        owner = np.where(segments[:, t] == 0, owner, segments[:, t])
    q, k = (jnp.repeat(x.astype(jnp.float32), N // K, axis=2) for x in (q, k))
    scale = H**-0.5 if scale is None else scale

    def step(state, token):
        q, k, v, g, beta, begins, real = token
        old = jnp.where(begins[:, None, None, None], 0.0, state)
        decayed = jnp.exp(g)[..., None, None] * old
        held = jnp.einsum("bnhw,bnh->bnw", decayed, k, precision="highest")
        write = beta[..., None] * (v - held)
        new = decayed + k[..., None] * write[..., None, :]
        out = scale * jnp.einsum("bnhw,bnh->bnw", new, q, precision="highest")
        real = real[:, None, None]
        return jnp.where(real[..., None], new, state), jnp.where(real, out, 0.0)

    tokens = *(x.astype(jnp.float32) for x in (q, k, v, g, beta)), begins, segments != 0
    tokens = jax.tree.map(lambda x: jnp.moveaxis(jnp.asarray(x), 1, 0), tokens)
    state, out = jax.lax.scan(step, state, tokens)
    return jnp.moveaxis(out, 0, 1), state


def operands(T=T, K=2, N=4, H=8, W=12, B=2, decay=None):
    """The arguments in the order of `NAMES`, and the cotangents of output and state."""
    shapes = (B, T, K, H), (B, T, K, H), (B, T, N, W), (B, T, N), (B, T, N), (B, N, H, W)
    q, k, v, g, beta, state = (normal(i, *shape) for i, shape in enumerate(shapes))
    # From next to no decay to none left.
    g = -jnp.exp(2.0 * g - 2.0) if decay is None else jnp.full_like(g, decay)
    x = l2_norm(q), l2_norm(k), v, g, jax.nn.sigmoid(beta), state
    return x, (normal(6, *shapes[2]), normal(7, *shapes[5]))


def results(f, x, cotangents, **options):
    """Output and state, and the gradients by name."""

    def both(x, cotangents):
        (out, state), pull = jax.vjp(partial(f, **options), *x)
        gradients = pull((cotangents[0].astype(out.dtype), cotangents[1]))
        return (out, state), dict(zip(NAMES, gradients, strict=True))

    return quick(both)(x, cotangents)


def chunked(q, k, v, g, beta, state, **options):
    return gated_delta_rule(q, k, v, g, beta, state=state, **options)


@pytest.mark.parametrize("case", fast(CASES, ["documents", "a late document"]))
def test_equals_recurrence(case):
    x = operands()
    close(results(chunked, *x, **CASES[case]), results(recurrence, *x, **CASES[case]))


@pytest.mark.parametrize(
    "sizes",
    fast(
        [dict(T=1, K=1, N=3, H=4, W=4), dict(T=29, K=3, N=3, H=16, W=5)],
        lambda sizes: sizes["T"] == 29,
    ),
    ids=str,
)
def test_sizes(sizes):
    x = operands(**sizes)
    close(results(chunked, *x, scale=0.5), results(recurrence, *x, scale=0.5))


@pytest.mark.parametrize("decay", fast([0.0, -30.0, "both"], ["both"]))
def test_decay(decay):
    """A strong decay leaves the small ones after it as exact as without it."""
    x, cotangents = operands(decay=0.0 if decay == "both" else decay)
    if decay == "both":
        weak_and_strong = jnp.where(jnp.arange(T) % 3 == 0, -30.0, -1e-3)[None, :, None]
        x = *x[:3], weak_and_strong + x[3], *x[4:]
    close(results(chunked, x, cotangents), results(recurrence, x, cotangents))


def test_nearly_parallel_keys():
    """Half of a chunk's products of keys are 1 but for 1e-4, every write replaces what is held,
    and nothing decays: powers of the system's matrix, which a series would add up, reach 1e17."""
    (q, k, v, g, beta, state), cotangents = operands(decay=0.0)
    k = l2_norm(k[:, :1] + 0.01 * k)
    x = q, k, v, g, jnp.ones_like(beta), state
    close(results(chunked, x, cotangents), results(recurrence, x, cotangents), scale=5.0)


def test_bfloat16():
    (q, k, v, *rest), cotangents = operands()
    x = *(y.astype(jnp.bfloat16) for y in (q, k, v)), *rest
    options = dict(segments=SEGMENTS, previous=PREVIOUS)
    got = results(chunked, x, cotangents, **options)
    exact = *(y.astype(jnp.float32) for y in x[:3]), *rest
    expected = results(recurrence, exact, cotangents, **options)
    assert got[0][0].dtype == got[1]["q"].dtype == jnp.bfloat16
    close(got, expected, "bfloat16")
    # The state never was bfloat16.
    assert error(got[0][1], expected[0][1]) < 1e-6


@pytest.mark.parametrize("chunk", fast([16, 64], [16]))
def test_other_documents_do_not_move_a_bit(chunk):
    """Everything about document 3, values and cotangents, changes, by a lot."""
    x, cotangents = operands(B=1)
    segments, inside = SEGMENTS[:1], jnp.asarray(SEGMENTS[:1] == 3)

    def change(y, factor=100.0):
        mask = inside.reshape(*inside.shape, *(1,) * (y.ndim - 2))
        return jnp.where(mask, factor * y[:, ::-1], y)

    q, k, v, g, beta, state = x
    other = change(q), change(k, -1.0), change(v), change(g, 3.0), change(beta, 1.0), state
    f = partial(results, chunked, segments=segments, previous=PREVIOUS[:1], chunk=chunk)
    (out, state), gradients = f(x, cotangents)
    (out2, state2), gradients2 = f(other, (change(cotangents[0]), cotangents[1]))
    np.testing.assert_array_equal(state, state2)
    np.testing.assert_array_equal(gradients.pop("state"), gradients2.pop("state"))
    rest = np.asarray(~inside[0])
    for a, b in [(out, out2), *((gradients[name], gradients2[name]) for name in gradients)]:
        assert np.isfinite(a).all() and np.isfinite(b).all()
        np.testing.assert_array_equal(a[:, rest], b[:, rest])
        assert not np.array_equal(a[:, ~rest], b[:, ~rest])


@pytest.mark.thorough
def test_thousands_of_documents():
    """Of one token each, of which the state is k βvᵀ."""
    (q, k, v, g, beta, _), _ = operands(T=4000, B=1, H=4, W=4)
    segments = 1 + jnp.arange(4000, dtype=jnp.int32)[None]
    out, state = quick(partial(gated_delta_rule, segments=segments))(q, k, v, g, beta)
    q, k = (jnp.repeat(y, 2, axis=2) for y in (q, k))
    written = beta[..., None] * v
    close(out, 0.5 * (q * k).sum(-1, keepdims=True) * written)
    close(state, k[:, -1, :, :, None] * written[:, -1, :, None])


@pytest.mark.thorough
@pytest.mark.parametrize("at", [4, 30, 44])
def test_halves_make_the_whole(at):
    """With the state handed on at a document's start, inside documents, and at their ends; also
    the gradients, through the state."""
    x = operands()

    def halves(q, k, v, g, beta, state):
        out, previous = [], PREVIOUS
        for tokens in (slice(at), slice(at, None)):
            part = [y[:, tokens] for y in (q, k, v, g, beta)]
            own = jnp.asarray(SEGMENTS[:, tokens])
            y, state = gated_delta_rule(
                *part, state=state, segments=own, previous=previous, chunk=16
            )
            out, previous = [*out, y], last_segment(own, previous)
        return jnp.concatenate(out, 1), state

    expected = results(chunked, *x, segments=SEGMENTS, previous=PREVIOUS, chunk=16)
    close(results(halves, *x), expected)


def test_counts_documents():
    segments = jnp.array([[0, 2, 2, 0, 2, 1, 2, 0], [0] * 8], jnp.int32)
    previous = jnp.array([2, 3], jnp.int32)
    assert count_documents(segments, previous).tolist() == [[0, 0, 0, 0, 0, 1, 2, 2], [0] * 8]
    other = count_documents(segments, previous - 1)
    assert other.tolist() == [[0, 1, 1, 1, 1, 2, 3, 3], [0] * 8]
    assert last_segment(segments, previous).tolist() == [2, 3]


@pytest.mark.thorough
def test_equals_transformers():
    torch = pytest.importorskip("torch")
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    (q, k, v, g, beta, state), _ = operands(B=1)
    q, k = 3.0 * q, 0.1 * k
    arrays = [l2_norm(q), l2_norm(k), v, g, beta]
    out, _ = gated_delta_rule(*arrays, segments=SEGMENTS[:1])
    whole, end = gated_delta_rule(*arrays, state=state)
    for f in (theirs.torch_chunk_gated_delta_rule, theirs.torch_recurrent_gated_delta_rule):

        def run(tokens, f=f, **options):
            given = (torch.tensor(np.asarray(y[:, tokens])) for y in (q, k, v, g, beta))
            return f(*given, use_qk_l2norm_in_kernel=True, **options)

        initial = torch.tensor(np.asarray(state))
        expected = run(slice(None), initial_state=initial, output_final_state=True)
        close((whole, end), tuple(y.numpy() for y in expected))
        for document in range(1, 6):
            tokens = np.flatnonzero(SEGMENTS[0] == document)
            close(out[:, tokens], run(tokens)[0].numpy())


@pytest.mark.thorough
def test_memory_is_linear():
    def bytes_at(T, segmented):
        x, _ = jax.eval_shape(partial(operands, T, B=1, H=16, W=16))
        segments = jax.ShapeDtypeStruct((1, T), jnp.int32)

        def f(x, segments):
            options = dict(segments=segments, previous=segments[:, 0]) if segmented else {}
            out, state = chunked(*x, **options)
            return jnp.square(out).sum() + state.sum()

        return temp_bytes(jax.grad(f), x, segments)

    for segmented in (False, True):
        assert 0 < bytes_at(8192, segmented) <= 2.2 * bytes_at(4096, segmented)


def test_a_remat_policy_saves_the_rule():
    """With the saved names, a group is computed as often as without remat."""
    x, _ = operands(B=1)

    def layer(q, *rest):
        return jnp.cos(chunked(jnp.sin(q), *rest)[0]).sum()

    save = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)
    plain, saved, again = (
        str(jax.make_jaxpr(jax.grad(f, (0, 1)))(*x)).count("cumsum[")
        for f in (layer, jax.checkpoint(layer, policy=save), jax.checkpoint(layer))
    )
    assert plain == saved < again


def kernels(*x, **options):
    return chunked(*x, impl="triton", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes, dtype", [((128, 128), "bfloat16"), ((64, 192), "float32")])
def test_kernels_equal_recurrence(sizes, dtype):
    """Also with values in float32, as shards of a sequence have them."""
    (q, k, v, *rest), cotangents = operands(H=sizes[0], W=sizes[1])
    x = q.astype(jnp.bfloat16), k.astype(jnp.bfloat16), v.astype(dtype), *rest
    options = dict(segments=SEGMENTS, previous=PREVIOUS)
    got = results(kernels, x, cotangents, **options)
    exact = tuple(y.astype(jnp.float32) for y in x)
    close(got, results(recurrence, exact, cotangents, **options), "bfloat16")
    inside = jnp.asarray(SEGMENTS == 3)

    def change(y):
        mask = inside.reshape(*inside.shape, *(1,) * (y.ndim - 2))
        return jnp.where(mask, 2 * y[:, ::-1], y)

    other = *map(change, x[:5]), x[5]
    other = results(kernels, other, (change(cotangents[0]), cotangents[1]), **options)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(other), strict=True):
        if a.shape[:2] == inside.shape:
            assert not np.array_equal(a[inside], b[inside])
            a, b = a[~inside], b[~inside]
        np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
def test_kernels_through_a_loop_of_layers():
    """XLA must not fuse the slices of a stack into the kernels, whose operands and residuals they
    are."""
    (q, k, v, g, beta, _), _ = operands(T=200, H=128, W=128)
    q, k = (jnp.stack([y, y[:, ::-1], -y]) for y in (q, k))
    save = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)

    def loss(q, k, v, impl):
        @partial(jax.checkpoint, policy=save)
        def layer(v, keys):
            q, k = keys
            return jnp.cos(v + gated_delta_rule(q, k, v, g, beta, impl=impl)[0]), None

        return (jnp.cos(v) * jax.lax.scan(layer, v, (q, k))[0]).sum()

    f = jax.jit(jax.value_and_grad(loss, (0, 1, 2)), static_argnums=3)
    q, k = (y.astype(jnp.bfloat16) for y in (q, k))
    wanted = f(q.astype(jnp.float32), k.astype(jnp.float32), v, "scan")
    close(f(q, k, v, "triton"), wanted, "bfloat16")


def test_a_remat_policy_saves_the_kernels(monkeypatch):
    """With the saved names, the loop over chunks does not run again; the systems may."""

    def call(name, inputs, shapes, *_):
        def kernel(*inputs):
            total = sum(x.astype(jnp.float32).sum() for x in inputs)
            return tuple(jnp.full(s.shape, total.astype(s.dtype)) for s in shapes)

        kernel.__name__ = f"{name}_kernel"
        return jax.jit(kernel)(*inputs)

    monkeypatch.setattr(delta_triton, "CALL", call)
    monkeypatch.setattr(delta_triton, "unsupported", lambda *_: None)
    x, _ = operands(B=1)

    def layer(q, *rest):
        return jnp.cos(kernels(jnp.sin(q), *rest)[0]).sum()

    save = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)
    counts = []
    for f in (layer, jax.checkpoint(layer, policy=save), jax.checkpoint(layer)):
        text = str(jax.make_jaxpr(jax.grad(f, (0, 1)))(*x))
        names = ("systems", "forward", "backward", "keys")
        counts.append([text.count(f"name={name}_kernel") for name in names])
    assert counts == [[1, 1, 1, 1], [2, 1, 1, 1], [2, 2, 1, 1]]


def test_auto_takes_the_kernels_where_they_can_run(monkeypatch):
    """A named implementation is used or raises."""
    q, v = (jax.ShapeDtypeStruct((1, 64, n, 128), jnp.bfloat16) for n in (2, 4))
    assert choose("auto", q, q, v) == "scan"
    with pytest.raises(NotImplementedError, match="'triton': needs an NVIDIA GPU"):
        choose("triton", q, q, v)
    with pytest.raises(ValueError, match="impl='fla': must be one of auto, scan, triton"):
        choose("fla", q, q, v)
    monkeypatch.setattr(delta_triton, "platform", lambda: "gpu")
    monkeypatch.setattr(delta_triton, "unusable", lambda: None)
    assert choose("auto", q, q, v) == choose("triton", q, q, v) == "triton"
    assert choose("scan", q, q, v) == "scan"
    few = q.update(shape=(1, 63, 2, 128))
    with record_choices() as choices:
        assert choose("auto", few, few, v) == "scan" and choose("triton", few, few, v) == "triton"
    assert [choice.lines() for choice in choices] == [
        [
            "gated delta rule: scan",
            "  not triton: computes 64 tokens at once, and there are fewer",
        ],
        ["gated delta rule: triton"],
    ]
    for change, message in (
        (dict(dtype=jnp.float32), "bfloat16, not float32"),
        (dict(shape=(1, 64, 2, 96)), "keys of 64 or 128 .* not 96"),
        (dict(shape=(1, MOST_TOKENS + 1, 2, 128)), "at most 4194240 tokens per device"),
    ):
        other = q.update(**change)
        assert choose("auto", other, other, v) == "scan"
        with pytest.raises(NotImplementedError, match=message):
            choose("triton", other, other, v)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(k=jnp.ones((2, 7, 2, 8))), "k: must be"),
        (dict(v=jnp.ones((2, T, 3, 12))), "v|g|3 value heads"),
        (dict(beta=jnp.ones((2, T, 2))), "beta: must be"),
        (dict(state=jnp.ones((2, 4, 12, 8))), "state: must be"),
        (dict(chunk=0), "chunk=0: must be at least 1"),
        (dict(previous=PREVIOUS), "previous: must be left out without segments"),
        (dict(segments=SEGMENTS), "previous: must be set with segments"),
    ],
)
def test_refuses(change, message):
    x = dict(zip(NAMES, operands()[0], strict=True)) | change
    # The checker of the annotations is faster than the operation with some of the shapes.
    with pytest.raises((ValueError, TypeError), match=message):
        gated_delta_rule.__wrapped__(**x)
