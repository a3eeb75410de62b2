"""The platform that functions are traced for: the default backend, or devices that this machine
lacks.

Programs for absent devices are compiled to find their memory use, and never run. Their fused
kernels cannot be built here, so a call with the same operands, results and workspace replaces each
kernel.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import version

import jax
import jax.numpy as jnp
from jax import Array

# XLA compiles a call only if a handler is registered under its name.
STAND_IN = "bptjax_stand_in"
# Compute capabilities of GPUs that give a kernel 99 KB of shared memory.
SMALL_MEMORY = (8, 6), (8, 9), (12, 0), (12, 1)
# Compute capability of GPUs of the generation Hopper.
HOPPER = 9, 0
_ABSENT: ContextVar[jax.Device | None] = ContextVar("absent device", default=None)


def platform() -> str:
    """Returns cpu, gpu or tpu."""
    device = _ABSENT.get()
    return jax.default_backend() if device is None else device.platform


def capability(device: jax.Device | None = None) -> tuple[int, int]:
    """Returns the compute capability of an NVIDIA GPU, by default of one that functions are traced
    for; (0, 0) for other devices."""
    device = device or _ABSENT.get() or jax.devices()[0]
    match = re.match(r"(\d+)\.(\d+)", getattr(device, "compute_capability", ""))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def misreads_host_memory(platform: str) -> bool:
    """Returns whether loops of compiled programs read arrays in host memory at wrong indices, so
    that layers get the activations of others: with jaxlib 0.10.2 and 0.11.0 on a GPU they do, with
    0.11.1 they do not. https://github.com/openxla/xla/pull/46231."""
    jaxlib = tuple(map(int, version("jaxlib").split(".")[:3]))
    return platform == "gpu" and jaxlib < (0, 11, 1)


def is_absent() -> bool:
    """Returns whether functions are traced for devices that this machine lacks."""
    return _ABSENT.get() is not None


@contextmanager
def absent(device: jax.Device) -> Iterator[None]:
    """Traces functions for absent devices of this type."""
    token = _ABSENT.set(device)
    try:
        yield
    finally:
        _ABSENT.reset(token)


def stand_in(
    operands: Sequence[Array],
    shapes: Sequence[jax.ShapeDtypeStruct],
    workspace: int = 0,
    aliases: dict[int, int] | None = None,
) -> tuple[Array, ...]:
    """Returns arrays of these shapes from a call that no device can run.

    Args:
      workspace: bytes of device memory that the real call needs while it runs.
      aliases: maps an operand's index to the index of the result that reuses its memory.
    """
    buffers = [jax.ShapeDtypeStruct((workspace,), jnp.uint8)] * bool(workspace)
    call = jax.ffi.ffi_call(STAND_IN, (*shapes, *buffers), input_output_aliases=aliases)
    return tuple(call(*operands))[: len(shapes)]


def like(x: Array) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
