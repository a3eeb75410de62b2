"""Reads and writes adapters in PEFT's format."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  Registers bfloat16 in NumPy, without which safetensors fails.
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from bptjax.models.config import ModelConfig
from bptjax.run.json_files import read_json
from bptjax.weights.hf import peft_experts
from bptjax.weights.hf.families.family import Family
from bptjax.weights.hf.peft_config import (
    ADAPTER_CONFIG,
    adapter_settings,
    is_target,
    rank_and_scale,
)
from bptjax.weights.hf.peft_modules import HEADS, embeddings, joined, linears
from bptjax.weights.lora import AdapterConfig, Adapters, LoraWeights

WEIGHTS, PREFIX = "adapter_model.safetensors", "base_model.model."


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
    of_experts = {path for p in peft_experts.expert_parameters(family, config) for path in p.paths}
    for sizes, names, parts in linears(family, config):
        pairs = [_pair(tensors, name, family) for name in names.values()]
        missing = [
            n for n, p in zip(names.values(), pairs, strict=True) if p is None and is_target(raw, n)
        ]
        # Adapters of experts may be in `target_parameters`.
        if missing and (any(pairs) or parts[0].path not in of_experts):
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
        if not A.any() and not B.any():
            # Written for vLLM, which wants an adapter on all modules of a group.
            continue
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


class Matrices(NamedTuple):
    """A module's adapter.

    Attributes:
      module: name of the module.
      A, B: `[r, I]` and `[O, r]`.
    """

    module: str
    A: np.ndarray
    B: np.ndarray
    scale: float
    transposed: bool = False


def linear_matrices(
    values: Mapping[str, LoraWeights], family: Family, config: ModelConfig
) -> Iterator[Matrices]:
    """Yields the adapters of linear layers; see `joined`."""
    for _, names, parts in linears(family, config):
        if any(part.path in values for part in parts):
            for index, name in names.items():
                yield Matrices(name, *joined(parts, values, index), parts[0].transposed)


def write_peft(
    directory: Path, adapters: Adapters, family: Family, config: ModelConfig, base: str
) -> None:
    """Writes the adapters in PEFT's format. Adapters of experts are written as PEFT's
    `target_parameters`, which need transformers 5."""
    tensors: dict[str, np.ndarray] = {}
    kinds: dict[str, tuple[int, float]] = {}
    transposed = False
    of_experts = {path for p in peft_experts.expert_parameters(family, config) for path in p.paths}
    values = {path: x for path, x in adapters.values.items() if path not in of_experts}
    for name, A, B, scale, own in linear_matrices(values, family, config):
        tensors |= named(name, A, B)
        kinds[name] = len(A), alpha(scale, len(A), adapters.config)
        transposed |= own
    modules, X = list(kinds), config.experts.count or 1
    written = peft_experts.write_experts(adapters.values, family, config)
    for name, module, A, B, scale in written:
        tensors |= named(module, A, B)
        kinds[name] = len(A) // X, alpha(scale, len(A) // X, adapters.config)
    r, own_alpha = next(iter(kinds.values()))
    raw = dict(
        base_model_name_or_path=base,
        r=r,
        lora_alpha=own_alpha,
        # PEFT has no dropout for parameters, and refuses it.
        lora_dropout=adapters.config.dropout if len(modules) == len(kinds) else 0.0,
        use_rslora=adapters.config.use_rslora,
        target_modules=targets(modules, family) or None,
        target_parameters=without_layer(kinds.keys() - {*modules}) or None,
        rank_pattern={name: rank for name, (rank, _) in kinds.items() if rank != r},
        alpha_pattern={name: own for name, (_, own) in kinds.items() if own != own_alpha},
        fan_in_fan_out=transposed,
        modules_to_save=_write_embeddings(tensors, adapters, family, config) or None,
    )
    save(directory, tensors, raw)


def named(module: str, A: np.ndarray, B: np.ndarray) -> dict[str, np.ndarray]:
    """Returns a module's matrices by the names of their tensors."""
    return {f"{PREFIX}{module}.lora_A.weight": A, f"{PREFIX}{module}.lora_B.weight": B}


def save(directory: Path, tensors: dict[str, np.ndarray], raw: dict[str, Any]) -> None:
    """Writes the tensors, and the keys `raw` of an adapter's config."""
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})
    raw = dict(peft_type="LORA", task_type="CAUSAL_LM", bias="none", inference_mode=True) | raw
    (directory / ADAPTER_CONFIG).write_text(json.dumps(raw, indent=2) + "\n")


def targets(names: Iterable[str], family: Family) -> list[str] | str:
    """Returns PEFT's target_modules: the module names within a layer. A vision model may have
    modules of the same names, so the pattern of a multimodal family has the text model's prefix."""
    ends = without_layer(names)
    if not family.wrapped:
        return ends
    return rf"{re.escape(family.prefix)}layers\.\d+\.({'|'.join(map(re.escape, ends))})"


def alpha(scale: float, r: int, config: AdapterConfig) -> float:
    """Returns the lora_alpha that gives this scale at rank r."""
    return float(f"{scale * (r**0.5 if config.use_rslora else r):.7g}")


def without_layer(names: Iterable[str]) -> list[str]:
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
