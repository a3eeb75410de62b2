"""Softmax attention in O(T) memory, by one of several implementations."""

import math
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from bptjax.ops.arguments import check_chunk, check_qkv, check_rate, check_softcap
from bptjax.ops.attention import cudnn, loop, reference, scan, triton
from bptjax.ops.attention.tile import Score
from bptjax.ops.mask import Mask
from bptjax.ops.saved import named

# Each implementation is a pair `forward(q, k, v, score, *, q_chunk, k_chunk) -> Partial(out, lse)`
# and `backward(q, k, v, out, lse, dout, score, *, q_chunk, k_chunk) -> (dq, dk, dv)`, and says in
# `unsupported(score, q, k)` what it refuses. `auto` takes the first that it can: on one H200 cuDNN
# was the fastest where it takes the arguments, but for 4 % with packed documents at head size 64
# (scripts/results/attention_h200.json), and triton faster than scan (compare_h200.json).
IMPLEMENTATIONS: dict[str, ModuleType] = {
    "cudnn": cudnn,
    "triton": triton,
    "scan": scan,
    "loop": loop,
    "reference": reference,
}

# Names under which a remat policy can keep what the backward pass needs, so that remat does not run
# the kernel again.
SAVED = ("attention_out", "attention_lse")

# Never picked by `auto`, and why.
OTHERS = {
    "loop": "one dispatch a tile; for comparison only",
    "reference": "[T, T] memory; for tests only",
}


def choose(impl: str, score: Score, q: Any, k: Any) -> tuple[str, dict[str, str]]:
    """The implementation that `impl` stands for, and of the others that `auto` weighed, why each
    was not taken. Of `q` and `k` only shapes and dtypes are looked at.

    Raises:
      ValueError: there is no such implementation.
      NotImplementedError: the named one cannot honour the arguments.
    """
    if impl == "auto":
        picked, why = None, {}
        for name, pair in IMPLEMENTATIONS.items():
            reason = OTHERS.get(name) or (
                pair.unsupported(score, q, k) if picked is None else f"slower than {picked}"
            )
            if reason is None:
                picked = name
            else:
                why[name] = reason
        assert picked is not None  # scan takes all.
        return picked, why
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"attention {impl!r}; there are auto, {', '.join(IMPLEMENTATIONS)}")
    reason = IMPLEMENTATIONS[impl].unsupported(score, q, k)
    if reason:
        raise NotImplementedError(f"attention {impl!r}: {reason}")
    return impl, {}


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    mask: Mask = Mask(causal=True),  # noqa: B008 (frozen)
    alibi: Float[Array | np.ndarray, "N"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    dropout_key: Array | None = None,
    impl: str = "auto",
    q_chunk: int = 512,
    k_chunk: int = 512,
    offload: float = 0.0,
) -> Float[Array, "B T N H"]:
    """Softmax attention in O(T) memory.

    `impl="auto"` picks by device and support; a named `impl` is used or raises. Softmax statistics
    and accumulation are float32 for any input dtype. A query that sees no key gives 0. Query head n
    reads key head n // (N / K).

    Args:
      mask: who sees whom; evaluated a tile at a time, never `[T, S]`.
      alibi: slopes; -alibi · |p - s| is added to the logits. Held constant by the gradient.
      scale: factor on q·k; H^-0.5 if left out.
      softcap: logits become softcap · tanh(logits / softcap).
      dropout: probability of dropping a weight. Which ones depends on the key, row, head and
        positions alone, not on the implementation or the chunks.
      dropout_key: a JAX random key, needed where dropout > 0.
      q_chunk, k_chunk: tokens in a block; T and S need not be multiples.
      offload: share of the tokens whose `SAVED` bear the names for host memory.

    Raises:
      NotImplementedError: the named implementation cannot honour the arguments.
      ValueError: shapes or dtypes of q, k and v that do not belong together, or an empty array; N
        is not a multiple of K; dropout outside [0, 1) or without a key; a soft cap that is not
        positive, or a scale that is not finite; ALiBi, T ≠ S and no positions; a chunk below 1; no
        such `impl`; a mask that `Mask.check` refuses.

    Liu & Abbeel 2023, https://arxiv.org/abs/2305.19370, Algorithm 1; Dao 2023 for the backward
    pass.
    """
    check_chunk(q_chunk=q_chunk, k_chunk=k_chunk)
    score = make_score(
        q,
        k,
        v,
        mask=mask,
        alibi=alibi,
        scale=scale,
        softcap=softcap,
        dropout=dropout,
        dropout_key=dropout_key,
    )
    name, _ = choose(impl, score, q, k)
    return differentiable((IMPLEMENTATIONS[name], q_chunk, k_chunk, offload), q, k, v, score)


def make_score(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Mask = Mask(causal=True),  # noqa: B008 (frozen)
    alibi: Array | np.ndarray | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    dropout_key: Array | None = None,
) -> Score:
    """Checks the arguments of `attention`, and returns its options as one value.

    Raises:
      ValueError: as `attention`.
    """
    check_qkv(q, k, v)
    check_rate(dropout=dropout)
    check_softcap(softcap)
    (B, T, N, H), S = q.shape, k.shape[1]
    mask.check(B, T, S)
    if dropout and dropout_key is None:
        raise ValueError(f"dropout={dropout} needs dropout_key")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale={scale}: must be finite; leave it out for head size ** -0.5")
    if alibi is not None and alibi.shape != (N,):
        raise ValueError(f"alibi: must be [{N}], one slope a query head, not {alibi.shape}")
    if alibi is not None and T != S and (mask.positions is None or mask.k_positions is None):
        raise ValueError(f"T={T} queries and S={S} keys: ALiBi needs Mask.positions, k_positions")
    return Score(
        mask=mask,
        scale=H**-0.5 if scale is None else scale,
        softcap=softcap,
        dropout=dropout,
        alibi=None if alibi is None else jnp.asarray(alibi, jnp.float32),
        dropout_key=_key_data(dropout_key) if dropout and dropout_key is not None else None,
    )


def _key_data(key: Array) -> Array:
    """uint32 `[2]` from a key of any implementation, new-style or raw."""
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    return key.reshape(-1)[:2]


def differentiable(
    options: tuple[Any, int, int, float], q: Array, k: Array, v: Array, score: Score
) -> Array:
    """`out` by a pair of forward and backward, as one function with a gradient; options are the
    pair, q_chunk, k_chunk and offload."""
    leaves, structure = jax.tree.flatten(score)
    known = [x if isinstance(x, np.ndarray) else None for x in leaves]
    traced = [x if n is None else None for x, n in zip(leaves, known, strict=True)]

    def whole(traced):
        """The score, NumPy still NumPy: which tiles its mask kills is known while tracing."""
        return structure.unflatten(
            [t if n is None else n for t, n in zip(traced, known, strict=True)]
        )

    return _attention(options, whole, q, k, v, traced)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(options, whole, q, k, v, traced):
    return _run("forward", options, (q, k, v), whole(traced)).out


def _forward(options, whole, q, k, v, traced):
    partial_ = _run("forward", options, (q, k, v), whole(traced))
    out, lse = (named(x, n, options[3]) for x, n in zip(partial_, SAVED, strict=True))
    return out, (q, k, v, out, lse, traced)


def _backward(options, whole, saved, dout):
    q, k, v, out, lse, traced = saved
    return *_run("backward", options, (q, k, v, out, lse, dout), whole(traced)), None


def _run(half, options, arrays, score):
    """One half of the pair, with the window that the mask's `window_index` picks."""
    pair, q_chunk, k_chunk, _ = options
    call = partial(getattr(pair, half), q_chunk=q_chunk, k_chunk=k_chunk)
    calls = [partial(call, *arrays, replace(score, mask=m)) for m in score.mask.each_window()]
    return calls[0]() if len(calls) == 1 else jax.lax.switch(score.mask.window_index, calls)


_attention.defvjp(_forward, _backward)
