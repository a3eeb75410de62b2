"""How a tensor of a Hugging Face file and parameters of ours are made of one another."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from bptjax.models.config import ModelConfig

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One tensor of the file, of each layer where its name has `{}`, and what it is here.

    Attributes:
      hf: its name.
      shape: its shape.
      ours: paths of the parameters it holds.
      split: the file's tensor to our arrays (of one layer).
      join: our arrays to the file's tensor; the inverse, bit for bit.
    """

    hf: str
    shape: Shape
    ours: tuple[str, ...]
    split: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    join: Callable[..., np.ndarray]

    @property
    def layered(self) -> bool:
        return "{}" in self.hf


def same(hf: str, ours: str, shape: Shape, file_shape: Shape | None = None) -> Row:
    """The same numbers in the same order."""
    file_shape = shape if file_shape is None else file_shape
    return Row(
        hf, file_shape, (ours,), lambda w: (w.reshape(shape),), lambda x: x.reshape(file_shape)
    )


def linear(
    hf: str, ours: str, inputs: Shape, outputs: Shape, *, bias: bool, transposed: bool = False
) -> Iterator[Row]:
    """A linear layer, its weight [outputs, inputs] in the file; `transposed`, the other way."""
    I, O = prod(inputs), prod(outputs)  # noqa: E741

    def split(w):
        return ((w if transposed else w.T).reshape(inputs + outputs),)

    def join(x):
        x = x.reshape(I, O)
        return x if transposed else x.T

    yield Row(f"{hf}.weight", (I, O) if transposed else (O, I), (f"{ours}.kernel",), split, join)
    if bias:
        yield same(f"{hf}.bias", f"{ours}.bias", outputs, (O,))


def fused(
    hf: str,
    ours: tuple[str, ...],
    inputs: int,
    outputs: tuple[Shape, ...],
    *,
    bias: bool,
    order: str = "stacked",
    transposed: bool = False,
) -> Iterator[Row]:
    """Several linear layers in one, with `outputs` each. `stacked`: one after the other. `grouped`:
    query, key and value heads mixed: for each key head its query heads, itself and its value head.
    """
    sizes = [prod(shape) for shape in outputs]
    O = sum(sizes)  # noqa: E741
    groups, H = outputs[-1] if order == "grouped" else (0, 0)

    def parts(w):
        """Rows [O, ...] to those of each layer."""
        if order == "stacked":
            return np.split(w, np.cumsum(sizes)[:-1])
        w = w.reshape(groups, -1, H, *w.shape[1:])
        each = w[:, :-2], w[:, -2], w[:, -1]
        return [x.reshape(-1, *w.shape[3:]) for x in each]

    def whole(each):
        if order == "stacked":
            return np.concatenate(each)
        each = [x.reshape(groups, -1, H, *x.shape[1:]) for x in each]
        return np.concatenate(each, 1).reshape(O, *each[0].shape[3:])

    def split(w):
        each = parts(w.T if transposed else w)
        return tuple(x.T.reshape(inputs, *s) for x, s in zip(each, outputs, strict=True))

    def join(*each):
        w = whole([x.reshape(inputs, -1).T for x in each])
        return w.T if transposed else w

    def split_bias(b):
        return tuple(x.reshape(s) for x, s in zip(parts(b), outputs, strict=True))

    def join_bias(*each):
        return whole([x.reshape(-1) for x in each])

    kernels, biases = (tuple(f"{o}.{n}" for o in ours) for n in ("kernel", "bias"))
    shape = (inputs, O) if transposed else (O, inputs)
    yield Row(f"{hf}.weight", shape, kernels, split, join)
    if bias:
        yield Row(f"{hf}.bias", (O,), biases, split_bias, join_bias)


def conv(hf: str, ours: str, patch: Shape, outputs: int) -> Iterator[Row]:
    """A convolution whose steps are as wide as its kernel: a linear layer of a patch."""
    size = prod(patch)

    def split(w):
        return (w.reshape(outputs, size).T,)

    def join(x):
        return x.T.reshape(outputs, *patch)

    yield Row(f"{hf}.weight", (outputs, *patch), (f"{ours}.kernel",), split, join)
    yield same(f"{hf}.bias", f"{ours}.bias", (outputs,))


def norm(hf: str, ours: str, c: ModelConfig, size: int | None = None) -> Iterator[Row]:
    """A norm's factor and summand, as far as it has them."""
    shape = (c.hidden_size if size is None else size,)
    if c.norm_scale:
        yield same(f"{hf}.weight", f"{ours}.scale", shape)
    if c.norm_bias:
        yield same(f"{hf}.bias", f"{ours}.bias", shape)


def qkv(
    c: ModelConfig, hf: str, *, order: str = "stacked", transposed: bool = False
) -> Iterator[Row]:
    """Queries, keys and values of a layer in one tensor."""
    names = "layers.query", "layers.key", "layers.value"
    outputs = (c.num_heads, c.H), (c.K, c.H), (c.K, c.H)
    return fused(
        hf, names, c.hidden_size, outputs, bias=c.qkv_bias, order=order, transposed=transposed
    )


def attention(
    c: ModelConfig, query: str, key: str, value: str, out: str, *, transposed: bool = False
) -> Iterator[Row]:
    """Four linear layers by name; an empty name is left out."""
    D, H = (c.hidden_size,), c.H
    for hf, ours, heads in (
        (query, "query", c.num_heads),
        (key, "key", c.K),
        (value, "value", c.K),
    ):
        if hf:
            yield from linear(hf, f"layers.{ours}", D, (heads, H), bias=c.qkv_bias)
    wide = (c.num_heads, H)
    yield from linear(out, "layers.out", wide, D, bias=c.out_bias, transposed=transposed)


def mlp(
    c: ModelConfig, up: str, down: str, gate: str = "", *, transposed: bool = False
) -> Iterator[Row]:
    """The feed-forward's linear layers by name."""
    D, F = (c.hidden_size,), (c.F,)
    for hf, ours, inputs, outputs in ((gate, "gate", D, F), (up, "up", D, F), (down, "down", F, D)):
        if hf:
            yield from linear(
                hf, f"layers.mlp.{ours}", inputs, outputs, bias=c.mlp_bias, transposed=transposed
            )


def ends(c: ModelConfig, embedding: str, norm_name: str, head: str = "lm_head") -> Iterator[Row]:
    """Embedding, final norm and output embedding."""
    yield same(f"{embedding}.weight", "embedding", (c.V, c.E))
    if c.final_norm:
        yield from norm(norm_name, "norm", c)
    if not c.tied_head:
        yield same(f"{head}.weight", "head", (c.V, c.E))
