"""Reads and writes Hugging Face directories: parameters, by a family's rules, and sidecar files."""

import re
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bptjax.models.config import ModelConfig
from bptjax.models.params import ArraySpec, Index
from bptjax.weights.hf import mxfp4
from bptjax.weights.hf.families import COPIES, IGNORED
from bptjax.weights.hf.families.encoders import CLASSIFIER_HEAD, MASKED_HEAD
from bptjax.weights.hf.families.family import Family, field_values
from bptjax.weights.hf.other_tensors import OtherTensors
from bptjax.weights.hf.tensor_rules import TensorRule
from bptjax.weights.hf.tensors import CODES, OTHER_CODES, Tensors, Writer, abridged

# Directory of the Hugging Face model's sidecar files, in a run or a converted checkpoint.
SIDECARS = "hf"
# File extensions of weights, in safetensors and other formats.
WEIGHTS = (
    ".safetensors",
    ".bin",
    ".index.json",
    ".pt",
    ".pth",
    ".h5",
    ".msgpack",
    ".gguf",
    ".onnx",
)


class HFCheckpoint:
    """The parameters in a Hugging Face directory; a `ParameterSource`.

    Attributes:
      specs: dtype and shape of each parameter by path, including stacked axes.
      files: the files of weights.
      config: the architecture; its embeddings are untied if the file has a separate head.
      others: the tensors that are not read but kept for exports: the rest of a multimodal model,
        and layers for multi-token prediction; None if there are none.
      left_out: names of tensors that are not read because they hold no parameters of this model:
        buffers that old versions of transformers saved, and heads that the class named by
        config.json does not have.
      decoded: names of tensors that are decoded from MXFP4.
      absent: shapes of new classes' parameters, which the files do not hold, by path.

    Args:
      new_classes: the files need not hold the parameters of `config`'s classifier.

    Raises:
      ValueError: missing or unexpected tensors, wrong shapes or dtypes, all in one message.
    """

    def __init__(
        self,
        directory: Path,
        family: Family,
        config: ModelConfig,
        new_classes: bool = False,
    ):
        self._tensors, self.config = Tensors(directory, family.renamed), config
        self._values, specs = field_values(config), self._tensors.specs
        self._layout = layout = family.find_layout(specs)
        self._names = family.names(config, layout)
        head = f"{layout.head}lm_head.weight"
        if family.wrapped and config.tied_head and head in specs and not self._is_copy(head):
            # As in transformers: the outer config may hide that the text model has a head.
            self.config = replace(config, tied_head=False)
            self._names = family.names(self.config, layout)
        self.absent: dict[str, tuple[int, ...]] = {}
        for head in CLASSIFIER_HEAD if new_classes else ():
            own = {r: n for r, n in self._names.items() if r.ours[0].startswith(head)}
            if specs.keys() & {name for names in own.values() for name in names.values()}:
                continue
            for rule in own:
                parts = rule.split(np.broadcast_to(np.int8(0), rule.shape))
                self.absent |= {p: a.shape for p, a in zip(rule.ours, parts, strict=True)}
                del self._names[rule]
        wanted = {n: rule.shape for rule, names in self._names.items() for n in names.values()}
        missing = sorted(wanted.keys() - specs.keys())
        ignored = [IGNORED, *family.ignored, *([MASKED_HEAD] if new_classes else [])]
        ignored += family.unused(config) if family.unused else ()
        ignored = re.compile("|".join(ignored))
        others = sorted(specs.keys() - wanted.keys())
        # Prefixes of the model's own names; every name starts with the empty prefix.
        own = (layout.body, layout.head or layout.body, "lm_head.") if family.wrapped else ""
        patterns = re.compile("|".join(family.kept))
        exported = [n for n in others if not n.startswith(own) or patterns.fullmatch(n)]
        self.others = None
        if family.wrapped or exported:
            self.others = OtherTensors(self._tensors, tuple(exported), layout)
            others = [n for n in others if n not in exported]
        self.left_out = [n for n in others if ignored.fullmatch(n)]
        others = [n for n in others if not ignored.fullmatch(n) and not self._is_copy(n)]
        present = {n: (*specs[n], shape) for n, shape in wanted.items() if n in specs}
        problems = {
            "missing": missing,
            "unexpected": others,
            "wrong shape": [
                f"{n} is {list(got)}, not {list(shape)}"
                for n, (_, got, shape) in present.items()
                if got != shape
            ],
            "wrong dtype": [
                f"{n} is {dtype}, not {', '.join(CODES)}"
                for n, (dtype, _, _) in present.items()
                if dtype not in CODES
            ]
            + [
                f"{n} is {spec.dtype}, not {', '.join(CODES | OTHER_CODES)}"
                for n, spec in (self.others.specs if self.others else {}).items()
                if spec.dtype not in CODES | OTHER_CODES
            ],
        }
        text = "; ".join(f"{kind}: {abridged(names)}" for kind, names in problems.items() if names)
        if text:
            raise ValueError(f"{directory}: {text}")
        self.specs, self.files = dict(self._specs()), tuple(self._tensors.files)
        self.decoded = self._tensors.decoded

    def _is_copy(self, name: str) -> bool:
        """Returns whether the tensor is a second copy of a tied parameter, with equal values."""
        copied = COPIES.get(name.removeprefix(self._layout.head))
        if not self.config.tied_head or copied is None:
            return False
        originals = (names[()] for rule, names in self._names.items() if rule.ours == (copied,))
        original, specs = next(originals, ""), self._tensors.specs
        return (
            specs[name] == specs.get(original)
            and specs[name].dtype in CODES
            and self._tensors.read(name).tobytes() == self._tensors.read(original).tobytes()
        )

    def _specs(self) -> Iterator[tuple[str, ArraySpec]]:
        for rule, names in self._names.items():
            dtypes = {self._tensors.specs[name].dtype for name in names.values()}
            if len(dtypes) > 1:
                raise ValueError(f"{rule.hf}: must have one dtype, not {', '.join(sorted(dtypes))}")
            (dtype,) = dtypes
            stacked = rule.stacked(self._values)
            parts = rule.split(np.broadcast_to(np.int8(0), rule.shape))
            for path, part in zip(rule.ours, parts, strict=True):
                yield path, ArraySpec(dtype, stacked + part.shape)

    def slices(self) -> Iterator[tuple[str, Index, np.ndarray]]:
        """Yields (path, index, array) of every parameter, reading one tensor at a time."""
        for rule, names in self._names.items():
            for index, name in names.items():
                parts = rule.split(self._tensors.read(name))
                for path, part in zip(rule.ours, parts, strict=True):
                    yield path, index, part

    def read(self, path: str, index: Index = ()) -> np.ndarray:
        """Reads a parameter, or the slice of it at `index` into its first axes."""
        rule, names = next(entry for entry in self._names.items() if path in entry[0].ours)
        stacked = len(rule.fields)
        if len(index) < stacked:
            size = rule.stacked(self._values)[len(index)]
            return np.stack([self.read(path, (*index, i)) for i in range(size)])
        parts = rule.split(self._tensors.read(names[index[:stacked]]))
        return parts[rule.ours.index(path)][index[stacked:]]


def write_hf(
    directory: Path,
    names: Mapping[TensorRule, Mapping[Index, str]],
    read: Callable[[str, Index], np.ndarray],
    dtype: Callable[[str], str],
    max_shard_size: str,
    others: OtherTensors | None = None,
    encoded: Collection[str] = (),
) -> float:
    """Writes a family's files. Holds one tensor in memory at a time. Returns the relative error of
    the encoded tensors (root mean square).

    Args:
      names: names of the tensors; see `Family.names`.
      read: returns a parameter by path and index into its stacked axes.
      dtype: returns the name of a parameter's dtype by path.
      others: tensors to copy.
      encoded: paths of parameters to write in MXFP4.
    """
    specs: dict[str, ArraySpec] = {}
    for rule, each in names.items():
        for name in each.values():
            if rule.ours[0] in encoded:
                shape = mxfp4.blocks_shape(rule.shape)
                specs[name + mxfp4.BLOCKS] = ArraySpec("uint8", shape)
                specs[name + mxfp4.SCALES] = ArraySpec("uint8", shape[:-1])
            else:
                specs[name] = ArraySpec(dtype(rule.ours[0]), rule.shape)
    specs |= others.specs if others else {}
    errors, squares = 0.0, 0.0
    with Writer(directory, specs, max_shard_size) as writer:
        if others is not None:
            for name in others.names:
                writer.write(name, others.read(name))
        for rule, each in names.items():
            for index, name in each.items():
                array = rule.join(*(read(path, index) for path in rule.ours))
                if rule.ours[0] not in encoded:
                    writer.write(name, array)
                    continue
                parts = mxfp4.encode(array)
                for ending, part in zip((mxfp4.BLOCKS, mxfp4.SCALES), parts, strict=True):
                    writer.write(name + ending, part)
                for new, w in zip(mxfp4.decode(*parts), array, strict=True):
                    w = w.astype(np.float32)
                    errors += float(np.square(new.astype(np.float32) - w).sum())
                    squares += float(np.square(w).sum())
    return (errors / squares) ** 0.5 if squares else 0.0


def sidecar_files(directory: Path) -> list[Path]:
    """Returns the files other than weights: config, tokenizer, chat template, generation config."""
    return [
        file
        for file in sorted(directory.iterdir())
        if file.is_file() and not file.name.endswith(WEIGHTS) and not file.name.startswith(".")
    ]


def copy_sidecar_files(source: Path, target: Path) -> None:
    """Copies the files other than weights to `target`, and creates it if it does not exist."""
    target.mkdir(parents=True, exist_ok=True)
    for file in sidecar_files(source):
        shutil.copyfile(file, target / file.name)


def describe_left_out(checkpoint: HFCheckpoint) -> str:
    """Returns a line about tensors left out, kept, decoded or new, counted over layers, or ""."""
    names, others = checkpoint.left_out, checkpoint.others.names if checkpoint.others else ()
    lines = [_counted(names, "left out", "of the files that hold no parameters of this model")]
    lines.append(_counted(others, "kept", "for exports, which are not trained"))
    decoded = "from MXFP4 to bfloat16, in which exports hold them without --experts mxfp4"
    lines.append(_counted(checkpoint.decoded, "decoded", decoded))
    if checkpoint.absent:
        lines.append(f"new parameters, which the files do not hold: {', '.join(checkpoint.absent)}")
    return "; ".join(filter(None, lines))


def _counted(names: Sequence[str], done: str, which: str) -> str:
    counts = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    shown = [name if n == 1 else f"{name} ({n})" for name, n in counts.items()]
    tensors = f"{len(names)} tensor{'s' * (len(names) > 1)}"
    return f"{done} {tensors} {which}: {abridged(shown)}" if names else ""
