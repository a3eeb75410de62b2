"""Programs that give the same bits in every process on the same GPUs."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from bptjax.ops.target import platform

# XLA options. The first replaces operations that add with atomics. Without the others, XLA times
# kernels when it compiles, and takes other ones in another process; Triton's have no default.
OPTIONS: dict[str, bool | str] = {
    "xla_gpu_exclude_nondeterministic_ops": True,
    "xla_gpu_autotune_level": "0",
    "xla_gpu_enable_triton_gemm": False,
}
# Indices that `add_in_order` reads at a time.
BLOCK = 1024
_ON: ContextVar[bool] = ContextVar("deterministic", default=False)


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Traces and compiles deterministic functions if `on`."""
    token = _ON.set(on)
    try:
        yield
    finally:
        _ON.reset(token)


def is_deterministic() -> bool:
    """Returns whether functions traced here must avoid what is not deterministic on a GPU. Other
    devices are always deterministic."""
    return _ON.get() and platform() == "gpu"


def compiler_options() -> dict[str, bool | str]:
    """Returns the XLA options for programs compiled here."""
    return dict(OPTIONS) if is_deterministic() else {}


def add_in_order(
    sums: Float[Array, "R D"], indices: Int[Array, "..."], values: Float[Array, "... D"]
) -> Float[Array, "R D"]:
    """Adds values to the float32 sums at their indices, in an order that depends on the indices
    only.

    XLA's deterministic scatter would sort all numbers of `values`, by 32-bit indices. Here each
    block first sums the values of equal indices, as a matrix product, and then adds each sum once.
    """
    (R, D), count = sums.shape, indices.size
    size = min(BLOCK, max(count, 1))
    padding = -count % size
    # Index R is out of range, so it adds nothing.
    indices = jnp.pad(indices.reshape(-1), (0, padding), constant_values=R)
    values = jnp.pad(values.reshape(-1, D), ((0, padding), (0, 0)))
    place = jnp.arange(size, dtype=indices.dtype)

    def add_block(sums, block):
        indices, values = block
        equal = indices[:, None] == indices[None]
        totals = jax.lax.dot(
            equal.astype(values.dtype),
            values,
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        at = jnp.where(jnp.argmax(equal, 1) == place, indices, R + place)
        return sums.at[at].add(totals, mode="drop", unique_indices=True), None

    blocks = indices.reshape(-1, size), values.reshape(-1, size, D)
    return jax.lax.scan(add_block, sums, blocks)[0]
