"""AdamW as Triton kernels through jax-triton, on NVIDIA GPUs. They read and write each element
once. XLA's kernels pass on both moments: in float32 if the states are in int8, and as copies if one
entry of a stack is updated."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import UInt32

from bptjax.ops.quantize import BLOCK
from bptjax.ops.target import like, platform
from bptjax.ops.triton_call import compiler_shards_arrays, triton_call, unusable
from bptjax.optim.update_rules import AdamW, bias

# Numbers of elements that may share an absolute maximum: powers of two.
BLOCKS = 16, 32, 64, 128, 256
# Elements of a program, and its warps.
TILE = 1024, 4
# Launches a kernel. Tests replace it to run kernels in Triton's interpreter.
CALL: Callable[..., tuple[Array, ...]] = partial(triton_call, "bptjax.optim.adamw_triton_kernels")


@dataclass(frozen=True)
class Constants:
    """Compile-time constants of a kernel, its one `tl.constexpr` argument.

    Attributes:
      block: elements of a block of int8 states; else 1.
      rows: blocks of a program; both are powers of two.
    """

    block: int
    rows: int
    beta1: float
    beta2: float
    epsilon: float


def unsupported(old: tuple[nnx.Variable, dict[str, Any]], g: nnx.Variable) -> str | None:
    """Returns why `step` cannot update this parameter and its slots, or these slices of them, or
    None if it can."""
    p, mu = old[0], old[1]["mu"]
    if platform() != "gpu":
        return "needs an NVIDIA GPU"
    if compiler_shards_arrays():
        return "runs on one device, and the mesh has more"
    if p.dtype not in (jnp.float32, jnp.bfloat16):
        return f"takes parameters in float32 or bfloat16, not {p.dtype}"
    block = _block(*old)
    if isinstance(mu, dict) and (block not in BLOCKS or p.shape[-1] % block):
        return f"takes last axes of whole blocks, not {p.shape[-1]}"
    if g.get_value().size >= 2**32:
        return "counts the elements of an entry in 32 bits"
    if {jax.typeof(x).memory_space for x in jax.tree.leaves((old, g))} != {jax.memory.Space.Device}:
        return "takes arrays in device memory"
    return unusable()


def step(
    rule: AdamW,
    scale: ArrayLike,
    rate: ArrayLike,
    decay: float,
    count: Array,
    old: tuple[nnx.Variable, dict[str, Any]],
    g: nnx.Variable,
    key: UInt32[Array, "2"],
    when: ArrayLike = True,
    index: ArrayLike = 0,
) -> tuple[nnx.Variable, dict[str, Any]]:
    """Returns (parameter, slots) after a step, in the memory of the old ones if they are donated.

    Args:
      scale: factor on the gradient.
      count: number of the step, from 1.
      old: the parameter and its slots, or slices of them.
      g: gradient of all of it, or of one entry.
      when: bool scalar; nothing changes if it is false.
      index: the entry of which `g` is the gradient.
    """
    p, slots = old
    held, structure = jax.tree.flatten((p, slots["mu"], slots["nu"]))
    corrections = 1 / bias(rule.beta1, count), 1 / bias(rule.beta2, count)
    (size, warps), block = TILE, _block(p, slots)
    blocks, rows = g.get_value().size // block, size // block
    floats = scale, rate, decay, *corrections
    numbers = jnp.stack([jnp.asarray(x, jnp.float32) for x in floats])
    words = jnp.stack([*key, *(jnp.asarray(x, jnp.uint32) for x in (when, index, blocks))])
    constants = Constants(block, rows, rule.beta1, rule.beta2, rule.epsilon)
    inputs = g.get_value(), numbers, words, *held
    aliases = {3 + i: i for i in range(len(held))}
    shapes, grid = tuple(map(like, held)), (-(-blocks // rows),)
    name = "adamw_int8" if isinstance(slots["mu"], dict) else "adamw"
    new = CALL(name, inputs, shapes, grid, warps, 1, constants, aliases)
    p, mu, nu = structure.unflatten(new)
    return p, {"mu": mu, "nu": nu}


def _block(p: nnx.Variable, slots: dict[str, Any]) -> int:
    """Returns the number of elements that share an absolute maximum."""
    return min(BLOCK, p.shape[-1]) if isinstance(slots["mu"], dict) else 1
