"""Families in GGUF files: how each differs from what all share, and the tensors of a model.

Metadata is read and written by the same rows, so that values which a GGUF file cannot hold are
found by reading its metadata back.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bptjax.models.config import ModelConfig
from bptjax.models.params import Index
from bptjax.weights.gguf.keys import Keys
from bptjax.weights.gguf.transforms import IDENTITY, Transform
from bptjax.weights.hf.families.family import Family, Layout, field_values
from bptjax.weights.hf.tensor_rules import TensorRule


@dataclass(frozen=True)
class Row:
    """A family in GGUF files.

    Attributes:
      arch: name of the architecture.
      keys: keys of metadata in addition to SHARED, with the attribute of transformers' config.
      transforms: (pattern of a tensor's name in Hugging Face files, transform); the first match
        counts.
      rules: yields rules in place of the family's, for tensors that a GGUF file splits or joins
        otherwise; None for the family's.
      renamed: (pattern of a tensor's name in Hugging Face files, name that the package gguf knows).
      rope: returns further rotary parameters from the metadata; None for none.
      ropes: types of rotary scaling besides linear and yarn.
      fixed: attributes of transformers' config that the architecture implies.
      read: returns further attributes from the metadata, a `Keys`; None for none.
      write: returns further metadata from transformers' config; None for none.
      chosen: says whether the row is for a file of this metadata and these tensors, if several rows
        have its architecture.
    """

    arch: str
    keys: dict[str, str] = field(default_factory=dict)
    transforms: tuple[tuple[str, Transform], ...] = ()
    rules: Callable[[Family, ModelConfig], Iterator[TensorRule]] | None = None
    renamed: tuple[tuple[str, str], ...] = ()
    rope: Callable[[Keys], dict[str, Any]] | None = None
    ropes: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Keys], dict[str, Any]] | None = None
    write: Callable[[Any, ModelConfig], dict[str, Any]] | None = None
    chosen: Callable[[Keys], bool] = lambda keys: True


@dataclass(frozen=True)
class Tensor:
    """A tensor of a GGUF file.

    Attributes:
      name: name in the file.
      rule: the rule of the tensor of Hugging Face files.
      indices: index into the rule's stacked axes, of one tensor, or of each expert's.
      stacked: the file has an axis of experts.
      transform: change of each tensor of a Hugging Face file.
    """

    name: str
    rule: TensorRule
    indices: tuple[Index, ...]
    stacked: bool
    transform: Transform
    config: ModelConfig

    def join(self, read: Callable[[str, Index], np.ndarray]) -> np.ndarray:
        """Returns the tensor, from a function that reads parameters by path and index."""
        parts = [
            self.transform.there(
                self.rule.join(*(read(path, index) for path in self.rule.ours)), self.config
            )
            for index in self.indices
        ]
        return np.stack(parts) if self.stacked else parts[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        one = self.transform.there(np.broadcast_to(np.float32(0), self.rule.shape), self.config)
        return (len(self.indices),) * self.stacked + one.shape

    def split(self, array: np.ndarray) -> tuple[np.ndarray, ...]:
        """Returns the parameters that one expert's slice of the tensor, or the tensor, holds."""
        return self.rule.split(self.transform.back(array, self.config))


def tensors(row: Row, family: Family, config: ModelConfig) -> list[Tensor]:
    """Returns the tensors of the model in a GGUF file.

    Raises:
      ValueError: the architecture has no name for a tensor.
    """
    import gguf

    values = field_values(config)
    (arch,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == row.arch)
    names = gguf.get_tensor_name_map(arch, config.num_layers)
    layout = Layout("model.") if family.wrapped else family.layouts[0]
    found = []
    for rule in row.rules(family, config) if row.rules else family.tensor_rules(config):
        rule = replace(rule, hf=family.rename(rule.hf, layout))
        transform = next((t for p, t in row.transforms if re.fullmatch(p, rule.hf)), IDENTITY)
        groups: dict[str, list[Index]] = {}
        for index, name in rule.names(values).items():
            for pattern, new in (*row.renamed, (r"\.experts\.\d+\.", ".experts.")):
                name = re.sub(pattern, new, name)
            own = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if own is None:
                raise ValueError(f"{name}: llama.cpp's {row.arch} has no such tensor")
            groups.setdefault(own, []).append(index)
        stacked = "{expert}" in rule.hf
        found += [
            Tensor(name, rule, tuple(indices), stacked, transform, config)
            for name, indices in groups.items()
        ]
    return found
