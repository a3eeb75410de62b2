import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import fast

from bptjax.ops.mask import Mask, Tiles
from ops.comparing import quick

T = 64
BOTH = dict(positions=np.arange(4), k_positions=np.arange(6))
PACKED = np.repeat([[1, 2, 3, 4]], 16, 1).astype(np.int32)
# Every fourth diagonal of the blocks.
BLOCKS = (np.arange(16)[:, None] - np.arange(16)) % 4 == 0
# Prompts of 20 and 30 tokens, each with two answers, and padding.
TREE = np.stack(
    [
        np.repeat([48, 30, 48, 0], [20, 10, 18, 16]),
        np.repeat([60, 44, 60, 0], [30, 14, 16, 4]),
    ]
).astype(np.int32)
POSITIONS = np.random.default_rng(0).permutation(T).astype(np.int32)


def nonempty(mask, q_chunk=4, k_chunk=4, S=T):
    """Block pairs to visit, as a set, whether known while tracing or not."""
    pairs, count = Tiles(mask, T, S, q_chunk, k_chunk).nonempty()
    return [tuple(map(int, pair)) for pair in pairs[: int(count)]]


@pytest.mark.parametrize(
    "mask, count",
    [
        (Mask(), 256),
        (Mask(causal=True), 136),
        (Mask(causal=True, window=1), 16),
        (Mask(causal=True, window=4), 31),
        (Mask(causal=True, window=5), 31),
        (Mask(causal=True, window=6), 45),
        (Mask(window=4), 46),
        (Mask(window=4, global_tokens=np.arange(T) < 4), 46 + 2 * 14),
        (Mask(causal=True, window=4, global_tokens=np.arange(T) == 33), 31 + 7 + 6),
        (Mask(block_mask=BLOCKS, block_size=4), 64),
        (Mask(block_mask=BLOCKS, block_size=4, window=4), 16),
        (Mask(causal=True, block_mask=BLOCKS[:8, :8], block_size=8), 40),
        (Mask(segments=PACKED), 64),
        (Mask(causal=True, segments=PACKED), 40),
        (Mask(causal=True, window=1, segments=PACKED), 16),
        (Mask(segments=np.zeros((1, T), np.int32)), 0),
        (Mask(causal=True, ends=TREE[:1]), 78 - 2 * 4),
        (Mask(causal=True, positions=np.arange(T) + T, k_positions=np.arange(T)), 256),
        (Mask(causal=True, positions=np.arange(T), k_positions=np.arange(T) + T), 0),
    ],
)
def test_nonempty_counts(mask, count):
    assert len(nonempty(mask)) == count
    assert jax.jit(lambda m: Tiles(m, T, T, 4, 4).nonempty()[1])(mask) == count


def test_window_of_one_chunk_at_32_chunks():
    assert len(nonempty(Mask(causal=True, window=2), 2, 2)) == 2 * 32 - 1


def test_rows_of_a_batch_are_joined():
    """A tile lives when any row needs it."""
    segments = np.array([[1] * 32 + [2] * 32, [1] * 16 + [2] * 48])
    assert len(nonempty(Mask(segments=segments), 16, 16)) == 12


def test_nonempty_is_static_for_static_masks():
    assert isinstance(Tiles(Mask(causal=True, window=9), T, T, 4, 4).nonempty()[1], int)
    assert isinstance(Tiles(Mask(segments=PACKED), T, T, 4, 4).nonempty()[1], int)
    sparse = Mask(block_mask=BLOCKS, block_size=4, global_tokens=np.arange(T) == 1)
    assert isinstance(Tiles(sparse, T, T, 4, 4).nonempty()[1], int)


@pytest.mark.parametrize(
    "chunks", fast([((4, 4),), ((7, 5),), ((64, 3),)], lambda chunks: chunks == (7, 5))
)
@pytest.mark.parametrize(
    "mask",
    [
        Mask(causal=True),
        Mask(window=3),
        Mask(causal=True, positions=POSITIONS),
        Mask(causal=True, window=5, positions=POSITIONS, segments=PACKED),
        Mask(segments=np.random.default_rng(1).integers(0, 4, (3, T), np.int32)),
        Mask(causal=True, positions=np.stack([POSITIONS, POSITIONS[::-1]])),
        Mask(causal=True, window=4, global_tokens=POSITIONS < 2, positions=POSITIONS),
        Mask(window=9, global_tokens=PACKED == 3, block_mask=BLOCKS[:11, :13], block_size=6),
        Mask(causal=True, window=7, ends=TREE, depths=np.stack([POSITIONS, POSITIONS[::-1]])),
        Mask(causal=True, ends=TREE[:, POSITIONS], positions=POSITIONS),
    ],
)
def test_tiles_are_the_mask(mask, chunks):
    """The tiles join to the full mask; no tile with an allowed pair is skipped; query blocks come
    in order, each once."""
    tiles = Tiles(mask, T, T, *chunks)
    full = jax.tree.map(jnp.asarray, mask.resolve(T, T))
    whole = np.asarray(quick(full.allowed)(full.of_queries, full.of_keys))
    visited, allowed = nonempty(mask, *chunks), quick(tiles.allowed)
    assert visited == sorted(set(visited))
    for i in range(tiles.nq):
        for j in range(tiles.nk):
            rows, columns = slice(i * chunks[0], (i + 1) * chunks[0]), j * chunks[1]
            here = whole[:, rows, columns : columns + chunks[1]]
            tile = np.asarray(allowed(i, j))
            assert (tile[:, : here.shape[1], : here.shape[2]] == here).all()
            assert not tile[:, :, here.shape[2] :].any(), "keys past the end"
            assert (i, j) in visited or not here.any()


def test_full_tiles():
    assert Tiles(Mask(), 8, 8, 4, 4).allowed(0, 0) is None
    assert Tiles(Mask(), 8, 7, 4, 4).allowed(0, 1).sum() == 4 * 3 // 4


@pytest.mark.parametrize(
    "mask, message",
    [
        (Mask(causal=True), "T=4 queries and S=6 keys: with causal, window or block_mask"),
        (Mask(block_mask=BLOCKS, block_size=1), "T=4 queries and S=6 keys: with causal, window"),
        (Mask(window=2, positions=np.arange(4)), "T=4 queries and S=6 keys"),
        (Mask(window=0), "window=0: must be at least 1 token"),
        (Mask(segments=np.ones((1, 4))), "must both be set"),
        (Mask(k_segments=np.ones((1, 6))), "must both be set"),
        (
            Mask(global_tokens=np.ones(4, bool)),
            "global_tokens and k_global_tokens must both be set",
        ),
        (Mask(block_mask=BLOCKS, **BOTH), "Mask.block_mask and block_size: must both be set"),
        (Mask(block_size=4), "Mask.block_mask and block_size: must both be set"),
        (Mask(block_mask=BLOCKS, block_size=0, **BOTH), "block_size=0"),
        (Mask(block_mask=BLOCKS[0], block_size=1, **BOTH), r"block_mask \(16,\)"),
        (
            Mask(block_mask=BLOCKS[:2, :2], block_size=2, **BOTH),
            r"k_positions=5: must be less than 4, the end of block_mask \(2, 2\) with block_size=2",
        ),
        (Mask(ends=np.ones((1, 6), np.int32)), "Mask.ends: must be left out unless"),
        (Mask(causal=True, ends=np.ones((1, 4), np.int32), **BOTH), "Mask.ends: must have 6"),
        (Mask(positions=np.arange(5)), "Mask.positions: must have 4 entries, one per token, not 5"),
        (
            Mask(k_positions=np.arange(5)),
            "Mask.k_positions: must have 6 entries, one per token, not 5",
        ),
    ],
)
def test_bad_masks(mask, message):
    with pytest.raises(ValueError, match=message):
        mask.resolve(4, 6)


def test_key_fields_without_query_fields_are_refused():
    with pytest.raises(ValueError, match="k_segments: requires Mask.segments"):
        Mask(k_segments=np.ones((1, 4))).resolve(4, 4)
    with pytest.raises(ValueError, match="k_global_tokens: requires Mask.global_tokens"):
        Mask(k_global_tokens=np.ones(4, bool)).resolve(4, 4)


def test_beyond_the_block_mask():
    """Traced positions cannot be refused: they attend to nothing, and nothing attends to them."""
    mask = Mask(block_mask=np.ones((2, 3), bool), block_size=4, positions=jnp.arange(16))
    p, full = jnp.arange(16)[None], mask.resolve(16, 16)
    allowed = quick(full.allowed)(full.of_queries, full.of_keys)[0]
    assert (allowed == (p.T < 8) & (p < 12)).all()
    tiles = Tiles(mask, 16, 16, 4, 4)
    assert tiles.nonempty()[1] == 2 * 3


def test_drawings_of_the_docstring():
    """The docstring draws what its four masks allow."""
    lines = (Mask.__doc__ or "").splitlines()
    drawn = [line for line in lines if re.fullmatch(r"[x. ]*x[x. ]*", line)]
    masks = (
        Mask(causal=True),
        Mask(causal=True, window=3),
        Mask(causal=True, segments=np.array([[1, 1, 1, 2, 2, 0]])),
        Mask(window=2, global_tokens=np.array([1, 0, 0, 0, 0, 0], bool)),
    )
    for t, line in enumerate(drawn):
        assert len(drawn) == 6 and [row.split() for row in re.split(r" {3,}", line.strip())] == [
            ["x" if Tiles(mask, 6, 6, 6, 6).allowed(0, 0)[0, t, s] else "." for s in range(6)]
            for mask in masks
        ]
