"""Compiles Triton's kernels for NVIDIA GPUs, on any machine: a process of its own, because triton
may have been imported as an interpreter elsewhere.

Prints for each kernel its name, the GPU's compute capability, and the shared memory it takes in
bytes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bptjax.ops import delta_triton, delta_triton_kernels, grouped_triton, grouped_triton_kernels
from bptjax.ops.attention import triton_flash, triton_kernels
from bptjax.ops.attention.contract import QKV, AttentionSpec
from bptjax.ops.delta_rule import gated_delta_rule
from bptjax.ops.grouped_matmul import grouped_matmul
from bptjax.ops.mask import Mask
from bptjax.optim import adamw_triton, adamw_triton_kernels
from bptjax.optim.optimizer import OptimizerConfig, init_opt_state
from bptjax.optim.update_rules import AdamW

T, N, K = 256, 4, 2
DOCUMENTS = np.repeat([[1, 2]], 128, 1).astype(np.int32)
EVERYTHING = dict(
    mask=Mask(
        causal=True,
        window=100,
        segments=DOCUMENTS,
        global_tokens=np.arange(T) < 3,
        block_mask=np.ones((2, 2), bool),
        block_size=128,
    ),
    softcap=5.0,
    dropout=0.1,
    alibi=jnp.ones(N),
    dropout_key=jnp.zeros(2, jnp.uint32),
)
CASES = {
    "causal, 64": (64, "bfloat16", dict(mask=Mask(causal=True))),
    "alibi, 128": (128, "bfloat16", dict(mask=Mask(), alibi=jnp.ones(N))),
    "everything, 64": (64, "bfloat16", EVERYTHING),
    "everything, 32, float32": (32, "float32", EVERYTHING),
    "documents, 256": (256, "float16", dict(mask=Mask(segments=DOCUMENTS))),
    "documents, 512": (512, "bfloat16", dict(mask=Mask(causal=True, segments=DOCUMENTS))),
}
DTYPES = ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32")
# The cases that need the most memory; they are compiled for older GPUs too.
OLDER = "alibi, 128", "documents, 256", "documents, 512"
POINTERS = {
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float32": "*fp32",
    "int32": "*i32",
    "uint32": "*u32",
    "uint8": "*u8",
    "int8": "*i8",
}

# Bytes of shared memory of each compiled kernel.
SHARED: dict[tuple[int, str, str], int] = {}


def call(of, module, name, inputs, shapes, grid, warps, stages, constants, aliases=None):
    """Compiles where the kernels would run, and returns zeros."""
    kernel = getattr(module, f"{name}_kernel")
    types = [POINTERS[np.dtype(x.dtype).name] for x in (*inputs, *shapes)]
    signature = dict(zip(kernel.arg_names, [*types, "constexpr"], strict=True))
    source = ASTSource(
        kernel,
        signature,
        {(len(types),): constants},
        {(i,): [["tt.divisibility", 16]] for i in range(len(types))},
    )
    options = dict(num_warps=warps, num_stages=stages)
    # Machine code for a GPU also runs on newer GPUs of the same major version.
    key = of[0], name, repr((signature, constants, options))
    if key not in SHARED:
        target = GPUTarget("cuda", 10 * of[0] + of[1], 32)
        SHARED[key] = triton_compile(source, target=target, options=options).metadata.shared
    print(f"{name}\t{of[0]}.{of[1]}\t{SHARED[key]}", flush=True)
    return tuple(jnp.zeros(s.shape, s.dtype) for s in shapes)


def experts(dtypes):
    """The grouped product and its gradients, for pairs of dtypes of tokens and matrices."""
    grouped_triton.available = lambda: True
    owners = jnp.zeros(2, jnp.int32)
    for tokens, matrices in dtypes:
        x, w = jnp.zeros((256, 768), tokens), jnp.zeros((2, 768, 256), matrices)
        y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, owners), x, w)
        pull(y)


def rule(H, W, dtype="bfloat16"):
    """The gated delta rule with values of this dtype, and its gradients."""
    delta_triton.unsupported = lambda q, k, v: None
    q, v, g = (
        jnp.zeros((1, T, 1, H), "bfloat16"),
        jnp.zeros((1, T, 2, W), dtype),
        jnp.zeros((1, T, 2)),
    )
    f = functools.partial(gated_delta_rule, impl="triton")
    (out, state), pull = jax.vjp(f, q, q, v, g, g)
    pull((out, state))


def states(dtype, size, kind="int8"):
    """An update of a parameter of this dtype and last axis, with slots of this kind."""
    p, count, key = (
        nnx.Param(jnp.zeros((8, size), dtype), axes=(None,)),
        jnp.ones((), int),
        jnp.zeros(2),
    )
    slots = init_opt_state(OptimizerConfig(state_dtype=kind), [p]).slots
    old = p, {name: tree[0] for name, tree in slots.items()}
    adamw_triton.step(AdamW(0.9, 0.95, 1e-8), 1.0, 0.1, 0.1, count, old, p, key.astype("uint32"))


def one_query():
    """The forward pass of a decoding step, with seven heads to a key, in a stack of layers."""
    q, k = jnp.zeros((2, 1, 7 * K, 128), "bfloat16"), jnp.zeros((2, T, K, 128), "bfloat16")
    mask = Mask(causal=True, positions=np.array([T - 1]), k_positions=np.arange(T))
    k = jnp.concatenate([k, k])
    triton_flash.forward(QKV(q, k, k), AttentionSpec(mask, 0.1), first=jnp.array(2))


def attention(name, over=False):
    H, dtype, options = CASES[name]
    q, k = (jnp.zeros((1, T, heads, H), dtype) for heads in (N, K))
    x, spec = QKV(q, k, k), AttentionSpec(scale=0.1, **options)
    flag = jnp.ones((), bool)
    state = triton_flash.forward(x, spec)
    if over:
        state = triton_flash.forward(x, spec, (flag, state))
    triton_flash.backward(x, state, q, spec, (flag, x) if over else None)


def main():
    for of in ((9, 0), (8, 0), (8, 9)):
        for module, kernels in (
            (grouped_triton, grouped_triton_kernels),
            (triton_flash, triton_kernels),
            (delta_triton, delta_triton_kernels),
            (adamw_triton, adamw_triton_kernels),
        ):
            module.CALL = functools.partial(call, of, kernels)
            module.capability = lambda device=None, of=of: of
        newest = of == (9, 0)
        experts(DTYPES if newest else DTYPES[2:])
        for name in CASES if newest else OLDER:
            attention(name)
        if newest:
            attention("documents, 256", over=True)
        one_query()
        rule(128, 128)
        states("bfloat16", 512)
        states("float32", 128)
        states("bfloat16", 512, "bfloat16")
        states("float32", 512, "float32")
        if newest:
            rule(64, 192, "float32")


if __name__ == "__main__":
    main()
