"""Where a token stands: rotary embedding and its scalings, ALiBi slopes, learned positions."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

# Scalings whose frequencies depend on the length of the document.
BY_LENGTH = ("dynamic", "longrope")

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
    dim: int,
    parameters: Mapping[str, Any],
    *,
    max_position_embeddings: int | None = None,
    length: Int[Array, "..."] | int | None = None,
) -> tuple[Float[Array | np.ndarray, "... R"], float]:
    """Radians per token of each rotated pair, float32, and the factor on cos and sin.

    Args:
      dim: rotated features of a head, 2R: what partial_rotary_factor, which is not read, leaves.
      parameters: in Hugging Face's schema: rope_theta, rope_type and what that needs. A key that is
        None counts as left out.
      max_position_embeddings: tokens that the positions were made for. Stands in for
        original_max_position_embeddings, and over it for the factor of yarn and longrope.
      length: tokens of the document, a number or one for each token, which `dynamic` and
        `longrope` depend on; within the original length if left out. May be traced. The result is
        NumPy's unless the type is one of these two and `length` is given.

    Raises:
      ValueError: an unknown rope_type or key, or one that is missing or not positive; `dim` is
        odd; a list of longrope is not of R entries.

    theta^(-2i / dim): Su et al. 2021, arXiv 2104.09864, Section 3.2.2. yarn: Peng et al. 2023,
    arXiv 2309.00071. longrope: Ding et al. 2024, arXiv 2402.13753. All as `transformers` defines
    them in `modeling_rope_utils`, and rounded as there.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in KEYS:
        raise ValueError(f"rope_type={kind!r} is not known; there are {', '.join(KEYS)}")
    p = {k: v for k, v in parameters.items() if v is not None}
    _check_keys(kind, p)
    if dim < 2 or dim % 2:
        raise ValueError(
            f"dim={dim}: features are rotated in pairs; change head_dim or partial_rotary_factor "
            "so that their product is even"
        )
    powers = np.float32(p["rope_theta"]) ** (np.arange(0, dim, 2, dtype=np.float32) / dim)
    plain = 1 / powers
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / np.float32(p["factor"]), 1.0
    if kind == "dynamic":
        longest = _needed(
            kind, "max_position_embeddings (max_position_embeddings)", max_position_embeddings
        )
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
        # With its None: an explicit truncate=None is false to transformers.
        return _yarn(powers, float(factor), original, parameters)
    return _longrope(powers, float(factor), original, length, p)


def _check_keys(kind: str, p: Mapping[str, Any]) -> None:
    needed, optional = KEYS[kind]
    for key in ("rope_theta", *needed):
        if key not in p:
            raise ValueError(f"rope_type={kind} needs rope_parameters.{key}; set it")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *needed, *optional}
    unknown = sorted(p.keys() - known)
    if unknown:
        raise ValueError(
            f"rope_type={kind} does not use rope_parameters.{unknown[0]}; leave it out"
        )
    for key in sorted(p.keys() - {"rope_type", "type", "truncate"}):
        values = np.asarray(p[key])
        number = values.dtype.kind in "iuf"
        # The weights of yarn's factor may be 0: that is none.
        least = 0 if key.startswith("mscale") else np.finfo(float).tiny
        if not number or not ((values >= least) & np.isfinite(values)).all():
            raise ValueError(f"rope_parameters.{key}={p[key]!r} is not positive")


def _needed(kind: str, name: str, value: Any) -> Any:
    if value is None:
        raise ValueError(f"rope_type={kind} needs {name}; set it")
    return value


def _dynamic(
    plain: np.ndarray, longest: int, length: Array | int, p: Mapping[str, Any]
) -> Float[Array, "... R"]:
    """theta · grown^(dim / (dim - 2)) in place of theta: the slowest pair is slowed by `grown`."""
    beyond = jnp.maximum(jnp.asarray(length) - longest, 0).astype(jnp.float32)
    grown = (1 + p["factor"] * (beyond / longest))[..., None]
    R = len(plain)
    powers = _like(grown, -np.arange(R, dtype=np.float32) / max(R - 1, 1))
    return _like(grown, plain) * grown**powers


def _like(x: Array, table: np.ndarray) -> np.ndarray:
    """`table` of R entries with as many axes as x."""
    return table.reshape((1,) * (x.ndim - 1) + table.shape)


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
    powers: np.ndarray, factor: float, original: int, p: Mapping[str, Any]
) -> tuple[np.ndarray, float]:
    """Pairs that turn less than beta_slow times in the original length are slowed by `factor`,
    those that turn more than beta_fast times kept, those between blended."""

    def stretch(weight=1.0):
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    def pair(turns):
        """Which pair makes so many turns in the original length."""
        return R * math.log(original / (turns * 2 * math.pi)) / math.log(p["rope_theta"])

    R = len(powers)
    low, high = pair(p.get("beta_fast") or 32), pair(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    # Up to 2R - 1, as in transformers and the paper's code, though there are R pairs.
    low, high = max(low, 0), min(high, 2 * R - 1)
    # transformers' guard against an empty ramp.
    width = (high - low) or 0.001
    kept = 1 - np.clip((np.arange(R, dtype=np.float32) - low) / width, 0, 1)
    frequencies = 1 / (factor * powers) * (1 - kept) + 1 / powers * kept
    scale = p.get("attention_factor")
    if scale is None:
        one, other = p.get("mscale"), p.get("mscale_all_dim")
        scale = stretch(one) / stretch(other) if one and other else stretch()
    return frequencies, float(scale)


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
                f"rope_parameters.{name} has {len(p[name])} entries for {len(powers)} pairs; "
                "give one for each"
            )
        each.append(np.float32(1.0) / (np.asarray(p[name], np.float32) * powers))
    scale = p.get("attention_factor")
    if scale is None:
        stretched = 1 + math.log(max(factor, 1.0)) / math.log(original)
        scale = math.sqrt(stretched)
    if length is None:
        return each[0], float(scale)
    beyond = (jnp.asarray(length) > original)[..., None]
    short, long = (_like(beyond, x) for x in each)
    return jnp.where(beyond, long, short), float(scale)


def document_lengths(
    positions: Int[Array, "B T"], segments: Int[Array | np.ndarray, "B T"] | None
) -> Int[Array, "B T"]:
    """Returns the length of each token's document: its largest position, plus one.

    Works for tokens in any order. `segments` holds any document numbers; without it, a sequence is
    one document.
    """
    if segments is None:
        return jnp.broadcast_to(positions.max(1, keepdims=True) + 1, positions.shape)
    T = positions.shape[1]

    def one(positions, segments):
        _, number = jnp.unique(segments, return_inverse=True, size=T)
        return jax.ops.segment_max(positions, number, num_segments=T)[number] + 1

    return jax.vmap(one)(positions, segments)


def rope(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    frequencies: Float[Array | np.ndarray, "... R"],
    factor: Float[Array, ""] | float = 1.0,
) -> Float[Array, "B T N H"]:
    """Rotates the first 2R of the H features by position · frequency, times `factor`; the others
    pass. Hugging Face's half-split layout: feature i turns with feature i + R. The frequencies are
    `[R]`, or `[B, T, R]` where they differ from token to token."""
    *tokens, R = frequencies.shape
    angle = positions.astype(jnp.float32)[..., None, None] * jnp.asarray(frequencies).reshape(
        *(tokens or (1, 1)), 1, R
    )
    cos, sin = jnp.cos(angle) * factor, jnp.sin(angle) * factor
    a, b = x[..., :R].astype(jnp.float32), x[..., R : 2 * R].astype(jnp.float32)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
    return turned if 2 * R == x.shape[-1] else jnp.concatenate([turned, x[..., 2 * R :]], -1)


def alibi_slopes(heads: int, *, interleaved: bool = False) -> Float[np.ndarray, "heads"]:
    """ALiBi's slope of each head, float32: 2^(-8 · i / N), i = 1..N, for a power of two. For other
    numbers, those of the next smaller one followed by every other one of the next larger; or
    `interleaved`, the even ones of the next larger followed by the odd ones, cut to N.

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
    """A learned embedding of `rows` positions out of a shorter or longer one: its rows again and
    again, after the `offset` rows before that of position 0. NumPy's of NumPy's, JAX's of JAX's.

    Raises:
      ValueError: the table has no rows after the first `offset`.
    """
    own = table.shape[0] - offset
    if own < 1:
        raise ValueError(
            f"offset={offset} leaves none of the table's {table.shape[0]} rows to repeat; "
            "give a longer table or a smaller offset"
        )
    return table[np.concatenate([np.arange(offset), offset + np.arange(rows) % own])]
