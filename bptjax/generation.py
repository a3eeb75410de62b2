"""Text from a model, a token at a time."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from bptjax.models.cache import Cache
from bptjax.models.config import Execution
from bptjax.models.decoder import Decoder


@partial(jax.jit, static_argnames=("new_tokens", "dtype", "execution"))
def generate(
    model: Decoder,
    prompt: Int[Array, "B T"],
    key: Array,
    *,
    new_tokens: int,
    temperature: float = 1.0,
    dtype: jnp.dtype = jnp.float32,
    execution: Execution = Execution(),  # noqa: B008 (frozen)
) -> Int[Array, "B new_tokens"]:
    """Samples the tokens that follow `prompt`; `temperature` 0 takes the likeliest."""
    B, T = prompt.shape
    cache = Cache.empty(model.config, B, T + new_tokens, dtype)
    hidden, cache = model.decode(prompt, cache, dtype=dtype, execution=execution)

    def choose(hidden, key):
        logits = model.logits(hidden[:, -1:])[:, 0]
        drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
        return jnp.where(temperature == 0.0, logits.argmax(-1), drawn)

    def step(carry, key):
        token, cache = carry
        hidden, cache = model.decode(token[:, None], cache, dtype=dtype, execution=execution)
        new = choose(hidden, key)
        return (new, cache), new

    first, *rest = jax.random.split(key, new_tokens)
    token = choose(hidden, first)
    if not rest:
        return token[:, None]
    _, tokens = jax.lax.scan(step, (token, cache), jnp.stack(rest))
    return jnp.concatenate([token[:, None], tokens.T], axis=1)
