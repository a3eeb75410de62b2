"""Chooses held-out documents at random."""

from collections.abc import Sequence

import numpy as np

# Odd constants of SplitMix64 (Steele, Lea & Flood 2014, https://doi.org/10.1145/2714064.2660195).
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def draw(sizes: Sequence[int], fraction: float, seed: int) -> np.ndarray:
    """Returns the sorted indices, over the documents of all files, of the held-out documents: one
    random document of every 1 / `fraction` consecutive documents of each file.

    If there are two or more documents, at least one is held out, and at least one is not. Apart
    from that, a choice depends on the seed, the number of the file and the documents' indices in
    it, not on the sizes: larger files keep the held-out documents of smaller ones.
    """
    counts = np.asarray(sizes, np.int64)
    total, ends = int(counts.sum()), np.cumsum(counts)
    # If 1 / `fraction` is not an integer, the sizes of blocks differ. The first block then starts
    # before the file, at random, so that sizes do not depend on the index.
    blocks = np.ceil(counts * fraction).astype(np.int64) + 2
    files = np.repeat(np.arange(len(counts)), blocks)
    block = np.arange(len(files)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    before = _random(seed, files, 0 * files) if 1 / fraction % 1 else 0.0
    start, end = (np.floor((x - before) / fraction) for x in (block, block + 1))
    chosen = np.floor(start + _random(seed, files, block + 1) * (end - start)).astype(np.int64)
    inside = (chosen >= 0) & (chosen < counts[files])
    chosen = chosen[inside] + (ends - counts)[files[inside]]
    if len(chosen) not in (0, total):
        return chosen
    one = (_random(seed, np.zeros(1), np.zeros(1)) * total).astype(np.int64)
    return np.delete(chosen, one[:total]) if len(chosen) else one[: total > 1]


def _random(seed: int, files: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Returns float64 in [0, 1) that depend on the seed, a file and a number alone."""
    bits = np.zeros(len(files), np.uint64)
    for each in (seed, files, numbers):
        bits = (bits ^ np.asarray(each, np.uint64)) + np.uint64(STEP)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(FIRST)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(SECOND)
        bits ^= bits >> np.uint64(31)
    return (bits >> np.uint64(11)) * 2.0**-53
