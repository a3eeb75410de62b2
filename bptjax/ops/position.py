"""Where a token stands: rotary embedding and its scalings, ALiBi slopes, learned positions."""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

# What each scaling needs, and what it may have, beside rope_theta.
LONG = ("original_max_position_embeddings",)
KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), LONG),
    "yarn": (
        (),
        (
            "factor",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
            *LONG,
        ),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), LONG),
    "longrope": (("short_factor", "long_factor"), ("factor", "attention_factor", *LONG)),
}


def rope_frequencies(
    size: int,
    parameters: Mapping[str, Any],
    *,
    max_positions: int | None = None,
    length: Array | int | None = None,
) -> tuple[Float[Array | np.ndarray, "R"], float]:
    """Radians per token of each rotated pair, float32, and the factor on cos and sin.

    Args:
      size: rotated features of a head, 2R.
      parameters: in Hugging Face's schema: rope_theta, rope_type and what that needs.
      max_positions: tokens that the positions were made for.
      length: longest position that is read, plus one, which `dynamic` and `longrope` depend on; at
        most `max_positions` if left out.

    Raises:
      ValueError: an unknown rope_type or key, or one that is missing.

    theta^(-2i / size): Su et al. 2021, arXiv 2104.09864, Section 3.2.2. yarn: Peng et al. 2023,
    arXiv 2309.00071. longrope: Ding et al. 2024, arXiv 2402.13753. All as `transformers` defines
    them in `modeling_rope_utils`.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in KEYS:
        raise ValueError(f"rope_type={kind!r} is not known; there are {', '.join(KEYS)}")
    p = {k: v for k, v in parameters.items() if v is not None}
    _check_keys(kind, p)
    if size < 2 or size % 2:
        raise ValueError(f"{size} rotated features; they turn in pairs")
    theta = np.float32(p["rope_theta"])
    powers = theta ** (np.arange(0, size, 2, dtype=np.float32) / np.float32(size))
    plain = np.float32(1.0) / powers
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / np.float32(p["factor"]), 1.0
    if kind == "dynamic":
        longest = _needed(kind, "max_position_embeddings", max_positions)
        if length is None:
            return plain, 1.0
        reach = jnp.maximum(length, longest).astype(jnp.float32)
        grown = p["factor"] * reach / longest - (p["factor"] - 1)
        base = theta * grown ** (size / (size - 2))
        return 1.0 / base ** (jnp.arange(0, size, 2, dtype=jnp.float32) / size), 1.0
    original = p.get(LONG[0]) or max_positions
    original = _needed(kind, LONG[0], original)
    if kind == "llama3":
        return _llama3(plain, original, p), 1.0
    factor = p.get("factor") or _needed(kind, "factor", max_positions) / original
    if kind == "yarn":
        return _yarn(powers, size, factor, original, p)
    return _longrope(powers, factor, original, length, p)


def _check_keys(kind: str, p: Mapping[str, Any]) -> None:
    needed, optional = KEYS[kind]
    for key in ("rope_theta", *needed):
        if key not in p:
            raise ValueError(f"rope_type={kind} needs rope_parameters.{key}")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *needed, *optional}
    unknown = sorted(p.keys() - known)
    if unknown:
        raise ValueError(
            f"rope_type={kind} does not use rope_parameters.{unknown[0]}; leave it out"
        )


def _needed(kind: str, name: str, value: Any) -> Any:
    if value is None:
        raise ValueError(f"rope_type={kind} needs {name}")
    return value


def _llama3(plain: np.ndarray, original: int, p: Mapping[str, Any]) -> np.ndarray:
    """Long waves are slowed by `factor`, short ones kept, those between blended."""
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    waves = np.float32(2 * math.pi) / plain
    slowed = np.where(waves > original / low, plain / np.float32(p["factor"]), plain)
    blend = (original / waves - low) / (high - low)
    between = (1 - blend) * slowed / p["factor"] + blend * slowed
    middle = ~(waves < original / high) & ~(waves > original / low)
    return np.where(middle, between, slowed).astype(np.float32)


def _yarn(
    powers: np.ndarray, size: int, factor: float, original: int, p: Mapping[str, Any]
) -> tuple[np.ndarray, float]:
    def stretch(scale, weight=1.0):
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    def feature(turns):
        """Which pair makes so many turns in the original length."""
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(p["rope_theta"]))

    low, high = feature(p.get("beta_fast") or 32), feature(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    # transformers' guard against an empty ramp.
    ramp = (np.arange(size // 2) - low) / (high - low if high != low else 0.001)
    kept = 1 - np.clip(ramp, 0, 1).astype(np.float32)
    frequencies = 1 / (np.float32(factor) * powers) * (1 - kept) + 1 / powers * kept
    scale = p.get("attention_factor")
    if scale is None:
        one, other = p.get("mscale"), p.get("mscale_all_dim")
        both = one and other
        scale = stretch(factor, one) / stretch(factor, other) if both else stretch(factor)
    return frequencies.astype(np.float32), float(scale)


def _longrope(
    powers: np.ndarray,
    factor: float,
    original: int,
    length: Array | int | None,
    p: Mapping[str, Any],
) -> tuple[Array | np.ndarray, float]:
    each = []
    for name in ("short_factor", "long_factor"):
        if len(p[name]) != len(powers):
            raise ValueError(
                f"rope_parameters.{name} has {len(p[name])} entries for {len(powers)} pairs"
            )
        each.append(np.float32(1.0) / (np.asarray(p[name], np.float32) * powers))
    scale = p.get("attention_factor")
    if scale is None:
        stretched = 1 + math.log(max(factor, 1.0)) / math.log(original)
        scale = math.sqrt(stretched)
    if length is None:
        return each[0], float(scale)
    return jnp.where(length > original, each[1], each[0]), float(scale)


def rope(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    frequencies: Float[Array | np.ndarray, "R"],
    factor: Float[Array, ""] | float = 1.0,
) -> Float[Array, "B T N H"]:
    """Rotates the first 2R of the H features by position · frequency, times `factor`; the others
    pass. Hugging Face's half-split layout: feature i turns with feature i + R."""
    R = frequencies.shape[0]
    angle = positions.astype(jnp.float32)[..., None, None] * jnp.asarray(frequencies).reshape(
        1, 1, 1, R
    )
    cos, sin = jnp.cos(angle) * factor, jnp.sin(angle) * factor
    a, b = x[..., :R].astype(jnp.float32), x[..., R : 2 * R].astype(jnp.float32)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
    return turned if 2 * R == x.shape[-1] else jnp.concatenate([turned, x[..., 2 * R :]], -1)


def alibi_slopes(heads: int, *, interleaved: bool = False) -> Float[np.ndarray, "heads"]:
    """ALiBi's slope of each head: 2^(-8i / N) for a power of two. For other numbers, those of the
    next smaller one followed by every other one of the next larger; or `interleaved`, the even ones
    of the next larger followed by the odd ones, cut to N. Press et al. 2021, arXiv 2108.12409, and
    its code; MPT's code.
    """
    if interleaved:
        above = 2 ** math.ceil(math.log2(heads))
        slopes = 2.0 ** (-8.0 * np.arange(1, above + 1) / above)
        if above != heads:
            slopes = np.concatenate([slopes[1::2], slopes[::2]])[:heads]
        return slopes.astype(np.float32)
    base = 2 ** math.floor(math.log2(heads))
    slopes = 2.0 ** (-8.0 * np.arange(1, base + 1) / base)
    extra = 2.0 ** (-4.0 * np.arange(1, 2 * (heads - base), 2) / base)
    return np.concatenate([slopes, extra]).astype(np.float32)


def extend_positions(
    table: Float[np.ndarray, "P D"], positions: int, offset: int = 0
) -> Float[np.ndarray, "Q D"]:
    """A learned embedding of `positions` positions out of a shorter or longer one: its rows again
    and again, after the `offset` rows before that of position 0."""
    rows = table[offset:]
    times = -(-positions // rows.shape[0])
    return np.concatenate([table[:offset], np.tile(rows, (times, 1))[:positions]])
