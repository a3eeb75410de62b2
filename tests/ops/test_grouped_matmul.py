"""Tokens grouped by expert and multiplied: what a dense product over all experts gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bptjax.ops import grouped_triton
from bptjax.ops.grouped_matmul import block_rows, collect, dispatch, group, grouped_matmul
from ops.comparing import close, normal, quick, temp_bytes

T, I, O, E, BLOCK = 13, 6, 10, 5, 4  # noqa: E741
RANDOM = np.random.default_rng(0)
# The experts of each token.
CASES = {
    "spread": RANDOM.permuted(np.tile(np.arange(E), (T, 1)), axis=1)[:, :2],
    "skewed": np.stack([np.minimum(RANDOM.geometric(0.5, T) - 1, 3), np.full(T, 4)], 1),
    "two experts, others empty": np.tile([4, 1], (T, 1)),
    "all to one": np.full((T, 1), 3),
}


def ours(x, w, weights, chosen):
    """Each token times the matrices of its experts, weighted."""
    groups = group(chosen, E, BLOCK)
    rows = grouped_matmul(dispatch(x, groups), w, groups.experts)
    weight = jnp.take(weights.reshape(-1), groups.choices, mode="fill", fill_value=0)
    return collect(rows * weight[:, None].astype(rows.dtype), groups)


def dense(x, w, weights, chosen):
    each = jnp.einsum("ti,eio->teo", *(a.astype(jnp.float32) for a in (x, w)), precision="highest")
    each = jnp.take_along_axis(each, chosen[..., None], 1)
    return (each * weights[..., None]).sum(1)


@functools.partial(quick, static_argnums=0)
def results(f, chosen, dy, *operands):
    y, pull = jax.vjp(functools.partial(f, chosen=chosen), *operands)
    return y, *pull(dy.astype(y.dtype))


@pytest.mark.parametrize(
    "name, dtype", [*((name, "float32") for name in CASES), ("spread", "bfloat16")]
)
def test_equals_dense(name, dtype):
    chosen = jnp.asarray(CASES[name])
    x, w = normal(0, T, I).astype(dtype), normal(1, E, I, O).astype(dtype)
    operands = chosen, normal(3, T, O), x, w, normal(2, *chosen.shape)
    got = results(ours, *operands)
    assert got[1].dtype == got[2].dtype == dtype
    close(got, results(dense, *operands), dtype)


def test_every_choice_has_a_row():
    """Also where blocks are full, and where every expert has three empty rows."""
    grouped = jax.jit(functools.partial(group, experts=E, block=BLOCK))
    for counts in ([4, 8, 0, 4, 1], [5, 1, 9, 1, 1], [0, 0, 0, 0, 17]):
        chosen = RANDOM.permutation(np.repeat(np.arange(E), counts))[:, None]
        groups = jax.tree.map(np.asarray, grouped(jnp.asarray(chosen)))
        rows = groups.rows[:, 0]
        assert np.array_equal(groups.experts[rows // BLOCK], chosen[:, 0])
        assert np.array_equal(groups.choices[rows], np.arange(17))
        assert (groups.choices == 17).sum() == len(groups.choices) - 17
        # Blocks behind those of the last expert have none.
        used = sum(-(-n // BLOCK) for n in counts)
        assert (groups.experts[:used] < E).all() and (groups.experts[used:] == E).all()


def test_matrix_gradients_accumulate_in_float32():
    """512 equal blocks: a sum in bfloat16 would stay at 256 times one."""
    x, w = jnp.ones((512, 1), jnp.bfloat16), jnp.ones((2, 1, 1), jnp.bfloat16)
    experts = jnp.ones(512, jnp.int32)
    got = jax.grad(lambda w: grouped_matmul(x, w, experts).astype(jnp.float32).sum())(w)
    assert got[:, 0, 0].tolist() == [0, 512]


def test_blocks_follow_the_tokens():
    assert [block_rows(*sizes) for sizes in ((1, 8), (16384, 128), (10**6, 8))] == [16, 64, 128]


def test_memory_follows_the_tokens():
    """A dense product over experts, as `jax.lax.ragged_dot` is, needs as much for each of them."""
    T, E, D = 256, 64, 32

    def loss(x, w, chosen):
        groups = group(chosen, E, 16)
        return grouped_matmul(dispatch(x, groups), w, groups.experts).sum()

    x, w = jax.ShapeDtypeStruct((T, D), "float32"), jax.ShapeDtypeStruct((E, D, D), "float32")
    sizes = [
        temp_bytes(jax.grad(loss, (0, 1)), x, w, jax.ShapeDtypeStruct((T, k), "int32"))
        for k in (4, 8)
    ]
    rows, matrices = 4 * D * (8 * T + 64 * 15), 4 * E * D * D
    assert sizes[0] < sizes[1] < 2 * sizes[0] and sizes[1] < 3 * rows + 2 * matrices < T * E * D * 4


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        ("bfloat16", (96, 160)),
        ("float32", (96, 160)),
        ("bfloat16", (128, 256)),
        ("float16", (256, 384)),
    ],
)
def test_kernels_through_a_loop_of_layers(dtype, sizes, monkeypatch):
    """Gradients of stacked matrices are those of the loop over blocks: XLA must not fuse the slices
    of a stack into the kernels, which are Pallas's on Hopper for some of these sizes."""
    L, T, (D, F), X = 3, 1000, sizes, 7
    x, up, down = (normal(i, *s) / 9 for i, s in enumerate([(T, D), (L, X, D, F), (L, X, F, D)]))
    chosen = jax.random.randint(jax.random.key(3), (T, 2), 0, X)

    def loss(x, up, down):
        groups = group(chosen, X)

        def layer(x, w):
            rows = grouped_matmul(dispatch(x, groups), w[0].astype(x.dtype), groups.experts)
            return x + collect(grouped_matmul(rows, w[1], groups.experts), groups), None

        # A mean, because float16 does not hold the gradients of a sum.
        return (jax.lax.scan(layer, x, (up, down))[0].astype(jnp.float32) ** 2).mean()

    operands = [a.astype(dtype) for a in (x, up, down)]
    got = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*operands)
    assert grouped_triton.available()
    monkeypatch.setattr(grouped_triton, "available", lambda: False)
    jax.clear_caches()
    with jax.default_matmul_precision("highest"):  # The default rounds operands to 10 bits.
        wanted = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*operands)
    jax.tree.map(lambda a, b: close(a, b, dtype), got, wanted)
