"""Dense attention in float32: the oracle. It shares with the tiled implementations the definition
of a score, and no loop."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from bptjax.ops.attention.tile import Score
from bptjax.ops.softmax import Partial


def unsupported(score: Score, q: Any, k: Any) -> str | None:
    """Why these arguments cannot be honoured; None where they can."""
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
    """The definition, with `[B, N, T, S]` arrays. Its plain autodiff is the oracle of every
    backward pass. The chunk sizes are not read."""
    logits, kept = _logits(q, k, score)
    # A row that sees nothing: keep its softmax finite, then take its weights away.
    some = (logits > -jnp.inf).any(-1, keepdims=True)
    lse = jax.nn.logsumexp(jnp.where(some, logits, 0.0), axis=-1, keepdims=True)
    weights = jnp.where(some, jnp.exp(logits - lse), 0.0) * kept
    out = jnp.einsum("bnts,bsnh->btnh", weights, _repeated(v, q), precision="highest")
    lse = jnp.where(some, lse, -jnp.inf)[..., 0].transpose(0, 2, 1)
    return Partial(out.astype(q.dtype), lse)


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
    """These keys' share of (dq, dk, dv), where `out` and `lse` may come from more keys than these:
    the derivative by the logits is weights · (dout · v - out · dout)."""
    out, dout = out.astype(jnp.float32), dout.astype(jnp.float32)
    delta = (out * dout).sum(-1).transpose(0, 2, 1)[..., None]
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse).transpose(0, 2, 1)[..., None]
    logits, by_logits, kept = jax.vjp(lambda q, k: _logits(q, k, score), q, k, has_aux=True)
    weights = jnp.exp(logits - lse)

    def gain(v):
        return jnp.einsum("btnh,bsnh->bnts", dout, _repeated(v, q), precision="highest")

    gained, by_values = jax.vjp(gain, v)
    (dv,) = by_values(weights * kept)
    dq, dk = by_logits(weights * (kept * gained - delta))
    return dq, dk, dv


def _repeated(x: Array, q: Array) -> Array:
    """Key or value heads in float32, each repeated for the query heads that read it."""
    return jnp.repeat(x.astype(jnp.float32), q.shape[2] // x.shape[2], axis=2)


def _logits(q: Array, k: Array, score: Score) -> tuple[Array, Array | float]:
    """Float32 `[B, N, T, S]`: logits, -inf where a key is not seen, and dropout's factors."""
    (B, T, N, _), S = q.shape, k.shape[1]
    mask = jax.tree.map(jnp.asarray, score.mask.resolve(T, S))
    p, s = jnp.atleast_2d(mask.positions), jnp.atleast_2d(mask.k_positions)
    raw = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), _repeated(k, q), precision="highest")
    logits, _ = score.cap(raw * score.scale)
    if score.alibi is not None:
        logits += score.bias(p, s)
    p_global, s_global = mask.global_tokens, mask.k_global_tokens
    if p_global is not None:
        p_global, s_global = jnp.atleast_2d(p_global), jnp.atleast_2d(s_global)
    allowed = mask.allowed(p, s, mask.segments, mask.k_segments, p_global, s_global)
    if allowed is not None:
        logits = jnp.where(allowed[:, None], logits, -jnp.inf)
    return logits, score.kept(B, N, p, s) if score.dropout else 1.0
