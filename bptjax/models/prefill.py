"""Fills the decoding cache with the tokens of prompts."""

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Int

from bptjax.models.cache import Cache
from bptjax.models.config import ModelConfig
from bptjax.models.decoder import Decoder
from bptjax.models.execution import Execution

# Tokens of the shortest chunk that `HeldCache` reads. Chunks have this length times powers of two,
# so that few lengths are compiled.
SHORTEST = 64


def prefill(
    model: Decoder, sequences: list[list[int]], size: int, chunk: int, **how: Any
) -> tuple[Int[Array, "B"], Cache]:
    """Aligns the sequences at their ends and reads all tokens but the last. Returns the last tokens
    and the cache. Landmark blocks start at multiples of their size in the cache, so with landmarks
    the first chunk is short instead of padded."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    longest = int(lengths.max()) - 1
    chunk = max(min(chunk, longest), 1)
    padded = longest if model.config.landmarks else -(-longest // chunk) * chunk
    tokens = np.zeros((len(sequences), padded + 1), np.int32)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[padded + 1 - len(sequence) :] = sequence
    cache = Cache.empty(model.config, len(sequences), size + padded - longest, how["dtype"])
    cache = replace(cache, start=jnp.asarray(padded + 1 - lengths))
    edges = [0, *range(padded % chunk or chunk, padded + 1, chunk)]
    for start, stop in pairwise(edges):
        cache = read(model, jnp.asarray(tokens[:, start:stop]), cache, lengths, **how)
    return jnp.asarray(tokens[:, -1]), cache


@partial(jax.jit, static_argnames=("dtype", "execution"), donate_argnums=2)
def read(
    model: Decoder,
    tokens: Int[Array, "B T"],
    cache: Cache,
    lengths: Int[Array, "B"],
    *,
    dtype: DTypeLike,
    execution: Execution,
) -> Cache:
    """Appends the tokens to the cache of sequences that have these lengths in the end."""
    return model.decode(tokens, cache, length=lengths, dtype=dtype, execution=execution)[1]


@dataclass
class HeldCache:
    """The cache of one sequence, kept between calls of `generate`, for models of which
    `saves_work` is true.

    Attributes:
      tokens: the tokens that the cache holds, and possibly later ones.
      cache: the cache; None if it is empty or in use. It starts with SHORTEST tokens of padding.
    """

    tokens: list[int] = field(default_factory=list)
    cache: Cache | None = None

    @staticmethod
    def saves_work(config: ModelConfig) -> bool:
        """Returns whether the cache of a shorter sequence can be cut and continued. States of
        attention-free layers cannot be cut, landmark blocks start at multiples of their size, and
        `longrope` and `dynamic` rotate the keys of a longer sequence differently."""
        scaled = {"longrope", "dynamic"} & set(config.rope_types)
        return not (config.mixers or config.landmarks or scaled)

    def keep(self, tokens: list[int], cache: Cache) -> None:
        """Keeps the cache of these tokens, a list to which its owner may append."""
        self.tokens, self.cache = tokens, cache

    def prefill(
        self, model: Decoder, sequences: list[list[int]], size: int, chunk: int, **how: Any
    ) -> tuple[Int[Array, "1"], Cache]:
        """Does the same as `prefill`, for one sequence, but reads only the tokens after its common
        start with the held tokens, and up to SHORTEST tokens before them."""
        (sequence,) = sequences
        *text, last = sequence
        cache, self.cache = self.cache, None
        slots, equal = size + SHORTEST, 0
        if cache is None or cache.k.shape[2] < slots:
            del cache  # Both need not exist at once.
            # Half as many slots more, so that a sequence that grows is rarely read again.
            cache = Cache.empty(model.config, 1, slots * 3 // 2, how["dtype"])
            cache = replace(cache, start=jnp.full(1, SHORTEST, jnp.int32))
        else:
            both = min(int(cache.length) - SHORTEST, len(text))
            same = np.equal(self.tokens[:both], text[:both])
            equal = both if same.all() else int(same.argmin())
        unread = -(-(len(text) - equal) // SHORTEST) * SHORTEST
        padded = np.array([0] * SHORTEST + text, np.int32)[None]
        edge = padded.shape[1] - unread
        cache = replace(cache, length=jnp.int32(edge))
        lengths = np.array([len(sequence)], np.int32)
        while (rest := padded.shape[1] - edge) > 0:
            count = SHORTEST
            while 2 * count <= min(rest, chunk):
                count *= 2
            tokens = jnp.asarray(padded[:, edge : edge + count])
            cache, edge = read(model, tokens, cache, lengths, **how), edge + count
        return jnp.array([last], jnp.int32), cache
