"""Sampling settings, and their defaults from a checkpoint's generation_config.json."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from bptjax.data.hf_tokenizer import GENERATION

# Fields of generation_config.json that transformers reads only with do_sample.
RANDOM = {"temperature", "top_k", "top_p", "min_p"}
# transformers' defaults with do_sample.
SAMPLED = {"temperature": 1.0, "top_k": 50}
CHAT_TEMPERATURE = 0.7
# Bounds of factors that keep logits finite in float32.
BOUNDS = 1e-6, 1e6
# Other fields that change generation in transformers; bptjax ignores them. Null, false and 0
# change nothing, nor does 1 in FACTORS.
FACTORS = "num_beams num_beam_groups typical_p encoder_repetition_penalty guidance_scale"
OTHERS = (
    "penalty_alpha top_h epsilon_cutoff eta_cutoff exponential_decay_length_penalty min_length "
    "min_new_tokens no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
    "force_words_ids sequence_bias suppress_tokens begin_suppress_tokens forced_bos_token_id "
    "forced_eos_token_id stop_strings watermarking_config"
)


@dataclass(frozen=True)
class Sampling:
    """Settings for sampling a token from logits. The steps apply in the order of `transformers`.

    Attributes:
      repetition_penalty: divides the logits of tokens that have occurred; negative logits are
        multiplied by it. Keskar et al. 2019, arXiv 1909.05858.
      temperature: divides the logits; 0 takes the most likely token.
      top_k: sample from the k most likely tokens; 0 from all.
      top_p: sample from the most likely tokens that together have this probability. Holtzman et al.
        2019, arXiv 1904.09751.
      min_p: sample from tokens with at least this share of the largest probability.
        Nguyen et al. 2024, arXiv 2407.01082.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        least, largest = BOUNDS
        if self.temperature != 0 and not least <= self.temperature <= largest:
            raise ValueError(
                f"temperature={self.temperature}: must be 0 or in [{least:g}, {largest:g}]"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: must not be negative; 0 turns it off")
        if not least <= self.repetition_penalty <= largest:
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty}: must be in [{least:g}, {largest:g}]"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must be in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p}: must be in [0, 1]")

    def draw(
        self, logits: Float[Array, "B V"], seen: Bool[Array, "B V"], key: Array
    ) -> Int[Array, "B"]:
        """Samples a token for each sequence; `seen` marks tokens that have occurred in it."""
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
        if self.min_p:
            least = logits.max(-1, keepdims=True) + math.log(self.min_p)
            logits = jnp.where(logits < least, -jnp.inf, logits)
        return jax.random.categorical(key, logits)


def choose_sampling(
    config: Mapping[str, Any], warn: Callable[[str], None], *, chat: bool, **chosen: Any
) -> tuple[Sampling, str]:
    """Chooses the sampling settings for a checkpoint.

    Chosen values win. Otherwise the values in `config` count as in transformers: without
    `do_sample: true` the most likely token is taken, and with it top_k defaults to 50. If `config`
    says nothing about sampling, the temperature is 0.7 for chats and 1 for other text.

    Args:
      config: fields of generation_config.json.
      warn: called with a line about ignored fields.
      chosen: fields of `Sampling`; None where nothing was chosen.

    Returns:
      The settings, and a line with the values and their sources.

    Raises:
      ValueError: a value of the wrong type, or out of range.
    """
    chosen = {name: value for name, value in chosen.items() if value is not None}
    given = {f.name: config[f.name] for f in fields(Sampling) if config.get(f.name) is not None}
    given = {name: value for name, value in given.items() if name not in chosen}
    sample = config.get("do_sample")
    if sample not in (None, True, False):
        raise ValueError(f"{GENERATION}: do_sample={sample!r}: must be true or false")
    for name, value in given.items():
        _check(name, value)
    if sample is None and not RANDOM & given.keys():
        values = {"temperature": CHAT_TEMPERATURE if chat else 1.0}
        origins = dict.fromkeys(values, f"default of {'chats' if chat else 'text'}")
    elif sample or RANDOM & chosen.keys():
        values, origins = SAMPLED, dict.fromkeys(SAMPLED, "default of transformers")
    else:
        values, origins = {"temperature": 0.0}, {"temperature": f"{GENERATION} without do_sample"}
        given = {name: value for name, value in given.items() if name not in RANDOM}
    unread = [x for x in FACTORS.split() if config.get(x) != 1] + OTHERS.split()
    if left := [f"{name}={config[name]}" for name in unread if config.get(name)]:
        warn(f"warning: {GENERATION}: not supported, left out: {', '.join(left)}")
    merged: Any = values | given | chosen
    sampling = Sampling(**merged)
    origins |= dict.fromkeys(given, GENERATION) | dict.fromkeys(chosen, "chosen")
    if sampling.temperature == 0:
        origins = {x: y for x, y in origins.items() if x not in RANDOM - {"temperature"}}
    texts = [
        ", ".join(
            f"{x}={getattr(sampling, x):{'d' if x == 'top_k' else 'g'}}"
            for x in origins
            if origins[x] == origin
        )
        + f" ({origin})"
        for origin in dict.fromkeys(origins.values())
    ]
    return sampling, f"sampling: {', '.join(texts)}"


def _check(name: str, value: Any) -> None:
    """Checks a number from generation_config.json.

    Raises:
      ValueError: a value of the wrong type, or out of range.
    """
    kind, text = (int, "an integer") if name == "top_k" else (int | float, "a number")
    try:
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ValueError(f"{name}={value!r}: must be {text}")
        known: Any = {name: value}
        Sampling(**known)
    except ValueError as error:
        raise ValueError(f"{GENERATION}: {error}; correct the file, or choose {name}") from error
