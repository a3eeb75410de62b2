"""Which query may see which key: a value that is evaluated a tile at a time and knows which tiles
are dead."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """A query at position p sees a key at position s when every condition that is set holds.

    Attributes:
      causal: s <= p.
      window: p - s < window; where not causal, |p - s| < window. In tokens, the query's own
        included.
      windows: several, of which `window_index` picks one as the program runs: for the layers of a
        scan that differ in it.
      segments: int32 `[B, T]`, the queries' documents. A key is seen from its own document only;
        segment 0 is padding, which sees nothing and is seen by nothing.
      k_segments: int32 `[B, S]`, the keys' documents; those of the queries if left out.
      positions: int32 `[T]` or `[B, T]`, absolute positions of the queries in the row (not in the
        document); `0..T-1` if left out.
      k_positions: int32 `[S]` or `[B, S]`, likewise; those of the queries if left out.
      window_index: int32 scalar.
    """

    causal: bool = field(default=False, metadata={"static": True})
    window: int | None = field(default=None, metadata={"static": True})
    windows: tuple[int | None, ...] | None = field(default=None, metadata={"static": True})
    segments: Array | np.ndarray | None = None
    k_segments: Array | np.ndarray | None = None
    positions: Array | np.ndarray | None = None
    k_positions: Array | np.ndarray | None = None
    window_index: Array | None = None

    def within(self, windows: tuple[int | None, ...], index: Array | int) -> "Mask":
        """The same mask with the window that `index` picks."""
        if len(set(windows)) == 1:
            return replace(self, window=windows[0])
        return replace(self, windows=windows, window_index=jnp.asarray(index))

    def each_window(self) -> list["Mask"]:
        """The masks that `window_index` picks from."""
        if self.windows is None:
            return [self]
        return [replace(self, window=w, windows=None, window_index=None) for w in self.windows]

    def resolve(self, T: int, S: int) -> "Mask":
        """The same mask with every field that has a default filled in. Positions that were left out
        become NumPy arrays: what follows from them is known while tracing.

        Raises:
          ValueError: T ≠ S with positions or segments given for one side only, or a wrong length.
        """
        ordered = self.causal or self.window is not None
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window}; a window is at least 1 token")
        if ordered and T != S and (self.positions is None or self.k_positions is None):
            raise ValueError(
                f"T={T} queries and S={S} keys: causal and window need Mask.positions, k_positions"
            )
        if T != S and (self.segments is None) != (self.k_segments is None):
            raise ValueError(f"T={T} queries, S={S} keys: give both Mask.segments and k_segments")
        positions = np.arange(T, dtype=np.int32) if self.positions is None else self.positions
        k_positions = self.k_positions
        if k_positions is None:
            k_positions = positions if T == S else np.arange(S, dtype=np.int32)
        k_segments = self.segments if self.k_segments is None else self.k_segments
        if k_segments is not None and self.segments is None:
            raise ValueError("Mask.k_segments without Mask.segments")
        full = replace(self, positions=positions, k_positions=k_positions, k_segments=k_segments)
        for name in ("segments", "k_segments", "positions", "k_positions"):
            value, length = getattr(full, name), S if name.startswith("k_") else T
            if value is not None and value.shape[-1] != length:
                raise ValueError(f"Mask.{name} has {value.shape[-1]} entries for {length} tokens")
        return full

    def allowed(self, p: Array, s: Array, p_seg: Array | None, s_seg: Array | None) -> Array | None:
        """Bool `[B or 1, t, s]` from positions `[B or 1, t]`, `[B or 1, s]` and segments; None
        where all is seen."""
        p, s = p[:, :, None], s[:, None, :]
        conditions = []
        if self.causal:
            conditions.append(s <= p)
        if self.window is not None:
            conditions.append(p - s < self.window)
            if not self.causal:
                conditions.append(s - p < self.window)
        if p_seg is not None and s_seg is not None:
            p_seg, s_seg = p_seg[:, :, None], s_seg[:, None, :]
            conditions.append((p_seg == s_seg) & (p_seg != 0))
        if not conditions:
            return None
        seen = conditions[0]
        for condition in conditions[1:]:
            seen = seen & condition
        return seen


class Tiles:
    """A mask over T queries and S keys, cut into `q_chunk` × `k_chunk` tiles; tile (i, j) starts at
    (i·q_chunk, j·k_chunk)."""

    def __init__(self, mask: Mask, T: int, S: int, q_chunk: int, k_chunk: int):
        self.mask = mask = mask.resolve(T, S)
        self.T, self.S, self.q_chunk, self.k_chunk = T, S, q_chunk, k_chunk
        self.nq, self.nk = -(-T // q_chunk), -(-S // k_chunk)
        self.q_positions = blocks(mask.positions, q_chunk, "edge")
        self.k_positions = blocks(mask.k_positions, k_chunk, "edge")
        self.q_segments = blocks(mask.segments, q_chunk, "constant")
        self.k_segments = blocks(mask.k_segments, k_chunk, "constant")

    def allowed(self, i, j) -> Array | None:
        """Bool `[B or 1, q_chunk, k_chunk]`, False on keys past the end; None where all is seen."""
        seen = self.mask.allowed(
            _at(self.q_positions, i),
            _at(self.k_positions, j),
            _at(self.q_segments, i),
            _at(self.k_segments, j),
        )
        if self.S % self.k_chunk:
            inside = j * self.k_chunk + jnp.arange(self.k_chunk) < self.S
            inside = inside[None, None, :]
            seen = inside if seen is None else seen & inside
        return seen

    def positions(self, i, j) -> tuple[Array, Array]:
        """Absolute positions of tile (i, j): queries int32 `[B or 1, q_chunk]`, keys `[B or 1,
        k_chunk]`."""
        return _at(self.q_positions, i), _at(self.k_positions, j)

    def live(self) -> tuple[np.ndarray | Array, int | Array]:
        """Tiles in which some query may see some key: `(pairs, count)`, pairs int32 `[n, 2]` of (i,
        j) in row order, of which the first `count` are live. Where positions are known while
        tracing and there are no segments, count is an int.

        A tile is kept when the ranges of its positions and segments allow a pair, so a kept tile
        may still be dead; a dropped one never holds a live pair.
        """
        mask = self.mask
        alive = [np.ones((self.nq, self.nk), bool)]
        if mask.causal or mask.window is not None:
            (q_low, q_high), (k_low, k_high) = _range(self.q_positions), _range(self.k_positions)
            if mask.causal:
                alive.append(k_low[None, :] <= q_high[:, None])
            if mask.window is not None:
                alive.append(q_low[:, None] - k_high[None, :] < mask.window)
                if not mask.causal:
                    alive.append(k_low[None, :] - q_high[:, None] < mask.window)
        if self.q_segments is not None:
            # Per row of the batch: the ranges of real (non-zero) segments overlap.
            q_low, q_high = _segments(self.q_segments)
            k_low, k_high = _segments(self.k_segments)
            overlap = (k_low[None] <= q_high[:, None]) & (q_low[:, None] <= k_high[None])
            alive.append(overlap.any(-1))

        known = np.logical_and.reduce([a for a in alive if isinstance(a, np.ndarray)])
        pairs = np.argwhere(known).astype(np.int32)
        rest = [a for a in alive if not isinstance(a, np.ndarray)]
        if not rest:
            return pairs, len(pairs)
        flags = jnp.ones(len(pairs), bool)
        for a in rest:
            flags &= a[pairs[:, 0], pairs[:, 1]]
        return jnp.asarray(pairs)[jnp.argsort(~flags, stable=True)], flags.sum()


def blocks(x: Any, chunk: int, mode: str) -> Any:
    """`[T]` or `[B, T]` to `[n, B or 1, chunk]`, NumPy in, NumPy out."""
    if x is None:
        return None
    xp = np if isinstance(x, np.ndarray) else jnp
    x = x[None] if x.ndim == 1 else x
    x = xp.pad(x, ((0, 0), (0, -x.shape[1] % chunk)), mode=mode)
    return xp.moveaxis(x.reshape(x.shape[0], -1, chunk), 1, 0)


def _at(blocks, i) -> Array | None:
    if blocks is None:
        return None
    return jax.lax.dynamic_index_in_dim(jnp.asarray(blocks), i, 0, keepdims=False)


def _range(blocks):
    """Least and greatest of each block over batch and tokens: two `[n]`."""
    return blocks.min((1, 2)), blocks.max((1, 2))


def _segments(blocks):
    """Least and greatest real segment of each block and row of the batch: two `[n, B]`; an empty
    range where all is padding."""
    xp = np if isinstance(blocks, np.ndarray) else jnp
    top = np.iinfo(np.int32).max
    return xp.where(blocks == 0, top, blocks).min(-1), xp.where(blocks == 0, -1, blocks).max(-1)
