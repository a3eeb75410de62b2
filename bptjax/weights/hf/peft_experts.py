"""Adapters of experts in PEFT's format for parameters (`target_parameters`). transformers 5 holds
experts in two 3-D parameters per layer: gate and up in one, down in the other."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from bptjax.models.config import ModelConfig
from bptjax.weights.hf.families.family import Family
from bptjax.weights.lora import LoraWeights


def module_name(family: Family) -> str:
    """Returns the name of the module of a layer's experts."""
    return f"{family.prefix}layers.{{layer}}.{family.experts_module}"


class ExpertParameter(NamedTuple):
    """A parameter `[X, inputs, outputs]` of all experts of a layer.

    Attributes:
      paths: bptjax's kernels in the parameter.
      outputs: positions of each kernel's outputs.
    """

    name: str
    paths: tuple[str, ...]
    inputs: int
    outputs: tuple[np.ndarray, ...]

    @property
    def size(self) -> int:
        """Number of outputs."""
        return sum(map(len, self.outputs))


def expert_parameters(family: Family, config: ModelConfig) -> list[ExpertParameter]:
    """Returns the parameters of a layer's experts, in transformers' order."""
    if family.experts is None or not config.experts.on:
        return []
    D, F = config.hidden_size, config.expert_F
    both = np.arange(2 * F)
    interleaved = family.experts == "interleaved"
    halves = (both[0::2], both[1::2]) if interleaved else (both[:F], both[F:])
    gate, up, down = (f"layers.mlp.{name}.kernel" for name in ("gate", "up", "down"))
    return [
        ExpertParameter("gate_up_proj", (gate, up), D, halves),
        ExpertParameter("down_proj", (down,), F, (np.arange(D),)),
    ]


def modules(family: Family, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Returns the paths of the experts' kernels by transformers' names of their parameters."""
    return {f"{module_name(family)}.{p.name}": p.paths for p in expert_parameters(family, config)}


def read_experts(
    take: Callable[[str], tuple[np.ndarray, np.ndarray] | None],
    rank_and_scale: Callable[[str], tuple[int, float]],
    targets: list[str],
    family: Family,
    config: ModelConfig,
) -> Iterator[tuple[str, LoraWeights]]:
    """Yields (path, weights) of the experts' adapters. Each kernel of a parameter gets all of `a`.

    Args:
      take: returns `lora_A` and `lora_B` of a module, or None if there are none.
      rank_and_scale: returns a parameter's rank and scale by its name.
      targets: the adapter's `target_parameters`.

    Raises:
      ValueError: a layer has no adapter, or one with another shape.
    """
    X = config.experts.count
    chosen = [
        parameter
        for parameter in expert_parameters(family, config)
        if any(f".{module_name(family)}.{parameter.name}".endswith(f".{name}") for name in targets)
    ]
    for depth, parameter in enumerate(reversed(chosen)):
        # PEFT wraps the module once per parameter, in their order.
        layers = []
        for layer in config.expert_layers:
            module = module_name(family).format(layer=layer)
            r, scale = rank_and_scale(f"{module}.{parameter.name}")
            wanted = (r * X, parameter.inputs), (parameter.size, r * X)
            pair = take(module + ".base_layer" * depth)
            if pair is None or (pair[0].shape, pair[1].shape) != wanted:
                shapes = None if pair is None else (pair[0].shape, pair[1].shape)
                raise ValueError(
                    f"{module}.{parameter.name}: must have lora_A and lora_B of shapes {wanted}, "
                    f"not {shapes}; a rank for each layer is not supported"
                )
            a, b = pair
            a = a.reshape(X, r, -1).swapaxes(1, 2)
            layers.append((a, b.reshape(-1, r, X).T, np.full(X, scale, np.float32)))
        a, b, scale = (np.stack(x) for x in zip(*layers, strict=True))
        if not a.any() and not b.any():
            # Written for vLLM, which wants an adapter on all experts' parameters.
            continue
        for path, outputs in zip(parameter.paths, parameter.outputs, strict=True):
            own = b[..., outputs]
            # Drop the other kernels' ranks.
            used = own.any((0, 1, 3))
            used = used if used.any() else ~used
            yield path, (a[..., used], own[:, :, used], scale)


def write_experts(
    values: dict[str, LoraWeights], family: Family, config: ModelConfig
) -> Iterator[tuple[str, str, np.ndarray, np.ndarray, float]]:
    """Yields (parameter, module, lora_A, lora_B, scale) of each adapted parameter of each layer.
    Kernels of one parameter get one pair of matrices: with shared ranks if their `a` is equal, as
    in PEFT's own adapters, otherwise with their ranks concatenated."""
    adapted = [
        parameter
        for parameter in expert_parameters(family, config)
        if any(path in values for path in parameter.paths)
    ]
    for depth, parameter in enumerate(reversed(adapted)):
        parts = [
            (values[path], outputs)
            for path, outputs in zip(parameter.paths, parameter.outputs, strict=True)
            if path in values
        ]
        for i, layer in enumerate(config.expert_layers):
            (first, _, every), X = (x[i] for x in parts[0][0]), config.experts.count
            shared = all(np.array_equal(first, a[i]) for (a, _, _), _ in parts)
            r = first.shape[-1] if shared else sum(a.shape[-1] for (a, _, _), _ in parts)
            A = np.zeros((X, r, parameter.inputs), np.float32)
            B = np.zeros((parameter.size, r, X), np.float32)
            start = 0
            for weights, outputs in parts:
                a, b, scale = (np.asarray(x[i], np.float32) for x in weights)
                ranks = slice(start, start + a.shape[-1])
                start += 0 if shared else a.shape[-1]
                A[:, ranks] = a.swapaxes(1, 2)
                # PEFT has one scale for all experts, so multiply `b` by the ratio of the scales.
                B[outputs, ranks] = (b * (scale / every[0])[:, None, None]).T
            module = module_name(family).format(layer=layer)
            wrapped = module + ".base_layer" * depth
            A, B = A.reshape(X * r, -1), B.reshape(parameter.size, r * X)
            yield f"{module}.{parameter.name}", wrapped, A, B, float(every[0])
