"""Compiles Triton's kernels for a Hopper GPU, on any machine: a process of its own,
because triton may have been imported as an interpreter elsewhere.

    python compiled.py CASE…   prints each kernel's name, and the shared memory it takes in bytes
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bptjax.ops import grouped_triton, grouped_triton_kernels
from bptjax.ops.attention import triton_flash, triton_kernels
from bptjax.ops.attention.contract import QKV, AttentionSpec
from bptjax.ops.grouped_matmul import grouped_matmul
from bptjax.ops.mask import Mask

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
}
POINTERS = {
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float32": "*fp32",
    "int32": "*i32",
    "uint32": "*u32",
    "int8": "*i8",
}


def call(module, name, inputs, shapes, grid, warps, stages, constants, aliases=None):
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
    made = triton_compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(f"{name}\t{made.metadata.shared}", flush=True)
    return tuple(jnp.zeros(s.shape, s.dtype) for s in shapes)


def experts():
    """The grouped product and its gradients, also of float32 matrices and bfloat16 tokens."""
    grouped_triton.CALL = functools.partial(call, grouped_triton_kernels)
    grouped_triton.available = lambda: True
    grouped_triton.capability = lambda device=None: (9, 0)
    owners = jnp.zeros(2, jnp.int32)
    for tokens, matrices in (("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32",) * 2):
        x, w = jnp.zeros((256, 768), tokens), jnp.zeros((2, 768, 256), matrices)
        y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, owners), x, w)
        pull(y)


def main(names):
    experts()
    triton_flash.CALL = functools.partial(call, triton_kernels)
    for name in names:
        H, dtype, options = CASES[name]
        q, k = (jnp.zeros((1, T, heads, H), dtype) for heads in (N, K))
        x, spec = QKV(q, k, k), AttentionSpec(scale=0.1, **options)
        triton_flash.backward(x, triton_flash.forward(x, spec), q, spec)


if __name__ == "__main__":
    main(sys.argv[1:] or CASES)
