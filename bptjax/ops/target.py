"""The platform that functions are traced for: the default backend's, or that of devices that are
not on this machine.

Programs for absent devices are compiled to read their memory, and never run. Their fused kernels
cannot be built here, so a call with the same operands, results and workspace stands in for each.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import Array

# XLA compiles a call only if a handler of its name is registered.
STAND_IN = "bptjax_stand_in"
_ABSENT: ContextVar[str | None] = ContextVar("absent platform", default=None)


def platform() -> str:
    """Returns cpu, gpu or tpu."""
    return _ABSENT.get() or jax.default_backend()


def is_absent() -> bool:
    """Returns whether functions are traced for devices that are not on this machine."""
    return _ABSENT.get() is not None


@contextmanager
def absent(name: str) -> Iterator[None]:
    """Traces functions for absent devices of the platform gpu or tpu."""
    token = _ABSENT.set(name)
    try:
        yield
    finally:
        _ABSENT.reset(token)


def compiler_options() -> dict[str, bool | str]:
    """Returns options of XLA for the target. Without a GPU it cannot measure which of its own
    matrix products beats cuBLAS, so it takes cuBLAS for all; the memory differs by 0.1 % at most.
    """
    return {"xla_gpu_enable_triton_gemm": False} if _ABSENT.get() == "gpu" else {}


def stand_in(
    operands: Sequence[Array], shapes: Sequence[jax.ShapeDtypeStruct], workspace: int = 0
) -> tuple[Array, ...]:
    """Returns arrays of these shapes from a call that no device can run.

    Args:
      workspace: bytes of device memory that the real call needs while it runs.
    """
    buffers = [jax.ShapeDtypeStruct((workspace,), jnp.uint8)] * bool(workspace)
    return tuple(jax.ffi.ffi_call(STAND_IN, (*shapes, *buffers))(*operands))[: len(shapes)]
