"""Chooses held-out documents at random."""

from collections.abc import Sequence
from typing import Any

import numpy as np

# Odd constants of SplitMix64 (Steele, Lea & Flood 2014, https://doi.org/10.1145/2714064.2660195).
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def group_sizes(files: Sequence[Any], sizes: Sequence[int]) -> list[int]:
    """Returns the number of documents of each group: a file, or consecutive text files that are one
    document each. `sizes` are the numbers of documents of `files`."""
    groups, before = [], False
    for file, size in zip(files, sizes, strict=True):
        single = getattr(file, "single", False)
        if single and before:
            groups[-1] += size
        else:
            groups.append(size)
        before = single
    return groups


def draw(sizes: Sequence[int], fraction: float, seed: int) -> np.ndarray:
    """Returns the sorted indices, over the documents of all groups, of the held-out documents: one
    random document of every 1 / `fraction` consecutive documents of each group.

    If there are two or more documents, at least one is held out, and at least one is not. Apart
    from that, a choice depends on the seed, the number of the group and the indices in it, not on
    `sizes`: larger groups keep the held-out documents of smaller ones.
    """
    counts = np.asarray(sizes, np.int64)
    total, ends = int(counts.sum()), np.cumsum(counts)
    # If 1 / `fraction` is not an integer, the sizes of blocks differ. The first block then starts
    # before the group, at random, so that sizes do not depend on the index.
    blocks = np.ceil(counts * fraction).astype(np.int64) + 2
    groups = np.repeat(np.arange(len(counts)), blocks)
    block = np.arange(len(groups)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    before = _random(seed, groups, 0 * groups) if 1 / fraction % 1 else 0.0
    start, end = (np.floor((x - before) / fraction) for x in (block, block + 1))
    chosen = np.floor(start + _random(seed, groups, block + 1) * (end - start)).astype(np.int64)
    inside = (chosen >= 0) & (chosen < counts[groups])
    chosen = chosen[inside] + (ends - counts)[groups[inside]]
    if len(chosen) not in (0, total):
        return chosen
    one = (_random(seed, np.zeros(1), np.zeros(1)) * total).astype(np.int64)
    return np.delete(chosen, one[:total]) if len(chosen) else one[: total > 1]


def _random(seed: int, groups: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Returns float64 in [0, 1) that depend on the seed, a group and a number alone."""
    bits = np.zeros(len(groups), np.uint64)
    for each in (seed, groups, numbers):
        bits = (bits ^ np.asarray(each, np.uint64)) + np.uint64(STEP)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(FIRST)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(SECOND)
        bits ^= bits >> np.uint64(31)
    return (bits >> np.uint64(11)) * 2.0**-53
