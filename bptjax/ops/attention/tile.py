"""One tile of attention, q_chunk queries against k_chunk keys: arithmetic that `loop` and `scan`
share.

Arrays inside are heads-first and divided along time: queries `[B, K, G, c, H]`, keys and values
`[B, K, s, H]`, logits `[B, K, G, c, s]`. The G = N / K query heads that read one key head are
adjacent.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from bptjax.ops.attention.contract import QKV, AttentionSpec, AttentionState
from bptjax.ops.attention.scores import alibi_bias, dropout_factors
from bptjax.ops.mask import Tiles
from bptjax.ops.softmax import OnlineSoftmax, soft_cap


def query_blocks(x: Array, kv_heads: int, chunk: int, fill: float = 0.0) -> Array:
    """Reshapes `[B, T, N, ...]` to `[n, B, K, G, chunk, ...]`; `fill` pads the last block."""
    x = _pad(x, chunk, fill)
    x = x.reshape(x.shape[0], -1, chunk, kv_heads, x.shape[2] // kv_heads, *x.shape[3:])
    return jnp.transpose(x, (1, 0, 3, 4, 2, *range(5, x.ndim)))


def from_query_blocks(x: Array, T: int) -> Array:
    """Reshapes `[n, B, K, G, chunk, ...]` to `[B, T, N, ...]`."""
    x = jnp.transpose(x, (1, 0, 4, 2, 3, *range(5, x.ndim)))
    B, n, chunk, K, G = x.shape[:5]
    return x.reshape(B, n * chunk, K * G, *x.shape[5:])[:, :T]


def key_blocks(x: Float[Array, "B S K H"], chunk: int) -> Float[Array, "n B K chunk H"]:
    """Divides keys or values into blocks, padding the last one with 0."""
    x = _pad(x, chunk, 0.0)
    return x.reshape(x.shape[0], -1, chunk, *x.shape[2:]).transpose(1, 0, 3, 2, 4)


def from_key_blocks(x: Float[Array, "n B K chunk H"], S: int) -> Float[Array, "B S K H"]:
    """Inverts `key_blocks`."""
    x = x.transpose(1, 0, 3, 2, 4)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :S]


def _pad(x: Array, chunk: int, fill: float) -> Array:
    width = [(0, 0)] * x.ndim
    width[1] = (0, -x.shape[1] % chunk)
    return jnp.pad(x, width, constant_values=fill)


class Tile:
    """Forward and backward pass of single tiles. (i, j) are block indices, Python ints or traced;
    all results are float32."""

    def __init__(self, x: QKV, spec: AttentionSpec):
        self.spec = spec
        (self.B, self.T, self.N, _), (_, self.S, self.K, _) = x.q.shape, x.k.shape
        self.q_chunk, self.k_chunk = min(spec.q_chunk, self.T), min(spec.k_chunk, self.S)
        self.tiles = Tiles(spec.mask, self.T, self.S, self.q_chunk, self.k_chunk)

    def forward_blocks(self, x: QKV) -> tuple[Array, Array, Array]:
        """Divides queries, keys and values into blocks."""
        q = query_blocks(x.q, self.K, self.q_chunk)
        return q, key_blocks(x.k, self.k_chunk), key_blocks(x.v, self.k_chunk)

    def backward_blocks(
        self, x: QKV, state: AttentionState, dout: Array
    ) -> tuple[Array, Array, Array, Array, Array, Array]:
        """Divides the operands of the backward pass into blocks: (q, k, v, lse, dout, delta)."""
        delta = (state.out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1)
        # lse = inf gives padded queries a weight of 0.
        padded = (x.q, 0.0), (state.lse, jnp.inf), (dout, 0.0), (delta, 0.0)
        q, lse, dout, delta = (query_blocks(y, self.K, self.q_chunk, fill) for y, fill in padded)
        return q, key_blocks(x.k, self.k_chunk), key_blocks(x.v, self.k_chunk), lse, dout, delta

    def _grouped(self, x: Array) -> Array:
        """Reshapes `[B or 1, N, t, s]` to `[B or 1, K, G, t, s]`."""
        return x.reshape(x.shape[0], self.K, self.N // self.K, *x.shape[2:])

    def _logits(self, q: Array, k: Array, i, j) -> tuple[Array, Callable[[Array], Array]]:
        """Returns the logits, and a function from their cotangent to the cotangent of q·k."""
        spec = self.spec
        logits = jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32)
        logits, derivative = soft_cap(logits * spec.scale, spec.softcap)
        if spec.alibi is not None:
            logits += self._grouped(alibi_bias(spec.alibi, *self.tiles.depths(i, j)))
        allowed = self.tiles.allowed(i, j)
        if allowed is not None:
            logits = jnp.where(allowed[:, None, None], logits, -jnp.inf)
        return logits, lambda dlogits: dlogits * derivative * spec.scale

    def _dropout(self, i, j) -> Array | None:
        if not self.spec.dropout:
            return None
        p, s = self.tiles.positions(i, j)
        return self._grouped(dropout_factors(self.spec, self.B, self.N, p, s))

    def forward(self, softmax: OnlineSoftmax, q: Array, k: Array, v: Array, i, j) -> OnlineSoftmax:
        """Adds tile (i, j) to the softmax of query block i."""
        softmax, weights = softmax.update(self._logits(q, k, i, j)[0])
        factors = self._dropout(i, j)
        weights = (weights if factors is None else weights * factors).astype(v.dtype)
        new = jnp.einsum("bkgts,bksh->bkgth", weights, v, preferred_element_type=jnp.float32)
        return softmax._replace(acc=softmax.acc + new)

    def backward(
        self, q: Array, k: Array, v: Array, lse: Array, dout: Array, delta: Array, i, j
    ) -> tuple[Array, Array, Array]:
        """Returns tile (i, j)'s share of (dq, dk, dv). `lse` and delta = Σ_h out · dout, both
        `[B, K, G, c]`, cover *all* keys. Dao 2023, arXiv 2307.08691, Algorithm 2."""
        logits, pull = self._logits(q, k, i, j)
        weights = jnp.exp(logits - jnp.where(lse == -jnp.inf, jnp.inf, lse)[..., None])
        dweights = jnp.einsum("bkgth,bksh->bkgts", dout, v, preferred_element_type=jnp.float32)
        factors = self._dropout(i, j)
        dropped = weights
        if factors is not None:
            dropped, dweights = weights * factors, dweights * factors
        dlogits = pull(weights * (dweights - delta[..., None]))
        dropped, dlogits = dropped.astype(dout.dtype), dlogits.astype(q.dtype)
        dv = jnp.einsum("bkgts,bkgth->bksh", dropped, dout, preferred_element_type=jnp.float32)
        dk = jnp.einsum("bkgts,bkgth->bksh", dlogits, q, preferred_element_type=jnp.float32)
        dq = jnp.einsum("bkgts,bksh->bkgth", dlogits, k, preferred_element_type=jnp.float32)
        return dq, dk, dv
