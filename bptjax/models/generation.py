"""Generates text from a model, one token at a time."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Bool, Int

from bptjax.data.tokenizer import Tokenizer
from bptjax.models.cache import Cache
from bptjax.models.config import ModelConfig
from bptjax.models.decoder import Decoder
from bptjax.models.execution import Execution
from bptjax.models.prefill import HeldCache, prefill, read
from bptjax.models.sampling import Sampling
from bptjax.ops.arguments import check_chunk
from bptjax.parallel.mesh import constrain

# Most tokens that the device draws before the host reads them, and about how many seconds that may
# take: texts appear while they are written.
MOST_AHEAD, WAIT = 32, 0.1

_State = tuple[Int[Array, "B"], Cache, Bool[Array, "B V"]]


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int] | np.ndarray],
    *,
    new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    seed: int = 0,
    stop: Sequence[int] = (),
    prefill_chunk: int = 2048,
    dtype: DTypeLike = jnp.float32,
    execution: Execution = Execution(),  # noqa: B008 (frozen)
    held: HeldCache | None = None,
) -> Iterator[Int[np.ndarray, "B"]]:
    """Yields the next token of each prompt, one step at a time; -1 after a sequence's end.

    Continuations do not depend on the lengths of the other prompts. Parameters on a mesh are used
    there.

    Args:
      prompts: token ids, of any lengths.
      new_tokens: maximum number of new tokens per prompt.
      stop: tokens that end a sequence; they are yielded too.
      prefill_chunk: prompt tokens processed at a time. Memory apart from the cache does not grow
        with the length of the prompts.
      dtype: dtype of the computation and the cache.
      held: cache of an earlier call whose prompt and text may start this prompt, with the same
        model and dtype; it then holds this call's. Only with one prompt.

    Raises:
      ValueError: no prompt, an empty prompt, or a token id outside the vocabulary; a negative
        `new_tokens`; a `prefill_chunk` below 1; more tokens than the model has learned positions.
    """
    config, landmarks = model.config, model.config.landmarks
    check_chunk(prefill_chunk=prefill_chunk)
    if new_tokens < 0:
        raise ValueError(f"new_tokens={new_tokens}: must not be negative")
    if min((len(prompt) for prompt in prompts), default=0) == 0:
        raise ValueError("prompts: must not be empty")
    for ids in map(np.asarray, prompts):
        if (bad := ids[(ids < 0) | (ids >= config.V)]).size:
            raise ValueError(f"prompts: must be token ids in [0, {config.V}), not {bad[0]}")
    if landmarks is not None and len(prompts) > 1:
        # Landmark blocks of prompts with different lengths end at different steps.
        options: Any = dict(new_tokens=new_tokens, sampling=sampling, stop=stop)
        options |= dict(prefill_chunk=prefill_chunk, dtype=dtype, execution=execution)
        each = (generate(model, [x], seed=seed + i, **options) for i, x in enumerate(prompts))
        yield from map(np.concatenate, zip_longest(*each, fillvalue=np.array([-1])))
        return
    seen = np.zeros((len(prompts), config.V), bool)
    for prompt, flags in zip(prompts, seen, strict=True):
        flags[np.asarray(prompt)] = True
    reserved = new_tokens
    if landmarks is not None:
        prompts, reserved = (
            [landmarks.prompt(np.asarray(prompts[0]))],
            landmarks.longest(new_tokens),
        )
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    longest = int(lengths.max())
    if config.position_embedding == "learned" and longest + reserved > (
        config.max_position_embeddings or 0
    ):
        raise ValueError(
            f"a prompt of {longest} tokens and {new_tokens} new tokens: must fit into the model's "
            f"max_position_embeddings={config.max_position_embeddings}; shorten them"
        )
    rotation_change = _rotation_change(config)
    sequences = [list(map(int, prompt)) for prompt in prompts]
    how: Any = dict(dtype=dtype, execution=execution)
    keys, stops = jax.random.split(jax.random.key(seed), new_tokens), np.array(stop, np.int32)
    ended, held_lengths, due = np.zeros(len(sequences), bool), lengths, False
    state: Any = None  # The newest token, the cache, and the tokens seen.
    # Processes must draw equally many tokens, but their clocks differ.
    alone = jax.process_count() == 1
    done, ahead = 0, 1 if alone else MOST_AHEAD
    # Entered for one call at a time: a suspended generator must not leave its mesh set.
    on_mesh = mesh_setter(model)
    while done < new_tokens:
        crossed = (held_lengths <= rotation_change) & (lengths > rotation_change)
        with on_mesh():
            if state is None or crossed[~ended].any():
                # Beyond this length, longrope rotates every key of the sequence differently.
                size = longest + reserved
                reading = held.prefill if held else prefill
                last, cache = reading(model, sequences, size, prefill_chunk, **how)
                state = last, cache, jnp.asarray(seen) if state is None else state[2]
            elif landmarks is not None and due:
                cache = read(model, state[0][:, None], state[1], lengths, **how)
                state = jnp.array([landmarks.token], jnp.int32), cache, state[2]
            before_change = rotation_change - lengths[lengths <= rotation_change] + 1
            count = int(min(ahead, new_tokens - done, *before_change))
            coming = keys[np.minimum(done + np.arange(MOST_AHEAD), new_tokens - 1)]
            started = time.perf_counter()
            rest = coming, lengths, ended, stops, np.int32(count)
            drawn, count, state = _steps(model, *state, *rest, sampling=sampling, **how)
            tokens = np.asarray(drawn)[: int(count)]
            seconds = time.perf_counter() - started
        for sequence, new in zip(sequences, tokens.T, strict=True):
            sequence.extend(np.maximum(new, 0).tolist())
        if held is not None:
            held.keep(sequences[0], state[1])
        yield from tokens
        ended = ended | np.isin(tokens, stop).any(0)
        if ended.all():
            return
        done += len(tokens)
        if landmarks is not None:
            if due := landmarks.is_due(len(sequences[0])):
                sequences[0].append(landmarks.token)
        elif alone and not WAIT / 2 < seconds < WAIT:
            ahead = min(2 * ahead, MOST_AHEAD) if seconds < WAIT else max(ahead // 2, 1)
        # New arrays, because a step may still be reading the old ones.
        held_lengths = lengths + len(tokens) - 1
        lengths = held_lengths + 1 + due


def continuations(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[np.ndarray],
    *,
    stop_strings: Sequence[str] = (),
    **options: Any,
) -> Iterator[list[str]]:
    """Yields, after each token, the texts generated so far. A text ends before a stop string or an
    end-of-text token. `options` go to `generate`."""
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
            ends = [at for s in stop_strings if (at := texts[i].find(s)) >= 0]
            if ends:
                texts[i], ended[i] = texts[i][: min(ends)], True
        yield list(texts)
        if all(ended):
            return


def length_warning(config: ModelConfig, length: int, name: str = "the model") -> str | None:
    """Returns a warning if `length` tokens exceed the model's positions, else None."""
    if not config.exceeds_positions(length):
        return None
    return (
        f"warning: {length:,} tokens are beyond the {config.max_position_embeddings:,} positions "
        f"that {name} was trained for; expect worse text there"
    )


def mesh_setter(model: Decoder) -> Callable[[], AbstractContextManager]:
    """Returns `jax.set_mesh` for the mesh of the model's parameters; does nothing without one."""
    where = jax.tree.leaves(model)[0].sharding
    if not isinstance(where, NamedSharding):
        return nullcontext
    assert isinstance(where.mesh, Mesh)
    return partial(jax.set_mesh, where.mesh)


def _rotation_change(config: Any) -> float:
    """Returns the length beyond which longrope rotates all keys by other frequencies.

    Beyond it, the cached keys of a sequence are recomputed, so that its tokens are the same as
    without a cache. transformers does so for Phi-3; for other models it mixes keys of both
    rotations. With `dynamic`, whose frequencies change with every token, cached keys stay as they
    are, as in transformers.
    """
    lengths = [
        p.get("original_max_position_embeddings") or config.max_position_embeddings
        for p, kind in zip(config.ropes, config.rope_types, strict=False)
        if kind == "longrope"
    ]
    return float(min(lengths, default=math.inf))


@partial(jax.jit, static_argnames=("sampling", "dtype", "execution"), donate_argnums=(2, 3))
def _steps(
    model: Decoder,
    token: Int[Array, "B"],
    cache: Cache,
    seen: Bool[Array, "B V"],
    keys: Array,
    lengths: Int[Array, "B"],
    ended: Bool[Array, "B"],
    stop: Int[Array, "S"],
    count: Int[Array, ""],
    *,
    sampling: Sampling,
    dtype: DTypeLike,
    execution: Execution,
) -> tuple[Int[Array, "N B"], Int[Array, ""], _State]:
    """Draws up to `count` tokens for each sequence, fewer if all sequences end.

    Args:
      token: the newest tokens, which are not in the cache.
      seen: tokens seen so far.
      keys: random keys `[N]`, one for each new token.
      lengths: lengths of the sequences with `token`.
      ended: sequences that have ended; their new tokens are -1.

    Returns:
      The new tokens, their number, and `token`, `cache` and `seen` after them.
    """

    def unfinished(carry):
        i, *_, ended = carry
        return (i < count) & ~ended.all()

    def step(carry):
        i, drawn, token, cache, seen, ended = carry
        hidden, cache = model.decode(
            token[:, None], cache, length=lengths + i, dtype=dtype, execution=execution
        )
        # Every device samples every token, so that every process has all of them.
        logits = constrain(model.logits(hidden)[:, 0], None, None)
        if model.config.landmarks is not None:
            logits = logits.at[:, model.config.landmarks.token].set(-jnp.inf)
        token = sampling.draw(logits, seen, keys[i]).astype(jnp.int32)
        seen = constrain(seen.at[jnp.arange(len(token)), token].set(True), None, None)
        drawn = drawn.at[i].set(jnp.where(ended, -1, token))
        return i + 1, drawn, token, cache, seen, ended | jnp.isin(token, stop)

    drawn = jnp.full((len(keys), len(token)), -1, jnp.int32)
    carry = jnp.zeros((), jnp.int32), drawn, token, cache, seen, ended
    i, drawn, token, cache, seen, _ = jax.lax.while_loop(unfinished, step, carry)
    return drawn, i, (token, cache, seen)
