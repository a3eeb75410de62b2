"""FlashAttention-4 as a kernel, through the primitives of fa4-jax: causal or not, one- or two-sided
windows, packed documents. O(T) memory; NVIDIA Hopper GPUs, float16 and bfloat16.

Zadouri et al. 2026, FlashAttention-4; https://github.com/nshepperd/fa4-jax.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

import bptjax.ops.attention.cudnn as cudnn
import bptjax.ops.attention.library_kernels as library_kernels
import bptjax.ops.attention.triton_flash as triton_flash
from bptjax.ops.attention.contract import QKV, AttentionSpec, AttentionState
from bptjax.ops.attention.library_kernels import document_starts
from bptjax.ops.target import capability, is_absent, like, platform, stand_in

# Bounds on the number of documents that the kernels are called for, and tokens per document between
# the bounds. Each document costs empty blocks and up to 128 tokens of memory. With a thousand
# documents, Triton is faster.
DOCUMENTS, TOKENS_PER_DOCUMENT = (16, 256), 256
# XLA fuses slices into these calls, which makes their gradients wrong.
XLA_FLAG = "--xla_gpu_enable_dynamic_slice_fusion=false"
# Runs batches whose documents are too many or not contiguous. The batch decides at run time, so the
# fallback must support the arguments too. For such a batch FlashAttention-4 gets empty documents,
# and the fallback overwrites its results; a branch would wait for the condition in every layer.
FALLBACK = triton_flash
# fa4-jax's GPU implementation; "reference" runs on any device.
BACKEND = "cute"


def unsupported(x: QKV, spec: AttentionSpec) -> str | None:
    """Returns why FlashAttention-4 cannot honor these arguments, or None if it can."""
    mask, H = spec.mask, x.q.shape[-1]
    if platform() != "gpu":
        return "needs an NVIDIA GPU"
    major, minor = capability()
    if major != 9:
        return f"needs a Hopper GPU, of compute capability 9.0, not {major}.{minor}"
    if triton_flash.compiler_shards_arrays():
        return "runs on one device, and the mesh has more"
    if not is_absent() and (reason := _missing()):
        return reason
    if reason := library_kernels.unsupported(x, spec, 256):
        return reason
    if x.q.size >= 2**31:
        return "was not tested on 2³¹ elements"
    if mask.causal and x.q.shape[1] != x.k.shape[1]:
        return "has causal masks where T = S only"
    if mask.segments is None:
        return None
    if H > 128:
        return f"was tested with documents at head sizes up to 128, not {H}"
    return FALLBACK.unsupported(x, spec)


@cache
def _missing() -> str | None:
    """Returns why this machine cannot run the kernels, or None if it can."""
    try:
        import cutejax.cache
        from fa4_jax.attention import AttnConfig, fa4_fwd_p, fa4_vjp_p  # noqa: F401
    except Exception as error:  # Of other versions, or of what they need.
        return f"needs fa4-jax ({error})"
    if not _slices_stay():
        return f"gives wrong gradients without XLA_FLAGS={XLA_FLAG}, set before JAX starts"
    config = cutejax.cache.config()
    if config.url is None and _is_writable(Path(config.spool_dir)):
        # Any URL makes cutejax keep the compiled kernels in the user's cache directory.
        cutejax.configure_cache(url="local", hmac_key="local", client_factory=_NoServer)
    return None


def _slices_stay() -> bool:
    """Returns whether XLA runs with `XLA_FLAG`. XLA reads the environment once."""
    try:
        from jax._src.lib import xla_client

        options = xla_client.CompileOptions().SerializeAsString()
    except (ImportError, AttributeError):
        return False
    # Field 105 of DebugOptions, xla_gpu_enable_dynamic_slice_fusion, is False.
    return b"\xc8\x06\x00" in options


def _is_writable(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK)


class _NoServer:
    """A stand-in for a server of compiled kernels: stores and returns nothing."""

    def hgetall(self, key: str) -> dict[bytes, bytes]:
        return {}

    def hset(self, key: str, mapping: dict[str, bytes]) -> None:
        pass


def forward(x: QKV, spec: AttentionSpec) -> AttentionState:
    """Uses FlashAttention-4's block sizes and ignores the chunks."""
    if spec.mask.segments is None:
        return _forward(x, spec)
    packing = documents(jnp.asarray(spec.mask.segments))
    return FALLBACK.forward(x, spec, (packing.fit, _forward(x, spec, packing)))


def backward(
    x: QKV, state: AttentionState, dout: Float[Array, "B T N H"], spec: AttentionSpec
) -> QKV:
    """Returns these keys' share of the gradients."""
    if spec.mask.segments is None:
        return _backward(x, state, dout, spec)
    packing = documents(jnp.asarray(spec.mask.segments))
    results = _backward(x, state, dout, spec, packing)
    return FALLBACK.backward(x, state, dout, spec, (packing.fit, results))


class Documents(NamedTuple):
    """Documents in the concatenated sequences.

    Attributes:
      fit: whether they are contiguous and fewer than M. If not, all lengths are 0.
      starts: 0 for an empty document, starts of the documents, and the end of the tokens. Empty
        documents at the end pad their number to M.
      lengths: lengths of the documents in tokens.
    """

    fit: Bool[Array, ""]
    starts: Int[Array, "M+1"]
    lengths: Int[Array, "M"]


def documents(segments: Int[Array, "B T"]) -> Documents:
    """Finds the documents: runs of equal segment numbers other than padding."""
    size, (least, most) = segments.size, DOCUMENTS
    count = min(max(size // TOKENS_PER_DOCUMENT, least), most)
    starts = document_starts(segments)
    # A document is contiguous if its number exceeds all earlier ones, as in packed sequences.
    before = jnp.pad(jax.lax.cummax(segments, 1), ((0, 0), (1, 0)))[:, :-1]
    fit = (~starts | (segments > before)).all() & (starts.sum() <= count)
    # For each token, the next token that begins a document or padding.
    change = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    place = jnp.where(change.reshape(-1), jnp.arange(size, dtype=jnp.int32), size)
    after = jnp.pad(jax.lax.cummin(place, reverse=True)[1:], (0, 1), constant_values=size)
    first = jnp.nonzero(starts.reshape(-1), size=count + 1, fill_value=size)[0].astype(jnp.int32)
    first = first.at[-1].set(size)
    end = after.at[first[:-1]].get(mode="fill", fill_value=size)
    lengths = jnp.where(fit, end - first[:-1], 0)
    # fa4-jax needs a document that starts at 0, where there may be padding.
    return Documents(fit, jnp.pad(first, (1, 0)), jnp.pad(lengths, (1, 0)))


def _forward(x: QKV, spec: AttentionSpec, packing: Documents | None = None) -> AttentionState:
    (B, T, N, _), operands = x.q.shape, (*_flat(x, packing), *_operands(packing))
    if is_absent():
        shape = (B, N, T) if packing is None else (N, B * T)
        out, lse = stand_in(operands, (like(operands[0]), jax.ShapeDtypeStruct(shape, "float32")))
    else:
        from fa4_jax.attention import fa4_fwd_p

        out, lse = fa4_fwd_p.bind(*operands, cfg=_config(spec, packing is not None), need_lse=True)
    lse = lse.transpose(0, 2, 1) if packing is None else lse.T.reshape(B, T, -1)
    return AttentionState(out.reshape(x.q.shape), lse)


def _backward(
    x: QKV,
    state: AttentionState,
    dout: Array,
    spec: AttentionSpec,
    packing: Documents | None = None,
) -> QKV:
    if x.q.shape[-1] > 128 and cudnn.unsupported(x, spec) is None:
        # cuDNN is faster (scripts/results/attention_fa4_h200.json).
        return cudnn.backward(x, state, dout, spec)
    # Weights are exp(logits - lse); they must be 0 for a query that attends to no key.
    lse = jnp.where(state.lse == -jnp.inf, jnp.inf, state.lse)
    lse = lse.transpose(0, 2, 1) if packing is None else lse.reshape(-1, lse.shape[-1]).T
    q, k, v, out, dout = _flat((*x, state.out, dout), packing)
    operands = q, k, v, out, lse, dout, *_operands(packing)
    if is_absent():
        gradients = stand_in(operands, [like(y) for y in (q, k, v)], _workspace(x, packing))
    else:
        from fa4_jax.attention import fa4_vjp_p

        config = _config(spec, packing is not None)
        gradients = fa4_vjp_p.bind(*operands, cfg=config, has_d_lse=False)
    return QKV(*(y.reshape(own.shape) for y, own in zip(gradients, x, strict=True)))


def _workspace(x: QKV, packing: Documents | None) -> int:
    """Returns the bytes of fa4-jax's arrays in the backward pass: float32 gradients of the queries,
    of keys and values too with fewer key heads, and two numbers per query and head. fa4-jax pads
    heads to multiples of 32, and documents to blocks of up to 128 tokens."""
    (B, T, N, H), (_, S, K, _) = x.q.shape, x.k.shape
    H = -(-H // 32) * 32
    more = 0 if packing is None else 128 * packing.lengths.size
    of_keys = 2 * (B * S + more) * K * H if K < N else 0
    return 4 * ((B * T + more) * N * (H + 2) + of_keys)


def _flat(arrays: Any, packing: Documents | None) -> list[Array]:
    """Returns the arrays `[B, T, ...]`; with documents, reshaped to `[B · T, ...]`."""
    return [y if packing is None else y.reshape(-1, *y.shape[2:]) for y in arrays]


def _operands(packing: Documents | None) -> tuple[Array, ...]:
    """Returns starts and lengths of documents, for queries and keys; empty without documents."""
    return () if packing is None else (*[packing.starts] * 2, *[packing.lengths] * 2)


def _config(spec: AttentionSpec, varlen: bool) -> Any:
    from fa4_jax.attention import AttnConfig

    mask = spec.mask
    reach = mask.window - 1 if mask.window else None
    return AttnConfig(
        causal=mask.causal and reach is None,
        local=reach is not None,
        window=(reach, 0 if mask.causal and reach is not None else reach),
        scale=spec.scale,
        mask=None,
        backend=BACKEND,
        varlen=varlen,
        # The fallback writes the padding.
        defined_padding=False,
    )
