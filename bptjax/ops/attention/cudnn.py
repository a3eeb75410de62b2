"""cuDNN's fused attention as a kernel, through the primitives behind `jax.nn`: causal or not, a
window, packed documents by offsets. O(T) memory; NVIDIA GPUs, float16 and bfloat16.

`jax.nn.dot_product_attention` itself returns no float32 lse and does not support documents.
"""

import inspect
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

import bptjax.ops.attention.library_kernels as library_kernels
import bptjax.ops.attention.triton_flash as triton_flash
from bptjax.ops.attention.contract import QKV, AttentionSpec, AttentionState, Kernel
from bptjax.ops.attention.library_kernels import (
    document_starts,
    hide_padding,
    single_documents,
    zero_padding,
)
from bptjax.ops.mask import Mask
from bptjax.ops.softmax import merge_states
from bptjax.ops.target import capability, is_absent, like, platform, stand_in

# Bytes of one head's keys and values that stay in an H200's cache while the queries pass. Beyond
# it the forward pass slows down: at head size 128 from 600 TFLOP/s to 570 on 131,072 tokens and 490
# on 524,288; the backward pass does not (scripts/results/attention_h200.json).
CACHE_BYTES = 32 * 2**20
# Maximum documents per sequence: cuDNN stores the statistics of each over the full length.
MAX_DOCUMENTS = 16
# Runs batches whose documents do not fit cuDNN's packing. The batch decides at run time, so the
# fallback must support the arguments too.
FALLBACK: Kernel = triton_flash


def unsupported(x: QKV, spec: AttentionSpec) -> str | None:
    """Returns why cuDNN cannot honor these arguments, or None if it can."""
    mask, T, S = spec.mask, x.q.shape[1], x.k.shape[1]
    if platform() != "gpu":
        return "needs an NVIDIA GPU"
    if triton_flash.compiler_shards_arrays():
        return "runs on one device, and the mesh has more"
    if missing := _missing_primitives():
        return f"this jax has other primitives: {missing}"
    if reason := library_kernels.unsupported(x, spec, 256 if capability() >= (9, 0) else 128):
        return reason
    if min(T, S) < 2:
        return "takes two tokens or more"
    if mask.window and not mask.causal:
        return "has windows in causal attention only"
    return None if mask.segments is None else FALLBACK.unsupported(x, spec)


def forward(x: QKV, spec: AttentionSpec) -> AttentionState:
    """Uses cuDNN's block sizes and ignores the chunks.

    With documents, the batch decides at run time: one document per sequence runs as attention
    without documents; up to `MAX_DOCUMENTS` contiguous documents are packed by offsets; other
    batches go to `FALLBACK`.
    """
    mask = spec.mask
    if mask.segments is None:
        return _forward(x, spec)
    segments = jnp.asarray(mask.segments)
    starts, sizes, fits = documents(segments)

    def single(x):
        return zero_padding(segments, _forward(x, spec))

    def packed(x):
        return zero_padding(segments, _forward(x, spec, (starts, sizes)))

    general = partial(FALLBACK.forward, spec=spec)
    if mask.window is not None or x.q.size >= 2**31 or x.q.shape[-1] > 128:
        # cuDNN has no windows in packed documents, offsets are int32, and heads above 128 are
        # untested with documents.
        packed = general
    if not mask.causal:
        return jax.lax.cond(fits, packed, general, x)
    branch = jnp.where(single_documents(segments), 0, jnp.where(fits, 1, 2))
    return jax.lax.switch(branch, [single, packed, general], x)


def backward(
    x: QKV, state: AttentionState, dout: Float[Array, "B T N H"], spec: AttentionSpec
) -> QKV:
    """Returns these keys' share of the gradients.

    Packed documents go to `FALLBACK`: cuDNN would hold float32 gradients of `MAX_DOCUMENTS` times
    the queries, 16 GiB for 32,768 tokens of 32 heads of 128, and would take longer
    (scripts/results/attention_h200.json).
    """
    mask = spec.mask
    if mask.segments is None:
        return _backward(x, state, dout, spec)
    segments, general = jnp.asarray(mask.segments), partial(FALLBACK.backward, spec=spec)
    if not mask.causal:
        return general(x, state, dout)

    def single(x, state, dout):
        # cuDNN computes attention for padding queries too.
        return zero_padding(segments, _backward(x, hide_padding(segments, state), dout, spec))

    return jax.lax.cond(single_documents(segments), single, general, x, state, dout)


def documents(
    segments: Int[Array, "B T"],
) -> tuple[Int[Array, "B M"], Int[Array, "B M"], Bool[Array, ""]]:
    """Finds the documents: the starts of each sequence's first `MAX_DOCUMENTS` documents, their
    lengths in tokens (0: no such document), and whether every document is contiguous and listed."""
    T = segments.shape[1]
    start = document_starts(segments)
    token = jnp.arange(T, dtype=jnp.int32)[None]
    # The first starts in order; T marks unused entries.
    starts = T - jax.lax.top_k(T - jnp.where(start, token, T), min(MAX_DOCUMENTS, T))[0]
    exists = starts < T
    ids = jnp.take_along_axis(segments, jnp.minimum(starts, T - 1), 1)
    members = (segments[:, None] == ids[:, :, None]) & exists[:, :, None]
    # A non-contiguous document has two starts with the same id.
    starts_of_id = ((ids[:, None] == ids[:, :, None]) & exists[:, None]).sum(-1)
    fits = (start.sum(-1) == exists.sum(-1)).all()
    fits &= jnp.where(exists, starts_of_id == 1, True).all()
    return starts, members.sum(-1, dtype=jnp.int32), fits


def _forward(
    x: QKV, spec: AttentionSpec, packing: tuple[Array, Array] | None = None
) -> AttentionState:
    mask, (q, k, _) = spec.mask, x
    pieces = _count_pieces(k)
    square = q.shape[1] == k.shape[1]
    if pieces > 1 and mask.causal and mask.window is None and square and packing is None:
        return _forward_in_pieces(x, spec, pieces)
    return _call_forward(x, spec, packing)


def _count_pieces(k: Array) -> int:
    """Returns the number of pieces of keys and values such that each piece fits in the cache."""
    return -(-2 * k.nbytes // (k.shape[0] * k.shape[2] * CACHE_BYTES))


def _forward_in_pieces(x: QKV, spec: AttentionSpec, n: int) -> AttentionState:
    """Attends from each of n pieces of the queries to one piece of the keys after another."""
    T = x.q.shape[1]
    # Round up to cuDNN's 128-token blocks. Padded keys come after every real query (causal), and
    # padded queries are sliced off below.
    size = -(-T // (n * 128)) * 128
    n = -(-T // size)
    x = QKV(*(jnp.pad(y, ((0, 0), (0, n * size - T), (0, 0), (0, 0))) for y in x))

    def piece(y, i):
        return jax.lax.dynamic_slice_in_dim(y, i * size, size, 1)

    def attend_piece(i):
        q = piece(x.q, i)

        def attend(j, spec):
            state = _call_forward(QKV(q, piece(x.k, j), piece(x.v, j)), spec)
            return state._replace(out=state.out.astype(jnp.float32))

        def earlier(j, state):
            return merge_states(state, attend(j, replace(spec, mask=Mask())))

        state = jax.lax.fori_loop(0, i, earlier, attend(i, spec))
        return state._replace(out=state.out.astype(q.dtype))

    states = jax.lax.map(attend_piece, jnp.arange(n))
    batch = x.q.shape[0]
    return AttentionState(
        *(y.swapaxes(0, 1).reshape(batch, -1, *y.shape[3:])[:, :T] for y in states)
    )


def _call_forward(
    x: QKV, spec: AttentionSpec, packing: tuple[Array, Array] | None = None
) -> AttentionState:
    (B, T, N, _), M = x.q.shape, 1 if packing is None else packing[0].shape[1]
    operands = *x, *_operands(x, packing)
    if is_absent():
        shapes = like(x.q), jax.ShapeDtypeStruct((B * M, N, T), jnp.float32)
        out, stats = stand_in(operands, shapes, workspace=1024 * M)
    else:
        out, stats = _primitives()._dot_product_attention_fwd_p.bind(
            *operands, **_options(spec, packing), is_training=True
        )
    if packing is None:
        return AttentionState(out, stats.transpose(0, 2, 1))
    # Statistics are [B · M, N, T], one document per entry of axis 0, from index 0 of axis 2.
    starts, _ = packing
    token = jnp.arange(T)
    number = jnp.maximum((starts[:, :, None] <= token[None, None]).sum(1) - 1, 0)
    inside = jnp.maximum(token[None] - jnp.take_along_axis(starts, number, 1), 0)
    lse = stats.reshape(B, M, N, T)[jnp.arange(B)[:, None], number, :, inside]
    return AttentionState(out, lse)


def _backward(x: QKV, state: AttentionState, dout: Array, spec: AttentionSpec) -> QKV:
    stats = jnp.where(state.lse == -jnp.inf, jnp.inf, state.lse).transpose(0, 2, 1)
    operands = *x, *_operands(x, None), stats, state.out, dout
    if is_absent():
        return QKV(*stand_in(operands, [like(y) for y in x], _backward_workspace(x)))
    return QKV(*_primitives()._dot_product_attention_bwd_p.bind(*operands, **_options(spec, None)))


def _backward_workspace(x: QKV) -> int:
    """Returns the bytes of cuDNN's workspace in the backward pass, as cuDNN 9.19 reports it:
    float32 gradients of the queries and, with fewer key heads, gradients of keys and values per
    query head; and one float32 per query and head."""
    (B, T, N, H), (_, S, K, _) = x.q.shape, x.k.shape
    of_keys = 2 * B * S * N * H * x.k.dtype.itemsize if K < N else 0
    return 4 * B * T * N * (H + 1) + of_keys + 256


def _operands(x: QKV, packing: tuple[Array, Array] | None) -> tuple[Array, ...]:
    """Returns the operands after (q, k, v): bias, lengths, offsets, page tables; unused ones are
    empty."""
    # Slices, not zeros: JAX would create zeros before a differentiated function and save them for
    # the backward pass, and XLA crashes on empty arrays that enter a mesh program that way.
    empty = x.q.reshape(-1)[:0]
    if packing is None:
        return (empty,) * 7
    starts, sizes = packing
    (B, T, N, H), K = x.q.shape, x.k.shape[2]
    sequence = jnp.arange(B, dtype=jnp.int32)[:, None] * T

    def offsets(heads):
        # In elements; cuDNN reads B · M + 1 offsets, the last of which is the end.
        flat = jnp.append((sequence + starts).reshape(-1), B * T) * (heads * H)
        return jnp.pad(flat, (0, B - 1)).reshape(B, -1).astype(jnp.int32)

    return empty, sizes, sizes, offsets(N), offsets(K), empty, empty


def _options(spec: AttentionSpec, packing: tuple[Array, Array] | None) -> dict[str, Any]:
    primitives = _primitives()
    kinds = primitives.MaskType
    if packing is None:
        kind = kinds.CAUSAL if spec.mask.causal else kinds.NO_MASK
    else:
        kind = kinds.PADDING_CAUSAL if spec.mask.causal else kinds.PADDING
    parameters = inspect.signature(primitives._dot_product_attention_fwd_cuda_lowering).parameters
    # jax 0.11.3 added score modifiers.
    newer = {name: None for name in ("score_mod_name", "score_mod_jaxpr") if name in parameters}
    return dict(
        scale=float(spec.scale),
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=kind,
        layout=primitives.AttentionLayout.BTNH.value,
        sliding_window_length=spec.mask.window or 0,
        **newer,
    )


def _primitives() -> ModuleType:
    """Returns the module of cuDNN's primitives, private to jax and subject to change."""
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def _missing_primitives() -> str | None:
    """Returns why cuDNN's primitives are unavailable, or None if they are available."""
    try:
        _primitives()._dot_product_attention_fwd_p, _primitives()._dot_product_attention_bwd_p
    except (ImportError, AttributeError) as error:
        return str(error)
    return None
