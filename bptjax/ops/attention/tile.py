"""One tile of attention, q_chunk queries against k_chunk keys: the arithmetic that the loops of
`loop` and `scan` share.

Inside, arrays are heads-first and cut along time: queries `[B, K, G, c, H]`, keys and values
`[B, K, s, H]`, logits `[B, K, G, c, s]`, where the G = N / K query heads that read one key head
stand together.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, UInt32

from bptjax.ops.dropout import keep
from bptjax.ops.mask import Mask, Tiles
from bptjax.ops.softmax import Running


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Score:
    """What makes q·k a weight, in this order: scale, soft cap, ALiBi, mask, softmax, dropout.

    Attributes:
      mask: who sees whom.
      scale: factor on q·k.
      softcap: logits become softcap · tanh(logits / softcap).
      dropout: probability of dropping a weight; the others are scaled by 1 / (1 - dropout).
      alibi: float32 `[N]`; -alibi · |p - s| is added, p and s being the mask's positions. It gets
        no gradient.
      dropout_key: uint32 `[2]` key data.
      first_row, first_head: int32 scalars, where these are some rows of the batch and some of the
        heads: dropout is by row and head.
    """

    mask: Mask
    scale: float = field(metadata={"static": True})
    softcap: float | None = field(default=None, metadata={"static": True})
    dropout: float = field(default=0.0, metadata={"static": True})
    alibi: Array | None = None
    dropout_key: Array | None = None
    first_row: Array | None = None
    first_head: Array | None = None

    def cap(self, logits: Array) -> tuple[Array, Array | float]:
        """Soft-capped logits and their derivative by the uncapped ones."""
        if self.softcap is None:
            return logits, 1.0
        bent = jnp.tanh(logits / self.softcap)
        return self.softcap * bent, 1.0 - bent * bent

    def bias(self, p: Array, s: Array) -> Array:
        """ALiBi, float32 `[B or 1, N, t, s]`, from positions `[B or 1, t]` and `[B or 1, s]`. Press
        et al. 2021, arXiv 2108.12409."""
        distance = jnp.abs(p[:, None, :, None] - s[:, None, None, :]).astype(jnp.float32)
        return -self.alibi[None, :, None, None] * distance

    def head_keys(self, batch: int, heads: int) -> Array:
        """Dropout's key of each row and head, uint32 `[B, N, 2]`."""
        fold = jax.vmap(jax.vmap(_fold, (None, None, 0)), (None, 0, None))
        rows, columns = (
            jnp.arange(n) if first is None else first + jnp.arange(n)
            for n, first in ((batch, self.first_row), (heads, self.first_head))
        )
        return fold(self.dropout_key, rows, columns)

    def kept(self, batch: int, heads: int, p: Array, s: Array) -> Array:
        """Weights' dropout factors, float32 `[B, N, t, s]`, 0 or 1 / (1 - dropout): the same for a
        position pair in any tile."""
        keys = self.head_keys(batch, heads)
        rows, columns = (
            jnp.broadcast_to(x[:, None, :], (batch, heads, x.shape[-1])) for x in (p, s)
        )
        return keep(keys, self.dropout, rows, columns) / jnp.float32(1.0 - self.dropout)


def _fold(key: UInt32[Array, "2"], row: Array, head: Array) -> UInt32[Array, "2"]:
    key = jax.random.wrap_key_data(key, impl="threefry2x32")
    return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, row), head))


def query_blocks(x: Array, kv_heads: int, chunk: int, fill: float = 0.0) -> Array:
    """`[B, T, N, ...]` to `[n, B, K, G, chunk, ...]`, the last block filled up with `fill`."""
    x = _fill_up(x, chunk, fill)
    x = x.reshape(x.shape[0], -1, chunk, kv_heads, x.shape[2] // kv_heads, *x.shape[3:])
    return jnp.transpose(x, (1, 0, 3, 4, 2, *range(5, x.ndim)))


def from_query_blocks(x: Array, T: int) -> Array:
    """`[n, B, K, G, chunk, ...]` to `[B, T, N, ...]`."""
    x = jnp.transpose(x, (1, 0, 4, 2, 3, *range(5, x.ndim)))
    B, n, chunk, K, G = x.shape[:5]
    return x.reshape(B, n * chunk, K * G, *x.shape[5:])[:, :T]


def key_blocks(x: Float[Array, "B S K H"], chunk: int) -> Float[Array, "n B K chunk H"]:
    """Cut along time, heads first, the last block filled up with 0."""
    x = _fill_up(x, chunk, 0.0)
    return x.reshape(x.shape[0], -1, chunk, *x.shape[2:]).transpose(1, 0, 3, 2, 4)


def from_key_blocks(x: Float[Array, "n B K chunk H"], S: int) -> Float[Array, "B S K H"]:
    x = x.transpose(1, 0, 3, 2, 4)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :S]


def _fill_up(x: Array, chunk: int, fill: float) -> Array:
    width = [(0, 0)] * x.ndim
    width[1] = (0, -x.shape[1] % chunk)
    return jnp.pad(x, width, constant_values=fill)


class Tile:
    """Forward and backward of single tiles. (i, j) are block numbers, Python ints or traced; all
    results are float32."""

    def __init__(self, score: Score, q: Array, k: Array, q_chunk: int, k_chunk: int):
        self.score = score
        (self.B, self.T, self.N, _), (_, self.S, self.K, _) = q.shape, k.shape
        self.q_chunk, self.k_chunk = min(q_chunk, self.T), min(k_chunk, self.S)
        self.tiles = Tiles(score.mask, self.T, self.S, self.q_chunk, self.k_chunk)

    def _grouped(self, x: Array) -> Array:
        """`[B or 1, N, t, s]` to `[B or 1, K, G, t, s]`."""
        return x.reshape(x.shape[0], self.K, self.N // self.K, *x.shape[2:])

    def _logits(self, q: Array, k: Array, i, j) -> tuple[Array, Callable[[Array], Array]]:
        """Logits, and their derivative's transpose: from a cotangent of theirs to one of q·k."""
        logits = jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32)
        logits, slope = self.score.cap(logits * self.score.scale)
        if self.score.alibi is not None:
            logits += self._grouped(self.score.bias(*self.tiles.positions(i, j)))
        allowed = self.tiles.allowed(i, j)
        if allowed is not None:
            logits = jnp.where(allowed[:, None, None], logits, -jnp.inf)
        return logits, lambda dlogits: dlogits * slope * self.score.scale

    def _kept(self, i, j) -> Array | None:
        if not self.score.dropout:
            return None
        return self._grouped(self.score.kept(self.B, self.N, *self.tiles.positions(i, j)))

    def forward(self, running: Running, q: Array, k: Array, v: Array, i, j) -> Running:
        """Takes tile (i, j) into the running softmax of the queries of block i."""
        running, weights = running.rescale(self._logits(q, k, i, j)[0])
        kept = self._kept(i, j)
        weights = (weights if kept is None else weights * kept).astype(v.dtype)
        new = jnp.einsum("bkgts,bksh->bkgth", weights, v, preferred_element_type=jnp.float32)
        return running._replace(acc=running.acc + new)

    def backward(
        self, q: Array, k: Array, v: Array, lse: Array, dout: Array, delta: Array, i, j
    ) -> tuple[Array, Array, Array]:
        """Tile (i, j)'s share of (dq, dk, dv), with `lse` and delta = Σ_h out · dout, both
        `[B, K, G, c]`, over *all* keys: shares add up. Dao 2023, arXiv 2307.08691, Algorithm 2."""
        logits, pull = self._logits(q, k, i, j)
        weights = jnp.exp(logits - jnp.where(lse == -jnp.inf, jnp.inf, lse)[..., None])
        dweights = jnp.einsum("bkgth,bksh->bkgts", dout, v, preferred_element_type=jnp.float32)
        kept = self._kept(i, j)
        used = weights
        if kept is not None:
            used, dweights = weights * kept, dweights * kept
        dlogits = pull(weights * (dweights - delta[..., None]))
        used, dlogits = used.astype(dout.dtype), dlogits.astype(q.dtype)
        dv = jnp.einsum("bkgts,bkgth->bksh", used, dout, preferred_element_type=jnp.float32)
        dk = jnp.einsum("bkgts,bkgth->bksh", dlogits, q, preferred_element_type=jnp.float32)
        dq = jnp.einsum("bkgts,bksh->bkgth", dlogits, k, preferred_element_type=jnp.float32)
        return dq, dk, dv

    def backward_blocks(self, q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array):
        """The backward pass's operands in blocks: (q, k, v, lse, dout, delta)."""
        delta = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1)
        # Queries past the end get lse = inf, so that their weights are 0.
        rows = (q, 0.0), (lse, jnp.inf), (dout, 0.0), (delta, 0.0)
        q, lse, dout, delta = (query_blocks(x, self.K, self.q_chunk, fill) for x, fill in rows)
        return q, key_blocks(k, self.k_chunk), key_blocks(v, self.k_chunk), lse, dout, delta
