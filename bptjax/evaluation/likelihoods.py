"""Log-likelihoods of continuations, in batches of texts of similar length."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from bptjax.data.landmarks import ignored
from bptjax.models.decoder import Decoder
from bptjax.ops.labels import IGNORED

# Largest number of tokens that the model reads at a time, unless one text is longer, and of tokens
# whose logits exist at a time.
TOKENS, HEAD_TOKENS = 16_384, 256
# Least number of tokens that a text is padded to.
SHORTEST = 32


def padded_length(length: int) -> int:
    """Returns the number of tokens that a text of `length` tokens is padded to. Padding is at most
    a quarter, and few lengths are compiled."""
    step = max(power_of_two(length) // 8, SHORTEST)
    return -(-length // step) * step


def power_of_two(count: int) -> int:
    """Returns the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def batches(lengths: Sequence[int], more: int = 0) -> Iterator[list[int]]:
    """Yields the indices of the texts of each batch, the longest first. Texts of a batch have the
    same padded length, and `TOKENS` tokens together, with `more` further tokens each."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for i, length in enumerate(lengths):
        by_length[padded_length(length)].append(i)
    for length in sorted(by_length, reverse=True):
        size = power_of_two(max(TOKENS // (length + more), 1) + 1) // 2
        for first in range(0, len(by_length[length]), size):
            yield by_length[length][first : first + size]


@partial(jax.jit, static_argnames="dtype")
def _hidden(model, tokens, positions, *, dtype):
    return model(tokens, positions=positions, dtype=dtype)[0]


@jax.jit
def _compared(model, hidden, rows, at, targets):
    """Returns the log-probability of each target [N], and whether it is the most likely token."""

    def compare(chunk):
        vectors, targets = chunk
        logits = model.logits(vectors[None])[0]
        found = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], 1)[:, 0]
        return found, logits.argmax(-1) == targets

    vectors = hidden[rows, at].reshape(-1, HEAD_TOKENS, hidden.shape[-1])
    found = jax.lax.map(compare, (vectors, targets.reshape(-1, HEAD_TOKENS)))
    return jax.tree.map(lambda x: x.reshape(-1), found)


def log_likelihoods(
    model: Decoder,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    dtype: DTypeLike,
    advance: Callable[[int], None] = lambda count: None,
) -> list[tuple[float, bool]]:
    """Returns the log-likelihood (nats) of each continuation given its context, and whether greedy
    decoding gives the continuation.

    Continuations that differ in their last token alone share a computation. Results do not depend
    on the other pairs, up to rounding.

    Args:
      pairs: token ids of a context and its continuation, neither empty.
      advance: called with the number of pairs of each finished batch.
    """
    same: dict[bytes, list[int]] = defaultdict(list)
    for i, (context, continuation) in enumerate(pairs):
        same[np.array([*context, *continuation][:-1], np.int32).tobytes()].append(i)
    texts, owners = [np.frombuffer(key, np.int32) for key in same], list(same.values())
    results: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
    for chosen in batches([len(text) for text in texts]):
        length = padded_length(len(texts[chosen[0]]))
        tokens, positions, places = [], [], []
        for text in (texts[i] for i in chosen):
            row, place = _arranged(model, text, length)
            tokens.append(row)
            # Padding repeats the last position, because some rotary scalings depend on the largest.
            positions.append(np.minimum(np.arange(len(row)), place[-1]))
            places.append(place)
        short = power_of_two(len(chosen)) - len(chosen)
        arrays = (jnp.asarray(np.stack(x + x[-1:] * short), jnp.int32) for x in (tokens, positions))
        hidden = _hidden(model, *arrays, dtype=jnp.dtype(dtype))
        asked = [(row, owner) for row, i in enumerate(chosen) for owner in owners[i]]
        wanted = [np.asarray(pairs[owner][1], np.int32) for _, owner in asked]
        counts = [len(each) for each in wanted]
        rows = np.repeat([row for row, _ in asked], counts)
        at = [places[row][-n:] for (row, _), n in zip(asked, counts, strict=True)]
        found = _compared(model, hidden, *map(_filled, (rows, *map(np.concatenate, (at, wanted)))))
        logs, greedy = map(np.asarray, found)
        starts = np.cumsum([0, *counts[:-1]])
        sums = np.add.reduceat(logs[: sum(counts)].astype(np.float64), starts)
        alike = np.logical_and.reduceat(greedy[: sum(counts)], starts)
        for (_, owner), total, is_greedy in zip(asked, sums, alike, strict=True):
            results[owner] = float(total), bool(is_greedy)
        advance(len(asked))
    return results


def _arranged(model: Decoder, text: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the text with landmarks, if the model has them, padded to `length` tokens without
    them; and the place that predicts the token after each token of the text."""
    row = {"tokens": np.pad(text, (0, length - len(text))), "labels": np.full(length, IGNORED)}
    row["labels"][: len(text)] = np.arange(len(text))
    if model.config.landmarks is not None:
        row = ignored(model.config.landmarks.insert(row))
    return row["tokens"], np.flatnonzero(row["labels"] != IGNORED)


def _filled(values: np.ndarray) -> jax.Array:
    """Returns the values with zeros up to a power of two times `HEAD_TOKENS`."""
    size = HEAD_TOKENS * power_of_two(-(-len(values) // HEAD_TOKENS))
    return jnp.asarray(np.pad(values, (0, size - len(values))), jnp.int32)
