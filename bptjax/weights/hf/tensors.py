"""Reads and writes weights on disk, one tensor or slice of a tensor at a time."""

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes  # noqa: F401  Registers bfloat16 in NumPy, without which safetensors fails.
import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open

from bptjax.models.params import ArraySpec, Index
from bptjax.run.json_files import read_json
from bptjax.run.progress import Progress
from bptjax.weights.hf import mxfp4

# Dtypes of parameters, and further dtypes of tensors that are copied.
CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
OTHER_CODES = {"float64": "F64", "bool": "BOOL", "uint8": "U8"} | {
    f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)
}
DTYPES = {code: name for name, code in (CODES | OTHER_CODES).items()}
SINGLE, INDEX, PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"


class Tensors:
    """The tensors of a checkpoint directory, by name.

    Args:
      renamed: (old, new) endings of names in old files.

    Attributes:
      specs: dtype and shape of each tensor. Files of old versions hold integer buffers, so dtypes
        outside `CODES` are allowed here; `HFCheckpoint` checks the tensors that it reads.
      files: the files of weights.
      metadata: the metadata of the last file.
      decoded: names of tensors that the files hold in MXFP4, which are read as bfloat16.

    Raises:
      ValueError: no weights, or a missing or damaged file.
    """

    def __init__(self, directory: Path, renamed: tuple[tuple[str, str], ...] = ()):
        self.directory = directory
        self.specs: dict[str, ArraySpec] = {}
        self.metadata: dict[str, str] = {}
        self._files: dict[str, tuple[Path, str]] = {}
        self._torch: dict[str, Any] = {}

        def new_name(name: str) -> str:
            for old, new in renamed:
                name = name.removesuffix(old) + new if name.endswith(old) else name
            return name

        files = self.files = _files(directory, SINGLE, INDEX)
        if not files:
            self.files = _files(directory, PICKLED, f"{PICKLED}.index.json")
            for file in self.files:
                self._torch |= {new_name(n): x for n, x in _unpickled(file).items()}
            if not self._torch:
                raise ValueError(f"{directory}: must hold {SINGLE}")
        for name, tensor in self._torch.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.specs[name] = ArraySpec(dtype, tuple(tensor.shape))
        for file in files:
            with _opened(file) as tensors:
                self.metadata = tensors.metadata() or {}
                for name in tensors.keys():  # noqa: SIM118 (no mapping)
                    part = tensors.get_slice(name)
                    dtype = DTYPES.get(part.get_dtype(), part.get_dtype())
                    self.specs[new_name(name)] = ArraySpec(dtype, tuple(part.get_shape()))
                    self._files[new_name(name)] = file, name
        self.decoded = tuple(
            name.removesuffix(mxfp4.BLOCKS)
            for name in self.specs
            if name.endswith(mxfp4.BLOCKS)
            and name.removesuffix(mxfp4.BLOCKS) + mxfp4.SCALES in self.specs
        )
        for name in self.decoded:
            blocks, scales = (self.specs.pop(name + part) for part in (mxfp4.BLOCKS, mxfp4.SCALES))
            valid = {blocks.dtype, scales.dtype} == {"uint8"} and len(blocks.shape) >= 3
            if not valid or scales.shape != blocks.shape[:-1]:
                raise ValueError(
                    f"{directory}: {name}{mxfp4.SCALES} must have one scale for each block of "
                    f"{name}{mxfp4.BLOCKS}, all uint8; {blocks}, {scales}"
                )
            self.specs[name] = ArraySpec("bfloat16", mxfp4.shape(blocks.shape))

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """Reads a tensor, or the slice of it at `index` into its first axes."""
        if name in self.decoded:
            parts = (self.read(name + part) for part in (mxfp4.BLOCKS, mxfp4.SCALES))
            return mxfp4.decode(*parts)[index]
        if name in self._torch:
            tensor, dtype = self._torch[name][index].contiguous(), self.specs[name].dtype
            if dtype != "bfloat16":
                return tensor.numpy()
            import torch

            return tensor.view(torch.int16).numpy().view(dtype)
        # Reopen the file in each call, because mapped pages count as used memory until it is
        # closed.
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
        raise ValueError(f"{file} is damaged or not a safetensors file: {error}") from error
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror or error}") from error


def _files(directory: Path, single: str, index: str) -> list[Path]:
    """Returns the file called `single`, or the files that the index lists.

    Raises:
      ValueError: the index lists no files, or files that do not exist.
    """
    if (directory / index).exists():
        names = read_json(directory / index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ValueError(f"{directory / index} is damaged: its weight_map lists no tensors")
        if strange := [x for x in names.values() if not isinstance(x, str)]:
            raise ValueError(f"{directory / index} is damaged: {strange[0]!r} is not a file name")
        # Such as an absolute path or one with `..`.
        if outside := [name for name in names.values() if Path(name).name != name]:
            raise ValueError(
                f"{directory / index}: {outside[0]!r} must be a file in this directory"
            )
        files = [directory / name for name in dict.fromkeys(names.values())]
        if missing := [file.name for file in files if not file.is_file()]:
            raise ValueError(f"{directory / index} lists files that do not exist: {missing}")
        return files
    return [directory / single] if (directory / single).exists() else []


def _unpickled(file: Path) -> dict[str, Any]:
    """Returns the tensors of a torch file, which stay on disk until they are read."""
    if importlib.util.find_spec("torch") is None:
        raise ValueError(
            f"{file} needs torch, which is not installed; pip install torch, or convert it to "
            f"{SINGLE}"
        )
    import torch

    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        # A damaged pickle can raise anything.
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{file} is damaged or not a torch file: {text}") from error
    tensors = isinstance(loaded, dict) and all(
        isinstance(name, str) and isinstance(x, torch.Tensor) for name, x in loaded.items()
    )
    if not tensors:
        raise ValueError(f"{file}: must hold a dict of tensors")
    return loaded


class Writer:
    """Writer of safetensors files. Takes tensors or slices of tensors in any order, and writes each
    to its final position.

    Args:
      specs: dtype and shape of all tensors, by name.
      max_shard_size: maximum size of a file, such as 5GB. Larger weights are split into several
        files with an index.
      metadata: added to the metadata of each file.
    """

    def __init__(
        self,
        directory: Path,
        specs: dict[str, ArraySpec],
        max_shard_size: str,
        metadata: Mapping[str, str] = MappingProxyType({}),
    ):
        try:
            plan = split_state_dict_into_shards_factory(
                specs,
                get_storage_size=lambda spec: spec.nbytes,
                filename_pattern="model{suffix}.safetensors",
                max_shard_size=max_shard_size,
            )
        except ValueError as error:
            raise ValueError(f"max_shard_size={max_shard_size}: {error}") from error
        self._specs, self._places = specs, {}
        self._left = {name: spec.nbytes for name, spec in specs.items()}
        self._progress = Progress("writing tensors", sum(self._left.values()))
        for file, names in plan.filename_to_tensors.items():
            header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
            end = 0
            for name in names:
                dtype, shape = specs[name]
                begin, end = end, end + specs[name].nbytes
                offsets = [begin, end]
                header[name] = dict(
                    dtype=(CODES | OTHER_CODES)[dtype], shape=shape, data_offsets=offsets
                )
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
        dtype, shape = self._specs[name]
        stacked, wanted = shape[: len(index)], tuple(shape[len(index) :])
        if (array.dtype.name, array.shape) != (dtype, wanted):
            raise ValueError(f"{name}: must be {dtype}{wanted}, not {array.dtype}{array.shape}")
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
            raise ValueError(f"not written: {abridged(left)}")


def abridged(names: Sequence[str]) -> str:
    """Formats up to eight names and the number of remaining ones."""
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
