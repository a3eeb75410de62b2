"""The grouped product on Hopper GPUs, in Pallas's interpreter: it takes shared memory, barriers and
asynchronous copies one by one, and reports races."""

from importlib.metadata import version
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from bptjax.ops import grouped_hopper, grouped_triton
from bptjax.ops.grouped_matmul import grouped_matmul
from bptjax.ops.target import HOPPER
from ops.comparing import close, normal

OLD = version("jax").startswith("0.10.")
# The last block has no expert, expert 1 no block. Inputs and outputs, which are tiles of 256 or of
# 128; steps take the slots of shared memory more than once.
OWNERS, X, ROWS = [0, 0, 2, 3], 3, grouped_hopper.ROWS
SIZES = [pytest.param(256, 128, marks=pytest.mark.thorough), (128, 256)]


@pytest.fixture
def interpreted(monkeypatch):
    kernels = pytest.importorskip("bptjax.ops.grouped_hopper_kernels")
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    run = kernels.plgpu.kernel
    params = InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(kernels.plgpu, "kernel", lambda *a, **k: run(*a, **k, interpret=params))
    monkeypatch.setattr(grouped_hopper, "capability", lambda: HOPPER)
    monkeypatch.setattr(grouped_triton, "available", lambda: True)
    device = SimpleNamespace(core_count=2)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("part", ["product", "input gradient", "matrix gradient"])
def test_equals_the_dense_product(part, inputs, outputs, interpreted):
    if OLD and part != "product":
        pytest.skip("the interpreter of jax 0.10 does not transpose tiles in shared memory")
    x, dy = normal(0, len(OWNERS) * ROWS, inputs), normal(1, len(OWNERS) * ROWS, outputs)
    w, owners = normal(2, X, inputs, outputs) / 16, jnp.array(OWNERS, jnp.int32)
    x, dy = (a.at[OWNERS.index(X) * ROWS :].set(0) for a in (x, dy))

    def dense(x, w):
        each = jnp.repeat(w.at[owners].get(mode="fill", fill_value=0), ROWS, 0)
        return jnp.einsum("mi,mio->mo", x, each, precision="highest")

    def ours(x, w):
        return grouped_matmul(x, w, owners)

    def found(f, *operands):
        x, w, dy = operands
        if part == "product":
            return f(x, w)
        return jax.vjp(f, x, w)[1](dy)[part == "matrix gradient"]

    low = [a.astype(jnp.bfloat16) for a in (x, w, dy)]
    assert grouped_hopper.suits(low[0], low[1], len(owners))
    close(found(ours, *low), found(dense, x, w, dy), "bfloat16")


@pytest.mark.parametrize(
    ("rows", "sizes", "dtypes", "taken"),
    [
        (2 * ROWS, (128, 256), ("bfloat16", "bfloat16"), True),
        (2 * ROWS, (128, 256), ("float16", "float16"), True),
        (2 * ROWS, (128, 256), ("bfloat16", "float32"), False),
        (2 * ROWS, (128, 256), ("float32", "float32"), False),
        (ROWS, (128, 256), ("bfloat16", "bfloat16"), False),
        (2 * ROWS, (128, 16), ("bfloat16", "bfloat16"), False),
        (2 * ROWS, (192, 128), ("bfloat16", "bfloat16"), False),
    ],
)
def test_other_shapes_are_left_to_triton(rows, sizes, dtypes, taken, monkeypatch):
    x, w = jnp.zeros((rows, sizes[0]), dtypes[0]), jnp.zeros((X, *sizes), dtypes[1])
    assert not grouped_hopper.suits(x, w, 2)
    monkeypatch.setattr(grouped_hopper, "capability", lambda: HOPPER)
    assert grouped_hopper.suits(x, w, 2) == taken


@pytest.mark.parametrize(
    ("generation", "taken"), [((9, 0), True), ((8, 0), False), ((10, 0), False)]
)
def test_gpus_of_other_generations_run_triton(generation, taken, monkeypatch):
    asked = []

    def recorded(kernels, shape):
        def call(*args):
            asked.append(kernels)
            return jnp.zeros(shape(*args), jnp.bfloat16)

        return call

    def rows(x, w, experts, transposed):
        return len(x), w.shape[1 if transposed else 2]

    for kernels in (grouped_hopper, grouped_triton):
        monkeypatch.setattr(kernels, "multiply", recorded(kernels, rows))
        matrices = recorded(kernels, lambda x, dy, w, experts: w.shape)
        monkeypatch.setattr(kernels, "matrix_gradients", matrices)
    monkeypatch.setattr(grouped_triton, "available", lambda: True)
    monkeypatch.setattr(grouped_hopper, "capability", lambda: generation)
    x, w = (jnp.ones(s, jnp.bfloat16) for s in ((2 * ROWS, 128), (X, 128, 256)))

    def total(x, w):
        return grouped_matmul(x, w, jnp.array([0, 2], jnp.int32)).astype(jnp.float32).sum()

    jax.grad(total, (0, 1))(x, w)
    assert asked == [grouped_hopper if taken else grouped_triton] * 3
