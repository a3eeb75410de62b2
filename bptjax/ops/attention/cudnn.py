"""cuDNN's fused attention as a pair, through the primitives behind `jax.nn`: causal or not, a
window, packed documents by offsets. O(T) memory; NVIDIA GPUs, float16 and bfloat16.

`jax.nn.dot_product_attention` itself gives no float32 lse and takes no documents.
"""

import inspect
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

import bptjax.ops.attention.triton as triton
from bptjax.ops.attention.tile import Score
from bptjax.ops.mask import Mask
from bptjax.ops.softmax import Partial, merge

# Bytes of one head's keys and values that stay in an H200's cache while queries go by. With more
# the forward pass slows down: at head size 128 from 600 TFLOP/s to 570 on 131,072 tokens and 490 on
# 524,288; the backward pass does not (scripts/results/attention_h200.json).
CACHED = 32 * 2**20
# Documents of a row that cuDNN gets: it keeps the statistics of each over the whole length.
MAX_DOCUMENTS = 16


def unsupported(score: Score, q: Any, k: Any) -> str | None:
    """Why these arguments cannot be honoured; None where they can."""
    mask, T, S = score.mask, q.shape[1], k.shape[1]
    if jax.default_backend() != "gpu":
        return "needs an NVIDIA GPU"
    if triton.several_devices():
        return "runs on one device, and the mesh has more"
    if hidden := _hidden():
        return f"this jax has other primitives: {hidden}"
    if jnp.dtype(q.dtype) not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {jnp.dtype(q.dtype).name}"
    if q.shape[3] % 8 or q.shape[3] > 128:
        return f"takes head sizes that are multiples of 8 up to 128, not {q.shape[3]}"
    for name, value in (("ALiBi", score.alibi), ("soft cap", score.softcap)):
        if value is not None:
            return f"has no {name}"
    if score.dropout:
        return "its dropout depends on the implementation"
    if mask.global_tokens is not None or mask.block_mask is not None:
        return "has no global tokens and no block masks"
    windows = [m.window for m in mask.each_window()]
    if min(T, S) < 2:
        return "takes two tokens or more"
    if any(windows) and not mask.causal:
        return "has windows in causal attention only"
    if any(windows) and T != S:
        return "has windows where T = S only"
    if (mask.causal or any(windows)) and not (
        _from_zero(mask.positions) and _from_zero(mask.k_positions)
    ):
        return "counts positions from 0"
    if mask.segments is not None:
        if T != S or mask.k_segments is not None:
            return "has documents where queries and keys are the same tokens only"
        # Rows that it cannot take go there.
        return triton.unsupported(score, q, k)
    return None


def forward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    score: Score,
    *,
    q_chunk: int = 0,
    k_chunk: int = 0,
) -> Partial:
    """cuDNN's own blocks are used, not the chunks.

    With documents, what a step gets decides as it runs: one document a row is attention without
    any; up to `MAX_DOCUMENTS`, each in one piece, are packed by offsets; others go to `triton`.
    """
    mask, arrays = score.mask, (q, k, v)
    if mask.segments is None:
        return _forward(*arrays, score)
    segments = jnp.asarray(mask.segments)
    starts, sizes, fits = documents(segments)

    def alone(q, k, v):
        return _silent(segments, _forward(q, k, v, score))

    def packed(q, k, v):
        return _silent(segments, _forward(q, k, v, score, (starts, sizes)))

    general = partial(triton.forward, score=score)
    if mask.window is not None or q.size >= 2**31:
        # Packed documents have no windows, and their offsets are int32.
        packed = general
    if not mask.causal:
        return jax.lax.cond(fits, packed, general, *arrays)
    branch = jnp.where(_one(segments), 0, jnp.where(fits, 1, 2))
    return jax.lax.switch(branch, [alone, packed, general], *arrays)


def backward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    out: Float[Array, "B T N H"],
    lse: Float[Array, "B T N"],
    dout: Float[Array, "B T N H"],
    score: Score,
    *,
    q_chunk: int = 0,
    k_chunk: int = 0,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """These keys' share of (dq, dk, dv); `out` and `lse` may come from more keys than these.

    Packed documents go to `triton`: cuDNN would keep float32 gradients of `MAX_DOCUMENTS` times the
    queries, 16 GiB for 32,768 tokens of 32 heads of 128, and takes longer
    (scripts/results/attention_h200.json).
    """
    mask, arrays = score.mask, (q, k, v, out, lse, dout)
    if mask.segments is None:
        return _backward(*arrays, score)
    segments, general = jnp.asarray(mask.segments), partial(triton.backward, score=score)
    if not mask.causal:
        return general(*arrays)

    def alone(q, k, v, out, lse, dout):
        return _silent(segments, _backward(q, k, v, out, lse, dout, score))

    return jax.lax.cond(_one(segments), alone, general, *arrays)


def _starts(segments: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Where a document starts."""
    before = jnp.pad(segments, ((0, 0), (1, 0)))[:, :-1]
    return (segments != 0) & (segments != before)


def _one(segments: Int[Array, "B T"]) -> Bool[Array, ""]:
    """Whether each row is one document and padding behind it, which in causal attention none of it
    sees."""
    start = _starts(segments)
    return (start[:, 0] & (start.sum(-1) == 1)).all()


def documents(
    segments: Int[Array, "B T"],
) -> tuple[Int[Array, "B M"], Int[Array, "B M"], Bool[Array, ""]]:
    """Where each row's first `MAX_DOCUMENTS` documents start, how many tokens they have (0: there
    is none), and whether those are all, each in one piece.
    """
    T = segments.shape[1]
    start = _starts(segments)
    token = jnp.arange(T, dtype=jnp.int32)[None]
    # The first few starts in order; T where there is none.
    starts = T - jax.lax.top_k(T - jnp.where(start, token, T), min(MAX_DOCUMENTS, T))[0]
    there = starts < T
    ids = jnp.take_along_axis(segments, jnp.minimum(starts, T - 1), 1)
    same = (segments[:, None] == ids[:, :, None]) & there[:, :, None]
    # A document in two pieces has two starts with one id.
    pieces = ((ids[:, None] == ids[:, :, None]) & there[:, None]).sum(-1)
    fits = (start.sum(-1) == there.sum(-1)).all() & jnp.where(there, pieces == 1, True).all()
    return starts, same.sum(-1, dtype=jnp.int32), fits


def _silent(segments: Int[Array, "B T"], arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """Zeros for padding, which cuDNN may leave unwritten; -inf for a Partial's lse."""
    real = (segments != 0)[..., None]
    if isinstance(arrays, Partial):
        return Partial(
            jnp.where(real[..., None], arrays.out, 0), jnp.where(real, arrays.lse, -jnp.inf)
        )
    return tuple(jnp.where(real[..., None], x, 0) for x in arrays)


def _forward(q, k, v, score, packing=None) -> Partial:
    mask, T = score.mask, q.shape[1]
    pieces = -(-2 * k.nbytes // (k.shape[0] * k.shape[2] * CACHED))
    if pieces > 1 and mask.causal and mask.window is None and T == k.shape[1] and packing is None:
        return _forward_by_pieces(q, k, v, score, pieces)
    return _forward_at_once(q, k, v, score, packing)


def _forward_by_pieces(q, k, v, score, n) -> Partial:
    """Each of n pieces of the queries against one piece of the keys after the other."""
    T = q.shape[1]
    # Whole blocks of cuDNN's; what fills the last piece up no query sees that is kept.
    size = -(-T // (n * 128)) * 128
    n = -(-T // size)
    q, k, v = (jnp.pad(x, ((0, 0), (0, n * size - T), (0, 0), (0, 0))) for x in (q, k, v))

    def piece(x, i):
        return jax.lax.dynamic_slice_in_dim(x, i * size, size, 1)

    def of_queries(i):
        mine = piece(q, i)

        def of_keys(j, score):
            out, lse = _forward_at_once(mine, piece(k, j), piece(v, j), score)
            return Partial(out.astype(jnp.float32), lse)

        def before(j, whole):
            return merge(whole, of_keys(j, replace(score, mask=Mask())))

        out, lse = jax.lax.fori_loop(0, i, before, of_keys(i, score))
        return Partial(out.astype(q.dtype), lse)

    parts = jax.lax.map(of_queries, jnp.arange(n))
    return Partial(*(x.swapaxes(0, 1).reshape(len(q), -1, *x.shape[3:])[:, :T] for x in parts))


def _forward_at_once(q, k, v, score, packing=None) -> Partial:
    out, stats = _fused()._dot_product_attention_fwd_p.bind(
        q, k, v, *_operands(q, k, packing), **_options(score, q, packing), is_training=True
    )
    if packing is None:
        return Partial(out, stats.transpose(0, 2, 1))
    # Statistics are [B · M, N, T], those of a document at its own start.
    starts, _ = packing
    (B, T, N, _), M = q.shape, starts.shape[1]
    token = jnp.arange(T)
    number = jnp.maximum((starts[:, :, None] <= token[None, None]).sum(1) - 1, 0)
    inside = jnp.maximum(token[None] - jnp.take_along_axis(starts, number, 1), 0)
    lse = stats.reshape(B, M, N, T)[jnp.arange(B)[:, None], number, :, inside]
    return Partial(out, lse)


def _backward(q, k, v, out, lse, dout, score) -> tuple[Array, Array, Array]:
    stats = jnp.where(lse == -jnp.inf, jnp.inf, lse).transpose(0, 2, 1)
    dq, dk, dv = _fused()._dot_product_attention_bwd_p.bind(
        q, k, v, *_operands(q, k, None), stats, out, dout, **_options(score, q, None)
    )
    return dq, dk, dv


def _operands(q: Array, k: Array, packing: tuple | None) -> tuple[Array, ...]:
    """What follows (q, k, v): bias, lengths, offsets and page tables, empty where not used."""
    # Not zeros: where a gradient is taken JAX would make them beforehand and keep them for the
    # backward pass, and XLA crashes on empty arrays that come into a mesh's program so.
    none = q.reshape(-1)[:0]
    if packing is None:
        return (none,) * 7
    starts, sizes = packing
    (B, T, N, H), K = q.shape, k.shape[2]
    row = jnp.arange(B, dtype=jnp.int32)[:, None] * T

    def offsets(heads):
        # In elements; cuDNN reads B · M + 1 of them, the last being the end.
        flat = jnp.append((row + starts).reshape(-1), B * T) * (heads * H)
        return jnp.pad(flat, (0, B - 1)).reshape(B, -1).astype(jnp.int32)

    return none, sizes, sizes, offsets(N), offsets(K), none, none


def _options(score: Score, q: Array, packing: tuple | None) -> dict[str, Any]:
    fused = _fused()
    kinds = fused.MaskType
    if packing is None:
        kind = kinds.CAUSAL if score.mask.causal else kinds.NO_MASK
    else:
        kind = kinds.PADDING_CAUSAL if score.mask.causal else kinds.PADDING
    parameters = inspect.signature(fused._dot_product_attention_fwd_cuda_lowering).parameters
    # jax 0.11.3 brought modifiers of the scores.
    newer = {name: None for name in ("score_mod_name", "score_mod_jaxpr") if name in parameters}
    return dict(
        scale=float(score.scale),
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=kind,
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=score.mask.window or 0,
        **newer,
    )


def _fused() -> ModuleType:
    """Private to jax: what it holds may change with any version."""
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def _hidden() -> str | None:
    """Why cuDNN's primitives are not to be had; None where they are."""
    try:
        _fused()._dot_product_attention_fwd_p, _fused()._dot_product_attention_bwd_p
    except (ImportError, AttributeError) as error:
        return str(error)
    return None


def _from_zero(positions: Any) -> bool:
    """Whether positions are known to be 0, 1, 2, …"""
    if positions is None:
        return True
    return isinstance(positions, np.ndarray) and np.array_equal(
        positions, np.broadcast_to(np.arange(positions.shape[-1]), positions.shape)
    )
