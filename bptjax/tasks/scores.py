"""Answers of a model to the samples of a task, and their scores with intervals."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike

from bptjax.data.tokenizer import Tokenizer
from bptjax.models.cache import Cache
from bptjax.models.config import ModelConfig
from bptjax.models.decoder import Decoder
from bptjax.models.generation import continuations
from bptjax.models.sampling import Sampling
from bptjax.tasks.sample import Sample, Sampler

# Probability that an interval covers, and resamples of a bootstrap.
COVERAGE, RESAMPLES = 0.95, 2000
# Largest number of prompt tokens that the model reads at a time, of sequences in a batch, and of
# bytes of the cache of a batch of several.
CHUNK, BATCH, CACHE_BYTES = 2048, 16, 2 * 2**30
# Samples that are made before the model needs them.
AHEAD = BATCH


class Answer(NamedTuple):
    """The text that a model continues a sample with, and its score."""

    sample: Sample
    text: str
    score: float


def answers(
    model: Decoder, tokenizer: Tokenizer, sampler: Sampler, count: int, dtype: DTypeLike
) -> Iterator[Answer]:
    """Yields the model's greedy answers to the first `count` samples, which it reads in batches.
    `dtype` is that of the computation. Parameters on a mesh are used there."""
    batch = batch_size(model.config, sampler.length, count, dtype)
    # Prompts of nearly the same length then have caches of the same size.
    chunk = min(CHUNK // batch, 2 ** max(int(np.log2(sampler.length)) - 2, 0))
    made = made_ahead(sampler.__getitem__, count)
    while samples := list(islice(made, batch)):
        # Batches of one size share a program.
        padded = samples + samples[-1:] * (batch - len(samples))
        texts = [""] * batch
        for step, longer in enumerate(
            continuations(
                model,
                tokenizer,
                [sample.ids for sample in padded],
                new_tokens=max(sample.new_tokens for sample in padded),
                sampling=Sampling(temperature=0.0),
                prefill_chunk=chunk,
                dtype=dtype,
            )
        ):
            for i, sample in enumerate(padded):
                texts[i] = longer[i] if step < sample.new_tokens else texts[i]
        for sample, text in zip(samples, texts, strict=False):
            yield Answer(sample, text, sampler.task.score(text, sample.drawn.references))


def batch_size(config: ModelConfig, length: int, count: int, dtype: DTypeLike) -> int:
    """Returns how many of `count` sequences of this length are read at once: a power of two. It
    depends on no device, because the processes of a run must agree."""
    cache = jax.eval_shape(lambda: Cache.empty(config, 1, length, dtype))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    most = max(min(CACHE_BYTES // size, BATCH, count), 1)
    return 2 ** (most.bit_length() - 1)


def made_ahead(make: Callable[[int], Sample], count: int) -> Iterator[Sample]:
    """Yields `make(i)` for each i below `count`, and makes a few in threads meanwhile. Tokenizers
    run in parallel."""
    with ThreadPoolExecutor(min(AHEAD, os.cpu_count() or 1)) as pool:
        waiting = deque(pool.submit(make, i) for i in range(min(AHEAD, count)))
        for i in range(count):
            sample = waiting.popleft().result()
            if i + AHEAD < count:
                waiting.append(pool.submit(make, i + AHEAD))
            yield sample


class Scores:
    """The scores of a model in one task and length. `seed` is that of the bootstrap."""

    def __init__(self, sampler: Sampler, seed: int):
        self.sampler, self.seed = sampler, seed
        self.scores: list[float] = []
        self._depths: list[float | None] = []

    def add(self, answer: Answer) -> None:
        drawn = answer.sample.drawn
        self.scores.append(answer.score)
        self._depths.append(drawn.depth)

    def row(self) -> dict[str, Any]:
        """Returns `task`, `length`, `samples`, `score`, the 95 % interval from `low` to `high`, and
        `by_depth`, the score in each fifth of the depths by its start, for a task with depths."""
        scores = np.array(self.scores)
        low, high = interval(scores, self.seed)
        row: dict[str, Any] = dict(task=self.sampler.name, length=self.sampler.length)
        row |= dict(samples=len(scores), score=float(scores.mean()), low=low, high=high)
        if None not in self._depths:
            fifth = np.array(self._depths, float) * 5 // 1
            row["by_depth"] = {f"{n / 5:g}": scores[fifth == n].mean() for n in np.unique(fifth)}
        return row


def interval(scores: np.ndarray, seed: int) -> tuple[float, float]:
    """Returns the ends of the 95 % interval of the mean score: Wilson's if each score is 0 or 1,
    else a bootstrap's."""
    n, mean = len(scores), float(scores.mean())
    if not np.isin(scores, (0, 1)).all():
        return bootstrap(scores, seed)
    z = NormalDist().inv_cdf((1 + COVERAGE) / 2)
    center = (mean + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * (mean * (1 - mean) / n + z**2 / (4 * n**2)) ** 0.5 / (1 + z**2 / n)
    return max(center - half, 0.0), min(center + half, 1.0)


def bootstrap(
    values: np.ndarray, seed: int, weights: np.ndarray | None = None
) -> tuple[float, float]:
    """Returns the ends of the 95 % interval of the mean of independent values, each with its
    weight, if given."""
    rng, n = np.random.default_rng(seed), len(values)
    means = []
    # All resamples of many values at once would fill the memory.
    for _ in range(RESAMPLES):
        chosen = rng.integers(n, size=n)
        own = None if weights is None else weights[chosen]
        means.append(np.average(values[chosen], weights=own))
    low, high = np.quantile(means, ((1 - COVERAGE) / 2, (1 + COVERAGE) / 2))
    return float(low), float(high)


def falls(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yields the rows before and after of each task and length whose score fell by more than its
    interval: each score is outside the interval of the other."""
    later = {(row["task"], row["length"]): row for row in after}
    for row in before:
        then = later.get((row["task"], row["length"]))
        if then is not None and then["score"] < row["low"] and row["score"] > then["high"]:
            yield row, then
