"""Writes adapters in the form that vLLM reads, and lists what vLLM refuses; as of vLLM 0.33."""

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import numpy as np

from bptjax.models.config import ModelConfig
from bptjax.weights.hf import peft_experts
from bptjax.weights.hf.families.family import Family
from bptjax.weights.hf.peft import (
    alpha,
    linear_matrices,
    named,
    save,
    targets,
    without_layer,
)
from bptjax.weights.hf.peft_modules import linears
from bptjax.weights.lora import Adapters, LoraWeights

# vLLM's values of --max-lora-rank, and its default.
RANKS, DEFAULT_RANK = (1, 8, 16, 32, 64, 128, 256, 320, 512), 16
EXPERTS = tuple(f"layers.mlp.{name}.kernel" for name in ("gate", "up", "down"))
# vLLM reads an adapter of in_proj_z only next to one of in_proj_qkv.
Z = "layers.linear.gate.kernel"
QKV = tuple(f"layers.linear.{name}.kernel" for name in ("query", "key", "value"))
MERGE = "serve the model that merge-adapter writes"


def write_vllm(
    directory: Path, adapters: Adapters, family: Family, config: ModelConfig, base: str
) -> None:
    """Writes the adapters in PEFT's format with the names and shapes of vLLM's modules: one pair of
    matrices for each expert, or for all experts of a layer if vLLM's model holds them in one
    parameter. All modules get the same scale.

    Raises:
      ValueError: vLLM refuses the adapters.
    """
    ranks = {path: a.shape[-1] for path, (a, _, _) in adapters.values.items()}
    if reason := refusal(family, config, ranks, adapters.modules):
        raise ValueError(f"{base}: must have an adapter that vLLM reads, but it {reason}; {MERGE}")
    values = _completed(adapters.values, family, config)
    stacked = EXPERTS if family.vllm_stacked else ()
    linear = {path: x for path, x in values.items() if path not in stacked}
    # Name in patterns, name of the tensors, matrices and scale of each module.
    written = [(m.module, *m[:4]) for m in linear_matrices(linear, family, config)]
    modules, X = len(written), config.experts.count or 1
    written += peft_experts.write_experts(values, family, config) if stacked else ()
    ranks = {}
    for number, (name, _, A, _, _) in enumerate(written):
        r = len(A) if number < modules else len(A) // X
        ranks[_key(name)] = max(r, ranks.get(_key(name), 0))
    r, scale = max(ranks.values()), max((own for *_, own in written), key=abs)
    tensors: dict[str, np.ndarray] = {}
    for number, (name, module, A, B, own) in enumerate(written):
        more = ranks[_key(name)] - len(A) if number < modules else 0
        A, B = np.pad(A, ((0, more), (0, 0))), np.pad(B, ((0, 0), (0, more)))
        tensors |= named(module, A, B if own == scale else B * np.float32(own / scale))
    # Old versions of vLLM read neither pattern; with both, all modules have the scale alpha / r.
    others = {key: rank for key, rank in ranks.items() if rank != r}
    names = [name for name, *_ in written]
    raw = dict(
        base_model_name_or_path=base,
        r=r,
        lora_alpha=alpha(scale, r, adapters.config),
        lora_dropout=adapters.config.dropout,
        use_rslora=adapters.config.use_rslora,
        target_modules=targets(names[:modules], family) or None,
        target_parameters=without_layer(names[modules:]) or None,
        rank_pattern=others,
        alpha_pattern={key: alpha(scale, rank, adapters.config) for key, rank in others.items()},
    )
    save(directory, tensors, raw)


def refusal(
    family: Family, config: ModelConfig, ranks: Mapping[str, int], in_full: Collection[str]
) -> str:
    """Returns what vLLM refuses in these adapters; empty if it reads them.

    Args:
      ranks: rank of each adapted kernel, by path.
      in_full: paths of embeddings that are trained in full.
    """
    if in_full:
        return f"refuses fully trained embeddings ({', '.join(sorted(in_full))})"
    largest: dict[str, int] = {}
    together = [
        (_key(next(iter(x.names.values()))), [p.path for p in x.parts])
        for x in linears(family, config)
    ]
    if family.vllm_stacked:
        together += [(p.name, p.paths) for p in peft_experts.expert_parameters(family, config)]
    for name, paths in together:
        if adapted := [ranks[path] for path in paths if path in ranks]:
            largest[name.split(".")[-1]] = sum(adapted)
    if not family.vllm_lora:
        return f"refuses all adapters of this family ({', '.join(largest)})"
    over = {name: r for name, r in largest.items() if r > RANKS[-1]}
    if over:
        text = ", ".join(f"{name} {r}" for name, r in over.items())
        return f"refuses ranks above {RANKS[-1]} ({text})"
    return ""


def max_lora_rank(r: int) -> int:
    """Returns the smallest value of --max-lora-rank that admits rank r."""
    return next(rank for rank in RANKS if rank >= r)


def _key(name: str) -> str:
    """Returns a pattern of a module's name in all layers and of all experts."""
    (within,) = without_layer([name])
    return re.sub(r"\.\d+\.", r".\\d+.", within)


def _completed(
    values: Mapping[str, LoraWeights], family: Family, config: ModelConfig
) -> dict[str, LoraWeights]:
    """Returns the adapters, and zero adapters of rank 1 for the kernels that vLLM wants one for."""
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for parameter in peft_experts.expert_parameters(family, config):
        for path, outputs in zip(parameter.paths, parameter.outputs, strict=True):
            shapes[path] = (parameter.inputs,), (len(outputs),)
    new: dict[str, LoraWeights] = {}

    def add(path: str, beside: Iterable[str]) -> None:
        scale = next(np.asarray(values[other][2]) for other in beside if other in values)
        inputs, outputs = shapes[path]
        a = np.zeros((*scale.shape, *inputs, 1), np.float32)
        new[path] = a, np.zeros((*scale.shape, 1, *outputs), np.float32), scale

    if config.experts.on and values.keys() & {*EXPERTS}:
        gate, up, down = EXPERTS
        if family.vllm_stacked:
            missing = [gate] * (gate not in values and up not in values)
            missing += [down] * (down not in values)
        else:
            missing = [path for path in EXPERTS if path not in values]
        for path in missing:
            add(path, EXPERTS)
    if Z in values and not values.keys() & {*QKV}:
        for linear in linears(family, config):
            for part in linear.parts:
                shapes[part.path] = part.inputs.shape, part.outputs.shape
        add(QKV[0], [Z])
    return {**values, **new}
