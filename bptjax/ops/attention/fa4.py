"""FlashAttention-4 as a kernel, through the primitives of fa4-jax: causal or not, one- or two-sided
windows, packed documents, trees of tokens. O(T) memory; NVIDIA Hopper GPUs, float16 and bfloat16.

Zadouri et al. 2026, FlashAttention-4; https://github.com/nshepperd/fa4-jax.
"""

import os
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float, Int

import bptjax.ops.attention.cudnn as cudnn
import bptjax.ops.attention.library_kernels as library_kernels
import bptjax.ops.attention.triton_flash as triton_flash
from bptjax.ops.attention.contract import PREPARED, QKV, AttentionSpec, AttentionState
from bptjax.ops.attention.packed import Documents, Trees, documents, trees
from bptjax.ops.mask import Mask
from bptjax.ops.softmax import merge_states
from bptjax.ops.target import capability, is_absent, like, platform, stand_in

# With this option XLA fuses slices into these calls, which makes their gradients wrong.
XLA_OPTION = "xla_gpu_enable_dynamic_slice_fusion"
XLA_FLAG = f"--{XLA_OPTION}=false"
# Runs batches whose documents are too many or not contiguous. The batch decides at run time, so the
# fallback must support the arguments too. For such a batch FlashAttention-4 gets empty documents,
# and the fallback overwrites its results; a branch would wait for the condition in every layer.
FALLBACK = triton_flash
# fa4-jax's GPU implementation; "reference" runs on any device.
BACKEND = "cute"
# Documents of the queries, and those of the keys that each attends to.
Packing = tuple[Documents, Documents]


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
    if reason := library_kernels.unsupported(x, spec, 256, trees=True):
        return reason
    if x.q.size >= 2**31:
        return "was not tested on 2³¹ elements"
    if mask.causal and x.q.shape[1] != x.k.shape[1]:
        return "has causal masks where T = S only"
    if mask.ends is not None and mask.window is not None:
        return "counts windows in the sequence, not along a branch"
    if mask.segments is None and mask.ends is None:
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


def prepare(spec: AttentionSpec) -> AttentionSpec:
    """Finds the documents; those of trees are found in each pass."""
    if spec.mask.segments is None:
        return spec
    packing = documents(jnp.asarray(spec.mask.segments))
    named = partial(checkpoint_name, name=PREPARED)
    return replace(spec, prepared=jax.tree.map(named, packing))


def forward(x: QKV, spec: AttentionSpec) -> AttentionState:
    """Uses FlashAttention-4's block sizes and ignores the chunks."""
    mask = spec.mask
    if mask.ends is not None:
        found = trees(jnp.asarray(mask.ends))
        ours = (partial(y, found=found, spec=spec) for y in (_forward_chains, _forward_trees))
        return jax.lax.switch(_way(found), (partial(FALLBACK.forward, spec=spec), *ours), x)
    if mask.segments is None:
        return _forward(x, spec)
    packing = spec.prepared or documents(jnp.asarray(mask.segments))
    return FALLBACK.forward(x, spec, (packing.fit, _forward(x, spec, (packing, packing))))


def backward(
    x: QKV, state: AttentionState, dout: Float[Array, "B T N H"], spec: AttentionSpec
) -> QKV:
    """Returns these keys' share of the gradients."""
    mask = spec.mask
    if mask.ends is not None:
        found = trees(jnp.asarray(mask.ends))
        ours = (partial(y, found=found, spec=spec) for y in (_backward_chains, _backward_trees))
        ways = partial(FALLBACK.backward, spec=spec), *ours
        return jax.lax.switch(_way(found), ways, x, state, dout)
    if mask.segments is None:
        return _backward(x, state, dout, spec)
    packing = spec.prepared or documents(jnp.asarray(mask.segments))
    results = _backward(x, state, dout, spec, (packing, packing))
    return FALLBACK.backward(x, state, dout, spec, (packing.fit, results))


def _way(found: Trees) -> Int[Array, ""]:
    """Returns 0 for trees that the kernels do not take, 1 if no tree branches, and 2 otherwise."""
    return jnp.where(found.fit, 1 + found.in_later.any().astype(jnp.int32), 0)


def _forward_chains(x: QKV, found: Trees, spec: AttentionSpec) -> AttentionState:
    spec = replace(spec, mask=Mask(causal=True))
    state = _forward(x, spec, (found.chains, found.chains))
    return _only(state, found.real)


def _forward_trees(x: QKV, found: Trees, spec: AttentionSpec) -> AttentionState:
    above = _forward(x, replace(spec, mask=Mask()), (found.later, found.prompts))
    state = merge_states(_forward_chains(x, found, spec), _only(above, found.in_later))
    return state._replace(out=state.out.astype(x.q.dtype))


def _only(state: AttentionState, at: Bool[Array, "B T"]) -> AttentionState:
    """Returns the state of some queries, and that of no keys for the others."""
    lse = jnp.where(at[..., None], state.lse, -jnp.inf)
    return AttentionState(jnp.where(at[..., None, None], state.out, 0), lse)


def _backward_chains(
    x: QKV, state: AttentionState, dout: Array, found: Trees, spec: AttentionSpec
) -> QKV:
    spec = replace(spec, mask=Mask(causal=True))
    gradients = _backward(x, state, dout, spec, (found.chains, found.chains))
    return QKV(*(jnp.where(found.real[..., None, None], y, 0) for y in gradients))


def _backward_trees(
    x: QKV, state: AttentionState, dout: Array, found: Trees, spec: AttentionSpec
) -> QKV:
    own = _backward_chains(x, state, dout, found, spec)
    spec = replace(spec, mask=Mask())
    above = _backward(x, state, dout, spec, (found.later, found.prompts))
    written = found.in_later, found.in_prompts, found.in_prompts
    return QKV(
        *(
            y + jnp.where(at[..., None, None], z, 0)
            for y, z, at in zip(own, above, written, strict=True)
        )
    )


def _forward(x: QKV, spec: AttentionSpec, packing: Packing | None = None) -> AttentionState:
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
    packing: Packing | None = None,
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


def _workspace(x: QKV, packing: Packing | None) -> int:
    """Returns the bytes of fa4-jax's arrays in the backward pass: float32 gradients of the queries,
    of keys and values too with fewer key heads, and two numbers per query and head. fa4-jax pads
    heads to multiples of 32, and documents to blocks of up to 128 tokens."""
    (B, T, N, H), (_, S, K, _) = x.q.shape, x.k.shape
    H = -(-H // 32) * 32
    more = 0 if packing is None else 128 * packing[0].lengths.size
    of_keys = 2 * (B * S + more) * K * H if K < N else 0
    return 4 * ((B * T + more) * N * (H + 2) + of_keys)


def _flat(arrays: Any, packing: Packing | None) -> list[Array]:
    """Returns the arrays `[B, T, ...]`; with documents, reshaped to `[B · T, ...]`."""
    return [y if packing is None else y.reshape(-1, *y.shape[2:]) for y in arrays]


def _operands(packing: Packing | None) -> tuple[Array, ...]:
    """Returns starts and lengths of documents, for queries and keys; empty without documents."""
    if packing is None:
        return ()
    return *(each.starts for each in packing), *(each.lengths for each in packing)


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
