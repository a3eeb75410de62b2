"""Attention masks: evaluated a tile at a time, and aware of which tiles are empty."""

from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import and_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

# Fields of a mask with one entry per key.
KEY_FIELDS = ("k_segments", "k_positions", "k_global_tokens", "k_depths", "ends")


class MaskFields(NamedTuple):
    """The fields of a mask for some queries, or for some keys; None where the mask has none.

    Attributes:
      depths: distances for window and ALiBi.
      ends: of keys only.
    """

    positions: Any
    segments: Any
    global_tokens: Any
    depths: Any
    ends: Any = None


# How `MaskFields` of a block are padded.
PADDING = MaskFields("edge", "constant", "constant", "edge", "constant")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """A query at position p may attend to a key at position s if every condition that is set holds.

    Four masks over six tokens; a row is a query, x marks the keys that it may attend to:

        Mask(causal=True)    Mask(causal=True,    Mask(causal=True,       Mask(window=2,
                               window=3)            segments=             global_tokens=
                                                    [[1,1,1,2,2,0]])      [1,0,0,0,0,0])
          x . . . . .          x . . . . .          x . . . . .             x x x x x x
          x x . . . .          x x . . . .          x x . . . .             x x x . . .
          x x x . . .          x x x . . .          x x x . . .             x x x x . .
          x x x x . .          . x x x . .          . . . x . .             x . x x x .
          x x x x x .          . . x x x .          . . . x x .             x . . x x x
          x x x x x x          . . . x x x          . . . . . .             x . . . x x

    Attributes:
      causal: s <= p.
      window: p - s < window; if not causal, |p - s| < window. In tokens, including the query.
      segments: int32 `[B, T]`, the queries' documents. Attention stays inside a document. Segment 0
        is padding: it attends to nothing, and nothing attends to it.
      k_segments: int32 `[B, S]`, the keys' documents; by default the queries' documents.
      positions: int32 `[T]` or `[B, T]`, absolute positions of the queries in the sequence, or in
        the document if `block_mask` counts from its start. `0..T-1` if left out.
      k_positions: int32 `[S]` or `[B, S]`, positions of the keys; by default the queries'
        positions.
      ends: int32 `[B, S]`, one per key, in causal masks: p < end. For trees of tokens laid out
        depth-first, such as a prompt and its answers: `end` is the position after the last token
        that continues the key, and positions count tokens of the sequence. A document is a tree
        without branches. Padding has end 0 and follows the trees. Replaces `segments`.
      depths: int32 `[T]` or `[B, T]`, positions that window and ALiBi count by instead: in a tree,
        the number of tokens before the token on its branch. By default `positions`.
      k_depths: int32 `[S]` or `[B, S]`, depths of the keys; by default the queries' depths.
      global_tokens: bool `[T]` or `[B, T]`, queries that ignore window and block mask: they attend
        to every key that the other conditions allow. Beltagy et al. 2020, arXiv 2004.05150.
      k_global_tokens: bool `[S]` or `[B, S]`, keys that every query may attend to in the same way;
        by default the queries' global tokens.
      block_mask: bool `[P, R]`: block_mask[p // block_size, s // block_size]. Positions beyond it
        attend to nothing, and nothing attends to them. Chunks no longer than a block skip the most
        tiles.
      block_size: tokens per block of `block_mask`.

    NumPy arrays are static: if all are, a loop over the non-empty tiles has a fixed length.
    """

    causal: bool = field(default=False, metadata={"static": True})
    window: int | None = field(default=None, metadata={"static": True})
    segments: Array | np.ndarray | None = None
    k_segments: Array | np.ndarray | None = None
    positions: Array | np.ndarray | None = None
    k_positions: Array | np.ndarray | None = None
    ends: Array | np.ndarray | None = None
    depths: Array | np.ndarray | None = None
    k_depths: Array | np.ndarray | None = None
    global_tokens: Array | np.ndarray | None = None
    k_global_tokens: Array | np.ndarray | None = None
    block_mask: Array | np.ndarray | None = None
    block_size: int | None = field(default=None, metadata={"static": True})

    def check(self, B: int, T: int, S: int) -> None:
        """Checks the mask for B sequences of T queries and S keys.

        Raises:
          ValueError: as in `resolve`; an array of another rank, batch or dtype than documented.
        """
        for group, shape, ranks, kind in (
            ("segments", "[batch, tokens]", (2,), jnp.integer),
            ("ends", "[batch, tokens]", (2,), jnp.integer),
            ("positions", "[tokens] or [batch, tokens]", (1, 2), jnp.integer),
            ("depths", "[tokens] or [batch, tokens]", (1, 2), jnp.integer),
            ("global_tokens", "[tokens] or [batch, tokens]", (1, 2), jnp.bool_),
        ):
            for name in (group, f"k_{group}"):
                x = getattr(self, name, None)
                if x is None:
                    continue
                if x.ndim not in ranks or (x.ndim == 2 and x.shape[0] not in (1, B)):
                    raise ValueError(f"Mask.{name}: must be {shape}, batch {B}; not {x.shape}")
                if not jnp.issubdtype(x.dtype, kind):
                    raise ValueError(f"Mask.{name}: must be {kind.__name__}, not {x.dtype}")
        self.resolve(T, S)

    def resolve(self, T: int, S: int) -> "Mask":
        """Returns the mask with all defaults filled in; default positions are static NumPy arrays.

        Raises:
          ValueError: T ≠ S with positions, segments, depths or global tokens given for one side
            only, or a wrong length; static positions beyond the block mask; `ends` in a mask that
            is not causal, or has segments, global tokens or a block mask.
        """
        ordered = self.causal or self.window is not None or self.block_mask is not None
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window}: must be at least 1 token, or None")
        if ordered and T != S and (self.positions is None or self.k_positions is None):
            raise ValueError(
                f"T={T} queries and S={S} keys: with causal, window or block_mask, Mask.positions "
                "and k_positions must be set"
            )
        if self.ends is not None:
            others = self.segments, self.global_tokens, self.block_mask
            if not self.causal or any(x is not None for x in others):
                raise ValueError(
                    "Mask.ends: must be left out unless the mask is causal, without segments, "
                    "global tokens and block mask"
                )
        given = {}
        for name in ("segments", "global_tokens", "depths"):
            own, of_keys = getattr(self, name), getattr(self, f"k_{name}")
            if T != S and (own is None) != (of_keys is None):
                raise ValueError(
                    f"T={T} queries and S={S} keys: Mask.{name} and k_{name} must both be set"
                )
            if own is None and of_keys is not None:
                raise ValueError(f"Mask.k_{name}: requires Mask.{name}")
            given[f"k_{name}"] = own if of_keys is None else of_keys
        positions = np.arange(T, dtype=np.int32) if self.positions is None else self.positions
        k_positions = self.k_positions
        if k_positions is None:
            k_positions = positions if T == S else np.arange(S, dtype=np.int32)
        full = replace(self, positions=positions, k_positions=k_positions, **given)
        of_queries = "segments", "global_tokens", "depths", "positions"
        for name in (*of_queries, *KEY_FIELDS):
            value, length = getattr(full, name), S if name in KEY_FIELDS else T
            if value is not None and value.shape[-1] != length:
                raise ValueError(
                    f"Mask.{name}: must have {length} entries, one per token, not {value.shape[-1]}"
                )
        full._check_block_mask()
        return full

    def keys(self, start: int, stop: int) -> "Mask":
        """Slices a resolved mask to the keys from `start` up to `stop`."""
        fields: dict[str, Any] = {
            name: field[..., start:stop]
            for name in KEY_FIELDS
            if (field := getattr(self, name)) is not None
        }
        return replace(self, **fields)

    def _check_block_mask(self):
        if (self.block_mask is None) != (self.block_size is None):
            raise ValueError("Mask.block_mask and block_size: must both be set")
        if self.block_mask is None or self.block_size is None:
            return
        if self.block_size < 1 or self.block_mask.ndim != 2:
            raise ValueError(
                f"Mask.block_size={self.block_size}, block_mask {self.block_mask.shape}: must be "
                "at least 1 token and [query blocks, key blocks]"
            )
        for name, n in zip(("positions", "k_positions"), self.block_mask.shape, strict=True):
            x = getattr(self, name)
            if isinstance(x, np.ndarray) and x.max(initial=0) >= n * self.block_size:
                raise ValueError(
                    f"Mask.{name}={x.max()}: must be less than {n * self.block_size}, the end of "
                    f"block_mask {self.block_mask.shape} with block_size={self.block_size}"
                )

    @property
    def of_queries(self) -> MaskFields:
        """The fields of the queries of a resolved mask, `[B or 1, T]`."""
        return _two_axes(self.positions, self.segments, self.global_tokens, self.depths)

    @property
    def of_keys(self) -> MaskFields:
        """The fields of the keys of a resolved mask, `[B or 1, S]`."""
        return _two_axes(
            self.k_positions, self.k_segments, self.k_global_tokens, self.k_depths, self.ends
        )

    def allowed(self, of_queries: MaskFields, of_keys: MaskFields) -> Array | None:
        """Returns bool `[B or 1, t, s]` from fields `[B or 1, t]` and `[B or 1, s]`; None if every
        pair is allowed."""
        p, p_seg, p_global, p_depth, _ = of_queries
        s, s_seg, s_global, s_depth, end = of_keys
        p, s = p[:, :, None], s[:, None, :]
        local = []
        if self.window is not None:
            here, there = p, s
            if p_depth is not None and s_depth is not None:
                here, there = p_depth[:, :, None], s_depth[:, None, :]
            local.append(here - there < self.window)
            if not self.causal:
                local.append(there - here < self.window)
        if self.block_mask is not None and self.block_size is not None:
            # Negative indices would count from the end.
            row, column = (
                jnp.where(x < 0, n, x // self.block_size)
                for x, n in zip((p, s), self.block_mask.shape, strict=True)
            )
            at = jnp.asarray(self.block_mask, bool).at[row, column]
            local.append(at.get(mode="fill", fill_value=False))
        if local and p_global is not None and s_global is not None:
            far = p_global.astype(bool)[:, :, None] | s_global.astype(bool)[:, None, :]
            local = [reduce(and_, local) | far]
        conditions = [s <= p] if self.causal else []
        if end is not None:
            conditions.append(p < end[:, None, :])
        conditions += local
        if p_seg is not None and s_seg is not None:
            p_seg, s_seg = p_seg[:, :, None], s_seg[:, None, :]
            conditions.append((p_seg == s_seg) & (p_seg != 0))
        return reduce(and_, conditions) if conditions else None

    def count_blocks(self, rows: tuple[Any, Any], columns: tuple[Any, Any]) -> tuple[Any, Any]:
        """Counts the set blocks and all blocks of `block_mask` between (first, last) positions of
        rows and of columns."""
        block_mask: Any = self.block_mask
        static = all(isinstance(x, np.ndarray) for x in (block_mask, *rows, *columns))
        xp = np if static else jnp
        # NumPy sums a static block mask: XLA takes minutes to fold sums of a million constants.
        sums_with = np if isinstance(block_mask, np.ndarray) else jnp
        sums = sums_with.cumsum(
            sums_with.cumsum(block_mask.astype(bool), 0, sums_with.int32), 1, sums_with.int32
        )
        sums = xp.asarray(sums_with.pad(sums, ((1, 0), (1, 0))))
        (top, bottom), (left, right) = (
            (low // self.block_size, high // self.block_size + 1) for low, high in (rows, columns)
        )
        size = (bottom - top) * (right - left)
        top, bottom = (xp.clip(x, 0, block_mask.shape[0]) for x in (top, bottom))
        left, right = (xp.clip(x, 0, block_mask.shape[1]) for x in (left, right))
        return sums[bottom, right] - sums[top, right] - sums[bottom, left] + sums[top, left], size


class Tiles:
    """A mask over T queries and S keys, divided into `q_chunk` × `k_chunk` tiles; tile (i, j)
    starts at (i·q_chunk, j·k_chunk)."""

    def __init__(self, mask: Mask, T: int, S: int, q_chunk: int, k_chunk: int):
        self.mask = mask = mask.resolve(T, S)
        self.T, self.S, self.q_chunk, self.k_chunk = T, S, q_chunk, k_chunk
        self.nq, self.nk = -(-T // q_chunk), -(-S // k_chunk)
        self.queries, self.keys = (
            MaskFields(*map(partial(blocks, chunk=chunk), fields, PADDING))
            for fields, chunk in ((mask.of_queries, q_chunk), (mask.of_keys, k_chunk))
        )

    def allowed(self, i, j) -> Array | None:
        """Returns bool `[B or 1, q_chunk, k_chunk]`, False on padded keys; None if every pair is
        allowed."""
        pairs = zip(self.queries, self.keys, strict=True)
        fields = zip(*((_at(x, i), _at(y, j)) for x, y in pairs), strict=True)
        allowed = self.mask.allowed(*map(MaskFields._make, fields))
        if self.S % self.k_chunk:
            inside = j * self.k_chunk + jnp.arange(self.k_chunk) < self.S
            inside = inside[None, None, :]
            allowed = inside if allowed is None else allowed & inside
        return allowed

    def positions(self, i, j) -> tuple[Array, Array]:
        """Returns the absolute positions of tile (i, j): queries int32 `[B or 1, q_chunk]`, keys
        `[B or 1, k_chunk]`."""
        return _at(self.queries.positions, i), _at(self.keys.positions, j)

    def depths(self, i, j) -> tuple[Array, Array]:
        """Returns the depths of tile (i, j) as `positions` does."""
        if self.queries.depths is None:
            return self.positions(i, j)
        return _at(self.queries.depths, i), _at(self.keys.depths, j)

    def nonempty(self) -> tuple[np.ndarray | Array, int | Array]:
        """Returns the tiles with an allowed pair: `(pairs, count)`, int32 pairs `[n, 2]` of (i, j)
        ordered by query block. The first `count` pairs are non-empty; an int if the mask is static.

        Decides by the ranges of a tile's positions and segments, and by its global tokens. A
        returned tile may still be empty; a dropped tile never holds an allowed pair.
        """
        mask, (queries, keys) = self.mask, (self.queries, self.keys)
        (q_low, q_high), (k_low, k_high) = _tile_ranges(queries.positions, keys.positions)
        local = []
        if mask.window is not None:
            (first, last), (k_first, k_last) = (q_low, q_high), (k_low, k_high)
            if queries.depths is not None:
                (first, last), (k_first, k_last) = _tile_ranges(queries.depths, keys.depths)
            local.append(first - k_last < mask.window)
            if not mask.causal:
                local.append(k_first - last < mask.window)
        if mask.block_mask is not None:
            count, _ = mask.count_blocks((q_low, q_high), (k_low, k_high))
            local.append(count > 0)
        if local and queries.global_tokens is not None:
            p_global, s_global = (
                x.any((1, 2)) for x in (queries.global_tokens, keys.global_tokens)
            )
            far = (p_global[:, None] | s_global[None])[..., None]
            local = [reduce(and_, local) | far]
        # Over sequences: a tile is empty if it is empty in all of them.
        conditions: list[Any] = [np.ones((self.nq, self.nk), bool)]
        if local:
            conditions.append(reduce(and_, local).any(-1))
        if mask.causal:
            conditions.append((k_low <= q_high).any(-1))
        if keys.ends is not None:
            conditions.append((q_low < keys.ends.max(-1)[None]).any(-1))
        if queries.segments is not None:
            # The ranges of segments, ignoring padding, overlap in some sequence.
            q_low, q_high = _segments(queries.segments)
            k_low, k_high = _segments(keys.segments)
            overlap = (k_low[None] <= q_high[:, None]) & (q_low[:, None] <= k_high[None])
            conditions.append(overlap.any(-1))

        static = np.logical_and.reduce([c for c in conditions if isinstance(c, np.ndarray)])
        pairs = np.argwhere(static).astype(np.int32)
        traced = [c for c in conditions if not isinstance(c, np.ndarray)]
        if not traced:
            return pairs, len(pairs)
        flags = jnp.ones(len(pairs), bool)
        for condition in traced:
            flags &= condition[pairs[:, 0], pairs[:, 1]]
        return jnp.asarray(pairs)[jnp.argsort(~flags, stable=True)], flags.sum()


def _two_axes(*fields: Any) -> MaskFields:
    return MaskFields(*(x if x is None or x.ndim == 2 else x[None] for x in fields))


def blocks(x: Any, mode: str, chunk: int) -> Any:
    """Reshapes `[T]` or `[B, T]` to `[n, B or 1, chunk]`; NumPy stays NumPy."""
    if x is None:
        return None
    xp: Any = np if isinstance(x, np.ndarray) else jnp
    x = x[None] if x.ndim == 1 else x
    x = xp.pad(x, ((0, 0), (0, -x.shape[1] % chunk)), mode=mode)
    return xp.moveaxis(x.reshape(x.shape[0], -1, chunk), 1, 0)


def _at(blocks, i) -> Any:
    if blocks is None:
        return None
    return jax.lax.dynamic_index_in_dim(jnp.asarray(blocks), i, 0, keepdims=False)


def _tile_ranges(queries: Any, keys: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Returns the minimum and maximum of each block of queries, `[nq, 1, B or 1]`, and of keys,
    `[1, nk, B or 1]`."""
    return (
        (queries.min(-1)[:, None], queries.max(-1)[:, None]),
        (keys.min(-1)[None], keys.max(-1)[None]),
    )


def _segments(blocks):
    """Returns the minimum and maximum segment of each block and sequence, ignoring padding: two
    `[n, B]`; an empty range if all is padding."""
    xp = np if isinstance(blocks, np.ndarray) else jnp
    blocks, top = blocks.astype(np.int32), np.iinfo(np.int32).max
    return xp.where(blocks == 0, top, blocks).min(-1), xp.where(blocks == 0, -1, blocks).max(-1)


def counts_from_zero(*positions: Any) -> bool:
    """Returns whether each of the positions is left out or statically 0, 1, 2, …"""
    return all(
        isinstance(p, np.ndarray)
        and np.array_equal(p, np.broadcast_to(np.arange(p.shape[-1]), p.shape))
        for p in positions
        if p is not None
    )
