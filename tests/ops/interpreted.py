"""Runs Triton's kernels in Triton's interpreter, on the CPU: a process of its own, because the
interpreter is chosen when triton is imported.

    python interpreted.py CASE…   prints each one's name and its largest error against the oracle

A case is one of attention, 'experts', 'over', 'stack', 'delta rule' or 'states'.
"""

import builtins
import dataclasses
import functools
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
import torch
import triton.language as tl
from flax import nnx
from triton._C.libtriton import ir
from triton.runtime import interpreter

from bptjax.ops import (
    delta_rule,
    delta_triton,
    delta_triton_kernels,
    grouped_triton,
    grouped_triton_kernels,
)
from bptjax.ops.attention import attend, reference, triton_flash, triton_kernels
from bptjax.ops.attention.contract import QKV, AttentionState
from bptjax.ops.grouped_matmul import grouped_matmul
from bptjax.optim import adamw_triton, adamw_triton_kernels
from bptjax.optim.optimizer import OptimizerConfig, _step, init_opt_state
from bptjax.optim.update_rules import AdamW
from bptjax.parallel.sequence import AutoKernel
from ops.attention_cases import CASES, oracle
from ops.comparing import TOLERANCE, error, normal, quick
from ops.test_delta_rule import operands, recurrence, results


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
# It looks for overflows of integers and, outside of its debug mode, drops what it finds.
options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
interpreter.interpreter_builder.options = options


def _without_name(self, types, fields=None):
    """Every tensor has a type of its shape, whose name nobody reads."""
    self.types, self.fields = types, fields or [""] * len(types)


tl.tuple_type.__init__ = _without_name


def _dot(self, a, b, d, precision, *_):
    """Rounds float32 operands as a GPU does, to the 10 bits of TF32 unless `precision` is `ieee`.
    The interpreter's own ignores `precision`, and multiplies the bits of bfloat16 as integers."""

    def numbers(x):
        if x.dtype.scalar == tl.bfloat16:
            return (x.data.astype(np.uint32) << 16).view(np.float32)
        if x.dtype.scalar == tl.float32 and precision != ir.INPUT_PRECISION.IEEE:
            return ((x.data.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)
        return x.data

    product = np.matmul(numbers(a), numbers(b), dtype=d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


vars(interpreter)["InterpreterBuilder"].create_dot = _dot


def call(module, name, inputs, shapes, grid, warps, stages, constants, aliases=None):
    """Runs like `triton_flash.CALL`, on torch tensors. Outputs start as the inputs whose memory
    they have, or as NaN, so that an element which is not written is noticed."""

    def tensor(x):
        x = np.asarray(x)
        if x.dtype == jnp.bfloat16:
            return torch.tensor(x.view(np.int16)).view(torch.bfloat16)
        return torch.tensor(x.view(np.int32) if x.dtype == np.uint32 else x)

    wide = dict.fromkeys((s.dtype for s in shapes), torch.float32)
    wide |= {np.dtype(jnp.bfloat16): torch.bfloat16}
    outputs = [torch.full(s.shape, float("nan"), dtype=wide[s.dtype]) for s in shapes]
    for i, o in (aliases or {}).items():
        outputs[o] = tensor(inputs[i])
    kernel = getattr(module, f"{name}_kernel")
    kernel[grid](*map(tensor, inputs), *outputs, C=constants)
    numbers = (x.float() if x.dtype == torch.bfloat16 else x for x in outputs)
    return tuple(
        jnp.asarray(x.numpy(), s.dtype if s.dtype == jnp.bfloat16 else None)
        for x, s in zip(numbers, shapes, strict=True)
    )


def experts():
    """The grouped product and its gradients, with an empty expert and a block without one, in tiles
    that do not divide the matrices."""
    grouped_triton.CALL = functools.partial(call, grouped_triton_kernels)
    grouped_triton.available = lambda: True
    grouped_triton.TILES = dict.fromkeys(grouped_triton.TILES, {4: (4, 8, 4, 1)})
    size = 2 * grouped_triton.GRADIENT_ROWS
    x, w, dy = normal(0, 7 * size, 10), normal(1, 4, 10, 6), normal(2, 7 * size, 6)
    owners = jnp.array([0, 0, 2, 2, 2, 3, 4], jnp.int32)
    x, dy = (a.at[6 * size :].set(0) for a in (x, dy))
    y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, owners), x, w)

    def dense(x, w):
        each = jnp.repeat(w.at[owners].get(mode="clip"), size, 0)
        return jnp.einsum("mi,mio->mo", x, each, precision="highest")

    wanted, pull_dense = jax.vjp(dense, x, w)
    got = y, *pull(dy)
    worst = max(error(a, b) for a, b in zip(got, (wanted, *pull_dense(dy)), strict=True))
    print(f"experts\t{worst}", flush=True)


def over():
    """Documents over the results of another kernel: kept but for padding, or overwritten."""
    case = CASES["segments"]
    (*qkv, dout), spec = case.operands(), case.spec()
    x, padding = QKV(*qkv), np.asarray(spec.mask.segments)[..., None] == 0
    assert padding.any()
    (out, lse), gradients = (state := triton_flash.forward(x, spec)), oracle("segments")[1:4]
    other = (
        AttentionState(jnp.full_like(out, 7), jnp.full_like(lse, 7)),
        QKV(*map(jnp.ones_like, x)),
    )
    worst = 0.0
    for keep in (True, False):
        flag = jnp.asarray(keep)
        got = triton_flash.forward(x, spec, (flag, other[0]))
        got = *got, *triton_flash.backward(x, state, dout, spec, (flag, other[1]))
        for name, a, b, old in zip(
            "olqkv", got, (out, lse, *gradients), (7, 7, 1, 1, 1), strict=True
        ):
            hidden = padding if a.ndim == 3 else padding[..., None]
            if keep:
                b = np.where(np.broadcast_to(hidden, a.shape), -np.inf if name == "l" else 0, old)
            assert np.array_equal(np.isfinite(a), np.isfinite(b))
            seen = np.isfinite(b)
            worst = max(worst, float(np.abs(np.where(seen, a, 0) - np.where(seen, b, 0)).max()))
    print(f"over\t{worst}", flush=True)


def stack():
    """Keys and values among those of other sequences."""
    case = CASES["segments"]
    (q, k, v, _), spec = case.operands(), case.spec()
    triton_flash.unsupported = lambda x, spec: None
    others = jnp.full_like(k, jnp.nan)
    x = QKV(q, *(jnp.concatenate([others, y, others[:1]]) for y in (k, v)))
    got = AutoKernel("triton").forward_from(x, spec, jnp.asarray(len(q)))
    wanted = triton_flash.forward(QKV(q, k, v), spec)
    assert np.array_equal(got.lse, wanted.lse)
    print(f"stack\t{error(got.out, wanted.out)}", flush=True)


def rule():
    """The gated delta rule on documents, in several groups of chunks, with the last chunk and group
    not full, and several tiles of values; and in bfloat16, relative to its tolerance. Another
    document moves no bit."""
    delta_triton.CALL = functools.partial(call, delta_triton_kernels)
    delta_triton.unsupported = lambda q, k, v: None
    delta_triton.TILES = dict.fromkeys(delta_triton.TILES, (8, 4, 1))
    x, cotangents = operands(T=560, N=2, K=1, W=16)
    lengths = [160, 1, 240, 39, 120], [40, 460, 60]
    segments = np.stack([np.repeat([1, 2, 3, 0, 4], lengths[0]), np.repeat([0, 1, 2], lengths[1])])
    options = dict(segments=segments.astype(np.int32), previous=jnp.array([1, 7], jnp.int32))

    def run(x, cotangents):
        def kernels(q, k, v, g, beta, state):
            given = dict(options, state=state, impl="triton")
            return delta_rule.gated_delta_rule(q, k, v, g, beta, **given)

        (out, state), pull = jax.vjp(kernels, *x)
        return out, *pull((cotangents[0].astype(out.dtype), cotangents[1])), state

    (out, state), gradients = results(recurrence, x, cotangents, **options)
    wanted = out, *(gradients[n] for n in ("q", "k", "v", "g", "beta", "state")), state
    got = run(x, cotangents)
    worst = max(error(a, b) for a, b in zip(got, wanted, strict=True))
    short = run((*(y.astype(jnp.bfloat16) for y in x[:3]), *x[3:]), cotangents)
    assert short[0].dtype == jnp.bfloat16
    # The interpreter rounds towards 0, with errors twice as large as those of a GPU.
    allowed = 2 * TOLERANCE["bfloat16"] / TOLERANCE["float32"]
    worst = max(worst, *(error(a, b) / allowed for a, b in zip(short, wanted, strict=True)))
    inside = segments == 3
    changed = [y.at[inside].set(2 * y[inside][::-1]) for y in (*x[:5], cotangents[0])]
    other = run((*changed[:5], x[5]), (changed[5], cotangents[1]))
    for a, b in zip(got, other, strict=True):
        if a.shape[:2] == inside.shape:
            assert not np.array_equal(a[inside], b[inside])
            a, b = a[~inside], b[~inside]
        assert np.array_equal(a, b)
    print(f"delta rule\t{worst}", flush=True)


def states():
    """Three updates of one entry of a stack, whose slots are in int8, in blocks of 256 and of the
    last axis, or in more bits; programs divide none of them. Gradients differ from column to
    column."""
    adamw_triton.CALL = functools.partial(call, adamw_triton_kernels)
    rule, worst = AdamW(0.9, 0.95, 1e-8), 0.0
    for kind, size, dtype in (
        ("int8", 512, jnp.float32),
        ("int8", 512, jnp.bfloat16),
        ("int8", 64, jnp.float32),
        ("bfloat16", 250, jnp.bfloat16),
        ("bfloat16", 512, jnp.float32),
        ("float32", 250, jnp.bfloat16),
    ):
        config = OptimizerConfig(state_dtype=kind)
        p = nnx.Param(normal(0, 3, 5, size).astype(dtype), axes=(None, None))
        slots = {name: tree[0] for name, tree in init_opt_state(config, [p]).slots.items()}
        start = held = p, slots
        for count in range(1, 4):
            g = p.replace(normal(count, 5, size) * jnp.geomspace(1e-3, 10, size))
            given = rule, 0.5, 1e-2, 0.1, jnp.asarray(count, jnp.int32)
            key = jnp.array([count, 7], jnp.uint32)
            wanted = _step(*given, jax.tree.map(lambda x: x[1], held), g, key)
            held = adamw_triton.step(*given, held, g, key, True, 1)
            got = jax.tree.map(lambda x: x[1], held)
            pairs = zip(*map(jax.tree.leaves, (got, wanted)), strict=True)
            worst = max(worst, *(error(a, b) for a, b in pairs))
            idle = adamw_triton.step(*given, held, g, key, False, 1)
            assert jax.tree.all(jax.tree.map(np.array_equal, idle, held))
        for a, b in zip(*map(jax.tree.leaves, (start, held)), strict=True):
            assert np.array_equal(a[::2], b[::2])
    print(f"states\t{worst}", flush=True)


OTHERS = {
    "experts": experts,
    "over": over,
    "stack": stack,
    "delta rule": rule,
    "states": states,
}


def main(names):
    triton_flash.CALL = functools.partial(call, triton_kernels)
    for name in names:
        # Small tiles, so that a short sequence has several empty, partial and full ones; with room
        # for pairs of keys.
        size = 16 if "dropout" in name else 8
        for kernel, blocks in triton_flash.BLOCKS.items():
            triton_flash.BLOCKS[kernel] = dict.fromkeys(blocks, (4, size, 4, 1))
            # All windows are narrow: two tokens in a tile of the forward pass, for two heads each.
            triton_flash.NARROW_BLOCKS[kernel] = dict.fromkeys((16, 32), (4, size, 4, 1))
        if name in OTHERS:
            OTHERS[name]()
            continue
        case = CASES[name]
        (q, k, v, dout), spec = case.operands(), case.spec()
        # The same logits and other results times powers of `c`, of operands that no 16 bits hold.
        c = 1.1
        x, dout = QKV(c * q, k / c, c * v), c * dout
        sinks = None if case.sinks is None else jnp.asarray(case.sinks)
        out, lse = state = attend(triton_flash, x, spec, sinks)
        got, powers = (out, *triton_flash.backward(x, state, dout, spec)), (1, 1, 3, 1)
        wanted = (c**n * y for n, y in zip(powers, oracle(name)[:4], strict=True))
        worst = max(error(a, b) for a, b in zip(got, wanted, strict=True))
        true = np.asarray(quick(lambda: attend(reference, x, spec, sinks).lse)())  # noqa: B023
        attends = np.isfinite(true)
        assert np.array_equal(np.isneginf(lse), ~attends)
        worst = max(worst, float(np.abs(np.asarray(lse) - true)[attends].max(initial=0.0)))
        print(f"{name}\t{worst}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
