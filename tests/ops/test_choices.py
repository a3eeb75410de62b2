"""The record of the kernels that attention chooses."""

import jax
import jax.numpy as jnp
import pytest

from bptjax.ops import attention as attention_package
from bptjax.ops import determinism
from bptjax.ops.attention import (
    KERNELS,
    NOT_DETERMINISTIC,
    attention,
    choose,
    cudnn,
    fa4,
    products,
    scan,
    triton_flash,
)
from bptjax.ops.attention.contract import QKV, AttentionSpec, AttentionState
from bptjax.ops.choices import record_choices
from bptjax.ops.determinism import deterministic
from bptjax.ops.mask import Mask

X = jnp.ones((1, 8, 2, 4))


def test_a_traced_program_records_its_kernels():
    for _ in range(2):  # The second time, the caches of jax are warm.

        def loss(x, impl):
            return attention(x, x, x, impl=impl).sum()

        with record_choices() as choices:
            jax.jit(jax.grad(loss), static_argnums=1).lower(X, "auto").compile()
            jax.jit(loss, static_argnums=1).lower(X, "loop").compile()
        automatic, named = choices
        others = [name for name, _ in automatic.refusals]
        assert automatic.name == "scan" and others == [n for n in KERNELS if n != "scan"]
        assert automatic.lines()[:2] == [
            "attention: scan",
            "  not fa4, cudnn, triton: needs an NVIDIA GPU",
        ]
        assert named.lines() == ["attention: loop"]


def test_refusals_and_calls_outside_are_not_recorded():
    spec = AttentionSpec(mask=Mask(causal=True), scale=1.0)
    with record_choices() as choices:
        with pytest.raises(NotImplementedError, match="NVIDIA"):
            choose("cudnn", QKV(X, X, X), spec)
    choose("auto", QKV(X, X, X), spec)
    assert choices == []


@pytest.mark.parametrize(
    ("size", "dtype", "of", "T", "window", "name"),
    [
        (512, "bfloat16", (9, 0), 256, None, "products"),
        (512, "float32", (8, 9), 256, 4096, "products"),
        (512, "bfloat16", (9, 0), 256, 4095, "triton"),
        (512, "bfloat16", (9, 0), 255, None, "triton"),
        (512, "float32", (9, 0), 8, None, "triton"),
        (512, "bfloat16", (8, 9), 8, None, "triton"),
        (512, "float32", (8, 9), 8, None, "scan"),
        (513, "bfloat16", (9, 0), 8, None, "scan"),
    ],
)
def test_auto_with_large_heads(size, dtype, of, T, window, name, monkeypatch):
    monkeypatch.setattr(attention_package, "platform", lambda: "gpu")
    for module in (fa4, cudnn, triton_flash):
        monkeypatch.setattr(module, "platform", lambda: "gpu")
        monkeypatch.setattr(module, "capability", lambda: of, raising=False)
    monkeypatch.setattr(triton_flash, "unusable", lambda: None)
    monkeypatch.setattr(fa4, "is_absent", lambda: True)
    spec = AttentionSpec(mask=Mask(causal=True, window=window), scale=1.0)
    x = jnp.ones((1, T, 2, size), dtype)
    assert choose("auto", QKV(x, x, x), spec)[0] == name


@pytest.mark.parametrize(
    "window, size, name",
    [(None, 64, "fa4"), (256, 64, "triton"), (257, 64, "fa4"), (1, 128, "triton"), (1, 129, "fa4")],
)
def test_auto_takes_triton_for_narrow_windows(window, size, name, monkeypatch):
    for kernel in (fa4, cudnn, triton_flash):
        monkeypatch.setattr(kernel, "unsupported", lambda x, spec: None)
    spec = AttentionSpec(mask=Mask(causal=True, window=window), scale=1.0)
    x = jnp.ones((1, 8, 2, size))
    chosen, refusals = choose("auto", QKV(x, x, x), spec)
    assert chosen == name and set(refusals) == set(KERNELS) - {name}


def test_deterministic_training_takes_no_kernel_that_adds_with_atomics(monkeypatch):
    for module in (determinism, fa4, cudnn, triton_flash):
        monkeypatch.setattr(module, "platform", lambda: "gpu")
    for kernel in (fa4, cudnn, triton_flash):
        monkeypatch.setattr(kernel, "unsupported", lambda x, spec: None)
    spec = AttentionSpec(mask=Mask(causal=True), scale=1.0)
    with deterministic(True):
        chosen, refusals = choose("auto", QKV(X, X, X), spec)
        assert choose("scan", QKV(X, X, X), spec) == ("scan", {})
        for name in NOT_DETERMINISTIC:
            assert refusals[name] == NOT_DETERMINISTIC[name]
            with pytest.raises(NotImplementedError, match=f"attention '{name}': its backward pass"):
                choose(name, QKV(X, X, X), spec)
    assert chosen == "triton"
    assert choose("auto", QKV(X, X, X), spec)[0] == "fa4"


@pytest.mark.parametrize(
    "batch, heads, chunk", [(1, 16, 2048), (1, 8, 2048), (8, 16, 512), (1, 1, 4096), (64, 64, 256)]
)
def test_products_take_tiles_of_a_bounded_size(batch, heads, chunk, monkeypatch):
    """Whatever chunks the caller gives."""
    chunks = []

    def forward(x, spec):
        chunks.append((spec.q_chunk, spec.k_chunk))
        return AttentionState(x.q, x.q[..., 0])

    monkeypatch.setattr(scan, "forward", forward)
    x = jnp.ones((batch, 8, heads, 2))
    products.forward(QKV(x, x, x), AttentionSpec(mask=Mask(), scale=1.0, q_chunk=3, k_chunk=5))
    assert chunks == [(chunk, chunk)]
