"""Position embeddings: rotary embedding and its scalings, ALiBi slopes, learned positions."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

# Scalings whose frequencies depend on the document's length.
BY_LENGTH = ("dynamic", "longrope")

# Required and optional keys of each scaling, apart from rope_theta.
LONG = ("original_max_position_embeddings",)
KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "proportional": ((), ("factor",)),
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


def rotated_features(size: int, parameters: Mapping[str, Any]) -> int:
    """Returns the `dim` to pass to `rope_frequencies` for a head of this size. `proportional` pairs
    all features of a head, and pairs beyond partial_rotary_factor do not rotate. Other types pair
    only the first partial_rotary_factor of the features."""
    if parameters.get("rope_type") == "proportional":
        return size
    return int(size * parameters.get("partial_rotary_factor", 1.0))


def rope_frequencies(
    dim: int,
    parameters: Mapping[str, Any],
    *,
    max_position_embeddings: int | None = None,
    length: Int[Array, "..."] | int | None = None,
) -> tuple[Float[Array | np.ndarray, "... R"], float]:
    """Returns the float32 radians per token of each rotated pair, and the factor on cos and sin.

    Args:
      dim: rotated features of a head, 2R, from `rotated_features`. Only `proportional` reads
        partial_rotary_factor.
      parameters: rope_theta, rope_type and the keys that this rope_type reads, in Hugging Face's
        schema. A key whose value is None counts as missing.
      max_position_embeddings: the model's context length in tokens. Replaces a missing
        original_max_position_embeddings; for yarn and longrope, its ratio to that length replaces a
        missing factor.
      length: document length in tokens, an int or an array with one length per token. Only
        `dynamic` and `longrope` read it; None means at most the original length. May be traced. The
        result is a NumPy array unless one of these two types gets a length.

    Raises:
      ValueError: rope_type or a key is unknown, a key is missing or not positive, `dim` is odd or
        less than 2, or a longrope list does not have R entries.

    theta^(-2i / dim): Su et al. 2021, arXiv 2104.09864, Section 3.2.2. yarn: Peng et al. 2023,
    arXiv 2309.00071. longrope: Ding et al. 2024, arXiv 2402.13753. Formulas and rounding follow
    `modeling_rope_utils` of `transformers`.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in KEYS:
        raise ValueError(f"rope_type={kind!r}: must be one of {', '.join(KEYS)}")
    p = {k: v for k, v in parameters.items() if v is not None}
    _check_keys(kind, p)
    if dim < 2 or dim % 2:
        raise ValueError(
            f"dim={dim}: must be even and at least 2, as features are rotated in pairs; change "
            "head_dim or partial_rotary_factor"
        )
    powers = np.float32(p["rope_theta"]) ** (np.arange(0, dim, 2, dtype=np.float32) / dim)
    plain = 1 / powers
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / np.float32(p["factor"]), 1.0
    if kind == "proportional":
        turning = np.arange(dim // 2) < int(p.get("partial_rotary_factor", 1.0) * dim // 2)
        return np.where(turning, plain, np.float32(0)) / np.float32(p.get("factor", 1.0)), 1.0
    if kind == "dynamic":
        longest = _needed(kind, "max_position_embeddings", max_position_embeddings)
        if p.get(LONG[0], longest) != longest:
            raise ValueError(
                f"rope_parameters.{LONG[0]}={p[LONG[0]]}: rope_type=dynamic scales beyond "
                f"max_position_embeddings={longest} and reads no other length; leave it out"
            )
        return (plain if length is None else _dynamic(plain, longest, length, p)), 1.0
    original = _needed(
        kind,
        f"rope_parameters.{LONG[0]} or max_position_embeddings",
        p.get(LONG[0], max_position_embeddings),
    )
    if kind == "llama3":
        return _llama3(plain, original, p), 1.0
    factor = p.get("factor")
    if factor is None:
        factor = (
            _needed(
                kind, "rope_parameters.factor or max_position_embeddings", max_position_embeddings
            )
            / original
        )
    if kind == "yarn":
        # Pass None values too: an explicit truncate=None means false to transformers.
        return _yarn(powers, float(factor), original, parameters)
    return _longrope(powers, float(factor), original, length, p)


def _check_keys(kind: str, p: Mapping[str, Any]) -> None:
    needed, optional = KEYS[kind]
    for key in ("rope_theta", *needed):
        if key not in p:
            raise ValueError(f"rope_parameters.{key}: must be set with rope_type={kind}")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *needed, *optional}
    unknown = sorted(p.keys() - known)
    if unknown:
        raise ValueError(f"rope_parameters.{unknown[0]}: must be left out with rope_type={kind}")
    for key in sorted(p.keys() - {"rope_type", "type", "truncate"}):
        values = np.asarray(p[key])
        number = values.dtype.kind in "iuf"
        # Yarn's mscale weights may be 0, which disables them.
        least = 0 if key.startswith("mscale") else np.finfo(float).tiny
        if not number or not ((values >= least) & np.isfinite(values)).all():
            bound = "not negative" if least == 0 else "positive"
            raise ValueError(f"rope_parameters.{key}={p[key]!r}: must be finite and {bound}")


def _needed(kind: str, name: str, value: Any) -> Any:
    if value is None:
        raise ValueError(f"{name}: must be set with rope_type={kind}")
    return value


def _dynamic(
    plain: np.ndarray, longest: int, length: Array | int, p: Mapping[str, Any]
) -> Float[Array, "... R"]:
    """Replaces theta by theta · growth^(dim / (dim - 2)): the slowest pair slows by `growth`."""
    beyond = jnp.maximum(jnp.asarray(length) - longest, 0).astype(jnp.float32)
    growth = (1 + p["factor"] * (beyond / longest))[..., None]
    R = len(plain)
    powers = _like(growth, -np.arange(R, dtype=np.float32) / max(R - 1, 1))
    return _like(growth, plain) * growth**powers


def _like(x: Array, table: np.ndarray) -> np.ndarray:
    """Reshapes `table` `[R]` to the number of axes of x."""
    return table.reshape((1,) * (x.ndim - 1) + table.shape)


def _llama3(plain: np.ndarray, original: int, p: Mapping[str, Any]) -> np.ndarray:
    """Slows long waves by `factor`, keeps short ones, and blends between."""
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    waves = np.float32(2 * math.pi) / plain
    slowed = np.where(waves > original / low, plain / np.float32(p["factor"]), plain)
    blend = (original / waves - low) / (high - low)
    between = (1 - blend) * slowed / p["factor"] + blend * slowed
    middle = ~(waves < original / high) & ~(waves > original / low)
    return np.where(middle, between, slowed).astype(np.float32)


def _yarn(
    powers: np.ndarray, factor: float, original: int, p: Mapping[str, Any]
) -> tuple[np.ndarray, float]:
    """Slows pairs with fewer than beta_slow turns in the original length by `factor`, keeps pairs
    with more than beta_fast turns, and blends between."""

    def stretch(weight=1.0):
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    def pair(turns):
        """Returns the (fractional) pair that makes `turns` turns in the original length."""
        return R * math.log(original / (turns * 2 * math.pi)) / math.log(p["rope_theta"])

    R = len(powers)
    low, high = pair(p.get("beta_fast") or 32), pair(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    # transformers and the paper's code limit it to 2R - 1, although there are R pairs.
    low, high = max(low, 0), min(high, 2 * R - 1)
    # As in transformers, to avoid an empty ramp.
    width = (high - low) or 0.001
    unscaled = 1 - np.clip((np.arange(R, dtype=np.float32) - low) / width, 0, 1)
    frequencies = 1 / (factor * powers) * (1 - unscaled) + 1 / powers * unscaled
    scale = p.get("attention_factor")
    if scale is None:
        mscale, all_dim = p.get("mscale"), p.get("mscale_all_dim")
        scale = stretch(mscale) / stretch(all_dim) if mscale and all_dim else stretch()
    return frequencies, float(scale)


def _longrope(
    powers: np.ndarray,
    factor: float,
    original: int,
    length: Array | int | None,
    p: Mapping[str, Any],
) -> tuple[Array | np.ndarray, float]:
    frequencies = []
    for name in ("short_factor", "long_factor"):
        if len(p[name]) != len(powers):
            raise ValueError(
                f"rope_parameters.{name}: must have {len(powers)} entries, one for each rotated "
                f"pair, not {len(p[name])}"
            )
        frequencies.append(np.float32(1.0) / (np.asarray(p[name], np.float32) * powers))
    scale = p.get("attention_factor")
    if scale is None:
        stretched = 1 + math.log(max(factor, 1.0)) / math.log(original)
        scale = math.sqrt(stretched)
    if length is None:
        return frequencies[0], float(scale)
    beyond = (jnp.asarray(length) > original)[..., None]
    short, long = (_like(beyond, x) for x in frequencies)
    return jnp.where(beyond, long, short), float(scale)


def document_lengths(
    positions: Int[Array, "B T"], segments: Int[Array | np.ndarray, "B T"] | None
) -> Int[Array, "B T"]:
    """Returns the length of each token's document: its largest position plus one.

    Works for tokens in any order. `segments` may hold any numbers; without it, a sequence is one
    document.
    """
    if segments is None:
        return jnp.broadcast_to(positions.max(1, keepdims=True) + 1, positions.shape)
    T = positions.shape[1]

    def sequence_lengths(positions, segments):
        _, number = jnp.unique(segments, return_inverse=True, size=T)
        return jax.ops.segment_max(positions, number, num_segments=T)[number] + 1

    return jax.vmap(sequence_lengths)(positions, segments)


def document_means(
    x: Float[Array, "B T D"], segments: Int[Array | np.ndarray, "B T"] | None
) -> Float[Array, "B T D"]:
    """Returns the mean over each token's document, summed in float32. Tokens and `segments` are as
    in `document_lengths`."""
    values, T = x.astype(jnp.float32), x.shape[1]
    if segments is None:
        return jnp.broadcast_to(values.mean(1, keepdims=True), x.shape).astype(x.dtype)

    def one(values, segments):
        _, number = jnp.unique(segments, return_inverse=True, size=T)
        total = jax.ops.segment_sum(values, number, num_segments=T)
        count = jax.ops.segment_sum(jnp.ones(T), number, num_segments=T)
        return (total / jnp.maximum(count, 1.0)[:, None])[number]

    return jax.vmap(one)(values, segments).astype(x.dtype)


def rope(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    frequencies: Float[Array | np.ndarray, "... R"],
    factor: Float[Array, ""] | float = 1.0,
) -> Float[Array, "B T N H"]:
    """Rotates the first 2R of the H features by position · frequency and scales them by `factor`;
    the other features pass unchanged. Uses Hugging Face's half-split layout: feature i is paired
    with feature i + R. Frequencies are `[R]`, or `[B, T, R]` if they differ between tokens."""
    *tokens, R = frequencies.shape
    angle = positions.astype(jnp.float32)[..., None, None] * jnp.asarray(frequencies).reshape(
        *(tokens or (1, 1)), 1, R
    )
    cos, sin = jnp.cos(angle) * factor, jnp.sin(angle) * factor
    a, b = x[..., :R].astype(jnp.float32), x[..., R : 2 * R].astype(jnp.float32)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
    return rotated if 2 * R == x.shape[-1] else jnp.concatenate([rotated, x[..., 2 * R :]], -1)


def alibi_slopes(heads: int, *, interleaved: bool = False) -> Float[np.ndarray, "heads"]:
    """Returns the float32 ALiBi slope of each of N heads.

    For N a power of two, the slopes are 2^(-8 · i / N), i = 1..N. For any other N, the slopes of
    the next smaller power are followed by every second slope of the next larger power. With
    `interleaved`, the first N of the next larger power's even slopes, then its odd ones.

    Press et al. 2021, arXiv 2108.12409, and its code; `interleaved`: MPT, `build_mpt_alibi_tensor`
    in transformers.
    """

    def powers(n):
        return 2.0 ** (-8.0 * np.arange(1, n + 1) / n)

    below = 2 ** math.floor(math.log2(heads))
    if below == heads:
        slopes = powers(heads)
    elif interleaved:
        slopes = np.concatenate([powers(2 * below)[1::2], powers(2 * below)[::2]])[:heads]
    else:
        slopes = np.concatenate([powers(below), powers(2 * below)[::2]])[:heads]
    return slopes.astype(np.float32)


def extend_positions(
    table: Float[Array | np.ndarray, "P D"], rows: int, offset: int = 0
) -> Float[Array | np.ndarray, "Q D"]:
    """Resizes a learned embedding to `rows` positions by repeating or truncating the table's rows
    after the `offset` rows that precede position 0. A NumPy table gives a NumPy array.

    Raises:
      ValueError: the table has no rows after the first `offset`.
    """
    own = table.shape[0] - offset
    if own < 1:
        raise ValueError(
            f"offset={offset}: must be less than the table's {table.shape[0]} rows; give a longer "
            "table or a smaller offset"
        )
    return table[np.concatenate([np.arange(offset), offset + np.arange(rows) % own])]
