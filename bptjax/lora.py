"""LoRA and QLoRA: linear layers that stay as they are, in few bits or not, each with a low-rank
product beside it that is trained."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from bptjax.models.linear import AdapterDropout, Linear, apply_kernel
from bptjax.models.params import param_path, put_param
from bptjax.ops.dropout import dropout
from bptjax.ops.quantize import Matrix, dequantize_matrix, quantize_matrix
from bptjax.parallel.mesh import sharding

ALL_LINEAR = "all-linear"
BITS = {"nf4": 4, "fp4": 4, "int8": 8}


@dataclass(frozen=True)
class AdapterConfig:
    """LoRA and QLoRA adapters, in the terms of PEFT.

    Attributes:
      type: none trains the model itself; lora trains low-rank adapters of its linear layers; qlora
        also quantizes those layers.
      r: rank of the adapters.
      alpha: adapters are scaled by alpha / r.
      dropout: dropout of the input of the adapters in training.
      target_modules: all-linear for every linear layer but the head, or a list of names in the
        terms of the checkpoint's family, such as [q_proj, v_proj].
      use_rslora: scales by alpha / √r instead.
      modules_to_save: names of embeddings that are trained in full beside the low-rank products
        (embed_tokens; lm_head, where the head is not tied); with model.add_tokens all are.
      bits: bits of a quantized weight.
      quant_type: quantization. nf4 and fp4 have 4 bits, int8 has 8. If not set, nf4, or int8 with 8
        bits.
      double_quant: quantizes the scales of the blocks too. 4.13 bits a parameter instead of 4.5.

    Hu et al. 2021, arXiv 2106.09685; Dettmers et al. 2023, arXiv 2305.14314; Kalajdzievski 2023,
    arXiv 2312.03732.
    """

    type: Literal["none", "lora", "qlora"] = "none"
    r: int = 8
    alpha: float = 8.0
    dropout: float = 0.0
    target_modules: str | list[str] = ALL_LINEAR
    use_rslora: bool = False
    modules_to_save: list[str] | None = None
    bits: Literal[4, 8] = 4
    quant_type: Literal["nf4", "fp4", "int8"] | None = None
    double_quant: bool = True

    def __post_init__(self):
        few = {"bits", "quant_type", "double_quant"}
        read = {"none": set(), "lora": {f.name for f in fields(self)} - few}
        for f in fields(self):
            value, used = getattr(self, f.name), read.get(self.type)
            if used is not None and f.name not in used | {"type"} and value != f.default:
                raise ValueError(f"adapter.{f.name}={value} has no use with type={self.type}")
        if self.r < 1:
            raise ValueError(f"adapter.r={self.r} is not positive")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"adapter.dropout={self.dropout} is not in [0, 1)")
        if isinstance(self.target_modules, str) and self.target_modules != ALL_LINEAR:
            raise ValueError(
                f"adapter.target_modules={self.target_modules}: {ALL_LINEAR}, or a list of names"
            )
        if BITS[self.book] != self.bits:
            raise ValueError(
                f"adapter.quant_type={self.quant_type} takes {BITS[self.book]} bits, and "
                f"adapter.bits={self.bits}"
            )

    @property
    def book(self) -> str:
        """The code book."""
        return self.quant_type or ("nf4" if self.bits == 4 else "int8")

    @property
    def scale(self) -> float:
        return self.alpha / (self.r**0.5 if self.use_rslora else self.r)


class Scale(nnx.Variable):
    """Of each layer what the low-rank product is multiplied by, `[L]`: kept, and not trained."""


class Saved(nnx.Param):
    """An embedding that is trained in full beside adapters, and saved with them."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """A kernel in few bits; stacked ones, as long as nobody calls it. What it contracts has the
    shape `inputs`.
    """

    matrix: Matrix
    book: str = field(metadata={"static": True})
    inputs: tuple[int, ...] = field(metadata={"static": True})

    def dense(self, dtype: DTypeLike) -> Array:
        """`[*inputs, *outputs]`."""
        matrix = jax.tree.map(lambda v: v[...], self.matrix, is_leaf=_is_variable)
        w = dequantize_matrix(matrix, self.book, math.prod(self.inputs)).astype(dtype)
        return w.reshape(*self.inputs, *w.shape[1:])

    def __call__(self, x: Array, in_ndim: int, seeds: AdapterDropout | None = None) -> Array:
        # The backward pass saves the kernel as it is stored.
        @jax.checkpoint
        def dot(kernel, x):
            return jnp.tensordot(x, kernel.dense(x.dtype), axes=in_ndim)

        return dot(self, x)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted:
    """A kernel with a low-rank product beside it: x · base + scale · (x · a) · b.

    Attributes:
      base: not trained.
      a: `[*inputs, r]`.
      b: `[r, *outputs]`.
      dropout: probability, of what `a` reads.
      number: of the linear layer, for its dropout.
    """

    base: nnx.Variable | Quantized
    a: nnx.LoRAParam
    b: nnx.LoRAParam
    scale: Scale
    dropout: float = field(metadata={"static": True})
    number: int = field(metadata={"static": True})

    def __call__(self, x: Array, in_ndim: int, seeds: AdapterDropout | None = None) -> Array:
        y = apply_kernel(self.base, x, in_ndim)
        if seeds is not None and self.dropout:
            key = jax.random.fold_in(jax.random.wrap_key_data(seeds.key), self.number)
            flat = x.reshape(*seeds.ids.shape, -1)
            x = dropout(flat, jax.random.key_data(key), self.dropout, seeds.ids).reshape(x.shape)
        low = jnp.tensordot(x, self.a[...].astype(x.dtype), axes=in_ndim)
        low = (low.astype(jnp.float32) * self.scale[...]).astype(x.dtype)
        return y + jnp.tensordot(low, self.b[...].astype(x.dtype), axes=1)


def linears(model: Any) -> dict[str, int]:
    """Paths of the kernels of the model's layers, and how many axes of what they read they
    contract.
    """
    found, _ = jax.tree.flatten_with_path(model, is_leaf=lambda x: isinstance(x, Linear))
    return {
        f"{param_path(at)}.kernel": linear.in_ndim
        for at, linear in found
        if isinstance(linear, Linear) and param_path(at).startswith("layers.")
    }


def embeddings_to_train(
    names: list[str] | None, modules: Mapping[str, str], every: bool
) -> set[str]:
    """Paths of the embeddings that `adapter.modules_to_save` names.

    Args:
      modules: names of the embeddings, and their paths.
      every: whether all of them are trained, whatever is named.

    Raises:
      ValueError: no embedding has this name.
    """
    found = set(modules.values()) if every else set()
    for name in names or ():
        paths = {path for n, path in modules.items() if f".{n}".endswith(f".{name}")}
        if not paths:
            known = ", ".join(n.split(".")[-1] for n in modules)
            raise ValueError(f"adapter.modules_to_save={name}: must be one of {known}")
        found |= paths
    return found


def train_in_full(model: Any, paths: set[str], dtype: DTypeLike) -> Any:
    """The model with the parameters at these paths trained beside its adapters, in `dtype`."""

    def one(at, leaf):
        if param_path(at) not in paths:
            return leaf
        return Saved(leaf.get_value().astype(dtype), axes=leaf.axes)

    return jax.tree.map_with_path(one, model, is_leaf=_is_variable)


def targets(wanted: str | list[str], modules: Mapping[str, tuple[str, ...]]) -> set[str]:
    """Paths of the kernels that `adapter.target_modules` names.

    Args:
      modules: names of linear layers, and the kernels that each holds.

    Raises:
      ValueError: a name that none has, or no name.
    """
    if isinstance(wanted, str):
        return {path for paths in modules.values() for path in paths}
    found: set[str] = set()
    for name in wanted:
        paths = [p for n, ps in modules.items() if f".{n}".endswith(f".{name}") for p in ps]
        if not paths:
            known = ", ".join(sorted({n.rpartition("}.")[-1] for n in modules}))
            raise ValueError(
                f"adapter.target_modules: no linear layer is {name}; there are {known}"
            )
        found.update(paths)
    if not found:
        raise ValueError("adapter.target_modules is empty: nothing would be trained")
    return found


def quantized(kernel: nnx.Variable, contracted: int, config: AdapterConfig) -> Quantized:
    """Stacked kernels `[L, *inputs, *outputs]` in few bits, one at a time."""
    value, axes = kernel.get_value(), kernel.axes
    inputs = value.shape[1 : 1 + contracted]

    def one(w):
        w = w.reshape(math.prod(inputs), *w.shape[contracted:])
        return quantize_matrix(w, config.book, config.double_quant)

    outer = (axes[0], *axes[contracted:])
    parts = zip(jax.lax.map(one, value), (outer, outer, (None,), ()), strict=True)
    variables: list[Any] = [None if x is None else nnx.Param(x, axes=a) for x, a in parts]
    return Quantized(Matrix(*variables), config.book, inputs)


def quantize(model: Any, config: AdapterConfig) -> Any:
    """The model with the kernels of its layers in few bits."""
    contracted = linears(model)

    def one(at, leaf):
        path = param_path(at)
        return quantized(leaf, contracted[path], config) if path in contracted else leaf

    return jax.tree.map_with_path(one, model, is_leaf=_is_variable)


def quantizer(model: Any, config: AdapterConfig) -> Callable[[str, Any, np.ndarray], Any]:
    """Returns a function in place of `put_param` that quantizes the kernels of the layers on the
    devices, each stack as it arrives, from the dtype that it has.

    Args:
      model: abstract, with shardings.
    """
    contracted = linears(model)

    def put_one(path, leaf, array):
        if path not in contracted:
            return put_param(path, leaf, array)
        kernel, where = put_param(path, leaf, array, array.dtype), leaf.get_value().sharding
        pack = partial(quantized, contracted=contracted[path], config=config)
        if isinstance(where, NamedSharding):
            like = jax.eval_shape(pack, kernel)
            shardings = jax.tree.map(
                lambda v: v.replace(sharding(where.mesh, v.axes, v.get_value().shape)),
                like,
                is_leaf=_is_variable,
            )
            return jax.jit(pack, out_shardings=shardings)(kernel)
        return jax.jit(pack)(kernel)

    return put_one


# Of one kernel, layers stacked: `a` `[L, *inputs, r]`, `b` `[L, r, *outputs]`, scale `[L]`.
Values = tuple[Any, Any, Any]


@dataclass(frozen=True)
class Adapters:
    """Adapters of a model, by the paths of their kernels, and how they were made.

    Attributes:
      modules: embeddings that were trained in full, by path; they take the place of the base's.
    """

    config: AdapterConfig
    values: dict[str, Values]
    modules: dict[str, np.ndarray] = field(default_factory=dict)


def new_adapters(
    model: Any, paths: set[str], config: AdapterConfig, dtype: DTypeLike, key: Array
) -> dict[str, Values]:
    """For the kernels at these paths: `a` uniform within ± 1/√inputs, as PEFT has it, `b` zero."""
    found, _ = jax.tree.flatten_with_path(model, is_leaf=_is_kernel)
    contracted = linears(model)
    numbers = {path: number for number, path in enumerate(sorted(contracted))}

    def new(path, kernel):
        if isinstance(kernel, Quantized):
            (L, _, *outputs), inputs = kernel.matrix.codes.shape, kernel.inputs
        else:
            (L, *shape), n = kernel.shape, contracted[path]
            inputs, outputs = shape[:n], shape[n:]
        shape, bound = (L, *inputs, config.r), math.prod(inputs) ** -0.5
        of_its_own = jax.random.fold_in(key, numbers[path])
        a = jax.random.uniform(of_its_own, shape, jnp.float32, -bound, bound)
        b = jnp.zeros((L, config.r, *outputs), dtype)
        return a.astype(dtype), b, jnp.full(L, config.scale, jnp.float32)

    return {param_path(at): new(param_path(at), k) for at, k in found if param_path(at) in paths}


def attach(model: Any, adapters: Mapping[str, Values], dropout: float) -> Any:
    """The model with these adapters beside its kernels, by path."""
    contracted = linears(model)
    numbers = {path: number for number, path in enumerate(sorted(contracted))}

    def one(at, kernel):
        path = param_path(at)
        if path not in adapters:
            return kernel
        n = contracted[path]
        if isinstance(kernel, Quantized):
            codes: Any = kernel.matrix.codes
            first, *outer = codes.axes
            axes = first, *(None,) * (n - 1), *outer
        else:
            axes = kernel.axes
        a, b, scale = adapters[path]
        return Adapted(
            kernel,
            nnx.LoRAParam(a, axes=(*axes[:n], None), matrix=(n, 1)),
            nnx.LoRAParam(b, axes=(None, *axes[n:]), matrix=(1, len(axes) - n)),
            Scale(scale, axes=()),
            dropout,
            numbers[path],
        )

    return jax.tree.map_with_path(one, model, is_leaf=_is_kernel)


def merged(w: Array, adapter: Values | None, *, contracted: int, config: AdapterConfig) -> Array:
    """One layer's kernel `[*inputs, *outputs]`, as it is stored for training, with its adapter in
    it; float32.
    """
    if config.type == "qlora":
        stack = quantized(nnx.Param(w[None], axes=(None,) * w.ndim), contracted, config)
        w = jax.tree.map(lambda x: x[0], stack).dense(jnp.float32)
    w = w.astype(jnp.float32)
    if adapter is None:
        return w
    a, b, scale = adapter
    return w + scale * jnp.tensordot(a.astype(jnp.float32), b.astype(jnp.float32), axes=1)


def prepared(layer: Any, dtype: DTypeLike) -> Any:
    """A layer with its kernels dense, in `dtype`."""

    def one(kernel):
        return nnx.Param(kernel.dense(dtype)) if isinstance(kernel, Quantized) else kernel

    return jax.tree.map(one, layer, is_leaf=lambda x: isinstance(x, Quantized))


def is_trained(v: nnx.Variable) -> bool:
    return isinstance(v, nnx.LoRAParam | Saved)


def is_saved(v: nnx.Variable) -> bool:
    """Whether a checkpoint holds it: the rest comes from where it came from."""
    return isinstance(v, nnx.LoRAParam | Saved | Scale)


def split(model: Any, chosen: Callable[[nnx.Variable], bool]) -> tuple[Any, Any]:
    """The chosen variables in a tree like the model, and the others in another; None elsewhere."""
    first, second = (
        jax.tree.map(
            lambda v, which=which: v if chosen(v) == which else None, model, is_leaf=_is_variable
        )
        for which in (True, False)
    )
    return first, second


def join(first: Any, second: Any) -> Any:
    """The inverse of `split`."""

    def one(a, b):
        return b if a is None else a

    return jax.tree.map(one, first, second, is_leaf=lambda x: x is None or _is_variable(x))


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _is_kernel(x: Any) -> bool:
    return isinstance(x, nnx.Variable | Quantized)
