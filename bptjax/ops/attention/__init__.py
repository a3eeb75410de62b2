"""Softmax attention in O(T) memory, by one of several kernels."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from bptjax.ops.arguments import check_chunk, check_qkv, check_rate, check_sinks, check_softcap
from bptjax.ops.attention import cudnn, fa4, loop, products, reference, scan, triton_flash
from bptjax.ops.attention.contract import (
    QKV,
    AttentionSpec,
    AttentionState,
    Kernel,
    PreparedKernel,
    SinkKernel,
)
from bptjax.ops.checkpoint_names import checkpoint_named
from bptjax.ops.choices import record
from bptjax.ops.determinism import is_deterministic
from bptjax.ops.mask import Mask
from bptjax.ops.softmax import empty_state, merge_states
from bptjax.ops.static_arrays import split_static
from bptjax.ops.target import platform

# `auto` takes the first kernel that honors the arguments. On one H200, fa4 was faster than cudnn
# and cudnn faster than triton, except for packed documents at head size 64
# (attention_fa4_h200.json in scripts/results) and for narrow windows, with which `auto` tries
# triton first (windows_h200.json); triton was faster than scan (compare_h200.json).
KERNELS: dict[str, Kernel] = {
    "fa4": fa4,
    "cudnn": cudnn,
    "triton": triton_flash,
    "scan": scan,
    "products": products,
    "loop": loop,
    "reference": reference,
}

# Why `auto` never takes these kernels.
NOT_AUTOMATIC = {
    "loop": "one dispatch per tile; for comparison only",
    "reference": "[T, T] memory; for tests only",
}

# Why training with train.deterministic=true refuses these kernels.
NOT_DETERMINISTIC = {
    "fa4": "its backward pass adds with atomics, in another order each time",
    # cuDNN's deterministic backward pass stores the gradients of all T² weights.
    "cudnn": "its backward pass adds with atomics, or else takes [T, T] memory",
}

# On a GPU, `auto` takes `products` for heads larger than WIDE, given at least MANY_QUERIES queries
# and no window below WIDE_WINDOW, which would leave most of a large tile empty. On one H200 it was
# 2.5 times as fast as triton for heads of 512 (attention_wide_h200.json).
WIDE, MANY_QUERIES, WIDE_WINDOW = 256, 256, 4096

# Names of the residuals of the backward pass. If a remat policy saves them, the kernel does not run
# again.
RESIDUAL_NAMES = ("attention_out", "attention_lse")


def choose(impl: str, x: QKV, spec: AttentionSpec) -> tuple[str, dict[str, str]]:
    """Returns the kernel to use for `impl`, and why `auto` rejected each other kernel. An open
    `record_choices` records both. Reads only the shapes and dtypes of `x`.

    Raises:
      ValueError: an unknown kernel.
      NotImplementedError: the named kernel cannot honor the arguments.
    """
    others = "no landmark attention" if spec.landmark_block else None
    refused = NOT_DETERMINISTIC if is_deterministic() else {}
    if impl == "auto":
        chosen, reasons = None, {}
        first = _preferred(x, spec)
        for name in sorted(KERNELS, key=lambda name: name != first):
            kernel = KERNELS[name]
            reason = (
                (name != "scan" and others)
                or NOT_AUTOMATIC.get(name)
                or refused.get(name)
                or (kernel.unsupported(x, spec) if chosen is None else f"slower than {chosen}")
            )
            if reason is None:
                chosen = name
            else:
                reasons[name] = reason
        assert chosen is not None  # scan honors everything.
        record("attention", chosen, reasons)
        return chosen, reasons
    if impl not in KERNELS:
        raise ValueError(f"attention={impl!r}: must be one of auto, {', '.join(KERNELS)}")
    reason = (impl != "scan" and others) or refused.get(impl)
    if reason := reason or KERNELS[impl].unsupported(x, spec):
        raise NotImplementedError(f"attention {impl!r}: {reason}")
    record("attention", impl, {})
    return impl, {}


def _preferred(x: QKV, spec: AttentionSpec) -> str | None:
    """Returns the kernel that `auto` tries before the others."""
    if triton_flash.is_narrow(x, spec):
        return "triton"
    (_, T, _, H), window = x.q.shape, spec.mask.window
    large = H > WIDE and T >= MANY_QUERIES and (window is None or window >= WIDE_WINDOW)
    return "products" if large and platform() == "gpu" else None


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    mask: Mask = Mask(causal=True),  # noqa: B008 (frozen)
    alibi: Float[Array | np.ndarray, "N"] | None = None,
    sinks: Float[Array | np.ndarray, "N"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    dropout_key: Array | None = None,
    impl: str = "auto",
    q_chunk: int = 512,
    k_chunk: int = 512,
    landmark_block: int | None = None,
    offload: float = 0.0,
) -> Float[Array, "B T N H"]:
    """Softmax attention in O(T) memory.

    `impl="auto"` picks by device and support; a named `impl` is used or raises. Softmax statistics
    and accumulation are float32 for any input dtype. A query that attends to no key gives 0. Query
    head n reads key head n // (N / K).

    Args:
      mask: which query may attend to which key; evaluated a tile at a time, never `[T, S]`.
      alibi: slopes; -alibi · |p - s| is added to the logits. Has no gradient.
      sinks: finite logits, one per query head, of an extra key with value 0 that every query of the
        head attends to. Scale, soft cap, ALiBi, mask and dropout do not apply to it. OpenAI 2025,
        arXiv 2508.10925.
      scale: factor on q·k; H^-0.5 if left out.
      softcap: logits become softcap · tanh(logits / softcap).
      dropout: probability of dropping a weight. Only the key, sequence, head and positions decide
        which weights are dropped, not the kernel or the chunks.
      dropout_key: a JAX random key, required if dropout > 0.
      q_chunk, k_chunk: tokens per chunk; T and S need not be multiples.
      landmark_block: computes `landmark_attention` with blocks of this number of tokens; k_chunk is
        rounded to a multiple of it.
      offload: share of the tokens whose residuals a remat policy can move to host memory.

    Raises:
      NotImplementedError: the named kernel cannot honor the arguments.
      ValueError: mismatched shapes or dtypes of q, k, v and sinks, or an empty array; N is not a
        multiple of K; dropout outside [0, 1) or without a key; a soft cap that is not positive, or
        a scale that is not finite; ALiBi with T ≠ S and no positions; a chunk below 1; an unknown
        `impl`; a mask that `Mask.check` refuses.

    Liu & Abbeel 2023, https://arxiv.org/abs/2305.19370, Algorithm 1; Dao 2023 for the backward
    pass.
    """
    x = QKV(q, k, v)
    spec = make_spec(
        x,
        mask=mask,
        alibi=alibi,
        scale=scale,
        softcap=softcap,
        dropout=dropout,
        dropout_key=dropout_key,
        q_chunk=q_chunk,
        k_chunk=k_chunk,
        landmark_block=landmark_block,
    )
    check_sinks(sinks, q.shape[2])
    name, _ = choose(impl, x, spec)
    return differentiable(KERNELS[name], x, spec, sinks=sinks, offload=offload)


def make_spec(
    x: QKV,
    *,
    mask: Mask = Mask(causal=True),  # noqa: B008 (frozen)
    alibi: Array | np.ndarray | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    dropout_key: Array | None = None,
    q_chunk: int = 512,
    k_chunk: int = 512,
    landmark_block: int | None = None,
) -> AttentionSpec:
    """Checks the arguments of `attention` and returns its options as one value.

    Raises:
      ValueError: as in `attention`.
    """
    check_chunk(q_chunk=q_chunk, k_chunk=k_chunk)
    check_qkv(*x)
    check_rate(dropout=dropout)
    check_softcap(softcap)
    (B, T, N, H), S = x.q.shape, x.k.shape[1]
    mask.check(B, T, S)
    # Segments `[1, T]` and ends apply to every sequence; kernels read `[B, T]`.
    of_sequence: dict[str, Any] = {
        name: jnp.broadcast_to(y, (B, y.shape[1]))
        for name in ("segments", "k_segments", "ends")
        if (y := getattr(mask, name)) is not None and y.shape[0] != B
    }
    mask = replace(mask, **of_sequence)
    if dropout and dropout_key is None:
        raise ValueError(f"dropout={dropout}: requires dropout_key")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale={scale}: must be finite; leave it out for head size ** -0.5")
    if landmark_block is not None:
        if landmark_block < 2:
            raise ValueError(
                f"landmark_block={landmark_block}: must be at least 2, a token and its landmark"
            )
        if mask.ends is not None:
            raise ValueError(
                f"landmark_block={landmark_block}: must be left out with Mask.ends, because blocks "
                "of a tree are not blocks of its branches"
            )
        k_chunk = max(1, round(k_chunk / landmark_block)) * landmark_block
    if alibi is not None and alibi.shape != (N,):
        raise ValueError(f"alibi: must be [{N}], one slope per query head, not {alibi.shape}")
    if alibi is not None and T != S and (mask.positions is None or mask.k_positions is None):
        raise ValueError(
            f"T={T} queries and S={S} keys: with ALiBi, Mask.positions and k_positions must be set"
        )
    return AttentionSpec(
        mask=mask,
        scale=H**-0.5 if scale is None else scale,
        softcap=softcap,
        dropout=dropout,
        q_chunk=q_chunk,
        k_chunk=k_chunk,
        landmark_block=landmark_block,
        alibi=None if alibi is None else jnp.asarray(alibi, jnp.float32),
        dropout_key=_key_data(dropout_key) if dropout and dropout_key is not None else None,
    )


def _key_data(key: Array) -> Array:
    """Returns uint32 `[2]` key data from a typed or raw key of any implementation."""
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    return key.reshape(-1)[:2]


def differentiable(
    kernel: Kernel,
    x: QKV,
    spec: AttentionSpec,
    *,
    sinks: Float[Array | np.ndarray, "N"] | None = None,
    offload: float = 0.0,
    state: AttentionState | None = None,
) -> Float[Array, "B T N H"]:
    """Returns the kernel's output, with the kernel's backward pass as its gradient.

    `sinks` are merged into the state that the kernel returns, so most kernels need not handle
    them. `offload` is the share of the tokens whose residuals a remat policy can move to host
    memory. With `state`, the result of `attend` on the same arguments, the kernel does not run
    forward.
    """
    if isinstance(kernel, PreparedKernel):
        spec = kernel.prepare(spec)
    traced, make_spec = split_static(spec)
    sinks = None if sinks is None else jnp.asarray(sinks, jnp.float32)
    with jax.named_scope("attention_kernel"):
        return _attention(kernel, make_spec, offload, x, sinks, traced, state)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(kernel, make_spec, offload, x, sinks, traced, state):
    return (state or attend(kernel, x, make_spec(traced), sinks)).out


def _forward(kernel, make_spec, offload, x, sinks, traced, state):
    state = state or attend(kernel, x, make_spec(traced), sinks)
    state = AttentionState(
        *(checkpoint_named(y, n, offload) for y, n in zip(state, RESIDUAL_NAMES, strict=True))
    )
    return state.out, (x, sinks, state, traced)


def _backward(kernel, make_spec, offload, residuals, dout):
    x, sinks, state, traced = residuals
    gradients = kernel.backward(x, state, dout, make_spec(traced))
    return QKV(*gradients), _sink_gradients(sinks, state, dout), None, None


def attend(
    kernel: Kernel, x: QKV, spec: AttentionSpec, sinks: Float[Array, "N"] | None = None
) -> AttentionState:
    """Attends to the keys and to the sinks, one extra key per query head. If a query attends to no
    key, its out is 0 and its lse the sink, or -inf without sinks."""
    if sinks is not None and isinstance(kernel, SinkKernel):
        return kernel.forward_with_sinks(x, spec, sinks)
    state = kernel.forward(x, spec)
    return state if sinks is None else add_sinks(x.q, state, sinks)


def add_sinks(
    q: Float[Array, "B T N H"], state: AttentionState, sinks: Float[Array, "N"]
) -> AttentionState:
    """Merges attention to the sinks into the state."""
    sink = empty_state(q)._replace(lse=jnp.broadcast_to(sinks, state.lse.shape))
    merged = merge_states(state, sink)
    return merged._replace(out=merged.out.astype(state.out.dtype))


def _sink_gradients(
    sinks: Array | None, state: AttentionState, dout: Array
) -> Float[Array, "N"] | None:
    """Returns -Σ weight · (out · dout), the gradient of the logit of a key whose value is 0."""
    if sinks is None:
        return None
    delta = (state.out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1)
    return -(jnp.exp(sinks[None, None] - state.lse) * delta).sum((0, 1))


_attention.defvjp(_forward, _backward)
