"""Writes the model of a GGUF file as a Hugging Face directory, one tensor at a time."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bptjax.data.tokenizer import load_tokenizer
from bptjax.models.config import ModelConfig
from bptjax.models.params import Index
from bptjax.parsing.flags import DTYPES
from bptjax.run.lazy_imports import transformers
from bptjax.run.output import atomic_directory
from bptjax.weights.gguf.file import GGUF
from bptjax.weights.gguf.keys import Keys
from bptjax.weights.gguf.metadata import find_row, read_architecture, read_metadata
from bptjax.weights.gguf.rope import FREQUENCIES, LONG_FACTORS, SHORT_FACTORS
from bptjax.weights.gguf.row import Tensor, tensors
from bptjax.weights.gguf.tokenizer import read_tokenizer
from bptjax.weights.hf.checkpoint import write_hf
from bptjax.weights.hf.config_export import rope_keys
from bptjax.weights.hf.families import FAMILIES
from bptjax.weights.hf.tensors import abridged
from bptjax.weights.pretrained import Pretrained, open_pretrained

ARCHITECTURE = "general.architecture"
# Dtypes of unquantized files; weights of other types become float16.
OWN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GGUFModel:
    """The parameters of a GGUF file.

    Attributes:
      kind: model_type.
      raw: config.json.
      config: the architecture.

    Raises:
      ValueError: the file is damaged, or its architecture is not supported.
    """

    def __init__(self, path: Path):
        self.file = file = GGUF(path)
        arch = file.metadata.get(ARCHITECTURE)
        if file.metadata.get("general.type", "model") != "model" or not isinstance(arch, str):
            raise ValueError(f"{path}: must hold a model")
        shapes = {name: info.shape for name, info in file.tensors.items()}
        self.keys = keys = Keys(arch, file.metadata, shapes, file.read)
        try:
            self.kind, row = find_row(keys)
            self.raw = read_metadata(keys, self.kind)
            self.config = read_architecture(self.raw)
            self.family = FAMILIES[self.kind]
            found = tensors(row, self.family, self.config)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        self._check(found)

    def _check(self, found: list[Tensor]) -> None:
        """Checks names and shapes of the tensors."""
        shapes, wanted = self.keys.shapes, {t.name: t.shape for t in found}
        own = {FREQUENCIES, LONG_FACTORS, SHORT_FACTORS}
        problems = {
            "missing": sorted(wanted.keys() - shapes.keys()),
            "unexpected": sorted(shapes.keys() - wanted.keys() - own),
            "wrong shape": [
                f"{name} is {list(shapes[name])}, not {list(shape)}"
                for name, shape in wanted.items()
                if shapes.get(name, shape) != shape
            ],
        }
        text = "; ".join(f"{kind}: {abridged(names)}" for kind, names in problems.items() if names)
        if text:
            raise ValueError(f"{self.file.path}: {text}")
        self._places: dict[tuple[str, Index], tuple[Tensor, Index, int]] = {}
        for tensor in found:
            for number, index in enumerate(tensor.indices):
                place = (number,) if tensor.stacked else ()
                for part, path in enumerate(tensor.rule.ours):
                    self._places[path, index] = tensor, place, part

    @cached_property
    def dtype(self) -> str:
        """Name of the dtype for the weights: of most values, or float16 for quantized values, which
        loses less of them than bfloat16."""
        sizes: dict[str, int] = {}
        for info in self.file.tensors.values():
            sizes[info.type.name] = sizes.get(info.type.name, 0) + int(np.prod(info.shape))
        return OWN.get(max(sizes, key=sizes.__getitem__), "float16")

    def read(self, path: str, index: Index) -> np.ndarray:
        """Reads a parameter at `index` into its stacked axes, as float32."""
        tensor, place, part = self._places[path, index]
        return tensor.split(self.file.read(tensor.name, place))[part]


def from_gguf(source: str, out: Path, *, dtype: str | None, max_shard_size: str) -> Pretrained:
    """Writes the model of the GGUF file `source` in Hugging Face's format.

    Args:
      dtype: dtype of the weights; None for the dtype of the file, or float16 if it is quantized.

    Raises:
      ValueError: one line about the error in the file; `out` is not created.
    """
    model = GGUFModel(Path(source))
    config, name = model.config, dtype or model.dtype
    assert name in DTYPES
    with atomic_directory(out) as directory:
        ids = read_tokenizer(model.file.metadata, directory, config.max_position_embeddings or 0)
        raw = model.raw | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")) | ids
        if config.position_embedding == "rope":
            own: dict[str, Any] = raw["rope_parameters"] or {}
            kept = {key: own[key] for key in model.family.rope_kept if key in own}
            raw |= rope_keys(config, model.family, kept)
        raw |= dict(architectures=[_class_name(model.kind)], dtype=name, torch_dtype=name)
        (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        write_hf(
            directory,
            model.family.names(config),
            lambda path, index: _cast(path, model.read(path, index), name),
            lambda path: name,
            max_shard_size,
        )
        load_tokenizer(directory, config.V)
        open_pretrained(ModelConfig(name_or_path=str(directory)))
    return open_pretrained(ModelConfig(name_or_path=str(out)))


def _cast(path: str, array: np.ndarray, dtype: str) -> np.ndarray:
    """Casts a parameter.

    Raises:
      ValueError: a value is too large for the dtype.
    """
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if dtype == "float16" and not np.isfinite(cast).all():
        raise ValueError(f"{path}: must have values that float16 holds; use --dtype bfloat16")
    return cast


def _class_name(kind: str) -> str:
    """Returns the name of the class of transformers that loads a decoder."""
    transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
