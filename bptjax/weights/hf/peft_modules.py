"""Names of linear layers and embeddings in PEFT's files, and bptjax's kernels in them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bptjax.models.config import ModelConfig
from bptjax.models.params import Index
from bptjax.weights.hf import peft_experts
from bptjax.weights.hf.families.family import Family, field_values
from bptjax.weights.hf.tensor_rules import TensorRule
from bptjax.weights.lora import LoraWeights

# Names of the output embedding's module, now and before transformers 5.
HEADS = "lm_head", "embed_out"


def modules(config: ModelConfig, family: Family | None) -> dict[str, tuple[str, ...]]:
    """Returns `{module name: paths of kernels}` for the linear layers of a family. Names contain
    the fields of `TensorRule`. Returns an empty dict without a family."""
    if family is None:
        return {}
    rules = filter(is_linear, family.tensor_rules(config))
    modules = {_module(rule.hf): rule.ours for rule in rules}
    return modules | peft_experts.modules(family, config)


def embeddings(config: ModelConfig, family: Family | None) -> dict[str, str]:
    """Returns `{module name: path}` for the input embedding, and for the output embedding if it is
    untied. Module names are those of transformers; without a family, they are the paths.
    """
    paths = {"embedding"} if config.tied_head else {"embedding", "head"}
    if family is None:
        return {path: path for path in sorted(paths)}
    rules = (rule for rule in family.tensor_rules(config) if rule.ours[0] in paths)
    embeddings = {rule.ours[0]: _module(rule.hf) for rule in rules}
    # transformers gives every head this name, whatever its name in the family's files.
    return {HEADS[0] if path == "head" else name: path for path, name in embeddings.items()}


def is_linear(rule: TensorRule) -> bool:
    """Returns whether a rule is for the weight of a linear layer in the transformer layers."""
    return bool(rule.fields) and rule.inputs > 0


@dataclass(frozen=True)
class Part:
    """One of bptjax's kernels within a linear layer of the family's files.

    Attributes:
      path: path of the kernel.
      inputs, outputs: indices of the kernel's inputs `[*inputs]` and outputs `[*outputs]` among
        those of the linear layer.
      transposed: whether the file's weight is [inputs, outputs].
    """

    path: str
    inputs: np.ndarray
    outputs: np.ndarray
    transposed: bool


class Linear(NamedTuple):
    """A linear layer of a family's files, repeated in every transformer layer.

    Attributes:
      sizes: sizes of the stacked axes of the kernels.
      names: module names by index into the stacked axes.
      parts: kernels that the linear layer holds.
    """

    sizes: tuple[int, ...]
    names: dict[Index, str]
    parts: list[Part]


def linears(family: Family, config: ModelConfig) -> Iterator[Linear]:
    """Yields the family's linear layers, each expert's included."""
    values, covered = field_values(config), set()
    for rule in filter(is_linear, family.tensor_rules(config)):
        covered |= {*rule.ours}
        names = {index: _module(name) for index, name in rule.names(values).items()}
        yield Linear(rule.stacked(values), names, kernels_in(rule))
    # Experts that the files fuse in one tensor. Name them as in files with a tensor per expert.
    layers, X = config.expert_layers, config.experts.count
    for parameter in peft_experts.expert_parameters(family, config):
        for path, outputs in zip(parameter.paths, parameter.outputs, strict=True):
            if path in covered:
                continue
            end = f"{path.split('.')[-2]}_proj"
            modules = [peft_experts.module_name(family).format(layer=layer) for layer in layers]
            indices: Iterator[Index] = np.ndindex(len(layers), X)
            names = {index: f"{modules[index[0]]}.{index[1]}.{end}" for index in indices}
            part = Part(path, np.arange(parameter.inputs), np.arange(len(outputs)), False)
            yield Linear((len(layers), X), names, [part])


def kernels_in(rule: TensorRule) -> list[Part]:
    """Returns the kernels in a linear layer's weight.

    Applies the rule's `split` to the row and column indices of the weight to find the positions of
    each kernel's inputs and outputs.
    """
    rows, columns = (np.arange(n, dtype=np.int32) for n in rule.shape)
    numbers = rows[:, None], columns[None]
    first, second = (rule.split(np.broadcast_to(n, rule.shape)) for n in numbers)
    parts = []
    for path, row_numbers, column_numbers in zip(rule.ours, first, second, strict=True):
        n = rule.inputs
        inputs, outputs = (..., *(0,) * (row_numbers.ndim - n)), (0,) * n
        ends = row_numbers[inputs].ravel()[[0, -1]]
        transposed = bool(ends[0] != ends[1])
        if transposed:
            row_numbers, column_numbers = column_numbers, row_numbers
        parts.append(Part(path, column_numbers[inputs], row_numbers[outputs], transposed))
    return parts


def joined(
    parts: list[Part], values: Mapping[str, LoraWeights], index: Index
) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns `lora_A` `[r, I]`, `lora_B` `[O, r]` and the scale of one linear layer at `index`
    into the stacked axes. Kernels share ranks if their `a` is equal; otherwise their ranks are
    concatenated, and `lora_B` is zero where the outputs of one kernel meet the ranks of another.
    Outputs of kernels without an adapter are zero."""
    adapted = [part for part in parts if part.path in values]
    I, O = parts[0].inputs.size, sum(part.outputs.size for part in parts)  # noqa: E741
    first = values[adapted[0].path][0]
    shared = all(np.array_equal(first, values[part.path][0]) for part in adapted[1:])
    r = first.shape[-1] if shared else sum(values[part.path][0].shape[-1] for part in adapted)
    A, B, start = np.zeros((r, I), np.float32), np.zeros((O, r), np.float32), 0
    scales = [float(values[part.path][2][index]) for part in adapted]
    for part, scale in zip(adapted, scales, strict=True):
        a, b, _ = (np.asarray(x[index], np.float32) for x in values[part.path])
        ranks = slice(start, start + a.shape[-1])
        start += 0 if shared else a.shape[-1]
        A[ranks, part.inputs] = np.moveaxis(a, -1, 0)
        # The file has one scale for all kernels, so multiply `b` by the ratio of the scales.
        share = 1.0 if scale == scales[0] else scale / scales[0]
        B[part.outputs, ranks] = share * np.moveaxis(b, 0, -1)
    return A, B, scales[0]


def _module(name: str) -> str:
    """Returns the name of the module that has this weight."""
    return name.removesuffix(".weight")
