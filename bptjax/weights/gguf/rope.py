"""Rotary positions in the metadata and tensors of GGUF files."""

import math
from typing import Any

import numpy as np

from bptjax.models.config import ModelConfig
from bptjax.ops.position import LONG, rope_frequencies, rotated_features
from bptjax.weights.gguf.keys import Keys

FREQUENCIES, LONG_FACTORS, SHORT_FACTORS = (
    f"rope_{name}.weight" for name in ("freqs", "factors_long", "factors_short")
)
# Default of llama.cpp and of transformers.
BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
LLAMA3 = "factor", "low_freq_factor", "high_freq_factor", LONG[0]
# Values of Llama 3.1 and later, which a file's factors usually come from.
USUAL = 1.0, 4.0, 8192


def full(config: ModelConfig) -> dict[str, Any]:
    """Returns the rotary parameters of full-attention layers."""
    return config.rope("full_attention")


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys of rotary positions.

    Raises:
      ValueError: llama.cpp does not compute this scaling.
    """
    if config.position_embedding != "rope":
        return {}
    p = full(config)
    kind = p.get("rope_type", "default")
    size = config.full_attention.head_dim or config.H
    keys: dict[str, Any] = {
        "rope.freq_base": float(p["rope_theta"]),
        "rope.dimension_count": rotated_features(size, p),
    }
    if "sliding_attention" in config.rope_parameters:
        keys["rope.freq_base_swa"] = float(config.rope("sliding_attention")["rope_theta"])
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(_factor(config, p))}
    if kind == "yarn":
        keys["rope.scaling.original_context_length"] = p[LONG[0]]
        keys |= {
            f"rope.scaling.yarn_{name}": float(p[name])
            for name, usual in BETAS.items()
            if p.get(name) and p[name] != usual
        }
        _, stretch = rope_frequencies(
            rotated_features(size, p), p, max_position_embeddings=config.max_position_embeddings
        )
        own = stretch / _stretch(keys["rope.scaling.factor"])
        if not math.isclose(own, 1, rel_tol=1e-6):
            keys["rope.scaling.attn_factor"] = own
    if kind == "longrope":
        original = p.get(LONG[0]) or config.max_position_embeddings
        _, stretch = rope_frequencies(
            rotated_features(size, p), p, max_position_embeddings=config.max_position_embeddings
        )
        keys |= {
            "rope.scaling.type": kind,
            "rope.scaling.original_context_length": original,
            "rope.scaling.attn_factor": float(stretch),
        }
    if kind == "dynamic":
        raise ValueError(f"rope_type={kind}: llama.cpp does not compute it")
    return keys


def _factor(config: ModelConfig, p: dict[str, Any]) -> float:
    return p.get("factor") or (config.max_position_embeddings or 0) / p[LONG[0]]


def _stretch(factor: float) -> float:
    """Returns llama.cpp's factor of yarn on cos and sin."""
    return 1 + 0.1 * math.log(max(factor, 1))


def rope_tensors(config: ModelConfig) -> dict[str, np.ndarray]:
    """Returns the tensors of rotary positions, by name."""
    if config.position_embedding != "rope":
        return {}
    p = full(config)
    kind, size = p.get("rope_type", "default"), config.full_attention.head_dim or config.H
    if kind == "longrope":
        names = {LONG_FACTORS: "long_factor", SHORT_FACTORS: "short_factor"}
        return {name: np.array(p[key], np.float32) for name, key in names.items()}
    if kind != "llama3":
        return {}
    plain, _ = rope_frequencies(size, {"rope_theta": p["rope_theta"]})
    slowed, _ = rope_frequencies(size, p, max_position_embeddings=config.max_position_embeddings)
    return {FREQUENCIES: np.asarray(plain / slowed, np.float32)}


def read_rope(keys: Keys, size: int, partial: bool = False) -> dict[str, Any]:
    """Returns rotary parameters from the keys and tensors.

    Args:
      size: features of a head.
      partial: return the partial factor even if it is 1.
    """
    p: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base", 10000.0)}
    rotated = keys.integer("rope.dimension_count", size)
    if rotated != size or partial:
        p["partial_rotary_factor"] = rotated / size
    if FREQUENCIES in keys.shapes:
        return p | _read_llama3(keys, p["rope_theta"], rotated)
    kind = keys.get("rope.scaling.type")
    factor = keys.number("rope.scaling.factor", keys.get("rope.scale_linear") or 0.0)
    if LONG_FACTORS in keys.shapes:
        original = keys.integer("rope.scaling.original_context_length")
        names = {LONG_FACTORS: "long_factor", SHORT_FACTORS: "short_factor"}
        p |= {key: [_short(x) for x in keys.read(name)] for name, key in names.items()}
        p |= {"rope_type": "longrope", LONG[0]: original}
        if stretch := keys.number("rope.scaling.attn_factor", 0.0):
            p["attention_factor"] = stretch
        return p
    if kind == "yarn" and factor:
        context = keys.integer("context_length")
        original = keys.integer("rope.scaling.original_context_length", context)
        p |= {"rope_type": kind, "factor": factor, LONG[0]: original}
        for name, usual in BETAS.items() if keys.arch == "mistral3" else ():
            value = keys.number(f"rope.scaling.yarn_{name}", usual)
            p |= {name: value} if value != usual else {}
        own = keys.number("rope.scaling.attn_factor", 1.0)
        if weight := keys.number("rope.scaling.yarn_log_multiplier", 0.0):
            own /= 1 + 0.1 * weight * math.log(max(factor, 1))
        if own != 1:
            p["attention_factor"] = own * _stretch(factor)
        return p
    if kind in (None, "linear") and factor not in (0.0, 1.0):
        return p | {"rope_type": "linear", "factor": factor}
    if kind not in (None, "linear", "none"):
        raise ValueError(f"{keys.arch}.rope.scaling.type={kind!r}: is not supported")
    return p | {"rope_type": "default"}


def _short(x: float) -> float:
    """Returns the shortest decimal number that rounds to the same float32."""
    return float(str(np.float32(x)))


def _read_llama3(keys: Keys, theta: float, rotated: int) -> dict[str, Any]:
    """Returns the parameters of rope_type llama3 that give the file's factors.

    Raises:
      ValueError: no parameters give these factors.
    """
    factors = keys.read(FREQUENCIES).astype(np.float64)
    plain = np.asarray(rope_frequencies(rotated, {"rope_theta": theta})[0], np.float64)
    if factors.shape != plain.shape or not (factors >= 1).all():
        raise ValueError(f"{FREQUENCIES}: must have one factor, at least 1, for each rotated pair")
    factor = _short(factors.max())
    if factor == 1:
        return {"rope_type": "default"}
    candidates = [USUAL]
    # Where factors change, 1 / factor = share + (1 - share) / max(factor), and the share is linear
    # in the frequency: (original · frequency / 2π - low) / (high - low).
    turns, between = plain / (2 * math.pi), (factors > 1 + 1e-6) & (factors < factor * (1 - 1e-6))
    x, share = turns[between], (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
    slope, start = 0.0, 0.0
    if len(x) > 1:
        slope, start = np.polyfit(x, share, 1)
    elif len(x) == 1:
        # The share is 1 at all greater frequencies and 0 at all smaller ones.
        slope = max(*((1 - share) / (turns[turns > x] - x)), *(share / (x - turns[turns < x])), 0.0)
        start = share[0] - slope * x[0]
    if start < 0:
        # The three lengths are known up to a factor.
        original = USUAL[2]
        scale = original / slope
        candidates.append((float(-start * scale), float((1 - start) * scale), original))
    for low, high, original in candidates:
        p = dict(zip(LLAMA3, (factor, low, high, original), strict=True))
        got, _ = rope_frequencies(rotated, p | {"rope_theta": theta, "rope_type": "llama3"})
        if np.allclose(plain / got, factors, rtol=1e-4):
            return {"rope_type": "llama3"} | p
    raise ValueError(f"{FREQUENCIES}: must be the factors of Llama 3.1's scaling")
