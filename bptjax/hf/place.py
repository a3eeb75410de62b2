"""Parameters put on devices, each where its sharding says."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import ml_dtypes  # noqa: F401  Without it NumPy knows no bfloat16.
import numpy as np
from flax import nnx

from bptjax.models.config import ModelConfig
from bptjax.ops.position import extend_positions


def put(path: str, leaf: Any, array: np.ndarray, dtype: Any = None) -> Any:
    """The abstract parameter `leaf` with this array, of its shape, in it, where it lives, in the
    dtype it has there, or in `dtype`.
    """
    wanted = leaf.get_value()
    array = np.ascontiguousarray(array, dtype or wanted.dtype)
    return leaf.replace(
        jax.make_array_from_callback(wanted.shape, wanted.sharding, array.__getitem__)
    )


def place(
    model: Any,
    params: Iterator[tuple[str, np.ndarray]],
    config: ModelConfig,
    put: Callable[[str, Any, np.ndarray], Any] = put,
) -> Any:
    """The abstract `model` (ShapeDtypeStructs with shardings) with these arrays in it, each `put`
    where it lives, resized for the config.
    """
    leaves, tree = jax.tree.flatten_with_path(model, is_leaf=lambda x: isinstance(x, nnx.Variable))
    at = {path_of(path): i for i, (path, _) in enumerate(leaves)}
    found: list[Any] = [None] * len(leaves)
    for path, array in params:
        found[at[path]] = put(path, leaves[at[path]][1], resized(path, array, config))
    missing = [path for path, i in at.items() if found[i] is None]
    assert not missing, missing
    return jax.tree.unflatten(tree, found)


def resized(path: str, array: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Returns a checkpoint's parameter in the shape that the config gives it: learned positions
    are repeated up to `max_position_embeddings`, and embeddings get rows for added tokens, the
    mean of the others; all else stays.
    """
    if path in ("embedding", "head") and len(array) < config.V:
        mean = array.mean(0, dtype=np.float32, keepdims=True).astype(array.dtype)
        return np.concatenate([array, mean.repeat(config.V - len(array), 0)])
    if path != "positions":
        return array
    return np.asarray(
        extend_positions(array, config.max_position_embeddings or 0, config.position_offset)
    )


def path_of(path: tuple) -> str:
    """`layers.query.kernel` of a parameter's place in the model."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
