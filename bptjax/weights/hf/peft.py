"""Reads and writes adapters in PEFT's format."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  Registers bfloat16 in NumPy, without which safetensors fails.
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from bptjax.models.config import ModelConfig
from bptjax.models.params import Index
from bptjax.run.json_files import read_json
from bptjax.weights.hf import peft_experts
from bptjax.weights.hf.families.family import Family, field_values
from bptjax.weights.hf.peft_config import (
    ADAPTER_CONFIG,
    adapter_settings,
    is_target,
    rank_and_scale,
)
from bptjax.weights.hf.tensor_rules import TensorRule
from bptjax.weights.lora import AdapterConfig, Adapters, LoraWeights

WEIGHTS, PREFIX = "adapter_model.safetensors", "base_model.model."
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


def read_peft(directory: Path, family: Family, config: ModelConfig) -> Adapters:
    """Reads the adapter in `directory`.

    If a family stores several kernels in one tensor, PEFT has one adapter for this tensor. Here
    each kernel gets a copy of `a`, and the part of `b` for its outputs.

    Raises:
      ValueError: a key or tensor is unsupported, missing, damaged or unexpected. The error names
        the key or tensor.
    """
    raw = read_json(directory / ADAPTER_CONFIG)
    settings = adapter_settings(raw, directory / ADAPTER_CONFIG)
    tensors = _tensors(directory / WEIGHTS)
    in_full, values = _read_embeddings(raw, tensors, family, config, directory), {}
    base = f"base_model_name_or_path={raw.get('base_model_name_or_path')!r}"
    for sizes, names, parts in _linears(family, config):
        pairs = [_pair(tensors, name, family) for name in names.values()]
        missing = [
            n for n, p in zip(names.values(), pairs, strict=True) if p is None and is_target(raw, n)
        ]
        if missing:
            raise ValueError(
                f"{directory / WEIGHTS}: must hold adapters of {', '.join(missing[:8])}; "
                f"check {base}"
            )
        r = max((a.shape[0] for a, _ in filter(None, pairs)), default=0)
        if r == 0:
            continue
        I, O = parts[0].inputs.size, sum(part.outputs.size for part in parts)  # noqa: E741
        A, B = np.zeros((len(names), r, I), np.float32), np.zeros((len(names), O, r), np.float32)
        scale = np.zeros(len(names), np.float32)
        for i, (name, pair) in enumerate(zip(names.values(), pairs, strict=True)):
            if pair is None:
                continue
            rank, scale[i] = rank_and_scale(raw, name)
            if [x.shape for x in pair] != [(rank, I), (O, rank)]:
                raise ValueError(
                    f"{directory / WEIGHTS}: {name}: must be {(rank, I)} and {(O, rank)}, not "
                    f"{pair[0].shape} and {pair[1].shape}; check r={rank} and {base}"
                )
            A[i, :rank], B[i, :, :rank] = pair
        for part in parts:
            a, b = A[:, :, part.inputs], B[:, part.outputs]
            # Each fused kernel may use only some of the ranks. Drop the unused ranks.
            used = b.reshape(-1, r).any(0)
            if len(parts) > 1 and used.any():
                a, b = a[:, used], b[..., used]
            adapter = np.moveaxis(a, 1, -1), np.moveaxis(b, -1, 1), scale
            values[part.path] = tuple(x.reshape(*sizes, *x.shape[1:]) for x in adapter)
    try:
        values |= peft_experts.read_experts(
            partial(_pair, tensors, family=family),
            partial(rank_and_scale, raw),
            raw.get("target_parameters") or [],
            family,
            config,
        )
    except ValueError as error:
        raise ValueError(f"{directory / WEIGHTS}: {error}") from error
    if tensors or not values:
        raise ValueError(
            f"{directory / WEIGHTS}: must hold adapters of linear layers of the model only, not "
            f"{', '.join(sorted(tensors)[:8]) or 'nothing'}; the model is {base}"
        )
    return Adapters(AdapterConfig(type="lora", **settings), values, in_full)


def write_peft(
    directory: Path, adapters: Adapters, family: Family, config: ModelConfig, base: str
) -> None:
    """Writes the adapters in PEFT's format.

    If a family stores several kernels in one tensor, their adapters become one pair of matrices
    with concatenated ranks. `lora_B` is zero where the outputs of one kernel meet the ranks of
    another. Adapters of experts are written as PEFT's `target_parameters`, which need transformers
    5.
    """
    tensors: dict[str, np.ndarray] = {}
    kinds: dict[str, tuple[int, float]] = {}
    transposed = False
    of_experts = {path for p in peft_experts.expert_parameters(family, config) for path in p.paths}
    values = {path: x for path, x in adapters.values.items() if path not in of_experts}
    for _, names, parts in _linears(family, config):
        if not any(part.path in values for part in parts):
            continue
        transposed |= parts[0].transposed
        for index, name in names.items():
            A, B, scale = joined(parts, values, index)
            tensors |= {f"{PREFIX}{name}.lora_A.weight": A, f"{PREFIX}{name}.lora_B.weight": B}
            kinds[name] = len(A), _alpha(scale, len(A), adapters.config)
    linears, X = list(kinds), config.experts.count or 1
    written = peft_experts.write_experts(adapters.values, family, config)
    for name, module, A, B, scale in written:
        tensors |= {f"{PREFIX}{module}.lora_A.weight": A, f"{PREFIX}{module}.lora_B.weight": B}
        kinds[name] = len(A) // X, _alpha(scale, len(A) // X, adapters.config)
    r, alpha = next(iter(kinds.values()))
    raw = dict(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=r,
        lora_alpha=alpha,
        # PEFT has no dropout for parameters, and refuses it.
        lora_dropout=adapters.config.dropout if len(linears) == len(kinds) else 0.0,
        use_rslora=adapters.config.use_rslora,
        target_modules=_targets(linears, family) or None,
        target_parameters=_without_layer(kinds.keys() - {*linears}) or None,
        rank_pattern={name: rank for name, (rank, _) in kinds.items() if rank != r},
        alpha_pattern={name: own for name, (_, own) in kinds.items() if own != alpha},
        fan_in_fan_out=transposed,
        modules_to_save=_write_embeddings(tensors, adapters, family, config) or None,
        bias="none",
        inference_mode=True,
    )
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})
    (directory / ADAPTER_CONFIG).write_text(json.dumps(raw, indent=2) + "\n")


def _targets(names: Iterable[str], family: Family) -> list[str] | str:
    """Returns PEFT's target_modules: the module names within a layer. A vision model may have
    modules of the same names, so the pattern of a multimodal family has the text model's prefix."""
    ends = _without_layer(names)
    if not family.wrapped:
        return ends
    return rf"{re.escape(family.prefix)}layers\.\d+\.({'|'.join(map(re.escape, ends))})"


def _alpha(scale: float, r: int, config: AdapterConfig) -> float:
    return float(f"{scale * (r**0.5 if config.use_rslora else r):.7g}")


def _without_layer(names: Iterable[str]) -> list[str]:
    """Returns the names within a layer, sorted."""
    return sorted({re.split(r"\.\d+\.", name, maxsplit=1)[1] for name in names})


def _both_ends(family: Family, config: ModelConfig) -> dict[str, str]:
    """Returns `{module name: path}` for both embeddings, even if they are tied."""
    return embeddings(replace(config, tied_head=False), family)


def _read_embeddings(
    raw: dict[str, Any],
    tensors: dict[str, np.ndarray],
    family: Family,
    config: ModelConfig,
    directory: Path,
) -> dict[str, np.ndarray]:
    """Removes the fully trained embeddings `[V, E]` from `tensors`, and returns `{path: array}`.

    Raises:
      ValueError: modules_to_save names a module that is not an embedding, a shape does not fit the
        base model, or the base model ties its embeddings but the adapter's embeddings differ.
    """
    file, known = directory / WEIGHTS, _both_ends(family, config)
    listed = raw.get("modules_to_save") or []
    arrays: dict[str, np.ndarray] = {}
    for module, path in known.items():
        modules = HEADS if path == "head" else (module,)
        for name in (family.rename(m, layout) for m in modules for layout in family.layouts):
            # If the vocabulary has grown, PEFT writes the tensor under several names.
            for part in (".original_module", ".modules_to_save", ""):
                if (tensor := tensors.pop(f"{PREFIX}{name}{part}.weight", None)) is not None:
                    arrays[path] = tensor
    for name in listed:
        ends = ((HEADS if path == "head" else (module,), path) for module, path in known.items())
        paths = [path for names, path in ends if any(f".{n}".endswith(f".{name}") for n in names)]
        if not paths:
            names = ", ".join(module.split(".")[-1] for module in known)
            config_file = directory / ADAPTER_CONFIG
            raise ValueError(f"{config_file}: modules_to_save={name}: must be one of {names}")
        tied = config.tied_head and "embedding" in arrays
        if paths[0] not in arrays and not (tied and raw.get("ensure_weight_tying")):
            raise ValueError(f"{file}: must hold {name}, which is in modules_to_save")
    if config.tied_head and arrays:
        # An embedding that modules_to_save does not list comes from the base model, so its head is
        # tied.
        follows = raw.get("ensure_weight_tying") or not listed
        head = arrays.pop("head", arrays.get("embedding") if follows else None)
        if head is None or not np.array_equal(head, arrays.get("embedding", head[:0])):
            raise ValueError(
                f"{file}: the base model ties its output embedding to the input embedding, but the "
                "adapter's differ: must be equal; set ensure_weight_tying in PEFT"
            )
    complete = arrays.keys() == set(embeddings(config, family).values())
    for path, x in arrays.items():
        shapes = {array.shape for array in arrays.values()}
        rows = len(x) == config.V or (len(x) > config.V and complete)
        if len(shapes) > 1 or x.ndim != 2 or x.shape[1] != config.E or not rows:
            raise ValueError(
                f"{file}: {path} is {x.shape}: must be {config.V, config.E}, as in the base model"
            )
    return arrays


def _write_embeddings(
    tensors: dict[str, np.ndarray], adapters: Adapters, family: Family, config: ModelConfig
) -> list[str]:
    """Adds the fully trained embeddings to `tensors`, and returns their module names.

    A tied embedding is written twice, because PEFT trains and loads a copy for each module.
    """
    names = []
    for module, path in _both_ends(family, config).items():
        array = adapters.modules.get("embedding" if config.tied_head else path)
        if array is not None:
            tensors[f"{PREFIX}{module}.weight"] = np.ascontiguousarray(array)
            names.append(module.split(".")[-1])
    return names


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


def _linears(family: Family, config: ModelConfig) -> Iterator[Linear]:
    """Yields the family's linear layers."""
    values = field_values(config)
    for rule in filter(is_linear, family.tensor_rules(config)):
        names = {index: _module(name) for index, name in rule.names(values).items()}
        yield Linear(rule.stacked(values), names, kernels_in(rule))


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
    into the stacked axes. Outputs of kernels without an adapter are zero."""
    adapted = [part for part in parts if part.path in values]
    I, O = parts[0].inputs.size, sum(part.outputs.size for part in parts)  # noqa: E741
    r = sum(values[part.path][0].shape[-1] for part in adapted)
    A, B, start = np.zeros((r, I), np.float32), np.zeros((O, r), np.float32), 0
    scales = [float(values[part.path][2][index]) for part in adapted]
    for part, scale in zip(adapted, scales, strict=True):
        a, b, _ = (np.asarray(x[index], np.float32) for x in values[part.path])
        ranks = slice(start, start := start + a.shape[-1])
        A[ranks, part.inputs] = np.moveaxis(a, -1, 0)
        # The file has one scale for all kernels, so multiply `b` by the ratio of the scales.
        share = 1.0 if scale == scales[0] else scale / scales[0]
        B[part.outputs, ranks] = share * np.moveaxis(b, 0, -1)
    return A, B, scales[0]


def _module(name: str) -> str:
    """Returns the name of the module that has this weight."""
    return name.removesuffix(".weight")


def _pair(
    tensors: dict[str, np.ndarray], module: str, family: Family
) -> tuple[np.ndarray, np.ndarray] | None:
    """Removes `lora_A` `[r, I]` and `lora_B` `[O, r]` of a module from `tensors`, and returns them;
    None if the module has no adapter."""
    for name in (family.rename(module, layout) for layout in family.layouts):
        names = [f"{PREFIX}{name}.lora_{part}.weight" for part in "AB"]
        if all(n in tensors for n in names):
            a, b = (tensors.pop(n).astype(np.float32) for n in names)
            return a, b
    return None


def _tensors(file: Path) -> dict[str, np.ndarray]:
    try:
        with safe_open(file, framework="numpy") as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is missing or damaged: {error}") from error
