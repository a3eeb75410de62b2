"""Runs Triton's kernels in Triton's interpreter, on the CPU: a process of its own, because the
interpreter is chosen when triton is imported.

    python interpreted.py CASE…   prints each one's name and its largest error against the oracle

A case is one of attention, or 'experts'.
"""

import builtins
import functools
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
import torch
from triton.runtime import interpreter

from bptjax.ops import grouped_triton, grouped_triton_kernels
from bptjax.ops.attention import attend, reference, triton_flash, triton_kernels
from bptjax.ops.attention.contract import QKV
from bptjax.ops.grouped_matmul import grouped_matmul
from ops.attention_cases import CASES, oracle
from ops.comparing import error, normal


class _AnyInt(type):
    def __instancecheck__(cls, x):
        return isinstance(x, builtins.int)


class _Int(int, metaclass=_AnyInt):
    """`int` that takes arrays of one element, as the interpreter asks and NumPy 2.4 refuses."""

    def __new__(cls, x=0, *rest):
        return builtins.int(x.item() if isinstance(x, np.ndarray) else x, *rest)


interpreter.int = _Int
# Nothing else runs here: the language is patched once, not at each call of a function.
interpreter._patch_lang = functools.cache(interpreter._patch_lang)
interpreter._LangPatchScope.restore = lambda self: None


def call(module, name, inputs, shapes, grid, warps, stages, constants):
    """Runs like `triton_flash.CALL`, on torch tensors. Outputs start as NaN, so that an element
    which is not written is noticed."""

    def tensor(x):
        x = np.asarray(x)
        return torch.tensor(x.view(np.int32) if x.dtype == np.uint32 else x)

    outputs = [torch.full(s.shape, float("nan"), dtype=torch.float32) for s in shapes]
    kernel = getattr(module, f"{name}_kernel")
    kernel[grid](*map(tensor, inputs), *outputs, C=constants)
    return tuple(jnp.asarray(x.numpy()) for x in outputs)


def experts():
    """The grouped product and its gradients, with an empty expert, in tiles that do not divide the
    matrices."""
    grouped_triton.CALL = functools.partial(call, grouped_triton_kernels)
    grouped_triton.available = lambda: True
    grouped_triton.TILES = dict.fromkeys(grouped_triton.TILES, {4: (4, 8, 4, 1)})
    x, w, dy = normal(0, 24, 10), normal(1, 4, 10, 6), normal(2, 24, 6)
    owners = jnp.array([0, 0, 2, 2, 2, 3], jnp.int32)
    y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, owners), x, w)

    def dense(x, w):
        each = jnp.repeat(w[owners], 4, 0)
        return jnp.einsum("mi,mio->mo", x, each, precision="highest")

    wanted, pull_dense = jax.vjp(dense, x, w)
    got = y, *pull(dy)
    worst = max(error(a, b) for a, b in zip(got, (wanted, *pull_dense(dy)), strict=True))
    print(f"experts\t{worst}", flush=True)


def main(names):
    triton_flash.CALL = functools.partial(call, triton_kernels)
    for kernel, blocks in triton_flash.BLOCKS.items():
        # Small tiles, so that a short sequence has several empty, partial and full ones.
        triton_flash.BLOCKS[kernel] = dict.fromkeys(blocks, (2, 8, 4, 1))
    for name in names:
        if name == "experts":
            experts()
            continue
        case = CASES[name]
        (*qkv, dout), spec = case.operands(), case.spec()
        x = QKV(*qkv)
        sinks = None if case.sinks is None else jnp.asarray(case.sinks)
        out, lse = state = attend(triton_flash, x, spec, sinks)
        got = out, *triton_flash.backward(x, state, dout, spec)
        worst = max(error(a, b) for a, b in zip(got, oracle(name)[:4], strict=True))
        true = np.asarray(attend(reference, x, spec, sinks).lse)
        attends = np.isfinite(true)
        assert np.array_equal(np.isneginf(lse), ~attends)
        worst = max(worst, float(np.abs(np.asarray(lse) - true)[attends].max(initial=0.0)))
        print(f"{name}\t{worst}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
