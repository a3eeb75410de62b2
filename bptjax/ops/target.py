"""The platform that functions are traced for: the default backend's, or that of devices that are
not on this machine.

Programs for absent devices are compiled to read their memory, and never run. Their fused kernels
cannot be built here, so a call with the same operands, results and workspace stands in for each.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import Array

# XLA compiles a call only if a handler of its name is registered.
STAND_IN = "bptjax_stand_in"
# Compute capabilities of GPUs that give a kernel 99 KB of shared memory.
SMALL_MEMORY = (8, 6), (8, 9), (12, 0), (12, 1)
_ABSENT: ContextVar[jax.Device | None] = ContextVar("absent device", default=None)


def platform() -> str:
    """Returns cpu, gpu or tpu."""
    device = _ABSENT.get()
    return jax.default_backend() if device is None else device.platform


def capability(device: jax.Device | None = None) -> tuple[int, int]:
    """Returns the compute capability of an NVIDIA GPU, by default one that functions are traced
    for; (0, 0) for other devices."""
    device = device or _ABSENT.get() or jax.devices()[0]
    found = re.match(r"(\d+)\.(\d+)", getattr(device, "compute_capability", ""))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def is_absent() -> bool:
    """Returns whether functions are traced for devices that are not on this machine."""
    return _ABSENT.get() is not None


@contextmanager
def absent(device: jax.Device) -> Iterator[None]:
    """Traces functions for absent devices like this one."""
    token = _ABSENT.set(device)
    try:
        yield
    finally:
        _ABSENT.reset(token)


def compiler_options() -> dict[str, bool | str]:
    """Returns options of XLA for the target. Without a GPU it cannot measure which of its own
    matrix products beats cuBLAS, so it takes cuBLAS for all; the memory differs by 0.1 % at most,
    with adapters by up to 4 %.
    """
    return {"xla_gpu_enable_triton_gemm": False} if is_absent() and platform() == "gpu" else {}


def stand_in(
    operands: Sequence[Array],
    shapes: Sequence[jax.ShapeDtypeStruct],
    workspace: int = 0,
    aliases: dict[int, int] | None = None,
) -> tuple[Array, ...]:
    """Returns arrays of these shapes from a call that no device can run.

    Args:
      workspace: bytes of device memory that the real call needs while it runs.
      aliases: number of the result that takes over an operand's memory, by the operand's number.
    """
    buffers = [jax.ShapeDtypeStruct((workspace,), jnp.uint8)] * bool(workspace)
    call = jax.ffi.ffi_call(STAND_IN, (*shapes, *buffers), input_output_aliases=aliases)
    return tuple(call(*operands))[: len(shapes)]


def like(x: Array) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
