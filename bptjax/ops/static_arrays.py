"""Pytrees in which NumPy arrays are static."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def split_static(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Returns the leaves that are not NumPy arrays, and a function that rebuilds the tree from
    them. Transformations of JAX trace their arguments, but not the NumPy arrays of this function,
    which kernels read to find empty tiles at trace time."""
    leaves, structure = jax.tree.flatten(tree)
    static = [y if isinstance(y, np.ndarray) else None for y in leaves]
    traced = [y if s is None else None for y, s in zip(leaves, static, strict=True)]

    def rebuild(traced):
        return structure.unflatten(
            [t if s is None else s for t, s in zip(traced, static, strict=True)]
        )

    return traced, rebuild
