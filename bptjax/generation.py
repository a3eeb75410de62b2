"""Text from a model, a token at a time."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from bptjax.data.tokenizer import Tokenizer
from bptjax.models.cache import Cache
from bptjax.models.config import Execution, ModelConfig
from bptjax.models.decoder import Decoder


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits, in this order, which is that of `transformers`.

    Attributes:
      repetition_penalty: logits of tokens that occurred are divided by it (multiplied, where
        negative). Keskar et al. 2019, arXiv 1909.05858.
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: only so many of the likeliest; 0 for all.
      top_p: only the likeliest that together have this probability. Holtzman et al. 2019, arXiv
        1904.09751.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        if not (
            0 <= self.temperature < math.inf
            and self.top_k >= 0
            and 0 < self.repetition_penalty < math.inf
        ):
            raise ValueError(
                f"temperature={self.temperature}, top_k={self.top_k}, repetition_penalty="
                f"{self.repetition_penalty}: the first two are not negative, the last is positive"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is not in (0, 1]")

    def draw(
        self, logits: Float[Array, "B V"], seen: Bool[Array, "B V"], key: Array
    ) -> Int[Array, "B"]:
        """A token for each row."""
        if self.repetition_penalty != 1.0:
            factor = jnp.where(logits > 0, 1 / self.repetition_penalty, self.repetition_penalty)
            logits = jnp.where(seen, logits * factor, logits)
        if self.temperature == 0.0:
            return logits.argmax(-1)
        logits = logits / self.temperature
        if self.top_k:
            least = jax.lax.top_k(logits, min(self.top_k, logits.shape[-1]))[0][:, -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if self.top_p < 1.0:
            falling = jnp.sort(logits, axis=-1, descending=True)
            before = jnp.cumsum(jax.nn.softmax(falling), -1) - jax.nn.softmax(falling)
            least = jnp.where(before < self.top_p, falling, jnp.inf).min(-1, keepdims=True)
            logits = jnp.where(logits < least, -jnp.inf, logits)
        return jax.random.categorical(key, logits)


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int] | np.ndarray],
    *,
    new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    seed: int = 0,
    stop: Sequence[int] = (),
    prefill_chunk: int = 2048,
    dtype: jnp.dtype = jnp.float32,
    execution: Execution = Execution(),  # noqa: B008 (frozen)
) -> Iterator[Int[np.ndarray, "B"]]:
    """Yields the next token of each prompt, one step at a time; -1 after a sequence's end.

    A prompt gets the tokens that it would get alone, whatever the others' lengths.

    Args:
      prompts: token ids, of any lengths.
      new_tokens: at most so many of each.
      stop: tokens that end a row; they are given too.
      prefill_chunk: the prompts are read so many tokens at a time: memory beside the cache does not
        grow with their length.
      dtype: of the computation and the cache.

    Raises:
      ValueError: an empty prompt, or more tokens than the model has learned positions.
    """
    config = model.config
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    longest = int(lengths.max())
    if lengths.min() == 0:
        raise ValueError("a prompt is empty")
    if config.position_embedding == "learned" and longest + new_tokens > (
        config.max_position_embeddings or 0
    ):
        raise ValueError(
            f"a prompt of {longest} tokens and {new_tokens} new ones are more than the model's "
            f"max_position_embeddings={config.max_position_embeddings}"
        )
    turn = _turning_point(config)
    rows = [list(map(int, prompt)) for prompt in prompts]
    seen = np.zeros((len(rows), config.V), bool)
    for row, flags in zip(rows, seen, strict=True):
        flags[row] = True
    run = partial(_step, sampling=sampling, dtype=dtype, execution=execution)
    keys = jax.random.split(jax.random.key(seed), new_tokens)
    ended = np.zeros(len(rows), bool)
    state: tuple[Any, ...] | None = None
    for i in range(new_tokens):
        if state is None or (lengths[~ended] == turn + 1).any():
            # Past this length every key of the sequence has to be rotated anew.
            size = longest + new_tokens
            chunk, cache = _prefill(
                model, rows, size, prefill_chunk, dtype=dtype, execution=execution
            )
            flags = jnp.asarray(seen) if state is None else state[2]
            state = run(model, chunk, cache, flags, keys[i], lengths)
        else:
            state = run(model, state[0][:, None], state[1], state[2], keys[i], lengths)
        token = np.where(ended, -1, np.asarray(state[0]))
        for row, new in zip(rows, token, strict=True):
            row.append(max(int(new), 0))
        yield token
        ended |= np.isin(token, stop)
        if ended.all():
            return
        # Not in place: a step may still read the array.
        lengths = lengths + 1


def continuations(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[np.ndarray],
    *,
    stop_strings: Sequence[str] = (),
    **options: Any,
) -> Iterator[list[str]]:
    """Yields the texts that follow the prompts so far, after each token. A text ends before a stop
    string or an end-of-text token.

    Args:
      options: of `generate`.
    """
    stop = tokenizer.stop_ids
    tokens: list[list[int]] = [[] for _ in prompts]
    texts, ended = ["" for _ in prompts], [False] * len(prompts)
    for new in generate(model, prompts, stop=stop, **options):
        for i, token in enumerate(new.tolist()):
            if ended[i] or token < 0:
                continue
            if token in stop:
                ended[i] = True
                continue
            tokens[i].append(token)
            texts[i] = tokenizer.decode(tokens[i])
            found = [at for s in stop_strings if (at := texts[i].find(s)) >= 0]
            if found:
                texts[i], ended[i] = texts[i][: min(found)], True
        yield list(texts)
        if all(ended):
            return


def length_warning(config: ModelConfig, length: int) -> str | None:
    """Returns a line if text of `length` tokens goes beyond the model's positions."""
    if not config.exceeds_positions(length):
        return None
    return (
        f"warning: {length:,} tokens are beyond the {config.max_position_embeddings:,} positions "
        "that the model was made for; expect worse text there"
    )


def _turning_point(config: Any) -> float:
    """Returns the length beyond which longrope rotates all keys by other frequencies.

    The cached keys of a sequence are then computed again, so that its tokens are those of a
    forward pass over all of its text. transformers does so for Phi-3; elsewhere it goes on with
    keys of both kinds. Under `dynamic`, whose frequencies change with every token, cached keys
    stay as they are, as in transformers.
    """
    lengths = [
        p.get("original_max_position_embeddings") or config.max_position_embeddings
        for p, kind in zip(config.ropes, config.rope_types, strict=False)
        if kind == "longrope"
    ]
    return min(lengths, default=float("inf"))


def _prefill(
    model: Decoder, rows: list[list[int]], size: int, chunk: int, **how: Any
) -> tuple[Array, Cache]:
    """Reads all but the last chunk of the rows, which end together: that chunk, and the cache."""
    lengths = np.array([len(row) for row in rows], np.int32)
    longest = int(lengths.max())
    chunk = min(chunk, longest)
    padded = -(-longest // chunk) * chunk
    tokens = np.zeros((len(rows), padded), np.int32)
    for line, row in zip(tokens, rows, strict=True):
        line[padded - len(row) :] = row
    cache = Cache.empty(model.config, len(rows), size + padded - longest, how["dtype"])
    cache = replace(cache, start=jnp.asarray(padded - lengths))
    for at in range(0, padded - chunk, chunk):
        cache = _read(model, jnp.asarray(tokens[:, at : at + chunk]), cache, lengths, **how)
    return jnp.asarray(tokens[:, padded - chunk :]), cache


@partial(jax.jit, static_argnames=("dtype", "execution"), donate_argnums=2)
def _read(model, tokens, cache, lengths, *, dtype, execution):
    return model.decode(tokens, cache, length=lengths, dtype=dtype, execution=execution)[1]


@partial(jax.jit, static_argnames=("sampling", "dtype", "execution"), donate_argnums=(2, 3))
def _step(model, tokens, cache, seen, key, lengths, *, sampling, dtype, execution):
    """Reads the tokens `[B, T]` and draws the next: (token `[B]`, cache, seen)."""
    hidden, cache = model.decode(tokens, cache, length=lengths, dtype=dtype, execution=execution)
    token = sampling.draw(model.logits(hidden[:, -1:])[:, 0], seen, key)
    return token, cache, seen.at[jnp.arange(len(token)), token].set(True)
