"""Dense attention in float32: the oracle. Shares the definition of a score with the tiled
implementations, but no loop."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from bptjax.ops.attention.contract import QKV, AttentionSpec, AttentionState
from bptjax.ops.attention.scores import alibi_bias, dropout_factors
from bptjax.ops.softmax import soft_cap


def unsupported(x: QKV, spec: AttentionSpec) -> str | None:
    """Returns None: the oracle honors every argument."""
    return None


def forward(x: QKV, spec: AttentionSpec) -> AttentionState:
    """Computes the definition, with `[B, N, T, S]` arrays. Plain autodiff of it is the oracle of
    every backward pass. Ignores the chunk sizes."""
    logits, factors = _logits(x.q, x.k, spec)
    # If a query attends to no key, keep its softmax finite, then zero its weights.
    some = (logits > -jnp.inf).any(-1, keepdims=True)
    lse = jax.nn.logsumexp(jnp.where(some, logits, 0.0), axis=-1, keepdims=True)
    weights = jnp.where(some, jnp.exp(logits - lse), 0.0) * factors
    out = jnp.einsum("bnts,bsnh->btnh", weights, _repeated(x.v, x.q), precision="highest")
    lse = jnp.where(some, lse, -jnp.inf)[..., 0].transpose(0, 2, 1)
    return AttentionState(out.astype(x.q.dtype), lse)


def backward(
    x: QKV, state: AttentionState, dout: Float[Array, "B T N H"], spec: AttentionSpec
) -> QKV:
    """Returns these keys' share of the gradients, from the derivative with respect to the logits:
    weights · (dout · v - out · dout)."""
    q, k, v = x
    out, dout = state.out.astype(jnp.float32), dout.astype(jnp.float32)
    delta = (out * dout).sum(-1).transpose(0, 2, 1)[..., None]
    lse = jnp.where(state.lse == -jnp.inf, jnp.inf, state.lse).transpose(0, 2, 1)[..., None]
    logits, pull_logits, factors = jax.vjp(lambda q, k: _logits(q, k, spec), q, k, has_aux=True)
    weights = jnp.exp(logits - lse)

    def weight_cotangent(v):
        return jnp.einsum("btnh,bsnh->bnts", dout, _repeated(v, q), precision="highest")

    dweights, pull_values = jax.vjp(weight_cotangent, v)
    (dv,) = pull_values(weights * factors)
    dq, dk = pull_logits(weights * (factors * dweights - delta))
    return QKV(dq, dk, dv)


def _repeated(x: Array, q: Array) -> Array:
    """Returns key or value heads in float32, repeated for each query head that reads them."""
    return jnp.repeat(x.astype(jnp.float32), q.shape[2] // x.shape[2], axis=2)


def _logits(q: Array, k: Array, spec: AttentionSpec) -> tuple[Array, Array | float]:
    """Returns float32 logits `[B, N, T, S]`, -inf where masked, and dropout factors."""
    (B, T, N, _), S = q.shape, k.shape[1]
    mask = jax.tree.map(jnp.asarray, spec.mask.resolve(T, S))
    of_queries, of_keys = mask.of_queries, mask.of_keys
    p, s = of_queries.positions, of_keys.positions
    raw = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), _repeated(k, q), precision="highest")
    logits, _ = soft_cap(raw * spec.scale, spec.softcap)
    if spec.alibi is not None:
        far = (p, s) if of_queries.depths is None else (of_queries.depths, of_keys.depths)
        logits += alibi_bias(spec.alibi, *far)
    allowed = mask.allowed(of_queries, of_keys)
    if allowed is not None:
        logits = jnp.where(allowed[:, None], logits, -jnp.inf)
    return logits, dropout_factors(spec, B, N, p, s) if spec.dropout else 1.0
