"""Rules that convert tensors of Hugging Face files to bptjax's parameters, and back."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from bptjax.models.config import ModelConfig
from bptjax.models.params import Index

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorRule:
    """A tensor of the file and the parameters that it holds.

    A name with fields, such as `layers.{layer}.experts.{expert}.up.weight`, stands for one tensor
    per layer and expert. Its parameters are stacked along one leading axis per field, in this
    order. `families.family.field_values` lists the fields.

    Attributes:
      hf: name in the file.
      shape: shape of one tensor in the file.
      ours: paths of the parameters.
      split: converts one tensor to the parameters, without the stacked axes.
      join: converts the parameters to the tensor; the exact inverse of `split`.
      inputs: number of input axes of a linear layer's kernels; 0 for other tensors.
      dtype: dtype in every file; None for the dtype of the other weights.
    """

    hf: str
    shape: Shape
    ours: tuple[str, ...]
    split: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    join: Callable[..., np.ndarray]
    inputs: int = 0
    dtype: str | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the stacked axes."""
        return tuple(re.findall(r"{(\w+)}", self.hf))

    def stacked(self, values: Mapping[str, Sequence[int]]) -> Shape:
        """Returns the sizes of the stacked axes; see `names`."""
        return tuple(len(values[field]) for field in self.fields)

    def names(self, values: Mapping[str, Sequence[int]]) -> dict[Index, str]:
        """Returns the names of the tensors by index into the stacked axes, last axis fastest.

        Args:
          values: layer or expert indices that each field stands for, in axis order.
        """
        numbers = product(*(values[field] for field in self.fields))
        names = (self.hf.format(**dict(zip(self.fields, n, strict=True))) for n in numbers)
        return dict(zip(np.ndindex(self.stacked(values)), names, strict=True))


def identity(hf: str, ours: str, shape: Shape, file_shape: Shape | None = None) -> TensorRule:
    """Returns the rule of a parameter that the file stores in the same order, possibly with another
    number of axes."""
    file_shape = shape if file_shape is None else file_shape
    return TensorRule(
        hf, file_shape, (ours,), lambda w: (w.reshape(shape),), lambda x: x.reshape(file_shape)
    )


def linear(
    hf: str,
    ours: str,
    inputs: Shape,
    outputs: Shape,
    *,
    bias: bool,
    transposed: bool = False,
    order: Sequence[int] | None = None,
) -> Iterator[TensorRule]:
    """Yields the rules of a linear layer, whose weight is [outputs, inputs] in the file, or
    [inputs, outputs] if `transposed`.

    Args:
      order: positions in the file of the last axis of `outputs`, if the file has another order.
    """
    I, O = prod(inputs), prod(outputs)  # noqa: E741
    place = np.arange(outputs[-1]) if order is None else np.asarray(order)
    back = np.argsort(place)

    def split(w):
        x = (w if transposed else w.T).reshape(inputs + outputs)
        return (x if order is None else x[..., place],)

    def join(x):
        x = (x if order is None else x[..., back]).reshape(I, O)
        return x if transposed else x.T

    shape = (I, O) if transposed else (O, I)
    kernel = (f"{ours}.kernel",)
    yield TensorRule(f"{hf}.weight", shape, kernel, split, join, inputs=len(inputs))
    if bias:
        yield TensorRule(
            f"{hf}.bias",
            (O,),
            (f"{ours}.bias",),
            lambda b: (b.reshape(outputs)[..., place],),
            lambda b: b[..., back].reshape(O),
        )


def fused(
    hf: str,
    ours: tuple[str, ...],
    inputs: int,
    outputs: tuple[Shape, ...],
    *,
    bias: bool,
    groups: int = 1,
    transposed: bool = False,
) -> Iterator[TensorRule]:
    """Yields the rules of several linear layers that the file stores as one. `outputs` are their
    output shapes.

    Args:
      groups: number of groups of heads. The file stores outputs group by group, and each layer has
        an equal share of every group.
    """
    sizes = [prod(shape) for shape in outputs]
    O = sum(sizes)  # noqa: E741
    ends = np.cumsum(sizes)[:-1] // groups

    def separate(w: np.ndarray) -> list[np.ndarray]:
        """Splits [O, ...] into the outputs of each layer."""
        parts = np.split(w.reshape(groups, -1, *w.shape[1:]), ends, axis=1)
        return [x.reshape(-1, *w.shape[1:]) for x in parts]

    def combine(layers: Sequence[np.ndarray]) -> np.ndarray:
        """Inverts `separate`."""
        parts = [x.reshape(groups, -1, *x.shape[1:]) for x in layers]
        return np.concatenate(parts, 1).reshape(O, *layers[0].shape[1:])

    def split(w):
        layers = separate(w.T if transposed else w)
        return tuple(x.T.reshape(inputs, *s) for x, s in zip(layers, outputs, strict=True))

    def join(*kernels):
        w = combine([x.reshape(inputs, -1).T for x in kernels])
        return w.T if transposed else w

    def split_bias(b):
        return tuple(x.reshape(s) for x, s in zip(separate(b), outputs, strict=True))

    def join_bias(*biases):
        return combine([x.reshape(-1) for x in biases])

    kernels, biases = (tuple(f"{o}.{n}" for o in ours) for n in ("kernel", "bias"))
    shape = (inputs, O) if transposed else (O, inputs)
    yield TensorRule(f"{hf}.weight", shape, kernels, split, join, inputs=1)
    if bias:
        yield TensorRule(f"{hf}.bias", (O,), biases, split_bias, join_bias)


def conv(hf: str, ours: str, patch: Shape, outputs: int) -> Iterator[TensorRule]:
    """Yields the rules of a convolution whose stride is its kernel size: a linear layer applied to
    each patch [channels, height, width]."""
    size = prod(patch)

    def split(w):
        return (w.reshape(outputs, size).T,)

    def join(x):
        return x.T.reshape(outputs, *patch)

    yield TensorRule(f"{hf}.weight", (outputs, *patch), (f"{ours}.kernel",), split, join)
    yield identity(f"{hf}.bias", f"{ours}.bias", (outputs,))


def norm(hf: str, ours: str, c: ModelConfig, size: int | None = None) -> Iterator[TensorRule]:
    """Yields the rules of a norm's scale and bias, if the config has them."""
    shape = (c.hidden_size if size is None else size,)
    if c.norms.scale:
        yield identity(f"{hf}.weight", f"{ours}.scale", shape)
    if c.norms.bias:
        yield identity(f"{hf}.bias", f"{ours}.bias", shape)


def qkv(
    c: ModelConfig,
    hf: str,
    *,
    groups: int = 1,
    transposed: bool = False,
) -> Iterator[TensorRule]:
    """Yields the rules of query, key and value projections that the file stores as one. See `fused`
    for `groups`."""
    names = "layers.query", "layers.key", "layers.value"
    outputs = (c.num_heads, c.H), (c.K, c.H), (c.K, c.H)
    bias, D = c.attention.qkv_bias, c.hidden_size
    return fused(hf, names, D, outputs, bias=bias, groups=groups, transposed=transposed)


def attention(
    c: ModelConfig,
    query: str,
    key: str,
    value: str,
    out: str,
    *,
    transposed: bool = False,
    order: Sequence[int] | None = None,
) -> Iterator[TensorRule]:
    """Yields the rules of attention's four linear layers; an empty name leaves one out.

    Args:
      order: positions in the file of the features of a query or key head; see `linear`.
    """
    D, H = (c.hidden_size,), c.H
    for hf, ours, heads in (
        (query, "query", c.num_heads),
        (key, "key", c.K),
        (value, "value", c.K),
    ):
        if hf:
            places, bias = None if ours == "value" else order, c.attention.qkv_bias
            yield from linear(hf, f"layers.{ours}", D, (heads, H), bias=bias, order=places)
    heads = (c.num_heads, H)
    yield from linear(out, "layers.out", heads, D, bias=c.attention.out_bias, transposed=transposed)


def mlp(
    c: ModelConfig,
    up: str,
    down: str,
    gate: str = "",
    *,
    transposed: bool = False,
    ours: str = "layers.mlp",
    size: int | None = None,
) -> Iterator[TensorRule]:
    """Yields the rules of the linear layers of the MLP `ours`; an empty name leaves one out.

    Args:
      size: inner width; defaults to the config's.
    """
    D, F = (c.hidden_size,), (size or c.F,)
    for hf, name, inputs, outputs in ((gate, "gate", D, F), (up, "up", D, F), (down, "down", F, D)):
        if hf:
            yield from linear(
                hf, f"{ours}.{name}", inputs, outputs, bias=c.mlp_bias, transposed=transposed
            )


def embedding_norm_head(
    c: ModelConfig, embedding: str, final_norm: str, head: str = "lm_head"
) -> Iterator[TensorRule]:
    """Yields the rules of the input embedding, and of the final norm, output embedding and bias of
    the logits if the config has them."""
    yield identity(f"{embedding}.weight", "embedding", (c.V, c.E))
    if c.norms.final:
        yield from norm(final_norm, "norm", c)
    if not c.tied_head:
        yield identity(f"{head}.weight", "head", (c.V, c.E))
    if c.head_bias:
        yield identity(f"{head}.bias", "head_bias", (c.V,))
