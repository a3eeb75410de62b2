"""LoRA and QLoRA: frozen linear layers, optionally quantized, plus trained low-rank products."""

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
from jax.typing import DTypeLike

from bptjax.models.experts import apply_expert_kernel
from bptjax.models.linear import AdapterDropout, apply_kernel
from bptjax.models.params import is_variable, param_path
from bptjax.ops.dropout import dropout
from bptjax.ops.grouped_matmul import grouped_matmul
from bptjax.weights.quantized_kernels import (
    KernelAxes,
    QuantizedKernel,
    is_kernel,
    linear_kernels,
    quantize_kernels,
)

ALL_LINEAR = "all-linear"
BITS = {"nf4": 4, "fp4": 4, "int8": 8}


@dataclass(frozen=True)
class AdapterConfig:
    """LoRA and QLoRA adapters, in the terms of PEFT.

    Attributes:
      type: none trains the model itself; lora trains low-rank adapters of its linear layers; qlora
        also quantizes those layers.
      r: rank of the adapters.
      alpha: adapters are scaled by alpha / r. If not set, r, or √r with use_rslora: a scale of 1.
      dropout: dropout of the input of the adapters in training.
      target_modules: all-linear for every linear layer except head and routers, or a list of the
        checkpoint's module names, such as [q_proj, v_proj].
      use_rslora: scale by alpha / √r instead.
      modules_to_save: names of embeddings to train in full in addition to the low-rank products
        (embed_tokens; lm_head, if the head is not tied). With model.add_tokens, all embeddings are
        trained.
      bits: bits per quantized weight.
      quant_type: quantization. nf4 and fp4 have 4 bits, int8 has 8. If not set, nf4, or int8 with 8
        bits.
      double_quant: quantize the scales of the blocks too. 4.13 bits per parameter instead of 4.5.
      serve: vllm refuses before training what vLLM's adapters do not support, and exports the
        adapter in vLLM's form at the end of the run.

    Hu et al. 2021, arXiv 2106.09685; Dettmers et al. 2023, arXiv 2305.14314; Kalajdzievski 2023,
    arXiv 2312.03732.
    """

    type: Literal["none", "lora", "qlora"] = "none"
    r: int = 8
    alpha: float | None = None
    dropout: float = 0.0
    target_modules: str | list[str] = ALL_LINEAR
    use_rslora: bool = False
    modules_to_save: list[str] | None = None
    bits: Literal[4, 8] = 4
    quant_type: Literal["nf4", "fp4", "int8"] | None = None
    double_quant: bool = True
    serve: Literal["vllm"] | None = None

    def __post_init__(self):
        of_quantization = {"bits", "quant_type", "double_quant"}
        read = {"none": set(), "lora": {f.name for f in fields(self)} - of_quantization}
        for f in fields(self):
            value, used = getattr(self, f.name), read.get(self.type)
            if used is not None and f.name not in used | {"type"} and value != f.default:
                default = "null" if f.default is None else f.default
                raise ValueError(
                    f"adapter.{f.name}={value}: must be {default} with adapter.type={self.type}, "
                    "which does not read it"
                )
        if self.r < 1:
            raise ValueError(f"adapter.r={self.r}: must be at least 1")
        if self.alpha is not None and not 0.0 < self.alpha < math.inf:
            raise ValueError(f"adapter.alpha={self.alpha}: must be positive and finite")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"adapter.dropout={self.dropout}: must be in [0, 1)")
        if isinstance(self.target_modules, str) and self.target_modules != ALL_LINEAR:
            raise ValueError(
                f"adapter.target_modules={self.target_modules}: must be {ALL_LINEAR} or a list of "
                "names"
            )
        if BITS[self.codebook] != self.bits:
            raise ValueError(
                f"adapter.bits={self.bits}: must be {BITS[self.codebook]} with "
                f"adapter.quant_type={self.quant_type}"
            )

    @property
    def codebook(self) -> str:
        """Name of the codebook of quantized weights."""
        return self.quant_type or ("nf4" if self.bits == 4 else "int8")

    @property
    def unit_alpha(self) -> float:
        """The alpha that gives scale 1, the default."""
        return math.sqrt(self.r) if self.use_rslora else float(self.r)

    @property
    def scale(self) -> float:
        """Factor on the low-rank product."""
        return 1.0 if self.alpha is None else self.alpha / self.unit_alpha


class LoraScale(nnx.Variable):
    """Factor on the low-rank product of each layer, `[L]`, or of each of its experts, `[L, X]`.
    Saved, but not trained."""


class TrainedEmbedding(nnx.Param):
    """An embedding that is trained in full next to adapters, and saved with them."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LoraKernel:
    """A frozen kernel with a low-rank product: x · base + scale · (x · a) · b.

    Attributes:
      base: the frozen kernel.
      a: `[*inputs, r]`; with experts `[X, *inputs, r]`.
      b: `[r, *outputs]`; with experts `[X, r, *outputs]`.
      dropout: dropout rate of the input of `a`.
      number: index of the linear layer, which seeds its dropout.
    """

    base: nnx.Variable | QuantizedKernel
    a: nnx.LoRAParam
    b: nnx.LoRAParam
    scale: LoraScale
    dropout: float = field(metadata={"static": True})
    number: int = field(metadata={"static": True})

    def __call__(self, x: Array, in_ndim: int, seeds: AdapterDropout | None = None) -> Array:
        y, x = apply_kernel(self.base, x, in_ndim), self._drop(x, seeds)
        low = jnp.tensordot(x, self.a[...].astype(x.dtype), axes=in_ndim)
        low = (low.astype(jnp.float32) * self.scale[...]).astype(x.dtype)
        return y + jnp.tensordot(low, self.b[...].astype(x.dtype), axes=1)

    def grouped(self, x: Array, experts: Array, seeds: AdapterDropout | None = None) -> Array:
        """Multiplies each token by the kernel of its expert, as in `grouped_matmul`."""
        y, x = apply_expert_kernel(self.base, x, experts), self._drop(x, seeds)
        b = self.b[...].astype(jnp.float32) * self.scale[...][:, None, None]
        return y + grouped_matmul(grouped_matmul(x, self.a[...], experts), b, experts)

    def _drop(self, x: Array, seeds: AdapterDropout | None) -> Array:
        if seeds is None or not self.dropout:
            return x
        key = jax.random.fold_in(jax.random.wrap_key_data(seeds.key), self.number)
        flat = x.reshape(*seeds.ids.shape, -1)
        key = jax.random.key_data(key)
        return dropout(flat, key, self.dropout, seeds.ids, seeds.first).reshape(x.shape)


def embeddings_to_train(
    names: list[str] | None, modules: Mapping[str, str], every: bool
) -> set[str]:
    """Returns the paths of the embeddings that `adapter.modules_to_save` names.

    Args:
      names: value of the key.
      modules: paths of the embeddings by name.
      every: whether to train all embeddings, named or not.

    Raises:
      ValueError: a name does not belong to an embedding.
    """
    chosen = set(modules.values()) if every else set()
    for name in names or ():
        paths = {path for n, path in modules.items() if f".{n}".endswith(f".{name}")}
        if not paths:
            known = ", ".join(n.split(".")[-1] for n in modules)
            raise ValueError(f"adapter.modules_to_save={name}: must be one of {known}")
        chosen |= paths
    return chosen


def train_in_full(model: Any, paths: set[str], dtype: DTypeLike) -> Any:
    """Returns the model with the parameters at these paths in `dtype`, to be trained in full."""

    def trained(at, leaf):
        if param_path(at) not in paths:
            return leaf
        return TrainedEmbedding(leaf.get_value().astype(dtype), axes=leaf.axes)

    return jax.tree.map_with_path(trained, model, is_leaf=is_variable)


def target_kernels(wanted: str | list[str], modules: Mapping[str, tuple[str, ...]]) -> set[str]:
    """Returns the paths of the kernels that `adapter.target_modules` names.

    Args:
      wanted: value of the key.
      modules: paths of each linear layer's kernels, by its name.

    Raises:
      ValueError: a name does not belong to a linear layer, or there are no names.
    """
    if isinstance(wanted, str):
        return {path for paths in modules.values() for path in paths}
    chosen: set[str] = set()
    for name in wanted:
        paths = [p for n, ps in modules.items() if f".{n}".endswith(f".{name}") for p in ps]
        if not paths:
            known = ", ".join(sorted({n.rpartition("}.")[-1] for n in modules}))
            raise ValueError(f"adapter.target_modules={name}: must be one of {known}")
        chosen.update(paths)
    if not chosen:
        raise ValueError("adapter.target_modules: must not be empty; nothing would be trained")
    return chosen


# (a `[L, *inputs, r]`, b `[L, r, *outputs]`, scale `[L]`) of a kernel stacked over layers; with
# experts (a `[L, X, *inputs, r]`, b `[L, X, r, *outputs]`, scale `[L, X]`).
LoraWeights = tuple[Any, Any, Any]


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model.

    Attributes:
      config: settings of the adapters.
      values: weights of the adapters, by the paths of their kernels.
      modules: fully trained embeddings, by path. They replace the base model's.
    """

    config: AdapterConfig
    values: dict[str, LoraWeights]
    modules: dict[str, np.ndarray] = field(default_factory=dict)


def new_adapters(
    model: Any, paths: set[str], config: AdapterConfig, dtype: DTypeLike, key: Array
) -> dict[str, LoraWeights]:
    """Returns new adapters for the kernels at these paths: `a` uniform within ± 1/√inputs, as in
    PEFT, and `b` zero."""
    leaves, _ = jax.tree.flatten_with_path(model, is_leaf=is_kernel)
    kernels = linear_kernels(model)
    numbers = {path: number for number, path in enumerate(sorted(kernels))}

    def new(path, kernel):
        stacked, n = kernels[path]
        quantized = isinstance(kernel, QuantizedKernel)
        shape = (kernel.matrix.codes if quantized else kernel).shape
        stack, outputs = shape[:stacked], shape[stacked + (1 if quantized else n) :]
        inputs = kernel.inputs if quantized else shape[stacked : stacked + n]
        bound, kernel_key = math.prod(inputs) ** -0.5, jax.random.fold_in(key, numbers[path])
        shape = *stack, *inputs, config.r
        a = jax.random.uniform(kernel_key, shape, jnp.float32, -bound, bound)
        b = jnp.zeros((*stack, config.r, *outputs), dtype)
        return a.astype(dtype), b, jnp.full(stack, config.scale, jnp.float32)

    return {param_path(at): new(param_path(at), k) for at, k in leaves if param_path(at) in paths}


def attach(model: Any, adapters: Mapping[str, LoraWeights], dropout: float) -> Any:
    """Attaches adapters to the model's kernels. `adapters` are given by path."""
    kernels = linear_kernels(model)
    numbers = {path: number for number, path in enumerate(sorted(kernels))}

    def attached(at, kernel):
        path = param_path(at)
        if path not in adapters:
            return kernel
        stacked, n = kernels[path]
        codes: Any = kernel.matrix.codes if isinstance(kernel, QuantizedKernel) else kernel
        names = codes.axes
        experts, axes = names[: stacked - 1], names[stacked - 1 :]
        if isinstance(kernel, QuantizedKernel):
            axes = axes[0], *(None,) * (n - 1), *axes[1:]
        a, b, scale = adapters[path]
        return LoraKernel(
            kernel,
            nnx.LoRAParam(a, axes=(*experts, *axes[:n], None), matrix=(n, 1)),
            nnx.LoRAParam(b, axes=(*experts, None, *axes[n:]), matrix=(1, len(axes) - n)),
            LoraScale(scale, axes=experts),
            dropout,
            numbers[path],
        )

    return jax.tree.map_with_path(attached, model, is_leaf=is_kernel)


def without_adapters(model: Any) -> Any:
    """Returns the model with the frozen kernels of its adapters in their place."""

    def base(leaf):
        return leaf.base if isinstance(leaf, LoraKernel) else leaf

    return jax.tree.map(base, model, is_leaf=lambda x: isinstance(x, LoraKernel))


def merged(
    w: Array, adapter: LoraWeights | None, *, kernel_axes: KernelAxes, config: AdapterConfig
) -> Array:
    """Returns a float32 kernel `[*stacked, *inputs, *outputs]` with its adapter merged. With qlora,
    the kernel is first rounded to its quantized values.
    """
    if kernel_axes.stacked:
        each = kernel_axes._replace(stacked=kernel_axes.stacked - 1)
        return jax.vmap(partial(merged, kernel_axes=each, config=config))(w, adapter)
    if config.type == "qlora":
        stack, axes = nnx.Param(w[None], axes=(None,) * w.ndim), kernel_axes._replace(stacked=1)
        quantized = quantize_kernels(stack, axes, config.codebook, config.double_quant)
        w = jax.tree.map(lambda x: x[0], quantized).dense(jnp.float32)
    w = w.astype(jnp.float32)
    if adapter is None:
        return w
    a, b, scale = adapter
    return w + scale * jnp.tensordot(a.astype(jnp.float32), b.astype(jnp.float32), axes=1)


def _matrices(adapter: LoraWeights) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns `a` `[*stack, I, r]`, `b` `[*stack, r, O]` and the scale in float32."""
    a, b, scale = (np.asarray(x, np.float32) for x in adapter)
    stack, r = scale.shape, a.shape[-1]
    return a.reshape(*stack, -1, r), b.reshape(*stack, r, -1), scale


def product_square(adapter: LoraWeights) -> float:
    """Returns the sum of squares of scale · a · b over all axes, without forming the product."""
    a, b, scale = _matrices(adapter)
    grams = a.swapaxes(-1, -2) @ a, b @ b.swapaxes(-1, -2)
    return float((np.square(scale) * (grams[0] * grams[1]).sum((-1, -2))).sum())


def product_dot(adapter: LoraWeights, w: np.ndarray) -> float:
    """Returns the sum over all axes of scale · a · b times `w`, which has the same shape, without
    forming the product."""
    a, b, scale = _matrices(adapter)
    w = w.reshape(*scale.shape, a.shape[-2], b.shape[-1])
    return float((scale * ((a.swapaxes(-1, -2) @ w) * b).sum((-1, -2))).sum())


def is_trained(v: nnx.Variable) -> bool:
    """Returns whether a variable of a model with adapters is trained."""
    return isinstance(v, nnx.LoRAParam | TrainedEmbedding)


def in_checkpoint(v: nnx.Variable) -> bool:
    """Returns whether checkpoints hold a variable of a model with adapters. The other variables
    belong to the base model."""
    return isinstance(v, nnx.LoRAParam | TrainedEmbedding | LoraScale)


def split(model: Any, chosen: Callable[[nnx.Variable], bool]) -> tuple[Any, Any]:
    """Splits the model into two trees of its structure: one with the chosen variables, one with the
    rest. Variables of the other tree are None."""
    first, second = (
        jax.tree.map(
            lambda v, which=which: v if chosen(v) == which else None, model, is_leaf=is_variable
        )
        for which in (True, False)
    )
    return first, second


def join(first: Any, second: Any) -> Any:
    """Inverts `split`."""

    def present(a, b):
        return b if a is None else a

    return jax.tree.map(present, first, second, is_leaf=lambda x: x is None or is_variable(x))
