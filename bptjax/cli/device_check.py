"""Compares attention kernels with the reference on a device, and measures the device's speed."""

import time
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import SingleDeviceSharding

from bptjax.cost.devices import KINDS, kind_of
from bptjax.ops.attention import KERNELS, NOT_AUTOMATIC, attention, make_spec
from bptjax.ops.attention.contract import QKV
from bptjax.ops.choices import record_choices
from bptjax.ops.mask import Mask

# Largest relative error of the output and of each gradient.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def check_kernels(device: jax.Device) -> Iterator[tuple[str, str | None, Callable[[], float]]]:
    """Yields (name, reason, function) for each kernel. If `auto` never takes the kernel on the
    device, the reason says why; else it is None.

    The function returns the largest relative error in causal attention, with and without packing.
    The dtype is bfloat16 on a GPU, float32 elsewhere. The oracle is the reference in float32.
    """
    T = 300
    dtype = jnp.bfloat16 if device.platform == "gpu" else jnp.float32
    shapes = [(1, T, heads, 64) for heads in (4, 4, 2, 2)]
    draws = zip(jax.random.split(jax.random.key(0), 4), shapes, strict=True)
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        q, dout, k, v = (jax.random.normal(*each).astype(dtype) for each in draws)
        single, packed = jnp.ones((1, T), int), jnp.repeat(jnp.arange(1, 4), T // 3)[None]
        exact, oracle = [x.astype(jnp.float32) for x in (dout, q, k, v)], _results("reference")
        wanted = [oracle(Mask(causal=True, segments=each), *exact) for each in (single, packed)]
    masks, x = (Mask(causal=True), Mask(causal=True, segments=packed)), QKV(q, k, v)

    def error(name: str) -> float:
        with jax.default_device(device), jax.default_matmul_precision("highest"):
            results = [_results(name)(mask, dout, *x) for mask in masks]
            pairs = zip(jax.tree.leaves(results), jax.tree.leaves(wanted), strict=True)
            errors = jnp.stack([_error(a, b) for a, b in pairs])
            return float(jnp.where(jnp.isnan(errors), jnp.inf, errors).max())

    for name, kernel in KERNELS.items():
        refusals = [kernel.unsupported(x, make_spec(x, mask=mask)) for mask in masks]
        yield name, next(filter(None, refusals), NOT_AUTOMATIC.get(name)), partial(error, name)


def measure(device: jax.Device) -> Iterator[tuple[str, str]]:
    """Yields the name of some GPU operations with their speed, next to the data sheet's."""
    kind = KINDS.get(kind_of(device.device_kind) or "")

    def rate(work: float, seconds: float, unit: float, name: str, peak: float | None) -> str:
        share = f", {work / seconds / peak:.0%} of the data sheet" if peak else ""
        return f"{work / seconds / unit:,.0f} {name}{share}"

    flops, bandwidth = (kind.flops, kind.bandwidth) if kind else (None, None)
    with jax.default_device(device):

        def random(*shape):
            # Random numbers, because constants draw less power and so raise the clock.
            return jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)

        n = 8192
        seconds = _seconds(jax.jit(jnp.matmul), random(n, n), random(n, n))
        yield "matrix product", rate(2 * n**3, seconds, 1e12, "TFLOP/s", flops)
        T, N, K, H = 8192, 32, 8, 128
        q, k = (random(1, T, heads, H) for heads in (N, K))
        work, mask = 2 * T * T * N * H, Mask(causal=True)
        with record_choices() as choices:
            forward = _seconds(jax.jit(partial(attention, mask=mask)), q, k, k)
        both = _seconds(partial(_results("auto"), mask), q, q, k, k)
        name = choices[0].name
        yield f"{name} forward", rate(work, forward, 1e12, "TFLOP/s", flops)
        yield f"{name} with backward", rate(3.5 * work, both, 1e12, "TFLOP/s", flops)
        x = random(2**29)
        seconds = _seconds(jax.jit(lambda x: x + 1), x)
        yield "device memory", rate(2 * x.nbytes, seconds, 1e9, "GB/s", bandwidth)
        here, host = (SingleDeviceSharding(device, memory_kind=m) for m in (None, "pinned_host"))
        x = x[: 2**27]
        y = jax.device_put(x, host)
        for name, array, to in (("device to host", x, host), ("host to device", y, here)):
            # Take the fastest: first transfers also allocate pinned memory, which is far slower.
            move = partial(jax.device_put, device=to)
            seconds = min(_seconds(move, array, repeats=1) for _ in range(3))
            yield name, rate(x.nbytes, seconds, 1e9, "GB/s", None)


def _results(impl: str) -> Callable[..., tuple[Array, ...]]:
    """Returns a compiled function that computes the output and the gradients of q, k and v."""

    @jax.jit
    def results(mask, dout, *qkv):
        function = partial(attention, mask=mask, impl=impl, q_chunk=128, k_chunk=128)
        out, pull = jax.vjp(function, *qkv)
        return out, *pull(dout)

    return results


def _error(a: Array, b: Array) -> Array:
    return jnp.linalg.norm(a.astype(jnp.float32).ravel() - b.ravel()) / jnp.linalg.norm(b.ravel())


def _seconds(function: Callable, *operands: Array, repeats: int = 20) -> float:
    """Returns the mean seconds per call, after a warm-up call."""
    result = jax.block_until_ready(function(*operands))
    start = time.perf_counter()
    for _ in range(repeats):
        result = function(*operands)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / repeats
