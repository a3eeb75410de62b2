"""Parameters by path: their source on disk, and their way into a model on its devices."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import ml_dtypes  # noqa: F401  Without it NumPy knows no bfloat16.
import numpy as np
from flax import nnx

from bptjax.models.config import ModelConfig
from bptjax.ops.per_device import REPLICATED, ShardedOver
from bptjax.ops.position import extend_positions
from bptjax.parallel.mesh import RULES
from bptjax.run.progress import Progress

# Index into the first axes of an array: layer, then expert. Empty for the full array.
Index = tuple[int, ...]


class ArraySpec(NamedTuple):
    """Dtype, by name, and shape of an array on disk."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@runtime_checkable
class ParameterSource(Protocol):
    """Parameters on disk, by path. Arrays have the dtypes of the files.

    Attributes:
      specs: dtype and shape of each parameter, including stacked axes.
      files: files that identify these parameters byte for byte.
    """

    specs: dict[str, ArraySpec]
    files: tuple[Path, ...]

    def read(self, path: str, index: Index = ()) -> np.ndarray:
        """Reads a parameter, or the slice of it at `index` into its first axes."""
        ...

    def slices(self) -> Iterator[tuple[str, Index, np.ndarray]]:
        """Yields (path, index, array) of every parameter, in slices as small as the files'."""
        ...


def stacked(
    source: ParameterSource, show: Callable[[str], None] | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (path, array) of every parameter. Memory holds one parameter at a time, or a group
    that the files fuse. Shows progress, including the caller's work; see `Progress` for `show`."""
    stacks: dict[str, np.ndarray] = {}
    size = sum(spec.nbytes for spec in source.specs.values())
    with Progress("loading weights", size, show) as progress:
        for path, index, part in source.slices():
            shape = source.specs[path].shape
            if not index:
                yield path, part
            else:
                if path not in stacks:
                    stacks[path] = np.empty(shape, part.dtype)
                stacks[path][index] = part
                if index == tuple(n - 1 for n in shape[: len(index)]):
                    yield path, stacks.pop(path)
            progress.advance(part.nbytes)


def is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def put_param(leaf: Any, array: np.ndarray, dtype: Any = None) -> Any:
    """Returns the abstract parameter `leaf` filled with `array`, on the devices of its sharding.

    Args:
      dtype: dtype on the devices; defaults to the dtype of `leaf`.
    """
    wanted = leaf.get_value()
    array = np.ascontiguousarray(array, dtype or wanted.dtype)
    return leaf.replace(
        jax.make_array_from_callback(wanted.shape, wanted.sharding, array.__getitem__)
    )


def fill_model(
    model: Any,
    params: Iterator[tuple[str, np.ndarray]],
    config: ModelConfig,
    put: Callable[[str, Any, np.ndarray], Any] | None = None,
) -> Any:
    """Fills the abstract `model` (ShapeDtypeStructs with shardings) with its parameters.

    Args:
      params: (path, array) of every parameter; arrays are resized to the config.
      put: as `put_param`, for the parameter at a path; by default, `put_param` for all.
    """
    leaves, tree = jax.tree.flatten_with_path(model, is_leaf=is_variable)
    numbers = {param_path(path): i for i, (path, _) in enumerate(leaves)}
    filled: list[Any] = [None] * len(leaves)
    for path, array in params:
        i = numbers[path]
        leaf, array = leaves[i][1], resize_param(path, array, config)
        filled[i] = put_param(leaf, array) if put is None else put(path, leaf, array)
    missing = [path for path, i in numbers.items() if filled[i] is None]
    assert not missing, missing
    return jax.tree.unflatten(tree, filled)


def resize_param(path: str, array: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Resizes a checkpoint's parameter to the shape that the config needs.

    Learned positions are repeated up to `max_position_embeddings`. Embeddings of added tokens are
    the mean of the existing embeddings. Other parameters stay as they are.
    """
    if path in ("embedding", "head", "head_bias") and len(array) < config.V:
        mean = array.mean(0, dtype=np.float32, keepdims=True).astype(array.dtype)
        return np.concatenate([array, mean.repeat(config.V - len(array), 0)])
    if path != "positions":
        return array
    return np.asarray(
        extend_positions(array, config.max_position_embeddings or 0, config.position_offset)
    )


def expert_placement(tree: Any) -> Any:
    """Returns the `per_device` placement of each parameter of a layer, as a tree prefix: sharded
    over the mesh axes of the experts if the first axis is the experts, otherwise replicated."""

    def place(v):
        of_experts = isinstance(v, nnx.Variable) and v.axes[:1] == ("experts",)
        return ShardedOver(RULES["experts"]) if of_experts else REPLICATED

    return jax.tree.map(place, tree, is_leaf=is_variable)


def slice_placement(tree: Any) -> Any:
    """Returns the placement of each parameter of a layer in `parallel.experts.sum_over_slices`, as
    a tree prefix: sharded along the experts' width if the parameter has that axis, otherwise
    replicated."""

    def place(v):
        if not isinstance(v, nnx.Variable) or "mlp" not in v.axes:
            return REPLICATED
        return ShardedOver(RULES["mlp"], v.axes.index("mlp"))

    return jax.tree.map(place, tree, is_leaf=is_variable)


def param_path(path: tuple) -> str:
    """Formats a key path of the model as a dotted string, such as `layers.query.kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
