"""Checks of public operations' arguments, as far as the arguments are static."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np


def check_chunk(**chunks: int) -> None:
    """Checks chunk sizes.

    Raises:
      ValueError: a chunk is below 1 token.
    """
    for name, chunk in chunks.items():
        if chunk < 1:
            raise ValueError(f"{name}={chunk}: must be at least 1 token")


def check_softcap(softcap: float | None, name: str = "softcap") -> None:
    """Checks a soft cap.

    Raises:
        ValueError: the cap is not positive and finite; logits would become 0 or NaN.
    """
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise ValueError(f"{name}={softcap}: must be positive and finite; leave it out for no cap")


def check_rate(**rates: float) -> None:
    """Checks dropout rates.

    Raises:
      ValueError: a rate is not a probability below 1.
    """
    for name, rate in rates.items():
        if not 0.0 <= rate < 1.0:
            raise ValueError(f"{name}={rate}: must be in [0, 1)")


def check_qkv(q: Any, k: Any, v: Any) -> None:
    """Checks shapes and dtypes of queries `[B, T, N, H]`, keys and values `[B, S, K, H]`.

    Raises:
        ValueError: mismatched shapes or dtypes, or an empty array.
    """
    arrays = {"q": q, "k": k, "v": v}
    for name, x in arrays.items():
        if x.ndim != 4 or 0 in x.shape:
            raise ValueError(f"{name}: must be [batch, tokens, heads, head size], not {x.shape}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name}: must be of a float dtype, not {x.dtype}")
    if k.shape != v.shape:
        raise ValueError(f"keys {k.shape} and values {v.shape}: must have the same shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"queries {q.shape} and keys {k.shape}: must have the same batch and head size"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads: must be a multiple of {k.shape[2]} key heads")
    if not q.dtype == k.dtype == v.dtype:
        dtypes = ", ".join(f"{name} {x.dtype}" for name, x in arrays.items())
        raise ValueError(f"{dtypes}: must have the same dtype; cast them")


def check_sinks(sinks: Any, heads: int) -> None:
    """Checks attention sinks.

    Raises:
      ValueError: the sinks are not one float per query head.
    """
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks: must be [{heads}], one logit per query head, not {sinks.shape}")
    if sinks is not None and not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ValueError(f"sinks: must be of a float dtype, not {sinks.dtype}")


def check_labels(labels: Any, classes: int, ignore: int) -> None:
    """Checks the dtype of labels, and their range if they are a NumPy array.

    Raises:
      ValueError: labels are not integers, or one is neither a class nor `ignore`.
    """
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"labels: must be integers, not {labels.dtype}")
    if isinstance(labels, np.ndarray):
        bad = labels[(labels != ignore) & ((labels < 0) | (labels >= classes))]
        if bad.size:
            raise ValueError(
                f"labels: must be in [0, {classes}), or {ignore} for tokens without a loss, not "
                f"{bad[0]}"
            )


def check_tokens(leaves: list[Any]) -> None:
    """Checks that arrays `[B, T, ...]` are not empty and agree in batch and tokens.

    Raises:
      ValueError: there is no array, one is empty, or their batch or tokens differ.
    """
    shapes = {x.shape[:2] for x in leaves}
    if len(shapes) != 1 or any(len(shape) < 2 or 0 in shape for shape in shapes):
        shown = ", ".join(map(str, sorted(shapes))) or "no arrays"
        raise ValueError(
            f"x: must be arrays [batch, tokens, ...] of one batch and length, not {shown}"
        )
