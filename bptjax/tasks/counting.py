"""Tasks that need all of the context: how often words occur."""

import math
from string import ascii_lowercase

import numpy as np

from bptjax.tasks.sample import Drawn
from bptjax.tasks.words import Filler, coined_words, letters

COMMON = 10


def common_words(rng: np.random.Generator, units: int, index: int, filler: Filler | None) -> Drawn:
    """Lists 10 words 30 times each and others 3 times each, numbered and in random order. In short
    prompts, all words occur less often."""
    often = min(30, 3 * units // 40)
    seldom = max(often // 10, 1)
    others = units - COMMON * often
    words = coined_words(rng, COMMON + -(-others // seldom))
    entries = words[:COMMON] * often + (words[COMMON:] * seldom)[:others]
    order = rng.permutation(units).tolist()
    context = " ".join(f"{n}. {entries[i]}" for n, i in enumerate(order, 1))
    return Drawn(context, "", tuple(words[:COMMON]))


def coded_words(rng: np.random.Generator, units: int, index: int, filler: Filler | None) -> Drawn:
    """Draws words of random letters, the k-th most frequent in proportion to k^-2; the most
    frequent is `...`. Asks for the next three."""
    expected = units * 6 / math.pi**2
    ranks = np.arange(1, int(math.sqrt(expected)) + 1)
    counts = (expected / ranks**2).astype(int).tolist()
    words = ["...", *letters(rng, len(ranks) - 1, 6, ascii_lowercase)]
    entries = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
    context = " ".join(map(entries.__getitem__, rng.permutation(len(entries)).tolist()))
    return Drawn(context, "", tuple(words[1:4]))
