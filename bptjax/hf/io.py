"""Tensors on disk: safetensors files, read and written a tensor, or a slice of one, at a time."""

import importlib.util
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  Without it NumPy knows no bfloat16, and safetensors fails.
import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open

from bptjax.hf.config import read_json
from bptjax.hf.families import COPIES, IGNORED, Family
from bptjax.hf.tensor_rules import Index, TensorRule
from bptjax.models.config import ModelConfig
from bptjax.progress import Progress

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
NAMES = {name: code for code, name in DTYPES.items()}
SINGLE, INDEX, PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
# Files that hold weights, ours or other formats', as opposed to what goes with them.
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


class Tensors:
    """The tensors of a checkpoint directory, by name.

    Args:
      renamed: endings of names in old files, and what they are now.

    Attributes:
      kinds: name to (dtype, shape). A dtype outside `NAMES` is allowed here, because files of old
        versions hold integer buffers; `Checkpoint` checks the tensors that it reads.
      files: the files of weights.

    Raises:
      ValueError: no weights, or a missing or damaged file.
    """

    def __init__(self, directory: Path, renamed: tuple[tuple[str, str], ...] = ()):
        self.directory = directory
        self.kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._files: dict[str, tuple[Path, str]] = {}
        self._torch: dict[str, Any] = {}

        def now(name: str) -> str:
            for old, new in renamed:
                name = name.removesuffix(old) + new if name.endswith(old) else name
            return name

        files = self.files = _files(directory, SINGLE, INDEX)
        if not files:
            self.files = _files(directory, PICKLED, f"{PICKLED}.index.json")
            for file in self.files:
                self._torch |= {now(n): x for n, x in _unpickled(file).items()}
            if not self._torch:
                raise ValueError(f"{directory} has no {SINGLE}")
        for name, tensor in self._torch.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.kinds[name] = dtype, tuple(tensor.shape)
        for file in files:
            with _opened(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 (no mapping)
                    part = tensors.get_slice(name)
                    dtype = DTYPES.get(part.get_dtype(), part.get_dtype())
                    self.kinds[now(name)] = dtype, tuple(part.get_shape())
                    self._files[now(name)] = file, name

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """Reads a tensor, or the slice of it at `index` into its first axes."""
        if name in self._torch:
            tensor, dtype = self._torch[name][index].contiguous(), self.kinds[name][0]
            if dtype != "bfloat16":
                return tensor.numpy()
            import torch

            return tensor.view(torch.int16).numpy().view(dtype)
        # Mapped pages count as memory in use until the file is closed, so each call opens it anew.
        file, written = self._files[name]
        with _opened(file) as tensors:
            if not index:
                return tensors.get_tensor(written)
            part = tensors.get_slice(written)[tuple(slice(i, i + 1) for i in index)]
            return part.reshape(part.shape[len(index) :])


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="numpy") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or no safetensors file: {error}") from error
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror or error}") from error


def _files(directory: Path, single: str, index: str) -> list[Path]:
    """Returns the file called `single`, or the files that the index lists.

    Raises:
      ValueError: the index lists no files, or files that are not there.
    """
    if (directory / index).exists():
        names = read_json(directory / index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ValueError(f"{directory / index} is damaged: its weight_map lists no tensors")
        if strange := [x for x in names.values() if not isinstance(x, str)]:
            raise ValueError(f"{directory / index} is damaged: {strange[0]!r} is not a file name")
        files = [directory / name for name in dict.fromkeys(names.values())]
        if missing := [file.name for file in files if not file.is_file()]:
            raise ValueError(f"{directory / index} lists files that are not there: {missing}")
        return files
    return [directory / single] if (directory / single).exists() else []


def _unpickled(file: Path) -> dict[str, Any]:
    """The tensors of one of torch's own files, left on disk until they are read."""
    if importlib.util.find_spec("torch") is None:
        raise ValueError(f"{file} needs torch, which is not installed; or convert it to {SINGLE}")
    import torch

    try:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        # Whatever a damaged pickle brings about.
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{file} is damaged or no torch file: {text}") from error
    tensors = isinstance(found, dict) and all(
        isinstance(name, str) and isinstance(x, torch.Tensor) for name, x in found.items()
    )
    if not tensors:
        raise ValueError(f"{file} holds something other than tensors by name")
    return found


class Checkpoint:
    """The tensors of a family found in a directory.

    Attributes:
      left_out: names of tensors that are not read, because they hold no parameters of this model:
        buffers that old versions of transformers saved, and heads that the class named by
        config.json does not have.

    Raises:
      ValueError: missing and unexpected tensors, wrong shapes and dtypes, all in one.
    """

    def __init__(self, directory: Path, family: Family, config: ModelConfig):
        self.tensors, self.config = Tensors(directory, family.renamed), config
        self.sizes, kinds = family.sizes(config), self.tensors.kinds
        bare = not any(name.startswith(family.prefix) for name in kinds)
        self.names = family.names(config, strip=family.prefix if bare else "")
        wanted = {n: rule.shape for rule, names in self.names.items() for n in names.values()}
        missing = sorted(wanted.keys() - kinds.keys())
        ignored = re.compile("|".join((IGNORED, *family.ignored)))
        others = sorted(kinds.keys() - wanted.keys())
        self.left_out = [n for n in others if ignored.fullmatch(n)]
        others = [n for n in others if not ignored.fullmatch(n) and not self._is_copy(n)]
        found = {n: (*kinds[n], shape) for n, shape in wanted.items() if n in kinds}
        problems = {
            "missing": missing,
            "unexpected": others,
            "wrong shape": [
                f"{n} is {list(got)}, not {list(shape)}"
                for n, (_, got, shape) in found.items()
                if got != shape
            ],
            "wrong dtype": [
                f"{n} is {dtype}, not {', '.join(NAMES)}"
                for n, (dtype, _, _) in found.items()
                if dtype not in NAMES
            ],
        }
        text = "; ".join(f"{what}: {_some(names)}" for what, names in problems.items() if names)
        if text:
            raise ValueError(f"{directory}: {text}")

    def _is_copy(self, name: str) -> bool:
        """Whether a tied parameter is stored a second time under this name, with equal values."""
        if not self.config.tied_head or name not in COPIES:
            return False
        originals = (
            names[()] for rule, names in self.names.items() if rule.ours == (COPIES[name],)
        )
        original, kinds = next(originals, ""), self.tensors.kinds
        return (
            kinds[name] == kinds.get(original)
            and kinds[name][0] in NAMES
            and self.tensors.read(name).tobytes() == self.tensors.read(original).tobytes()
        )

    def kinds(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """(dtype, shape) of each parameter by path, with its stacked axes."""
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for rule, names in self.names.items():
            dtypes = {self.tensors.kinds[name][0] for name in names.values()}
            if len(dtypes) > 1:
                raise ValueError(f"{rule.hf} is {' and '.join(sorted(dtypes))}; use one dtype")
            parts = rule.split(np.broadcast_to(np.int8(0), rule.shape))
            stacked = tuple(self.sizes[field] for field in rule.fields)
            for path, part in zip(rule.ours, parts, strict=True):
                found[path] = dtypes.copy().pop(), stacked + part.shape
        return found

    def pieces(self) -> Iterator[tuple[str, Index, np.ndarray]]:
        """(path, index, array) of every parameter, one tensor of the file in memory at a time."""
        for rule, names in self.names.items():
            for index, name in names.items():
                for path, part in zip(rule.ours, rule.split(self.tensors.read(name)), strict=True):
                    yield path, index, part

    def read(self, path: str, index: Index = ()) -> np.ndarray:
        """Reads a parameter, or the slice of a stacked one at `index` into its first axes."""
        rule, names = next((rule, names) for rule, names in self.names.items() if path in rule.ours)
        stacked = len(rule.fields)
        if len(index) < stacked:
            size = self.sizes[rule.fields[len(index)]]
            return np.stack([self.read(path, (*index, i)) for i in range(size)])
        parts = rule.split(self.tensors.read(names[index[:stacked]]))
        return parts[rule.ours.index(path)][index[stacked:]]

    def params(self) -> Iterator[tuple[str, np.ndarray]]:
        """(path, array), stacked: the parameters of one rule in memory at a time."""
        stacks: dict[str, np.ndarray] = {}
        kinds = self.kinds()
        for path, index, part in self.pieces():
            if not index:
                yield path, part
                continue
            _, shape = kinds[path]
            if path not in stacks:
                stacks[path] = np.empty(shape, part.dtype)
            stacks[path][index] = part
            if index == tuple(n - 1 for n in shape[: len(index)]):
                yield path, stacks.pop(path)


def write_hf(
    directory: Path,
    names: Mapping[TensorRule, Mapping[Index, str]],
    read: Callable[[str, Index], np.ndarray],
    kind: Callable[[str], str],
    max_shard_size: str,
) -> None:
    """Writes a family's files, one tensor in memory at a time.

    Args:
      names: of the tensors, see `Family.names`.
      read: returns a parameter by path and index into its stacked axes.
      kind: returns the name of a parameter's dtype by path.
    """
    entries = {
        name: (kind(rule.ours[0]), rule.shape)
        for rule, each in names.items()
        for name in each.values()
    }
    with Writer(directory, entries, max_shard_size) as writer:
        for rule, each in names.items():
            for index, name in each.items():
                writer.write(name, rule.join(*(read(path, index) for path in rule.ours)))


class Writer:
    """safetensors files whose tensors arrive in any order; each goes straight to its place.

    Args:
      entries: name to (dtype, shape).
      max_shard_size: such as 5GB; several files and an index where it does not suffice.
    """

    def __init__(
        self, directory: Path, entries: dict[str, tuple[str, tuple[int, ...]]], max_shard_size: str
    ):
        def size(entry):
            return int(np.prod(entry[1], dtype=np.int64)) * np.dtype(entry[0]).itemsize

        try:
            plan = split_state_dict_into_shards_factory(
                entries,
                get_storage_size=size,
                filename_pattern="model{suffix}.safetensors",
                max_shard_size=max_shard_size,
            )
        except ValueError as error:
            raise ValueError(f"max_shard_size={max_shard_size}: {error}") from error
        self._entries, self._places = entries, {}
        self._left = {name: size(entry) for name, entry in entries.items()}
        self._progress = Progress("writing tensors", sum(self._left.values()))
        for file, names in plan.filename_to_tensors.items():
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            end = 0
            for name in names:
                dtype, shape = entries[name]
                begin, end = end, end + size(entries[name])
                offsets = [begin, end]
                header[name] = dict(dtype=NAMES[dtype], shape=shape, data_offsets=offsets)
            text = json.dumps(header).encode()
            text += b" " * (-len(text) % 8)
            with (directory / file).open("wb") as stream:
                stream.write(len(text).to_bytes(8, "little") + text)
                stream.truncate(8 + len(text) + end)
            for name in names:
                start = 8 + len(text) + header[name]["data_offsets"][0]
                self._places[name] = directory / file, start
        if plan.is_sharded:
            index = dict(metadata=plan.metadata, weight_map=plan.tensor_to_filename)
            (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def write(self, name: str, array: np.ndarray, index: Index = ()) -> None:
        """Writes a tensor, or the slice of it at `index` into its first axes."""
        dtype, shape = self._entries[name]
        stacked, wanted = shape[: len(index)], tuple(shape[len(index) :])
        if (array.dtype.name, array.shape) != (dtype, wanted):
            raise ValueError(f"{name}: {array.dtype}{array.shape}, planned {dtype}{wanted}")
        file, start = self._places[name]
        with file.open("r+b") as stream:
            slices = int(np.ravel_multi_index(index, stacked)) if index else 0
            stream.seek(start + slices * array.nbytes)
            stream.write(np.ascontiguousarray(array).view(np.uint8).data)
        self._progress.advance(array.nbytes)
        self._left[name] -= array.nbytes

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self._progress.close()
        left = sorted(name for name, size in self._left.items() if size)
        if kind is None and left:
            raise ValueError(f"not written: {_some(left)}")


def companions(directory: Path) -> list[Path]:
    """What goes with the weights: config, tokenizer, chat template, generation config."""
    return [
        file
        for file in sorted(directory.iterdir())
        if file.is_file() and not file.name.endswith(WEIGHTS) and not file.name.startswith(".")
    ]


def copy_companions(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for file in companions(source):
        shutil.copyfile(file, target / file.name)


def left_out(names: Sequence[str]) -> str:
    """One line about tensors that were not read, counted over the layers; empty without any."""
    counts = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    shown = [name if n == 1 else f"{name} ({n})" for name, n in counts.items()]
    tensors = f"{len(names)} tensor{'s' * (len(names) > 1)}"
    text = f"left out {tensors} of the files that hold no parameters of this model: {_some(shown)}"
    return text if names else ""


def _some(names: Sequence[str]) -> str:
    """All of a few, the first of many."""
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
